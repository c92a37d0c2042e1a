"""The device of this process: the accelerator that torch.accelerator finds, or the CPU."""

import resource
import sys

import torch

from utils.errors import UsageError


def select_device(name: str, local_rank: int = 0) -> torch.device:
    """Turn 'auto', 'cpu', 'cuda', 'cuda:1', 'mps', ... into a torch.device that is there.

    local_rank: number of this process on its node, which chooses among its accelerators where `name` has no number.
    Where each process sees one device only, it gets that one.
    Raises UsageError for a name torch does not know or a device this machine lacks.
    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if name == "auto":
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


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all work that was started."""
    if device.type != "cpu":
        torch.accelerator.synchronize()


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory that this process has held: allocated by torch on CUDA, else resident on the host."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes on macOS, KiB on Linux
