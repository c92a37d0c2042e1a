"""A tracker of every operation in a training step: memory, arithmetic, messages."""

import weakref
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from tools.instruments.counting import Collective, Watch, collective
from tools.instruments.phases import PHASES, phases_of
from training.step import TrainingStep
from utils.torch_private import storage_id

aten = torch.ops.aten
# Uses of memory. A storage with several uses counts as the first of them.
LABELS = ("parameters", "gradients", "optimizer", "activations", "batch", "buffers", "temporaries")
ATTENTION = "attention"


class Operation(NamedTuple):
    """phase: forward, backward or update. kind: matmul, attention, pointwise, copy. moved: bytes read and written.

    name: the operator, as torch calls it; '' where a formula counts several alike.
    """

    phase: str
    kind: str
    flops: float
    moved: float
    dtype: torch.dtype
    name: str = ""


class Message(NamedTuple):
    """phase: as of an Operation. group: of ranks, by name. sent: bytes, as tools.instruments.counting counts them."""

    phase: str
    kind: str
    group: str
    sent: int


LIKE = {  # operators of a CPU that torch counts nothing of, and those that compute the same
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: aten._scaled_dot_product_flash_attention_backward,
}


class Tracker(Watch):
    """Context: `operations` and `messages` are Counters of what runs inside; `memory()` tells what was held.

    tensors: those that exist before. limit: bytes held at once above which a MemoryError is raised. Memory that an
    operation holds only while it runs is not seen.
    phase, sent_forward: kept up to date by tools.instruments.phases. groups: {name of a process group: ranks in it}.
    """

    def __init__(self, tensors: Iterable[Tensor] = (), limit: float | None = None):
        super().__init__()
        self.limit, self.held = limit, 0
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

    def saw(self, func: Any, args: tuple, kwargs: dict[str, Any], result: Any) -> None:
        """Note the memory of an operation, and count it."""
        given, made = list(plain_tensors(tree_leaves((args, kwargs)))), list(plain_tensors(tree_leaves(result)))
        self._note(given + made)
        if sent := collective(func, args, kwargs):
            name = sent.group.group_name
            self.groups.setdefault(name, tuple(dist.get_process_group_ranks(sent.group)))
            if sent.kind != "recv":
                self.messages[Message(self.phase_of(sent), sent.kind, name, sent.sent)] += 1
            self.label("buffers", made)
        elif not func.is_view and func.namespace == "aten":
            self._operation(func, args, kwargs, result, given, made)

    def phase_of(self, found: Collective) -> str:
        """The phase of a message: one to the next stage of a pipeline counts as forward, whenever it is sent."""
        if found.kind != "send":
            return self.phase
        (tensor,) = found.tensors[0]
        return "forward" if storage_id(tensor) in self.sent_forward else "backward"

    def _operation(self, func, args, kwargs, result, given, made):
        moved = {_place(t): t.numel() * t.element_size() for t in (*given, *made)}
        if not moved or func in NO_WORK:
            return
        flops, packet = 0, func._overloadpacket
        if formula := flop_registry.get(LIKE.get(packet, packet)):
            flops = formula(*args, **kwargs, out_val=result)
        kind = "pointwise" if torch.Tag.pointwise in func.tags else "copy"
        if flops:
            kind = ATTENTION if ATTENTION in str(packet) else "matmul"
        dtype = (given or made)[0].dtype
        self.operations[Operation(self.phase, kind, flops, sum(moved.values()), dtype, packet.__name__)] += 1

    def _number(self, storage):
        key = storage._cdata
        if key not in self.storages:
            self.born += 1
            self.storages[key] = self.born, weakref.ref(storage, lambda _, key=key: self._gone(key))
        return self.storages[key][0]

    def _gone(self, key):
        number, _ = self.storages.pop(key)
        self._changed(number, -self.sizes.pop(number, 0))

    def _note(self, tensors):
        for tensor in plain_tensors(tensors):
            self._sized(tensor.untyped_storage())

    def _sized(self, storage):
        """Note the size of a storage, which fully_shard may change."""
        number, size = self._number(storage), storage.nbytes()
        if change := size - self.sizes.get(number, 0):
            self.sizes[number] = size
            self._changed(number, change)
            if self.limit is not None and self.held > self.limit:
                raise MemoryError(f"{self.held} bytes of tensors: the limit is {self.limit:.0f}")

    def _changed(self, number, change):
        self.held += change
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


def plain_tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among some values; for a DTensor, or another wrapper of tensors, the tensors inside."""
    for value in values:
        if is_traceable_wrapper_subclass(value):
            yield from plain_tensors([getattr(value, name) for name in value.__tensor_flatten__()[0]])
        elif isinstance(value, torch.Tensor):
            yield value


Messages = dict[str, dict[str, tuple[float, float]]]  # by phase and kind: collectives, bytes that a rank sends


def messages_of_a_step(step: TrainingStep, x: Tensor, y: Tensor) -> Messages:
    """{phase: {kind: (collectives, bytes)}} that this rank sends in step(0, x, y), a TrainingStep."""
    with Tracker() as tracker, phases_of(step, tracker):
        step(0, x, y)
    return by_phase(tracker.messages)


def by_phase(messages: Counter[Message]) -> Messages:
    """{phase: {kind: (collectives, bytes)}} of counted Messages."""
    found: Messages = {phase: {} for phase in PHASES}
    for message, calls in messages.items():
        before = found[message.phase].get(message.kind, (0, 0))
        found[message.phase][message.kind] = before[0] + calls, before[1] + calls * message.sent
    return found


def _place(tensor):
    """Identifies the part of a storage that a tensor covers."""
    return storage_id(tensor), tensor.storage_offset(), tensor.shape, tensor.stride()


NO_WORK = {
    aten._unsafe_view.default,
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.detach.default,
}
