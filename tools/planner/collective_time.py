"""How long a collective takes: its latency and its bytes over the bandwidth, the alpha-beta model (Hockney 1994)."""

import math
from functools import cache

import numpy as np

from tools.planner.hardware import Gpu

PASSES = {"all_reduce": 2}  # round the ring; others: 1


@cache
def node_shapes(ranks: tuple[int, ...], world_size: int, gpus_per_node: int) -> set[tuple[int, int]]:
    """{(nodes, fewest ranks on a node)} of every group of a world that is laid out like this one.

    Every group is this one, shifted: ranks are numbered in row-major order of the mesh.
    """
    offsets, seen, shapes = np.array(ranks) - min(ranks), np.zeros(world_size, dtype=bool), {}
    while not seen.all():
        first = int(seen.argmin())
        seen[first + offsets] = True
        if first % gpus_per_node not in shapes:  # groups that start at the same place of a node are placed alike
            _, count = np.unique((first + offsets) // gpus_per_node, return_counts=True)
            shapes[first % gpus_per_node] = len(count), int(count.min())
    return set(shapes.values())


def collective_time(
    kind: str, sent: float, count: int, size: int, nodes: int, fewest: int, gpu: Gpu, ring: bool = True
) -> float:
    """Seconds of `count` collectives in which a rank sends `sent` bytes altogether.

    size: ranks of the group. nodes: that the group spans. fewest: ranks of the group on a node, at least.
    ring: each message passes all ranks (rings through all NICs of the group; Jeaugey 2019, "Massively Scale Your Deep
    Learning Training with NCCL 2.4"); else it goes to one other rank.
    """
    link, nic = gpu.link * gpu.network_efficiency, gpu.nic * gpu.network_efficiency
    hop_inside, hop_across = gpu.hop_inside, gpu.hop_across
    if gpu.measured:
        if size > nodes:
            link, hop_inside = _measured(kind, 1, ring, gpu)
        if nodes > 1:
            nic, hop_across = _measured(kind, nodes, ring, gpu)
    if nodes == 1:
        seconds = sent / link
    elif not ring:
        seconds = sent / nic
    elif kind == "all_to_all":
        seconds = sent * (size - fewest) / (size - 1) / nic  # what leaves the node
    else:
        seconds = sent / min(link, nic * fewest)
    if not ring:
        hops = hop_across if nodes > 1 else hop_inside
    else:
        hops = (size - nodes) * hop_inside + (nodes - 1) * hop_across
        if kind == "all_reduce":  # small messages take a tree of nodes
            tree = (size / nodes - 1) * hop_inside + math.log2(nodes) * hop_across
            hops = min(hops, tree)
    return count * PASSES.get(kind, 1) * hops + seconds


def _measured(kind, nodes, ring, gpu):
    """(bytes/s, latency of a hop) of a measured machine, with which its own groups take what was measured."""
    found = gpu.measured.collective("send" if not ring else kind, nodes, gpu.name)
    hops = PASSES.get(kind, 1) * (found.ranks - 1) if ring else 1
    return found.bandwidth, found.latency / hops
