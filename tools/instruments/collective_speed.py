"""Collectives between the ranks of a node, and between nodes: whether their numbers are right, and how long they take.

Times are measured by size, and fitted as latency and bandwidth.
"""

import statistics
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.distributed as dist
from scipy.optimize import least_squares
from torch import Tensor

from tools.instruments.clock import timed
from tools.instruments.counting import bytes_sent

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send")
BATCHES = 5  # of measurements
SECONDS = 0.01  # that one takes
CHECKED = 1001  # numbers of each rank; not a multiple of the pattern's length
PRODUCT = 320  # rows of the matrices: a millisecond on a core
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Point = tuple[float, float]  # bytes that a rank sends in a call, seconds of the call


def places(nodes: Sequence[Sequence[int]]) -> dict[str, list[list[int]]]:
    """{inside | across: groups of ranks}: those of each node, and those at the same place of all nodes.

    nodes: the ranks of each node. Groups of one rank are left out.
    """
    groups_of = {
        "inside": [list(ranks) for ranks in nodes],
        "across": [list(peers) for peers in zip(*nodes, strict=False)],
    }
    found = {}
    for place, groups in groups_of.items():
        several = [group for group in groups if len(group) > 1]
        if several:
            found[place] = several
    return found


def calls_of(
    group: dist.ProcessGroup, part: Tensor, whole: Tensor, other: Tensor
) -> dict[str, tuple[Callable[[], object], Tensor, Tensor]]:
    """{kind: (a call of this collective, the tensor that it is given, the tensor that receives)}.

    part: (n,), of a rank. whole, other: (ranks * n,), of all ranks.
    """
    ranks = group.size()
    rank = group.rank()

    def exchange():
        """Send to the next rank and receive from the one before, as a pipeline does forward and backward."""
        following = (rank + 1) % ranks
        previous = (rank - 1) % ranks
        sends = dist.P2POp(dist.isend, whole, group=group, group_peer=following)
        takes = dist.P2POp(dist.irecv, other, group=group, group_peer=previous)
        for work in dist.batch_isend_irecv([sends, takes]):
            work.wait()

    return {
        "all_reduce": (lambda: dist.all_reduce(whole, group=group), whole, whole),
        "all_gather": (lambda: all_gather(other, part, group=group), part, other),
        "reduce_scatter": (lambda: reduce_scatter(part, whole, group=group), whole, part),
        "all_to_all": (lambda: dist.all_to_all_single(other, whole, group=group), whole, other),
        "broadcast": (lambda: dist.broadcast(whole, group=group, group_src=0), whole, whole),
        "send": (exchange, whole, other),
    }


def are_right(device: torch.device, dtype: torch.dtype) -> dict[str, bool]:
    """{kind: whether this rank gets the right numbers} of collectives of all ranks; bfloat16 holds these numbers."""
    group = dist.group.WORLD
    assert group
    ranks = group.size()
    rank = group.rank()
    factors = torch.arange(ranks, device=device) % 3 + 1  # of the ranks
    pattern = torch.arange(ranks * CHECKED, device=device) % 5
    total = pattern * factors.sum()
    exchanged = pattern.view(ranks, CHECKED)[rank] * factors[:, None]  # (ranks, CHECKED): a row of every rank
    expected = {
        "all_reduce": total,
        "all_gather": factors.repeat_interleave(CHECKED),
        "reduce_scatter": total.view(ranks, CHECKED)[rank],
        "all_to_all": exchanged.flatten(),
        "broadcast": pattern * factors[0],
        "send": pattern * factors[rank - 1],
    }
    if ranks == 1 and device.type == "cpu":
        del expected["send"]  # gloo sends nothing to itself
    right = {}
    for kind, numbers in expected.items():
        whole = (pattern * factors[rank]).to(dtype)
        own = int(factors[rank])
        part = torch.full((CHECKED,), own, device=device, dtype=dtype)
        other = torch.zeros_like(whole)
        call, _, received = calls_of(group, part, whole, other)[kind]
        call()
        # Partial sums are rounded.
        right[kind] = torch.allclose(received.float(), numbers.float(), rtol=0.02)
    return right


def measure_collective(
    kind: str,
    group: dist.ProcessGroup,
    size: int,
    device: torch.device,
) -> Point:
    """The Point of a collective of tensors of `size` bytes: the median of batches, of the slowest rank.

    Each call follows a matrix product, whose time is taken out: in a step ranks come to a message at different moments,
    and a CPU has to wake the thread that sends. One after another, small messages can take a third of that time.
    """
    ranks = group.size()
    part = torch.zeros(max(1, size // 4 // ranks), device=device)
    whole = torch.zeros(len(part) * ranks, device=device)
    other = torch.empty_like(whole)
    call, given, _ = calls_of(group, part, whole, other)[kind]
    sent = bytes_sent(kind, given.nbytes, ranks)
    if kind == "all_to_all":
        sent = given.nbytes * (ranks - 1) / ranks  # a rank keeps its own share
    factor = torch.rand(PRODUCT, PRODUCT, device=device)

    def batch(times, calls=1):
        for _ in range(times):
            torch.mm(factor, factor)
            for _ in range(calls):
                call()

    # How often a call fits into a measurement: as often on all ranks.
    batch(1)
    of_two, _ = timed(device, batch, 2)
    fitting = SECONDS / max(of_two / 2, 1e-6)
    number = torch.tensor([fitting], device=device)
    dist.all_reduce(number, dist.ReduceOp.MIN, group)
    times = max(1, int(number))

    # Products with calls, less products alone.
    differences = []
    for _ in range(BATCHES):
        with_calls, _ = timed(device, batch, times)
        alone, _ = timed(device, batch, times, 0)
        differences.append(with_calls - alone)
    of_a_call = max(1e-6, statistics.median(differences) / times)
    usual = torch.tensor([of_a_call], device=device)
    dist.all_reduce(usual, dist.ReduceOp.MAX, group)
    return float(sent), float(usual)


def all_points(
    groups: Sequence[Sequence[int]],
    device: torch.device,
    sizes: Sequence[int],
    kinds: Sequence[str] = KINDS,
) -> dict[str, list[Point]]:
    """{kind: its Points} in the group of this rank among `groups`, as fast as in the slowest group; all ranks call it.

    sizes: bytes of a tensor.
    """
    group, _ = dist.new_subgroups_by_enumeration([*map(list, groups)])
    points = {}
    for kind in kinds:
        measured = [(0.0, 0.0)] * len(sizes)  # of a rank in no group, so that the largest is that of a group
        if group:
            measured = [measure_collective(kind, group, size, device) for size in sizes]
        table = torch.tensor(measured, dtype=torch.float64).to(device, torch.float32)
        dist.all_reduce(table, dist.ReduceOp.MAX)
        points[kind] = [(float(sent), float(seconds)) for sent, seconds in table.tolist()]
    return points


def fit(points: Sequence[Point]) -> tuple[float, float]:
    """(latency in seconds, bandwidth in bytes/s) of Points: seconds = latency + sent / bandwidth.

    Ratios count, so that small and large messages weigh alike, and one outlier weighs little (soft L1).
    """
    sent, seconds = np.array(points, dtype=float).T

    def off(logs):
        """Logarithms of fitted seconds to measured ones."""
        latency = np.exp(logs[0])
        bandwidth = np.exp(logs[1])
        fitted = latency + sent / bandwidth
        return np.log(fitted / seconds)

    # Begin at the shortest time and the largest rate.
    largest_rate = (sent / seconds).max()
    start = np.log([seconds.min(), max(1.0, largest_rate)])
    best = least_squares(off, start, loss="soft_l1", f_scale=0.1)
    latency, bandwidth = np.exp(best.x)
    return float(latency), float(bandwidth)
