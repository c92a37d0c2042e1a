"""The same numbers in every repetition of a run on the same GPUs (`--deterministic`).

On a CPU they are the same anyway. On a GPU some kernels add up in the order in which their threads end, the backward
passes of attention among them: flash and memory-efficient attention have a slower one that does not, cuDNN's attention
has none in torch ("Reproducibility" in PyTorch's notes). So torch is told to take only kernels that repeat their
numbers, and not to take cuDNN's attention.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from utils.errors import UsageError, first_line
from utils.schema import Config

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
REPEATABLE = (":4096:8", ":16:8")  # workspaces with which cuBLAS repeats its numbers (NVIDIA's manual of cuBLAS)
NO_KERNEL = "does not have a deterministic implementation"  # so torch calls it
_active = False  # in this process, by make_repeatable


def prepare_environment(config: Config) -> None:
    """Set what libraries read as they start; call it before the device is used.

    Raises UsageError where the environment has a workspace for cuBLAS with which it does not repeat its numbers.
    """
    if not config.deterministic:
        return
    workspace = os.environ.setdefault(CUBLAS, REPEATABLE[0])
    if workspace not in REPEATABLE:
        raise UsageError(
            f"--deterministic: {CUBLAS}={workspace} in the environment lets cuBLAS give other numbers each time: "
            f"unset it, or set {' or '.join(REPEATABLE)}"
        )
    # Else torch.compile measures which of several kernels is the fastest, and each sums in an order of its own.
    os.environ["TORCHINDUCTOR_DETERMINISTIC"] = "1"


def make_repeatable(config: Config) -> None:
    """Let torch take only kernels that repeat their numbers, where the config says so; else as it was before."""
    global _active
    if config.deterministic == _active:  # what a user has switched stays as it is
        return
    _active = config.deterministic
    torch.use_deterministic_algorithms(_active)
    torch.backends.cuda.enable_cudnn_sdp(not _active)
    # New memory need not be filled: nothing here reads what it has not written, and it would cost a pass over it.
    torch.utils.deterministic.fill_uninitialized_memory = not _active  # type: ignore[attr-defined]  # a module with properties


@contextmanager
def unrepeatable_as_usage_error() -> Iterator[None]:
    """Raise UsageError, naming it, for an operation that has no kernel that repeats its numbers."""
    try:
        yield
    except RuntimeError as error:
        if not _active or NO_KERNEL not in str(error):
            raise
        operation, _, _ = first_line(error).partition(f" {NO_KERNEL}")
        raise UsageError(
            f"--deterministic: {operation} gives other numbers each time on this device, and torch has no other "
            "kernel for it: take another operation, or leave --deterministic out"
        ) from error
