"""How long a collective takes: its latency and its bytes over the bandwidth, the alpha-beta model (Hockney 1994)."""

import math
from functools import cache

import numpy as np

from tools.planner.hardware import Gpu

PASSES = {"all_reduce": 2}  # round the ring; others: 1


@cache
def node_shapes(ranks: tuple[int, ...], world_size: int, gpus_per_node: int) -> set[tuple[int, int]]:
    """{(nodes, the fewest ranks of a node)} of all groups of a world that are laid out like this one.

    All of them are this group moved along: ranks are numbered in row-major order of the mesh.
    """
    offsets, seen, shapes = np.array(ranks) - min(ranks), np.zeros(world_size, dtype=bool), {}
    while not seen.all():
        first = int(seen.argmin())
        seen[first + offsets] = True
        if first % gpus_per_node not in shapes:  # groups that begin alike in a node lie alike
            _, count = np.unique((first + offsets) // gpus_per_node, return_counts=True)
            shapes[first % gpus_per_node] = len(count), int(count.min())
    return set(shapes.values())


def collective_time(
    kind: str, sent: float, count: int, size: int, nodes: int, fewest: int, gpu: Gpu, ring: bool = True
) -> float:
    """Seconds of `count` collectives in which a rank sends `sent` bytes altogether.

    size: ranks of the group, on so many nodes, at least `fewest` on each. ring: each message passes all ranks (rings
    through all NICs of the group; Jeaugey 2019, "Massively Scale Your Deep Learning Training with NCCL 2.4"), else it
    goes to one other rank.
    """
    link, nic = gpu.link * gpu.network_efficiency, gpu.nic * gpu.network_efficiency
    if nodes == 1:
        seconds = sent / link
    elif not ring:
        seconds = sent / nic
    elif kind == "all_to_all":
        seconds = sent * (size - fewest) / (size - 1) / nic  # what leaves the node
    else:
        seconds = sent / min(link, nic * fewest)
    if not ring:
        hops = gpu.hop_across if nodes > 1 else gpu.hop_inside
    else:
        hops = (size - nodes) * gpu.hop_inside + (nodes - 1) * gpu.hop_across
        if kind == "all_reduce":  # or a tree of nodes, with small messages
            tree = (size / nodes - 1) * gpu.hop_inside + math.log2(nodes) * gpu.hop_across
            hops = min(hops, tree)
    return count * PASSES.get(kind, 1) * hops + seconds
