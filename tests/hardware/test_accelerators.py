"""Accelerators of fake hosts: trees like /dev, /proc and /sys, and the vendors' variables."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from elastic_aio.hardware.host import (
    Accelerator,
    DeviceSources,
    device_of,
    find_accelerators,
    numa_node,
    read_nvml,
)


def write(path: Path, text: object = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def make_nvidia(root: Path, *minors: int, described: bool = True) -> None:
    """Make NVIDIA devices; their PCI addresses run against their minor numbers."""
    for name in ("nvidiactl", "nvidia-uvm", "null", *(f"nvidia{minor}" for minor in minors)):
        write(root / "dev" / name)
    for minor in minors if described else ():
        pci = f"0000:{0x40 - minor:02X}:00.0"
        write(
            root / f"proc/driver/nvidia/gpus/{pci}/information",
            f"Model: \t\t H200\nGPU UUID: \t GPU-{minor}{minor}\nDevice Minor: \t {minor}",
        )


def make_amd(root: Path, *minors: int) -> None:
    nodes = root / "sys/class/kfd/kfd/topology/nodes"
    write(nodes / "0/properties", "simd_count 0\ncpu_cores_count 64")
    for number, minor in enumerate(minors, 1):
        write(root / f"dev/dri/renderD{minor}")
        write(
            nodes / f"{number}/properties",
            f"simd_count 304\nlocation_id {number << 8}\ndomain 1\ndrm_render_minor {minor}\n"
            f"unique_id {0xAB00 + number}",
        )


def make_intel(root: Path, *addresses: str, driver: str = "xe", vendor: str = "0x8086") -> None:
    drivers = root / "sys/bus/pci/drivers" / driver
    drivers.mkdir(parents=True, exist_ok=True)
    for number, pci in enumerate(addresses, 128):
        device = root / "sys/devices/pci0000:00" / pci
        write(device / "vendor", vendor)
        (device / "driver").symlink_to(drivers)
        write(root / f"dev/dri/renderD{number}")
        write(root / f"dev/dri/card{number}")
        (root / f"sys/class/drm/renderD{number}").mkdir(parents=True)
        (root / f"sys/class/drm/renderD{number}/device").symlink_to(device)


def found(word: str, root: Path, **env: str) -> list[Accelerator]:
    return find_accelerators(word, DeviceSources(env, root))


def test_a_host_without_devices(tmp_path: Path) -> None:
    for word in ("gpu", "xpu", "auto", "npu", "hpu"):
        assert found(word, tmp_path) == []
        assert found(word, tmp_path, CUDA_VISIBLE_DEVICES="0", ZE_AFFINITY_MASK="0") == []


@pytest.mark.parametrize(
    ("listed", "count"),
    [
        (None, 3),
        ("0,1,2", 3),
        ("1", 1),
        (" 0 , 2", 2),
        ("", 0),
        ("-1", 0),
        ("0,-1,1", 1),
        ("0,nonsense,1", 1),
        ("0,1,1", 0),
        ("GPU-8932f937-d72c,GPU-1", 2),
        ("MIG-GPU-8932f937-d72c/1/0", 1),
        ("0,1,2,3,4,5", 3),
        ("7", 0),
    ],
)
def test_nvidia_devices_that_are_listed(tmp_path: Path, listed: str | None, count: int) -> None:
    """CUDA takes the list up to the first entry that is no device of this host."""
    make_nvidia(tmp_path, 0, 1, 12, described=False)
    env = {} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}
    assert len(found("gpu", tmp_path, **env)) == count
    assert len(found("auto", tmp_path, **env)) == count


def test_nvidia_devices_in_the_order_of_their_addresses(tmp_path: Path) -> None:
    """CUDA numbers equal devices so, whatever their minor numbers are."""
    make_nvidia(tmp_path, 0, 1, 2)
    addresses = ["0000:3e:00.0", "0000:3f:00.0", "0000:40:00.0"]
    assert [device.pci for device in found("gpu", tmp_path)] == addresses
    (tmp_path / "dev/nvidia1").unlink()  # a container without it
    assert [device.pci for device in found("gpu", tmp_path)] == [addresses[0], addresses[2]]


def test_the_order_of_the_variable(tmp_path: Path) -> None:
    """By index, by name, and by the beginning of a name."""
    make_nvidia(tmp_path, 0, 1, 2)
    devices = found("gpu", tmp_path, CUDA_VISIBLE_DEVICES="2,GPU-11")
    assert [device.pci for device in devices] == ["0000:40:00.0", "0000:3f:00.0"]
    assert len(found("gpu", tmp_path, CUDA_VISIBLE_DEVICES="GPU-2,GPU-7,0")) == 1


def test_a_process_sees_one_mig_instance(tmp_path: Path) -> None:
    """However many are listed; all of them where each worker gets its own."""
    make_nvidia(tmp_path, 0)
    write(tmp_path / "proc/driver/nvidia/capabilities/gpu0/mig/gi1/access")
    env = {"CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b"}
    known = [Accelerator("0000:40:00.0", "GPU-00", ("MIG-a", "MIG-b"))]
    assert len(find_accelerators("gpu", DeviceSources(env, tmp_path))) == 1
    for variables, expected in ((env, ["MIG-a", "MIG-b"]), ({}, ["MIG-a", "MIG-b"])):
        sources = DeviceSources(variables, tmp_path, lambda: known, is_divided=True)
        devices = find_accelerators("gpu", sources)
        assert [device.uuid for device in devices] == expected
        assert {device.pci for device in devices} == {"0000:40:00.0"}
    assert len(find_accelerators("gpu", DeviceSources({}, tmp_path, lambda: known))) == 1


def test_amd_devices(tmp_path: Path) -> None:
    make_amd(tmp_path, 128, 129, 130)
    addresses = ["0001:01:00.0", "0001:02:00.0", "0001:03:00.0"]
    assert [device.pci for device in found("gpu", tmp_path)] == addresses
    (tmp_path / "dev/dri/renderD128").unlink()  # a container without it
    assert [device.pci for device in found("auto", tmp_path)] == addresses[1:]


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"ROCR_VISIBLE_DEVICES": "2,0"}, ["03", "01"]),
        ({"ROCR_VISIBLE_DEVICES": "GPU-000000000000ab02"}, ["02"]),
        ({"HIP_VISIBLE_DEVICES": "1"}, ["02"]),
        ({"CUDA_VISIBLE_DEVICES": "1"}, ["02"]),
        ({"ROCR_VISIBLE_DEVICES": "2,0", "HIP_VISIBLE_DEVICES": "1"}, ["01"]),
        ({"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "1,2"}, ["01"]),
    ],
)
def test_amd_variables(tmp_path: Path, env: dict[str, str], expected: list[str]) -> None:
    """HIP numbers what ROCr shows, and reads CUDA's variable if it has none of its own."""
    make_amd(tmp_path, 128, 129, 130)
    assert [device.pci[5:7] for device in found("gpu", tmp_path, **env)] == expected


def test_intel_devices(tmp_path: Path) -> None:
    """An integrated device counts only alone, and never for `auto`."""
    make_intel(tmp_path, "0000:00:02.0")
    assert len(found("xpu", tmp_path)) == 1
    assert found("auto", tmp_path) == found("gpu", tmp_path) == []
    other = tmp_path / "other"
    make_intel(other, "0000:00:02.0", "0000:9a:00.0", "0000:1a:00.0", driver="i915")
    assert [device.pci for device in found("xpu", other)] == ["0000:1a:00.0", "0000:9a:00.0"]
    assert len(found("auto", other)) == 2
    assert [d.pci for d in found("xpu", other, ZE_AFFINITY_MASK="1.0")] == ["0000:9a:00.0"]
    assert len(found("xpu", other, ZE_AFFINITY_MASK="0.0,0.1")) == 2
    assert len(found("xpu", other, ZE_AFFINITY_MASK="0,7")) == 1


def test_devices_of_other_vendors_are_no_intel_devices(tmp_path: Path) -> None:
    make_intel(tmp_path, "0000:9a:00.0", vendor="0x1002")
    assert found("xpu", tmp_path) == []


@pytest.mark.parametrize(
    ("word", "files", "variable"),
    [
        ("npu", ["davinci0", "davinci1", "davinci10", "davinci_x"], "ASCEND_RT_VISIBLE_DEVICES"),
        ("mlu", ["cambricon_dev0", "cambricon_dev1", "cambricon_dev2"], "MLU_VISIBLE_DEVICES"),
        ("musa", ["mtgpu.0", "mtgpu.1", "mtgpu.2"], "MUSA_VISIBLE_DEVICES"),
    ],
)  # fmt: skip
def test_private_backends(tmp_path: Path, word: str, files: list[str], variable: str) -> None:
    for name in files:
        write(tmp_path / "dev" / name)
    assert len(found(word, tmp_path)) == len(found("auto", tmp_path)) == 3
    assert len(found(word, tmp_path, **{variable: "2"})) == 1


def test_files_that_two_vendors_share(tmp_path: Path) -> None:
    for number, vendor in enumerate(["0x1da3", "0x8086"]):
        write(tmp_path / f"dev/accel/accel{number}")
        write(tmp_path / f"sys/class/accel/accel{number}/device/vendor", vendor)
    assert len(found("hpu", tmp_path)) == 1


@pytest.mark.parametrize(
    ("word", "env", "expected"),
    [
        ("gpu", {}, ("CUDA_VISIBLE_DEVICES", "1")),
        ("gpu", {"CUDA_VISIBLE_DEVICES": "4, GPU-x"}, ("CUDA_VISIBLE_DEVICES", "GPU-x")),
        ("gpu", {"CUDA_VISIBLE_DEVICES": "4"}, ("CUDA_VISIBLE_DEVICES", None)),
        ("gpu", {"CUDA_VISIBLE_DEVICES": ""}, ("CUDA_VISIBLE_DEVICES", None)),
        ("gpu", {"HIP_VISIBLE_DEVICES": "4,5"}, ("HIP_VISIBLE_DEVICES", "5")),
        ("gpu", {"ZE_AFFINITY_MASK": "0,3"}, ("ZE_AFFINITY_MASK", "3")),
        ("xpu", {}, ("ZE_AFFINITY_MASK", "1")),
        ("npu", {}, ("ASCEND_RT_VISIBLE_DEVICES", "1")),
    ],
)
def test_the_device_of_a_worker(
    word: str, env: dict[str, str], expected: tuple[str, str | None]
) -> None:
    assert device_of(1, word, env) == expected


def test_the_numa_node_of_a_device(tmp_path: Path) -> None:
    """-1, a device without an address, and no file at all mean node 0, as in torch."""
    for pci, node in (("0000:01:00.0", 3), ("0000:02:00.0", -1)):
        write(tmp_path / f"sys/bus/pci/devices/{pci}/numa_node", node)
    places = ["0000:01:00.0", "0000:02:00.0", "0000:03:00.0", ""]
    assert [numa_node(Accelerator(pci), tmp_path) for pci in places] == [3, 0, 0, 0]


def fake_nvml(**functions: object) -> ModuleType:
    """Return a module with the calls of `pynvml` that are used: a whole and a divided device."""

    class NVMLError(Exception):
        pass

    def refuse(*_: object) -> None:
        raise NVMLError

    def instance(handle: int, index: int) -> str:
        if index == 1:
            raise NVMLError
        return f"MIG-{handle}{index}"

    nvml = ModuleType("pynvml")
    vars(nvml).update(
        NVMLError=NVMLError,
        NVML_DEVICE_MIG_ENABLE=1,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetMigMode=lambda handle: [1, 1] if handle else refuse(),
        nvmlDeviceGetMaxMigDeviceCount=lambda handle: 3,
        nvmlDeviceGetMigDeviceHandleByIndex=instance,
        nvmlDeviceGetUUID=lambda handle: handle if isinstance(handle, str) else b"GPU-%d" % handle,
        nvmlDeviceGetPciInfo=lambda handle: SimpleNamespace(busId=f"0000000{handle}:3A:00.0"),
    )
    vars(nvml).update(functions)
    return nvml


def test_nvml_knows_mig_instances(monkeypatch: pytest.MonkeyPatch) -> None:
    """A place without an instance is left out; a device without MIG has none."""
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml())
    assert read_nvml() == [
        Accelerator("0000:3a:00.0", "GPU-0"),
        Accelerator("0001:3a:00.0", "GPU-1", ("MIG-10", "MIG-12")),
    ]


def test_nvml_may_be_missing_or_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert read_nvml() is None
    nvml = fake_nvml()

    def fail() -> int:
        raise nvml.NVMLError  # the driver was removed

    vars(nvml).update(nvmlDeviceGetCount=fail)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert read_nvml() is None
