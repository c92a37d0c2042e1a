"""How the ranks of a run come to one decision: all take the same way, also where one of them met an error."""

import socket
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from utils import comm
from utils.errors import ConnectionLostError, UsageError

T = TypeVar("T")


def on_main(function: Callable[[], T]) -> T:
    """Call function() on rank 0; every rank gets its result, or raises the exception that it raised."""
    if comm.world_size() == 1:
        return function()
    # An exception travels to the other ranks like a result.
    outcome: list[Any] = [None, None]  # result, exception
    if comm.is_main():
        try:
            outcome[0] = function()
        except Exception as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def raise_on_all_ranks(function: Callable[[], T]) -> T:
    """Call function() on every rank; where some raise a UsageError or ConnectionLostError, all raise the first one."""
    error_here: UsageError | ConnectionLostError | None = None
    try:
        result = function()
    except (UsageError, ConnectionLostError) as error:
        error_here = error
    for first in filter(None, comm.gather(error_here)):
        raise first
    return result


class Vote:
    """Tells all ranks whether something is so on any of them: one number, summed on the host.

    Nothing waits for the device. The first call makes a process group, so all ranks call it together.
    """

    def __init__(self) -> None:
        self.group: dist.ProcessGroup | None = None

    def __call__(self, condition: bool) -> bool:
        """Tell whether a condition holds on any rank. All ranks call this as often."""
        if comm.world_size() == 1:
            return condition
        if self.group is None:
            self.group = comm.new_cpu_group()
        count = torch.tensor([int(condition)])
        dist.all_reduce(count, group=self.group)
        return count.item() > 0


def check_alike(own: dict[str, str]) -> None:
    """Raise UsageError, on every rank, where a rank sees something else than rank 0. own: {name: what is seen}."""
    seen = comm.gather((socket.gethostname(), own))
    # Rank 0 is what the others are compared with.
    first_host, first = seen[0]
    for number, (host, other) in enumerate(seen):
        for name in sorted(first | other):
            there = other.get(name, "nothing")
            here = first.get(name, "nothing")
            if there != here:
                raise UsageError(f"{name}: rank {number} on {host} sees {there}, rank 0 on {first_host} {here}")
