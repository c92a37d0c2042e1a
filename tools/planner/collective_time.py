"""Seconds of a collective by where its ranks stand: latency, and bytes over bandwidth.

The alpha-beta model: Hockney 1994. Rings through all NICs of a group: Jeaugey 2019, "Massively Scale Your Deep Learning
Training with NCCL 2.4".
"""

import math
from functools import cache

import numpy as np

from tools.planner.hardware import Gpu

ROUNDS = {"all_reduce": 2}  # round the ring; others: 1


@cache
def node_shapes(
    ranks: tuple[int, ...],
    world_size: int,
    gpus_per_node: int,
) -> set[tuple[int, int]]:
    """{(nodes, fewest ranks on a node)} of every group of a world that is laid out like this one.

    Every group is this one, shifted: ranks are numbered in row-major order of the mesh.
    """
    offsets = np.array(ranks) - min(ranks)
    seen = np.zeros(world_size, dtype=bool)
    shapes: dict[int, tuple[int, int]] = {}
    while not seen.all():
        first = int(seen.argmin())
        members = first + offsets
        seen[members] = True
        place = first % gpus_per_node
        # Groups that start at the same place of a node are placed alike.
        if place not in shapes:
            _, ranks_on_nodes = np.unique(members // gpus_per_node, return_counts=True)
            shapes[place] = len(ranks_on_nodes), int(ranks_on_nodes.min())
    return set(shapes.values())


def collective_time(
    kind: str,
    sent: float,
    count: int,
    size: int,
    nodes: int,
    fewest: int,
    gpu: Gpu,
    ring: bool,
) -> float:
    """Seconds of `count` collectives in which a rank sends `sent` bytes altogether.

    size: ranks of the group. nodes: that the group spans. fewest: ranks of the group on a node, at least.
    ring: each message passes all ranks; else it goes to one other rank.
    """
    link = gpu.link * gpu.network_efficiency
    nic = gpu.nic * gpu.network_efficiency
    hop_inside = gpu.hop_inside
    hop_across = gpu.hop_across
    if gpu.measured:
        if size > nodes:
            link, hop_inside = _measured(kind, 1, ring, gpu)
        if nodes > 1:
            nic, hop_across = _measured(kind, nodes, ring, gpu)

    # The bytes.
    if nodes == 1:
        seconds = sent / link
    elif not ring:
        seconds = sent / nic
    elif kind == "all_to_all":
        # A rank on the node with the fewest ranks sends most to other nodes.
        share_that_leaves = (size - fewest) / (size - 1)
        seconds = sent * share_that_leaves / nic
    else:
        # Rings pass a node through the NICs of all ranks that the group has there.
        seconds = sent / min(link, nic * fewest)

    # The latencies of a round.
    if not ring:
        hops = hop_across if nodes > 1 else hop_inside
    else:
        hops = (size - nodes) * hop_inside + (nodes - 1) * hop_across
        if kind == "all_reduce":
            # Small messages take a tree of nodes.
            tree = (size / nodes - 1) * hop_inside + math.log2(nodes) * hop_across
            hops = min(hops, tree)
    rounds = ROUNDS.get(kind, 1)
    return count * rounds * hops + seconds


def _measured(kind, nodes, ring, gpu):
    """(bytes/s, latency of a hop) of a measured machine, with which its own groups take what was measured."""
    measured_as = kind if ring else "send"
    found = gpu.measured.collective(measured_as, nodes, gpu.name)
    # The measured latency is that of a whole collective.
    hops = ROUNDS.get(kind, 1) * (found.ranks - 1) if ring else 1
    return found.bandwidth, found.latency / hops
