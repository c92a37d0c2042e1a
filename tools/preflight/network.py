"""Checks of the network: interfaces, the process group, collectives, bandwidth."""

import datetime
import os
import time
from argparse import Namespace
from collections.abc import Iterator

import torch
import torch.distributed as dist

from tools.instruments import collective_speed
from tools.preflight.rendezvous import CheckResult, Rendezvous
from utils.device import backend_for, physical_name, select_device, synchronize
from utils.errors import first_line
from utils.launch import interface_addresses, interface_towards, name_gloo_interface

SIZES = {"cpu": (2**12, 2**20, 2**23), "cuda": (2**12, 2**22, 2**26)}  # bytes of the messages that are timed
WHERE = {"inside": "inside a node", "across": "across nodes"}
SLOW = {
    ("NCCL_IB_DISABLE", "1"): "InfiniBand is switched off",
    ("NCCL_P2P_DISABLE", "1"): "GPUs of a node do not talk to one another directly",
    ("NCCL_SHM_DISABLE", "1"): "shared memory is switched off",
    ("NCCL_DEBUG", "TRACE"): "a line for every call",
    ("CUDA_LAUNCH_BLOCKING", "1"): "the host waits for every kernel",
    ("TORCH_DISTRIBUTED_DEBUG", "DETAIL"): "every collective is checked",
}


def unknown_interfaces(value: str) -> bool:
    """Tell whether no interface of this node matches 'ib', '=eth0' or 'eth,ib' (prefixes, as NCCL reads them)."""
    if value.startswith("^"):
        return False
    exact, names = value.startswith("="), value.lstrip("=").split(",")
    return not any(
        there == name if exact else there.startswith(name) for there in interface_addresses() for name in names
    )


def process_group(options: Namespace, ranks: Rendezvous) -> Iterator[CheckResult]:
    """Check that all ranks can join one group: NCCL if each has a GPU of its own, otherwise gloo."""
    if ranks.size == 1:
        return
    launch, device = ranks.launch, select_device(options.device, ranks.launch.local_rank)
    this_gpu = None if device.type == "cpu" else physical_name(device) or f"{ranks.node} {device}"
    cards = ranks.exchange("process group: devices", this_gpu)
    count, without = len(set(cards)), [rank for rank, card in enumerate(cards) if card is None]
    if 0 < len(without) < ranks.size:
        yield CheckResult("FAIL", "devices", f"{ranks.names(without)} has no GPU, others have", "equal nodes")
        device = torch.device("cpu")
    elif not without and count < ranks.size:
        message = f"{ranks.size} ranks share {count} GPUs, which NCCL refuses"
        advice = "one rank per GPU: --nproc_per_node, --ntasks-per-node, --gpus-per-task"
        yield CheckResult("FAIL", "devices", message, advice)
        device = torch.device("cpu")
    elif launch.ranks_per_node < (here := torch.accelerator.device_count()) and not without:
        message = f"{launch.ranks_per_node} ranks on a node, {here} GPUs"
        yield CheckResult("warn", "devices", message, "as many ranks as GPUs, or some are idle")

    name_gloo_interface(launch)
    backend, began = backend_for(device), time.monotonic()
    # NCCL ends the process at its timeout, before the rendezvous can say which rank is missing.
    patience = ranks.patience * (1 if backend == "gloo" else 100)
    store = ranks.store.clone()  # type: ignore[union-attr]  # not in torch's stubs
    dist.init_process_group(
        backend, store=dist.PrefixStore("group", store), rank=ranks.rank, world_size=ranks.size,
        timeout=datetime.timedelta(seconds=patience), device_id=None if backend == "gloo" else device,
    )  # fmt: skip
    ranks.device = device
    dist.all_reduce(torch.ones(1, device=device))
    synchronize(device)
    interface = interface_towards(launch.master_addr)
    route = f"{interface} {interface_addresses().get(interface, '')}".strip()
    answers = ranks.exchange("process group: ready", [time.monotonic() - began, route])
    seconds, routes = zip(*answers, strict=True)
    yield CheckResult("ok", "process group", f"{backend}, {ranks.size} ranks, ready after {max(seconds):.1f} s")
    for node, members in ranks.by_node(range(ranks.size)).items():
        message = f"{node}: {len(members)} rank(s), reaches rank 0 by {routes[members[0]]}"
        yield CheckResult("ok", "node", message)


def collectives(_options: Namespace, ranks: Rendezvous) -> Iterator[CheckResult]:
    """Check that collectives of every kind give the right numbers, and measure what they send, and how late."""
    device = group_device(ranks, "collectives")
    if device is None:
        return
    ranks.device = None  # a group that fails here is not used again
    for dtype in (torch.float32, torch.bfloat16):
        right, name = collective_speed.are_right(device, dtype), str(dtype).removeprefix("torch.")
        if wrong := [kind.replace("_", "-") for kind, well in right.items() if not well]:
            advice = "NCCL_DEBUG=INFO, NCCL_P2P_DISABLE=1 to find the link; tell the site"
            yield CheckResult("FAIL", "collectives", f"{name}: wrong numbers from {', '.join(wrong)}", advice)
        else:
            kinds = ", ".join(right).replace("_", "-")
            yield CheckResult("ok", "collectives", f"{name}: {kinds} give the right numbers")
    ranks.device = device


def bandwidth(_options: Namespace, ranks: Rendezvous) -> Iterator[CheckResult]:
    """Bytes/s that a rank sends, and latency: among all ranks, inside each node, and across nodes."""
    device = group_device(ranks, "bandwidth")
    if device is None:
        return
    nodes = list(ranks.by_node(range(ranks.size)).values())
    parts = {"all ranks": [list(range(ranks.size))]}
    if len(nodes) > 1:
        parts |= {WHERE[place]: groups for place, groups in collective_speed.places(nodes).items()}
    sizes = SIZES.get(device.type, SIZES["cuda"])
    for label, groups in parts.items():
        values, shown = {}, []
        points = collective_speed.all_points(groups, device, sizes, ("all_reduce", "all_gather", "all_to_all"))
        for kind, measured in points.items():
            latency, speed = collective_speed.fit(measured)
            name = kind.replace("_", "-")
            values[name] = {"latency": latency, "bandwidth": speed}
            shown.append(f"{name} {speed / 1e9:.2f} GB/s, {latency * 1e6:.0f} us")
        text = f"{label}, sent by a rank, up to {sizes[-1] >> 20} MiB: {'; '.join(shown)}"
        yield CheckResult("ok", "bandwidth", text, values=values)


def checkpoint_group(_options: Namespace, ranks: Rendezvous) -> Iterator[CheckResult]:
    """Check that all ranks can join a gloo group beside their own: a checkpoint's, whatever the devices are."""
    if group_device(ranks, "checkpoint group") is None:
        return
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "what the host name resolves to")
    patience = datetime.timedelta(seconds=ranks.patience)
    try:
        dist.monitored_barrier(dist.new_group(backend="gloo", timeout=patience), patience, wait_all_ranks=True)
    except RuntimeError as error:
        advice = "GLOO_SOCKET_IFNAME: the interface by which the other nodes reach this one"
        yield CheckResult("FAIL", "checkpoint group", f"gloo through {interface}: {first_line(error)}", advice)
        return
    yield CheckResult("ok", "checkpoint group", f"gloo through {interface}: all ranks have met")


def group_device(ranks: Rendezvous, check: str) -> torch.device | None:
    """The device of the process group, made current in this thread; None if any rank has no group."""
    device = ranks.device
    if ranks.size == 1 or not all(ranks.exchange(f"{check}: group", device is not None)):
        return None
    if device is not None and device.type != "cpu":
        torch.accelerator.set_device_index(device.index)
    return device


CHECKS = (process_group, collectives, bandwidth, checkpoint_group)  # ranks that fail in the last one disagree on groups
