"""The device of this process: the accelerator that torch.accelerator finds, or the CPU."""

import os
import resource
import socket
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from utils.errors import UsageError

DRIVERS = {"/proc/driver/nvidia/version": "NVIDIA", "/sys/module/amdgpu/version": "AMD"}


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
    """What says that this process should have GPUs: a Slurm job with some, or a driver; '' where nothing does."""
    if count := os.environ.get("SLURM_GPUS_ON_NODE") or os.environ.get("SLURM_GPUS_PER_TASK"):
        return f"Slurm gave this job GPUs ({count} on this node)"
    for path, what in DRIVERS.items():
        if Path(path).exists():
            return f"this machine has a driver of {what}"
    return ""


def library(device: torch.device, *needed: str) -> Any:
    """What torch has for a kind of accelerator: torch.cuda, for ROCm too, torch.xpu, ...

    needed: names of functions. None where one of them is missing, and on the CPU.
    """
    module = torch.get_device_module(device) if device.type != "cpu" else None
    return module if module and all(hasattr(module, name) for name in needed) else None


def backend_for(device: torch.device) -> str:
    """Through which library ranks on such devices communicate: nccl on CUDA and ROCm, xccl on XPU, gloo on CPUs.

    Raises UsageError where this build of torch has none for them.
    """
    backend = dist.Backend.default_device_backend_map.get(device.type, "")
    if device.type in dist.Backend.backend_capability.get(backend, ()) and dist.is_backend_available(backend):
        return backend
    raise UsageError(
        f"torch {torch.__version__} has no {backend or 'library'} through which ranks on {device.type} communicate: "
        "another build of torch, one process, or --device cpu"
    )


def physical_name(device: torch.device) -> str:
    """What no two processes on one GPU can say of their devices; '' for a device that is no GPU of CUDA or ROCm."""
    if device.type != "cuda":
        return ""
    return f"{socket.gethostname()} {torch.cuda.get_device_properties(device).uuid}"


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all work that was started."""
    if device.type != "cpu":
        torch.accelerator.synchronize()


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory that this process has held: allocated by torch on a GPU, else resident on the host."""
    if gpu := library(device, "max_memory_allocated"):
        return gpu.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes on macOS, KiB on Linux
