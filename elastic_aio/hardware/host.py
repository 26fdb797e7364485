"""Accelerators and CPUs of this host, found without torch: by device files, sysfs and NVML.

An accelerator exists for a process if it has the device file, which containers give out one by one,
and if the variable of its vendor does not hide it.  The order is the order of the PCI addresses, in
which the runtimes number equal devices.  Kinds are named as in torch: "cuda" (NVIDIA, and AMD with
ROCm), "xpu" (Intel), and the names of private-use backends.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from msgspec import Struct

from elastic_aio.hardware.cpus import Cpus, Topology, parse_cpus

_CUDA: Final = "CUDA_VISIBLE_DEVICES"
_HIP: Final = "HIP_VISIBLE_DEVICES"
_ROCR: Final = "ROCR_VISIBLE_DEVICES"
_LEVEL_ZERO: Final = "ZE_AFFINITY_MASK"

_INTEL_DRIVERS: Final = ("i915", "xe")
# The integrated one of a desktop processor has this place on the bus, always.
_INTEGRATED: Final = "0000:00:02.0"


class Accelerator(Struct, frozen=True):
    """One device; a field is empty if it is unknown."""

    pci: str = ""
    """Its PCI address, `0000:17:00.0`."""
    uuid: str = ""
    """Its name in a variable of visible devices, `GPU-...` or `MIG-...`."""
    instances: tuple[str, ...] = ()
    """Names of its MIG instances, which take its place."""


class PrivateBackend(Struct, frozen=True):
    """How the devices of a private-use backend of torch are found."""

    files: str
    """Pattern of the device files in `/dev`."""
    variable: str
    """Lists the visible devices by index."""
    vendor: str = ""
    """PCI vendor of the files, where several vendors share the name."""


PRIVATE_BACKENDS: Final[Mapping[str, PrivateBackend]] = {
    "npu": PrivateBackend(r"davinci\d+", "ASCEND_RT_VISIBLE_DEVICES"),
    "mlu": PrivateBackend(r"cambricon_dev\d+", "MLU_VISIBLE_DEVICES"),
    "musa": PrivateBackend(r"mtgpu\.\d+", "MUSA_VISIBLE_DEVICES"),
    "hpu": PrivateBackend(r"accel/accel\d+", "HABANA_VISIBLE_MODULES", "0x1da3"),
}
"""Backends whose devices are counted here; other names are plug-ins."""


class DeviceSources(Struct, frozen=True):
    """Where the devices of a host are looked up."""

    env: Mapping[str, str]
    root: Path = Path("/")
    """The directory with `dev`, `proc` and `sys`."""
    read_nvml: Callable[[], Sequence[Accelerator] | None] = lambda: None
    """Returns the NVIDIA devices as NVML knows them; None if it cannot be used."""
    is_divided: bool = False
    """Whether each worker sees its own device only."""


def find_accelerators(word: str, sources: DeviceSources) -> list[Accelerator]:
    """Return the visible devices that a word for the number of workers counts.

    The word is "gpu", "xpu", "auto" (the first kind that exists) or a name of `PRIVATE_BACKENDS`.
    """
    if word == "gpu":
        return _nvidia(sources) or _amd(sources)
    if word == "xpu":
        return _visible(_intel(sources), sources.env.get(_LEVEL_ZERO), _level_zero_device)
    if word in PRIVATE_BACKENDS:
        return _private(PRIVATE_BACKENDS[word], sources)
    found = find_accelerators("gpu", sources)
    if not found and (intel := find_accelerators("xpu", sources)):
        found = [device for device in intel if device.pci != _INTEGRATED]
    others = (find_accelerators(name, sources) for name in PRIVATE_BACKENDS)
    return found or next(filter(None, others), [])


def device_variable(word: str, env: Mapping[str, str]) -> str:
    """Return the variable that hides devices from a worker, of the kind that a word names."""
    if word in PRIVATE_BACKENDS:
        return PRIVATE_BACKENDS[word].variable
    if word == "xpu" or (env.get(_LEVEL_ZERO) and not env.get(_CUDA)):
        return _LEVEL_ZERO
    # HIP ignores CUDA's variable if it has its own.
    return _HIP if env.get(_HIP) else _CUDA


def device_of(local_rank: int, word: str, env: Mapping[str, str]) -> tuple[str, str | None]:
    """Return the variable and the value that leave one worker its own device only.

    The value is None if the variable already lists too few devices.
    """
    variable = device_variable(word, env)
    listed = env.get(variable)
    if listed is None:
        return variable, str(local_rank)
    devices = [part.strip() for part in listed.split(",")] if listed.strip() else []
    return variable, devices[local_rank] if local_rank < len(devices) else None


def numa_node(device: Accelerator, root: Path = Path("/")) -> int:
    """Return the NUMA node of a device; 0 if the kernel knows none."""
    text = _text(root / "sys/bus/pci/devices" / device.pci / "numa_node") if device.pci else ""
    return int(text) if text.isdecimal() else 0


# ------------------------------------------------------------------------ vendors


def _nvidia(sources: DeviceSources) -> list[Accelerator]:
    present = _nvidia_present(sources)
    listed = sources.env.get(_CUDA)
    if present and (any(device.instances for device in present) or "MIG-" in (listed or "")):
        known = sources.read_nvml()
        present = present if known is None else list(known)
    if listed is None:
        whole = [device for device in present if not device.instances]
        found = whole or [
            Accelerator(device.pci, name) for device in present for name in device.instances
        ]
    else:
        found = _visible(present, listed, _cuda_device)
    # A process sees one MIG instance, however many are listed.
    sees_one = not sources.is_divided and any(device.uuid.startswith("MIG-") for device in found)
    return found[:1] if sees_one else found


def _nvidia_present(sources: DeviceSources) -> list[Accelerator]:
    """Return the devices that have a device file, with their facts in `/proc`."""
    minors = [
        int(name[6:]) for name in _names(sources.root / "dev") if re.fullmatch(r"nvidia\d+", name)
    ]
    described: dict[int, Accelerator] = {}
    for path in sorted((sources.root / "proc/driver/nvidia/gpus").glob("*")):
        lines = _text(path / "information").splitlines()
        fields = {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}
        minor = fields.get("Device Minor", "")
        if minor.isdecimal():
            mig = sources.root / f"proc/driver/nvidia/capabilities/gpu{minor}/mig"
            instances = tuple(f"MIG-{path.name}" for path in mig.glob("gi[0-9]*"))
            described[int(minor)] = Accelerator(
                path.name.lower(), fields.get("GPU UUID", ""), instances
            )
    known = [device for minor, device in described.items() if minor in minors]
    unknown = [Accelerator() for minor in minors if minor not in described]
    return sorted(known, key=lambda device: device.pci) + unknown


def _amd(sources: DeviceSources) -> list[Accelerator]:
    present = []
    nodes = (sources.root / "sys/class/kfd/kfd/topology/nodes").glob("[0-9]*")
    for path in sorted(nodes, key=lambda path: int(path.name)):
        lines = (line.split() for line in _text(path / "properties").splitlines())
        fields = {words[0]: words[1] for words in lines if len(words) == 2 and words[1].isdecimal()}
        render = sources.root / f"dev/dri/renderD{fields.get('drm_render_minor', '')}"
        if fields.get("simd_count", "0") != "0" and render.exists():
            place, domain = int(fields.get("location_id", 0)), int(fields.get("domain", 0))
            pci = f"{domain:04x}:{place >> 8:02x}:{place >> 3 & 31:02x}.{place & 7}"
            present.append(Accelerator(pci, f"GPU-{int(fields.get('unique_id', 0)):016x}"))
    left = _visible(present, sources.env.get(_ROCR), _cuda_device)
    return _visible(left, sources.env.get(_HIP) or sources.env.get(_CUDA), _cuda_device)


def _intel(sources: DeviceSources) -> list[Accelerator]:
    present = []
    for name in _names(sources.root / "dev/dri"):
        device = sources.root / "sys/class/drm" / name / "device"
        is_intel = _text(device / "vendor") == "0x8086"
        driver = (device / "driver").resolve().name
        if re.fullmatch(r"renderD\d+", name) and is_intel and driver in _INTEL_DRIVERS:
            present.append(Accelerator(device.resolve().name))
    present.sort(key=lambda device: device.pci)
    # As in torch, an integrated one is used only alone.
    return [device for device in present if device.pci != _INTEGRATED] or present


def _private(backend: PrivateBackend, sources: DeviceSources) -> list[Accelerator]:
    directory, _, pattern = backend.files.rpartition("/")
    present = []
    for name in sorted(_names(sources.root / "dev" / directory), key=_number):
        device = sources.root / "sys/class" / directory / name / "device"
        is_vendor = not backend.vendor or _text(device / "vendor") == backend.vendor
        if re.fullmatch(pattern, name) and is_vendor:
            present.append(Accelerator())
    return _visible(present, sources.env.get(backend.variable), _cuda_device)


# ---------------------------------------------------------------------- variables


def _visible(
    present: Sequence[Accelerator],
    listed: str | None,
    resolve: Callable[[str, Sequence[Accelerator]], Accelerator | None],
) -> list[Accelerator]:
    """Return the devices of a list, up to its first entry that is none."""
    if listed is None:
        return list(present)
    found: dict[str, Accelerator] = {}
    for entry in map(str.strip, listed.split(",")):
        if entry in found:
            return []  # as in the runtimes
        if (device := resolve(entry, present)) is None:
            break
        found[entry] = device
    return list(found.values())


def _cuda_device(entry: str, present: Sequence[Accelerator]) -> Accelerator | None:
    if entry.isdecimal() and len(entry) < 6:
        return present[int(entry)] if int(entry) < len(present) else None
    if not present or not re.fullmatch(r"(GPU|MIG)-[\w-]+(/\d+/\d+)?", entry):
        return None
    # A prefix is enough; `MIG-GPU-<uuid>/<gi>/<ci>` names the device of the instance.
    whole = entry.removeprefix("MIG-").partition("/")[0].lower()
    for device in present:
        if entry in device.instances or (device.uuid and device.uuid.lower().startswith(whole)):
            return Accelerator(device.pci, entry)
    is_known = entry.startswith("GPU-") and all(device.uuid for device in present)
    return None if is_known else Accelerator("", entry)


def _level_zero_device(entry: str, present: Sequence[Accelerator]) -> Accelerator | None:
    index = entry.partition(".")[0]  # `1.0` is a tile of device 1
    is_index = index.isdecimal() and len(index) < 6 and int(index) < len(present)
    return present[int(index)] if is_index else None


def _number(name: str) -> int:
    return int(re.sub(r"\D", "", name) or 0)


def _names(path: Path) -> list[str]:
    try:
        return sorted(
            (entry.name for entry in path.iterdir()), key=lambda name: (_number(name), name)
        )
    except OSError:
        return []


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, ValueError):
        return ""


# --------------------------------------------------------------------------- NVML


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
        instances.append(_decoded(nvml.nvmlDeviceGetUUID(instance)))
    # NVML writes eight digits of the domain, sysfs four.
    domain, _, rest = _decoded(nvml.nvmlDeviceGetPciInfo(handle).busId).lower().partition(":")
    pci = f"{domain[-4:]}:{rest}"
    return Accelerator(pci, _decoded(nvml.nvmlDeviceGetUUID(handle)), tuple(instances))


def _decoded(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


# --------------------------------------------------------------------------- CPUs


def read_topology(sys: Path = Path("/sys"), cpus: Iterable[int] = ()) -> Topology:
    """Read the topology from sysfs.

    A kernel without NUMA has no nodes there: all CPUs then belong to node 0.  Where a file of a CPU
    cannot be read, the CPU has a package, core and cache of its own.  `cpus` are described even if
    no node lists them.
    """
    nodes: dict[int, Cpus] = {}
    for path in sorted(sys.glob("devices/system/node/node[0-9]*")):
        if found := parse_cpus(_text(path / "cpulist")):
            nodes[int(path.name[4:])] = found
    if not nodes:
        nodes[0] = frozenset(cpus) or parse_cpus(_text(sys / "devices/system/cpu/online"))
    every = frozenset(cpus).union(*nodes.values())
    packages, cores, caches = {}, {}, {}
    for cpu in every:
        path = sys / f"devices/system/cpu/cpu{cpu}"
        package = _text(path / "topology/physical_package_id")
        packages[cpu] = int(package) if re.fullmatch(r"-?\d+", package) else 0
        cores[cpu] = parse_cpus(_text(path / "topology/thread_siblings_list")) | {cpu}
        caches[cpu] = _last_cache(path / "cache") | {cpu}
    return Topology(nodes, packages, cores, caches)


def _last_cache(path: Path) -> Cpus:
    """Return the CPUs that share the highest level of data cache; empty if it is unknown."""
    best, shared = -1, Cpus()
    for index in sorted(path.glob("index[0-9]*")):
        level = _text(index / "level")
        is_data = _text(index / "type") in ("Unified", "Data")
        if is_data and level.isdecimal() and int(level) > best:
            best, shared = int(level), parse_cpus(_text(index / "shared_cpu_list"))
    return shared
