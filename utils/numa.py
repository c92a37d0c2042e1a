"""Keeps a process on the CPUs next to its GPU: copies to the others cross the link between a node's sockets."""

import logging
import os
from pathlib import Path

import torch

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
