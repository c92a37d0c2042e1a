"""One device of gloo for all groups of a process, for ranks that come to many meshes.

torch gives each group a device of its own, and each device has a thread that wakes a hundred times a second, whether
there is anything to do or not. Ranks of a training have some twenty groups, which costs nothing that one could measure.
Ranks that many layouts use in turn have hundreds, and their threads take the cores from those that compute.
"""

import os
from functools import cache
from typing import Any

import torch.distributed as dist


def share_gloo_device() -> None:
    """From now on the groups of gloo that this process makes have one device together."""
    group: Any = dist.ProcessGroupGloo
    make = group.__init__

    @cache
    def device(interface: str | None) -> Any:
        return group.create_device(interface=interface) if interface else group.create_default_device()

    def init(self: Any, store: Any, rank: int, size: int, timeout: Any, **newer: Any) -> None:
        if any(newer.values()):  # arguments of newer torch, which only its own constructor knows
            return make(self, store, rank, size, timeout, **newer)
        interface = os.environ.get("GLOO_SOCKET_IFNAME")
        options = group._Options()
        options._devices = [device(interface)]
        options._timeout = timeout
        return make(self, store, rank, size, options)

    group.__init__ = init
