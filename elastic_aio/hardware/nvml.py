"""NVIDIA devices by NVML, through `nvidia-ml-py` (the extra `nvml`); knows MIG instances."""

from __future__ import annotations

from typing import Any

from elastic_aio.hardware.accelerators import Accelerator


def read_nvml() -> list[Accelerator] | None:
    """Return all devices in PCI order; None if the library or the driver cannot be used."""
    try:
        import pynvml  # optional

        pynvml.nvmlInit()
    except Exception:  # noqa: BLE001  # not installed, no driver, no permission: not used then
        return None
    try:
        handles = [
            pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())
        ]
        return [_describe(pynvml, handle) for handle in handles]
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()


def _describe(nvml: Any, handle: Any) -> Accelerator:
    instances = []
    try:
        is_divided = nvml.nvmlDeviceGetMigMode(handle)[0] == nvml.NVML_DEVICE_MIG_ENABLE
        count = nvml.nvmlDeviceGetMaxMigDeviceCount(handle) if is_divided else 0
    except nvml.NVMLError:
        count = 0  # without MIG
    for index in range(count):
        try:
            instance = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
        except nvml.NVMLError:
            continue  # a place without an instance
        instances.append(_text(nvml.nvmlDeviceGetUUID(instance)))
    # NVML writes eight digits of the domain, sysfs four.
    domain, _, rest = _text(nvml.nvmlDeviceGetPciInfo(handle).busId).lower().partition(":")
    pci = f"{domain[-4:]}:{rest}"
    return Accelerator(pci, _text(nvml.nvmlDeviceGetUUID(handle)), tuple(instances))


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
