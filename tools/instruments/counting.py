"""Count the collectives of a piece of code, and the bytes that this rank sends in them.

    with CollectiveCounter() as counted:
        loss.backward()
    counted.calls     # Counter({"all_reduce": 2})
    counted.bytes     # Counter({"all_reduce": 66355200})

It sees functional collectives, eager or compiled, those of torch.distributed, and those of DDP and fully_shard.
"""

from collections import Counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from distributed.shard.core.tensor import LocalTensors
from utils.torch_private import group_named

# Of an operator's name, without underscores and without the i of isend, one of these is the beginning.
KINDS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",  # its name begins with reduce too, so it comes first
    "all_to_all",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "send",
    "recv",
    "barrier",
)
# The names of the arguments that hold what a rank sends, in the schemas of the operators.
INPUTS = ("input", "inputs", "input_tensor", "input_tensors", "tensor", "tensors", "input_list")


class Watch(TorchDispatchMode):
    """Context: `on_op` is called after each operation, eager or compiled, on the plain tensors that it worked on."""

    @classmethod
    def is_infra_mode(cls) -> bool:
        """True: torch.compile does not run under other modes; what compiled code does comes by here as well."""
        return True

    def on_op(
        self,
        func: Any,
        args: tuple,
        kwargs: dict[str, Any],
        result: Any,
    ) -> None:
        """func: a torch._ops.OpOverload, which has made `result` from the arguments."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple = (),
        kwargs: dict | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        # C++ asks the tensors of a plan for their device in this way, several times for each operation.
        if func is torch.ops.prim.device.default:
            return args[0].device
        with LocalTensors():  # down here a ShardTensor is its local part
            result = func(*args, **kwargs)
            self.on_op(func, args, kwargs, result)
        return result


class CollectiveCounter(Watch):
    """Counts by kind: `calls`, and `bytes` that this rank sends under the best algorithm for large messages.

    An all-reduce counts as a reduce-scatter and an all-gather of the same tensor. Uneven shards count with the padding
    that is sent. A broadcast, reduce, gather or scatter counts its tensor once on every rank.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls = Counter[str]()
        self.bytes = Counter[str]()

    def on_op(
        self,
        func: Any,
        args: tuple,
        kwargs: dict[str, Any],
        result: Any,
    ) -> None:
        """Count a collective."""
        found = collective(func, args, kwargs)
        if found:
            self.calls[found.kind] += 1
            self.bytes[found.kind] += found.sent


class Collective(NamedTuple):
    """A call of a collective: its kind, the bytes that this rank must send, the process group, the tensors sent."""

    kind: str
    sent: int
    group: dist.ProcessGroup
    tensors: list[Any]


def collective(
    func: Any,
    args: tuple,
    kwargs: dict[str, Any],
) -> Collective | None:
    """The Collective of an operator (torch._ops.OpOverload) with these arguments; None for any other operator."""
    # c10d has the operators of torch.distributed, and _c10d_functional those of functional collectives.
    if func.namespace not in ("c10d", "_c10d_functional"):
        return None
    name = func._opname.replace("_", "").removeprefix("i")
    kind = next((kind for kind in KINDS if name.startswith(kind.replace("_", ""))), None)
    if kind is None:
        return None

    # The arguments by name.
    names = [argument.name for argument in func._schema.arguments]
    arguments = dict(zip(names, args, strict=False)) | kwargs
    tensors = [arguments[name] for name in INPUTS if name in arguments]
    group = _group(arguments)
    size = _nbytes(tensors)

    sent = int(bytes_sent(kind, size, group.size()))
    if kind == "all_to_all":
        # The parts for the other ranks, which may be uneven.
        rows = arguments.get("input_split_sizes") or [1] * group.size()
        to_others = sum(rows) - rows[group.rank()]
        sent = size * to_others // max(1, sum(rows))
    return Collective(kind, sent, group, tensors)


def bytes_sent(kind: str, size: float, ranks: int) -> float:
    """Bytes that a rank sends in a collective over so many ranks. size: bytes of the tensor that it is given."""
    # The sender counts what is received.
    if kind in ("recv", "barrier"):
        return 0
    # A ring reaches these lower bounds: Patarasuk and Yuan 2009, doi:10.1016/j.jpdc.2008.09.002.
    others = ranks - 1
    # {kind: (times its tensor, shared by so many)}; any other kind sends its tensor once.
    factors = {
        "all_reduce": (2 * others, ranks),
        "all_gather": (others, 1),
        "reduce_scatter": (others, ranks),
    }
    times, shared_by = factors.get(kind, (1, 1))
    return size * times // shared_by


def _group(arguments):
    # Functional collectives name their group. The others have it in a box of TorchScript.
    name = "group_name" if "group_name" in arguments else "process_group"
    group = arguments[name]
    if isinstance(group, str):
        return group_named(group)
    if isinstance(group, dist.ProcessGroup):
        return group
    return dist.ProcessGroup.unbox(group)


def _nbytes(values):
    if isinstance(values, torch.Tensor):
        return values.nbytes
    # An operator may take lists of tensors, or lists of such lists.
    return sum(map(_nbytes, values))
