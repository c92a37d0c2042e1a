"""What a training step does, operation by operation: memory, arithmetic, messages."""

import weakref
from collections import Counter
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from tools.instruments.counting import collective
from tools.instruments.messages import phase_of
from tools.instruments.peak import plain_tensors
from tools.instruments.watching import Watch
from tools.planner.fake import nothing_to_read

aten = torch.ops.aten
# Uses of memory. A storage with several uses counts as the first of them.
LABELS = ("parameters", "gradients", "optimizer", "activations", "batch", "buffers", "temporaries")
ATTENTION = "attention"


class Operation(NamedTuple):
    """phase: forward, backward or update. kind: matmul, attention, pointwise, copy. moved: bytes read and written."""

    phase: str
    kind: str
    flops: float
    moved: float
    dtype: torch.dtype


class Message(NamedTuple):
    """phase: as of an Operation. group: of ranks, by name. sent: bytes, as tools.instruments.counting counts them."""

    phase: str
    kind: str
    group: str
    sent: int


def _cpu_attention(q, k, v, *args, **kwargs):
    return sdpa_flop_count(q.shape, k.shape, v.shape)


def _cpu_attention_backward(grad, q, k, v, *args, **kwargs):
    return sdpa_backward_flop_count(grad.shape, q.shape, k.shape, v.shape)


FLOPS = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: _cpu_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _cpu_attention_backward,
}


class Tracker(Watch):
    """Context: `operations` and `messages` are Counters of what runs inside; `memory()` tells what was held.

    phase, sent_forward: kept up to date by tools.instruments.phases. groups: {name of a process group: ranks in it}.
    """

    def __init__(self, tensors: Iterable[Tensor] = ()):
        super().__init__()
        self.phase = "forward"
        self.sent_forward: set[int] = set()
        self.operations: Counter[Operation] = Counter()
        self.messages: Counter[Message] = Counter()
        self.groups: dict[str, tuple[int, ...]] = {}
        # Storages are numbered in the order of their creation. By address: the number, and a weak reference.
        self.storages: dict[int, tuple[int, weakref.ref]] = {}
        self.sizes: dict[int, int] = {}
        self.labels: dict[int, str] = {}
        self.events: list[tuple[int, int]] = []  # number, change of its size
        self.born = 0
        self._note(tensors)

    def label(self, name: str, tensors: Iterable[Tensor]) -> None:
        """Say what the memory of these tensors is used for."""
        for tensor in plain_tensors(tensors):
            number = self._number(tensor.untyped_storage())
            before = self.labels.get(number, "temporaries")
            self.labels[number] = min(before, name, key=LABELS.index)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        value = nothing_to_read(func, args)
        return super().__torch_dispatch__(func, types, args, kwargs) if value is None else value

    def saw(self, func: Any, args: tuple, kwargs: dict[str, Any], result: Any) -> None:
        """Note the memory of an operation, and count it."""
        given, made = list(plain_tensors(tree_leaves((args, kwargs)))), list(plain_tensors(tree_leaves(result)))
        self._note(given + made)
        if sent := collective(func, args, kwargs):
            self._message(sent)
            self.label("buffers", made)
        elif not func.is_view and func.namespace == "aten":
            self._operation(func, args, kwargs, result, given, made)

    def _message(self, sent):
        name = sent.group.group_name
        self.groups.setdefault(name, tuple(dist.get_process_group_ranks(sent.group)))
        if sent.kind != "recv":
            self.messages[Message(phase_of(self, sent), sent.kind, name, sent.sent)] += 1

    def _operation(self, func, args, kwargs, result, given, made):
        moved = {_place(t): t.numel() * t.element_size() for t in (*given, *made)}
        if not moved or func in NO_WORK:
            return
        flops, packet = 0, func._overloadpacket
        if func in FLOPS:
            flops = FLOPS[func](*args, **kwargs)
        elif packet in flop_registry:
            flops = flop_registry[packet](*args, **kwargs, out_val=result)
        kind = "pointwise" if torch.Tag.pointwise in func.tags else "copy"
        if flops:
            kind = ATTENTION if ATTENTION in str(packet) else "matmul"
        dtype = given[0].dtype if given else made[0].dtype
        self.operations[Operation(self.phase, kind, flops, sum(moved.values()), dtype)] += 1

    def _number(self, storage):
        key = storage._cdata
        if key not in self.storages:
            self.born += 1
            self.storages[key] = self.born, weakref.ref(storage, lambda _, key=key: self._gone(key))
        return self.storages[key][0]

    def _gone(self, key):
        number, _ = self.storages.pop(key)
        self.events.append((number, -self.sizes.pop(number, 0)))

    def _note(self, tensors):
        for tensor in plain_tensors(tensors):
            self._sized(tensor.untyped_storage())

    def _sized(self, storage):
        """Note the size of a storage, which fully_shard may change."""
        number, size = self._number(storage), storage.nbytes()
        if change := size - self.sizes.get(number, 0):
            self.sizes[number] = size
            self.events.append((number, change))

    def __enter__(self):
        resize = torch.UntypedStorage.resize_

        def resize_(storage, size):
            result = resize(storage, size)
            self._sized(storage)
            return result

        self.resizing = patch.object(torch.UntypedStorage, "resize_", resize_)
        self.resizing.start()
        return super().__enter__()

    def __exit__(self, *error):
        self.resizing.stop()
        return super().__exit__(*error)

    def memory(self, apart: Collection[str] = ()) -> dict[str, float]:
        """{label: most bytes, each at its own moment}; "peak": most bytes at once, without the labels `apart`."""
        now: Counter[str] = Counter()
        most: Counter[str] = Counter()
        for number, change in self.events:
            label = self.labels.get(number, "temporaries")
            now[label] += change
            most[label] = max(most[label], now[label])
            now["peak"] += change * (label not in apart)
            most["peak"] = max(most["peak"], now["peak"])
        return {name: most[name] for name in (*LABELS, "peak")}


def _place(tensor):
    """Identifies the part of a storage that a tensor covers."""
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride()


NO_WORK = {
    aten._unsafe_view.default,
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.detach.default,
}
