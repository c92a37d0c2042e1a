"""The device of this process: the accelerator that torch.accelerator finds, or the CPU."""

import os
import re
import resource
import socket
import sys
from pathlib import Path

import torch

from utils.errors import UsageError

DRIVERS = {"/proc/driver/nvidia/version": "NVIDIA", "/sys/module/amdgpu/version": "AMD"}
VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def select_device(name: str, local_rank: int = 0) -> torch.device:
    """Turn 'auto', 'cpu', 'cuda', 'cuda:1', 'mps', ... into a torch.device that is there.

    local_rank: number of this process on its node, which chooses among its accelerators where `name` has no number.
    Where each process sees one device only, it gets that one.
    Raises UsageError for a name torch does not know or a device this machine lacks, and where 'auto' finds no GPU
    although there are some.
    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if name == "auto":
        if accelerator is None and (there := promised_gpus()):
            raise UsageError(
                f"{there}, but torch {torch.__version__} sees none: take a build of torch for this machine's driver, "
                "in a container also the option for GPUs (--nv, --rocm); --device cpu trains on the CPU"
            )
        name = accelerator.type if accelerator else "cpu"
    present = f"this machine has cpu{f' and {accelerator.type}' if accelerator else ' only'}"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"device '{name}': not a device torch knows; {present}") from None
    if device.type == "cpu":
        return device
    if accelerator is None or device.type != accelerator.type:
        raise UsageError(f"device '{name}': not on this machine; {present}")
    count = torch.accelerator.device_count()
    if device.index is None:
        device = torch.device(device.type, local_rank % count)
    if device.index >= count:
        raise UsageError(f"device '{name}': this machine has {count} of them, numbered from 0")
    torch.accelerator.set_device_index(device.index)
    return device


def promised_gpus() -> str:
    """What says that this process should have GPUs: a Slurm job with some, or a driver.

    '' where nothing does, and where they are hidden on purpose.
    """
    if any(os.environ.get(name) == "" for name in VISIBLE):
        return ""
    if count := os.environ.get("SLURM_GPUS_ON_NODE") or os.environ.get("SLURM_GPUS_PER_TASK"):
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
    """What this build of torch is for: 'CUDA 13.0', 'ROCm 7.1' or 'no GPU'."""
    if torch.version.hip:
        return f"ROCm {torch.version.hip}"
    return f"CUDA {torch.version.cuda}" if torch.version.cuda else "no GPU"


def physical_name(device: torch.device) -> str:
    """What no two processes on one GPU can say of their devices; '' for a device that is no GPU of CUDA or ROCm."""
    if device.type != "cuda":
        return ""
    return f"{socket.gethostname()} {torch.cuda.get_device_properties(device).uuid}"


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all work that was started."""
    if device.type != "cpu":
        torch.accelerator.synchronize()


def empty_cache(device: torch.device) -> None:
    """Give the memory that torch keeps for its next tensors back to the device, for other processes."""
    if device.type != "cpu":
        torch.accelerator.empty_cache()


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory that this process has held: allocated by torch on CUDA, else resident on the host."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes on macOS, KiB on Linux
