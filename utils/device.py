"""The device of this process: the accelerator that torch.accelerator finds, or the CPU.

The process stays on the CPUs next to its GPU: copies to the others cross the link between a node's sockets.
"""

import contextlib
import ctypes
import logging
import os
import re
import resource
import socket
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from utils.errors import UsageError

DRIVERS = {"/proc/driver/nvidia/version": "NVIDIA", "/sys/module/amdgpu/version": "AMD"}
# Blocks of pinned memory of this many MiB or more are not rounded up.
EXACT_PINNING = "pinned_max_round_threshold_mb:1"
VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def select_device(name: str, local_rank: int = 0) -> torch.device:
    """Turn 'auto', 'cpu', 'cuda', 'cuda:1', 'mps', ... into a torch.device that is there.

    local_rank: number of this process on its node, which chooses among its accelerators where `name` has no number.
    On the CPU this process keeps freed memory from here on.
    Where each process sees one device only, it gets that one.
    Raises UsageError for a name torch does not know or a device this machine lacks, and where 'auto' finds no GPU
    although there are some.
    """
    # This also finds a GPU of ROCm, which calls itself cuda.
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if name == "auto":
        # A job that paid for GPUs must not train on the CPU in silence.
        there = promised_gpus() if accelerator is None else ""
        if there:
            raise UsageError(
                f"{there}, but torch {torch.__version__} sees none: take a build of torch for this machine's driver, "
                "in a container also the option for GPUs (--nv, --rocm); --device cpu trains on the CPU"
            )
        name = accelerator.type if accelerator else "cpu"
    beside_cpu = f" and {accelerator.type}" if accelerator else " only"
    present = f"this machine has cpu{beside_cpu}"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"device '{name}': not a device torch knows; {present}") from None
    # The CPU needs neither a number nor pinned memory.
    if device.type == "cpu":
        _keep_freed_memory()
        return device
    if accelerator is None or device.type != accelerator.type:
        raise UsageError(f"device '{name}': not on this machine; {present}")
    count = torch.accelerator.device_count()
    # Ranks of a node take its devices in turn.
    if device.index is None:
        device = torch.device(device.type, local_rank % count)
    if device.index >= count:
        raise UsageError(f"device '{name}': this machine has {count} of them, numbered from 0")
    # The setting counts only before the first pinned tensor.
    pin_exact_sizes(device)
    torch.accelerator.set_device_index(device.index)
    stay_near(device)
    return device


def _keep_freed_memory() -> None:
    """Let glibc keep the memory of freed tensors for the next ones.

    By default it returns large blocks to the system, which clears every page of them again in the next step.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        mallopt(-4, 0)  # M_MMAP_MAX: no block is mapped on its own
        mallopt(-1, -1)  # M_TRIM_THRESHOLD: the end of the heap is never returned


def promised_gpus() -> str:
    """Name the sign that this process should have GPUs; '' if there is none or they are hidden on purpose."""
    # An empty list of visible devices hides all of them.
    if any(os.environ.get(name) == "" for name in VISIBLE):
        return ""
    count = os.environ.get("SLURM_GPUS_ON_NODE") or os.environ.get("SLURM_GPUS_PER_TASK")
    if count:
        return f"Slurm gave this job GPUs ({count} on this node)"
    there = driver()
    return f"this machine has a driver of {there[0]}" if there else ""


def driver() -> tuple[str, str] | None:
    """Maker and version of the driver of this machine's GPUs; None without one."""
    for path, maker in DRIVERS.items():
        if Path(path).exists():
            version = re.search(r"\d+(\.\d+)+", Path(path).read_text())
            return maker, version[0] if version else "of unknown version"
    return None


def built_for() -> str:
    """Describe the target of this build of torch: 'CUDA 13.0', 'ROCm 7.1', 'XPU 2025' or 'no GPU'."""
    version = torch.version
    kinds = {
        "ROCm": version.hip,
        "CUDA": version.cuda,
        "XPU": getattr(version, "xpu", None),
    }
    for name, number in kinds.items():
        if number:
            return f"{name} {number}"
    return "no GPU"


def device_module(device: torch.device, *needed: str) -> Any:
    """torch.cuda (for ROCm too), torch.xpu, ... of a device; None on the CPU, and without a function that is needed."""
    if device.type in ("cpu", "meta"):
        return None
    module = torch.get_device_module(device)
    has_all = all(hasattr(module, name) for name in needed)
    return module if has_all else None


def backend_for(device: torch.device) -> str:
    """Through which library ranks on such devices communicate: nccl on CUDA and ROCm, xccl on XPU, gloo on CPUs.

    Raises UsageError where this build of torch has none for them.
    """
    # torch says which library belongs to a device, and whether this build has it.
    backend = dist.Backend.default_device_backend_map.get(device.type, "")
    is_for_device = device.type in dist.Backend.backend_capability.get(backend, ())
    if is_for_device and dist.is_backend_available(backend):
        return backend
    raise UsageError(
        f"torch {torch.__version__} has no {backend or 'library'} through which ranks on {device.type} communicate: "
        "another build of torch, one process, or --device cpu"
    )


def physical_name(device: torch.device) -> str:
    """Host name, PCI address and UUID of this process's GPU; '' for a device that is no GPU of CUDA or ROCm.

    Parts of one GPU may share its address, and drivers may give all GPUs the same UUID: only both together tell.
    """
    if device.type != "cuda":
        return ""
    properties = torch.cuda.get_device_properties(device)
    # Newer versions of torch tell the address, older ones give empty parts.
    parts = [getattr(properties, f"pci_{part}_id", "") for part in ("domain", "bus", "device")]
    address = ":".join(map(str, parts))
    return f"{socket.gethostname()} {address} {properties.uuid}"


def device_name(device: torch.device) -> str:
    """The name that a GPU reports; for other devices their type."""
    gpu = device_module(device, "get_device_name")
    return gpu.get_device_name(device) if gpu else device.type


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all work that was started."""
    if device.type != "cpu":
        torch.accelerator.synchronize()


@cache
def capture_stream() -> torch.cuda.Stream:
    """The stream on which a step that becomes a CUDA graph is warmed up and captured, and its DDP is built."""
    return torch.cuda.Stream()


@contextlib.contextmanager
def on_capture_stream() -> Iterator[None]:
    """A context whose work runs on the capture stream, in order with what the current stream gets before and after."""
    current = torch.cuda.current_stream()
    side = capture_stream()
    side.wait_stream(current)
    with torch.cuda.stream(side):
        yield
    current.wait_stream(side)


def on_this_device(function: Callable[[], None]) -> Callable[[], None]:
    """The function for a thread that this one starts, on this one's device.

    Without it a call of CUDA in a thread makes a context on device 0, hundreds of MB there for every rank of a node.
    """
    if not torch.accelerator.is_available():
        return function
    # The device of the thread that calls this.
    index = torch.accelerator.current_device_index()

    def run() -> None:
        torch.accelerator.set_device_index(index)
        function()

    return run


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """A small tensor on the device: copied there from the host without waiting for what the device still has to do."""
    # Only a copy from pinned memory lets the host go on.
    from_host = x.device.type == "cpu" and device_module(device, "Stream")
    return x.pin_memory().to(device, non_blocking=True) if from_host else x.to(device)


def empty_cache(device: torch.device) -> None:
    """Give the memory that torch keeps for its next tensors back to the device, for other processes."""
    if device.type != "cpu":
        torch.accelerator.empty_cache()


def empty_host_cache() -> None:
    """Give the pinned memory that torch keeps for its next tensors back to the system."""
    public = getattr(torch.accelerator, "empty_host_cache", None)  # of newer torch
    private = getattr(torch._C, "_host_emptyCache", None)  # of builds for CUDA and ROCm
    empty = public or private
    if empty:
        empty()


def pin_exact_sizes(device: torch.device) -> None:
    """Let torch pin as much host memory as is asked for, not the next power of two, where it can do so.

    Call it before anything is pinned. What PYTORCH_ALLOC_CONF says of it stays.
    """
    read = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    write = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if device.type != "cuda" or read is None or write is None:
        return
    before = read()
    # The user's own setting wins.
    if EXACT_PINNING.partition(":")[0] in before:
        return
    try:
        write(",".join(filter(None, [before, EXACT_PINNING])))
    except (RuntimeError, ValueError):  # this torch does not know the setting
        write(before)


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory that this process has held: allocated by torch on a GPU, else resident on the host."""
    gpu = device_module(device, "max_memory_allocated")
    if gpu:
        return gpu.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes on macOS, KiB on Linux


log = logging.getLogger(__name__)
PCI = Path("/sys/bus/pci/devices")


def pci_address(device: torch.device) -> str | None:
    """The address of a GPU of CUDA or ROCm, as Linux writes it: 0000:c1:00.0; None where torch does not tell."""
    properties = torch.cuda.get_device_properties(device)
    # Older versions of torch do not know the address.
    parts = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if None in parts:
        return None
    domain, bus, number = parts
    return f"{domain:04x}:{bus:02x}:{number:02x}.0"


def cpus_in(text: str) -> set[int]:
    """CPUs of a list as Linux writes it: "0-3,8" is {0, 1, 2, 3, 8}."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def stay_near(device: torch.device) -> None:
    """Let this thread, and those that it starts, run only on CPUs next to the device, of those that they have.

    Nothing is changed where it has some of those CPUs, but fewer than half of its own are among them: whoever gave it
    the others meant it to have them.
    """
    if device.type != "cuda" or not hasattr(os, "sched_setaffinity"):
        return
    address = pci_address(device)
    if address is None:
        return
    try:
        # Linux lists the CPUs on the device's side of the node.
        near = cpus_in((PCI / address / "local_cpulist").read_text())
        # A launcher may have bound this process to some CPUs already.
        allowed = os.sched_getaffinity(0)
        chosen = allowed & near
        has_all_of_them = bool(chosen) and chosen == near  # nobody has bound it, as with torchrun
        if not has_all_of_them and len(chosen) < len(allowed) / 2:
            if not chosen:
                log.info(
                    "All CPUs of this process are far from its GPU: srun --distribution=block:block, or --cpu-bind"
                )
            return
        os.sched_setaffinity(0, chosen)
    except (OSError, ValueError):  # a container that hides it, or a virtual machine
        return
