"""The device of this process: the accelerator that torch.accelerator finds, or the CPU."""

import contextlib
import os
import resource
import socket
import sys
import weakref
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

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


def physical_name(device: torch.device) -> str:
    """What no two processes on one GPU can say of their devices; '' for a device that is no GPU of CUDA or ROCm."""
    if device.type != "cuda":
        return ""
    return f"{socket.gethostname()} {torch.cuda.get_device_properties(device).uuid}"


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
    current, side = torch.cuda.current_stream(), capture_stream()
    side.wait_stream(current)
    with torch.cuda.stream(side):
        yield
    current.wait_stream(side)


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy a small tensor without waiting for what the device still has to do."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def pin(array: np.ndarray) -> None:
    """Lock the pages of a host array, whose memory is its own pages, until it is gone: a GPU then copies by itself.

    torch's pinned tensors are rounded up to a power of two, nearly twice what a large buffer needs.
    """
    runtime, address = torch.cuda.cudart(), array.ctypes.data
    torch.cuda.check_error(runtime.cudaHostRegister(address, array.nbytes, 0))
    weakref.finalize(array, runtime.cudaHostUnregister, address)


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory that this process has held: allocated by torch on CUDA, else resident on the host."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes on macOS, KiB on Linux
