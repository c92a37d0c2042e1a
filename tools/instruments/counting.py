"""Count the collectives of a piece of code, and the bytes that this rank sends in them.

    with CollectiveCounter() as counted:
        loss.backward()
    counted.calls     # Counter({"all_reduce": 2})
    counted.bytes     # Counter({"all_reduce": 66355200})

It sees functional collectives, eager or compiled, those of torch.distributed, and those of DDP and fully_shard.
"""

import math
from collections import Counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tools.instruments.watching import Watch

# Of an operator's name, without underscores and without the i of isend, one of these is the beginning.
KINDS = (
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather", "scatter", "send",
    "recv", "barrier",
)  # fmt: skip
INPUTS = ("input", "inputs", "input_tensor", "input_tensors", "tensor", "tensors", "input_list")


class CollectiveCounter(Watch):
    """Counts by kind: `calls`, and `bytes` that this rank sends under the best algorithm for large messages.

    An all-reduce counts as a reduce-scatter and an all-gather of the same tensor. Uneven shards count with the padding
    that is sent. A broadcast, reduce, gather or scatter counts its tensor once on every rank.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def saw(self, func: Any, args: tuple, kwargs: dict[str, Any], result: Any) -> None:
        """Count a collective."""
        if found := collective(func, args, kwargs):
            self.calls[found.kind] += 1
            self.bytes[found.kind] += found.sent


class Collective(NamedTuple):
    """A call of a collective: its kind, the bytes that this rank must send, the process group, the tensors sent."""

    kind: str
    sent: int
    group: dist.ProcessGroup
    tensors: list[Any]


def collective(func: Any, args: tuple, kwargs: dict[str, Any]) -> Collective | None:
    """The Collective of an operator (torch._ops.OpOverload) with these arguments; None for any other operator."""
    if func.namespace not in ("c10d", "_c10d_functional"):
        return None
    name = func._opname.replace("_", "").removeprefix("i")
    kind = next((kind for kind in KINDS if name.startswith(kind.replace("_", ""))), None)
    if kind is None:
        return None
    arguments = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    tensors = [arguments[name] for name in INPUTS if name in arguments]
    group = _group(arguments)
    return Collective(kind, _sent(kind, _nbytes(tensors), group, arguments), group, tensors)


def bytes_sent(kind: str, size: float, ranks: int) -> float:
    """Bytes that a rank sends in a collective over so many ranks. size: bytes of the tensor that it is given."""
    if kind in ("recv", "barrier"):
        return 0
    factors = {
        "all_reduce": (2 * (ranks - 1), ranks),
        "all_gather": (ranks - 1, 1),
        "reduce_scatter": (ranks - 1, ranks),
    }
    times, shared_by = factors.get(kind, (1, 1))
    return size * times // shared_by


def _sent(kind, size, group, arguments):
    if kind == "all_to_all":
        rows = arguments.get("input_split_sizes") or [1] * group.size()
        return size * (sum(rows) - rows[group.rank()]) // max(1, sum(rows))
    return bytes_sent(kind, size, group.size())


def _group(arguments):
    group = arguments["group_name"] if "group_name" in arguments else arguments["process_group"]
    if isinstance(group, dist.ProcessGroup):
        return group
    if isinstance(group, str):
        return dist.distributed_c10d._resolve_process_group(group)
    return dist.ProcessGroup.unbox(group)


def _nbytes(values):
    if isinstance(values, torch.Tensor):
        return math.prod(values.shape) * values.element_size()
    return sum(map(_nbytes, values))
