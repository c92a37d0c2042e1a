"""The part of tools.preflight that asks about the network: interfaces, the process group, collectives, bandwidth."""

import contextlib
import datetime
import os
import shutil
import socket
import struct
import subprocess
import time
from argparse import Namespace
from collections.abc import Iterator

import torch
import torch.distributed as dist

from tools.preflight.check_results import Finding
from tools.preflight.rendezvous import RollCall
from utils.device import select_device, synchronize

MESSAGE = {"cuda": 64 << 20, "cpu": 8 << 20}  # bytes
REPEATS = 5
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
SLOW = {
    ("NCCL_IB_DISABLE", "1"): "InfiniBand is switched off",
    ("NCCL_P2P_DISABLE", "1"): "GPUs of a node do not talk to one another directly",
    ("NCCL_SHM_DISABLE", "1"): "shared memory is switched off",
    ("NCCL_DEBUG", "TRACE"): "a line for every call",
    ("CUDA_LAUNCH_BLOCKING", "1"): "the host waits for every kernel",
    ("TORCH_DISTRIBUTED_DEBUG", "DETAIL"): "every collective is checked",
}


def nvidia_driver() -> str | None:
    """The version of the driver that nvidia-smi tells; None where there is none."""
    if not shutil.which("nvidia-smi"):
        return None
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, timeout=20)
    return answer.stdout.split()[0] if answer.returncode == 0 and answer.stdout.strip() else None


def interfaces() -> list[str]:
    """Names of the network interfaces of this node."""
    return [name for _, name in socket.if_nameindex()]


def unknown_interfaces(value: str) -> bool:
    """Whether 'ib', '=eth0' or 'eth,ib' (prefixes, as NCCL reads them) means no interface of this node."""
    if value.startswith("^"):
        return False
    exact, names = value.startswith("="), value.lstrip("=").split(",")
    return not any(there == name if exact else there.startswith(name) for there in interfaces() for name in names)


def towards(host: str, port: int) -> str:
    """Interface and address of this node on the way to a host, 'eth0 10.0.0.3'."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # sends nothing
        mine = probe.getsockname()[0]
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            for name in interfaces():
                with contextlib.suppress(OSError):  # an interface without an address
                    request = struct.pack("256s", name.encode()[:15])
                    answer = fcntl.ioctl(probe.fileno(), 0x8915, request)  # SIOCGIFADDR of Linux
                    if socket.inet_ntoa(answer[20:24]) == mine:
                        return f"{name} {mine}"
    return mine


def process_group(_options: Namespace, ranks: RollCall) -> Iterator[Finding]:
    """Join all ranks, by NCCL where each has a GPU of its own, else by gloo."""
    if ranks.size == 1:
        return
    launch = ranks.launch
    device = select_device("auto", launch.local_rank)
    if device.type != "cuda":
        device = torch.device("cpu")
    card = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    own = card and f"{card.uuid} {card.pci_bus_id}"  # type: ignore[attr-defined]  # not in torch's stubs
    cards = ranks.exchange("process group: devices", [ranks.node, own])
    if None in [card for _, card in cards]:
        device = torch.device("cpu")
        if any(card for _, card in cards):
            without = [rank for rank, (_, card) in enumerate(cards) if card is None]
            yield Finding("FAIL", "devices", f"{ranks.names(without)} has no GPU, others have", "equal nodes")
    elif len({tuple(card) for card in cards}) < ranks.size:
        found = f"{ranks.size} ranks share {len({tuple(card) for card in cards})} GPUs, which NCCL refuses"
        yield Finding(
            "FAIL", "devices", found, "one rank per GPU: --nproc_per_node, --ntasks-per-node, --gpus-per-task"
        )
        device = torch.device("cpu")
    elif launch.ranks_per_node < torch.accelerator.device_count():
        idle = f"{launch.ranks_per_node} ranks on a node, {torch.accelerator.device_count()} GPUs"
        yield Finding("warn", "devices", idle, "as many ranks as GPUs, or some are idle")
    if launch.nodes == 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # as utils.comm does: a host name need not resolve
    backend, began = "nccl" if device.type == "cuda" else "gloo", time.monotonic()
    patience = ranks.patience * (100 if backend == "nccl" else 1)  # NCCL would end the process before it is told why
    store = ranks.store.clone()  # type: ignore[union-attr]  # not in torch's stubs
    dist.init_process_group(
        backend, store=dist.PrefixStore("group", store), rank=ranks.rank, world_size=ranks.size,
        timeout=datetime.timedelta(seconds=patience), device_id=device if backend == "nccl" else None,
    )  # fmt: skip
    ranks.device = device
    dist.all_reduce(torch.ones(1, device=device))
    synchronize(device)
    seconds = max(ranks.exchange("process group: seconds", time.monotonic() - began))
    yield Finding("ok", "process group", f"{backend}, {ranks.size} ranks, ready after {seconds:.1f} s")
    ways: dict[str | None, tuple[str, list[int]]] = {}
    for rank, way in enumerate(ranks.exchange("process group: way", towards(launch.master_addr, launch.master_port))):
        ways.setdefault(ranks.nodes[rank], (way, []))[1].append(rank)
    for node, (way, members) in ways.items():
        yield Finding("ok", "node", f"{node}: {len(members)} rank(s), reaches rank 0 by {way}")


def collectives(_options: Namespace, ranks: RollCall) -> Iterator[Finding]:
    """All-reduce, all-gather and all-to-all with numbers that bfloat16 can hold, and known results."""
    rank, size, device = ranks.rank, ranks.size, group_device(ranks, "collectives")
    if device is None:
        return
    ranks.device = None  # what fails here is not tried again
    pattern = torch.arange(1000, device=device) % 5
    for dtype in (torch.float32, torch.bfloat16):
        reduced = (pattern * (rank % 3 + 1)).to(dtype)
        dist.all_reduce(reduced)
        total = pattern * sum(r % 3 + 1 for r in range(size))
        gathered = torch.empty(size * 1000, dtype=dtype, device=device)
        all_gather(gathered, (pattern + rank % 128).to(dtype))
        sent = (rank % 16 * 16 + torch.arange(size, device=device) % 16).to(dtype).repeat_interleave(7)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        expected = (torch.arange(size, device=device) % 16 * 16 + rank % 16).repeat_interleave(7)
        right = {
            "all-reduce": torch.allclose(reduced.float(), total.float(), rtol=0.02),  # sums are rounded on the way
            "all-gather": all((gathered[r * 1000 : (r + 1) * 1000] == pattern + r % 128).all() for r in range(size)),
            "all-to-all": bool((received == expected).all()),
        }
        name = str(dtype).removeprefix("torch.")
        wrong = [kind for kind, well in right.items() if not well]
        if wrong:
            advice = "NCCL_DEBUG=INFO, NCCL_P2P_DISABLE=1 to find the link; tell the site"
            yield Finding("FAIL", "collectives", f"{name}: wrong numbers from {', '.join(wrong)}", advice)
        else:
            yield Finding("ok", "collectives", f"{name}: {', '.join(right)} give the right numbers")
    ranks.device = device


def bandwidth(_options: Namespace, ranks: RollCall) -> Iterator[Finding]:
    """What a rank sends per second, in all ranks together, inside each node and across nodes."""
    device = group_device(ranks, "bandwidth")
    if device is None:
        return
    places: dict[str | None, list[int]] = {}  # node -> its ranks
    for rank, node in enumerate(ranks.nodes):
        places.setdefault(node, []).append(rank)
    parts = {"all ranks": [list(range(ranks.size))]}
    if len(places) > 1:
        parts["inside a node"] = list(places.values())
        parts["across nodes"] = [list(members) for members in zip(*places.values(), strict=False)]
    for label, groups in parts.items():
        mine: tuple[dist.ProcessGroup, int] | None = None
        for members in groups:  # every rank takes part in making every group
            made = dist.new_group(members) if len(members) > 1 else None
            mine = (made, len(members)) if made and ranks.rank in members else mine
        speeds = {}
        for kind in ("all-reduce", "all-gather", "all-to-all"):
            speed = measure(kind, *mine, device) if mine else None
            told = [s for s in ranks.exchange(f"bandwidth: {label}, {kind}", speed) if s]
            if told:
                speeds[kind] = min(told)
        if speeds:
            found = f"{label}, {MESSAGE[device.type] >> 20} MiB: "
            found += ", ".join(f"{kind} {speed:.2f}" for kind, speed in speeds.items()) + " GB/s sent by a rank"
            yield Finding("ok", "bandwidth", found, values=speeds)


def measure(kind: str, group: dist.ProcessGroup, size: int, device: torch.device) -> float:
    """GB/s that a rank of the group sends with a ring, median of some repeats after the first."""
    count = MESSAGE[device.type] // 4 // size
    part, whole = torch.zeros(count, device=device), torch.zeros(count * size, device=device)
    other = torch.empty_like(whole)
    call, sent = {
        "all-reduce": (lambda: dist.all_reduce(whole, group=group), 2 * (size - 1)),
        "all-gather": (lambda: all_gather(other, part, group=group), size - 1),
        "all-to-all": (lambda: dist.all_to_all_single(other, whole, group=group), size - 1),
    }[kind]
    seconds = []
    for _ in range(REPEATS + 1):
        synchronize(device)
        began = time.perf_counter()
        call()
        synchronize(device)
        seconds.append(time.perf_counter() - began)
    return sent * count * 4 / 1e9 / sorted(seconds[1:])[REPEATS // 2]


def group_device(ranks: RollCall, check: str) -> torch.device | None:
    """The device of the process group, None where a rank has none; checks run in threads, which know no current one."""
    device = ranks.device
    if ranks.size == 1 or not all(ranks.exchange(f"{check}: group", device is not None)):
        return None
    if device is not None and device.type == "cuda":
        torch.accelerator.set_device_index(device.index)
    return device


CHECKS = (process_group, collectives, bandwidth)
