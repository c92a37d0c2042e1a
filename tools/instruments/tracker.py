"""A tracker of every operation in a training step: memory, arithmetic, messages."""

import weakref
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from itertools import count
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import flop_registry

from tools.instruments.counting import Collective, Watch, collective
from training.step.speed_options import EXPENSIVE
from utils.torch_private import is_dtensor, storage_id

aten = torch.ops.aten
PASSES = ("forward", "backward", "update")
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
    """phase: as of an Operation. group: its ranks, in a Trace by name. sent: bytes, as counting.py has it."""

    phase: str
    kind: str
    group: Any
    sent: int


# Operators of a CPU that torch counts nothing of, and those that compute the same.
LIKE = {
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: aten._scaled_dot_product_flash_attention_backward,
}
# Operators that are no views and move nothing.
NO_WORK = {
    aten._unsafe_view.default,
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.detach.default,
}


class Tracker(Watch):
    """Context: `operations` and `messages` are Counters of what runs inside; `memory()` tells what was held.

    tensors: those that exist before. Memory that an operation holds only while it runs is not seen.
    phase, sent_forward: kept up to date by phases_of.
    storages: {address: (number in the order of creation, bytes, weak reference)} of those that exist. saved: numbers of
    those that the backward pass needs.
    """

    def __init__(self, tensors: Iterable[Any] = ()):
        super().__init__()
        self.phase = "forward"
        self.sent_forward = set[int]()
        self.operations = Counter[Operation]()
        self.messages = Counter[Message]()
        self.numbers = count()  # one for each storage, since addresses are used again
        self.storages: dict[int, tuple[int, int, weakref.ref]] = {}
        self.saved = set[int]()
        self.labels: dict[int, str] = {}  # {number of a storage: its use}
        self.events: list[tuple[int, int, str]] = []  # number, change of its size, phase
        self.events_before = 0  # those of tensors that existed before the context
        self.note(tensors)

    def label(self, name: str, tensors: Iterable[Any]) -> set[int]:
        """Say what the memory of these tensors is used for; returns the numbers of their storages."""
        numbers = self.note(tensors)
        for number in numbers:
            # Of several uses the one that stands first in LABELS counts: a parameter may be saved as an activation.
            before = self.labels.get(number, LABELS[-1])
            self.labels[number] = min(before, name, key=LABELS.index)
        return numbers

    def note(self, tensors: Iterable[Any]) -> set[int]:
        """Note the size of the storages of these tensors, whatever else is among them; returns their numbers."""
        return {self._sized(tensor.untyped_storage()) for tensor in plain_tensors(tensors)}

    def save(self, tensors: Iterable[Tensor]) -> None:
        """Note tensors that the backward pass needs."""
        self.saved |= self.label("activations", tensors)

    def nbytes(self, numbers: set[int]) -> int:
        """Bytes of those of these storages that still exist."""
        # A copy: one that Python's garbage collection frees meanwhile takes its entry out of the dictionary.
        held = list(self.storages.values())
        return sum(size for number, size, _ in held if number in numbers)

    def on_op(
        self,
        func: Any,
        args: tuple,
        kwargs: dict[str, Any],
        result: Any,
    ) -> None:
        """Note the memory of an operation, and count it."""
        given = list(plain_tensors([*args, *kwargs.values()]))
        made = list(plain_tensors([result]))
        if any(tensor.device.type == "meta" for tensor in made):  # a rule asks torch for a shape
            return
        # Inputs are noted as well: an operation may be the first to show a tensor that was made without one.
        self.note(given + made)
        if func in EXPENSIVE and torch.is_grad_enabled():
            # Selective checkpointing keeps it, and autograd is not told.
            self.save(made)

        # A collective is a message and no operation. What it makes is a buffer.
        sent = collective(func, args, kwargs)
        if sent:
            self._count_message(sent)
            self.label("buffers", made)
            return
        makes_no_work = func.is_view or func.namespace != "aten" or func in NO_WORK
        if not makes_no_work and (given or made):
            flops = _flops(func, args, kwargs, result)
            self._count_operation(func, given, made, flops)

    def _count_message(self, sent: Collective) -> None:
        if sent.kind == "recv":  # the sender counts it
            return
        ranks = tuple(dist.get_process_group_ranks(sent.group))
        message = Message(self.phase_of(sent), sent.kind, ranks, sent.sent)
        self.messages[message] += 1

    def _count_operation(
        self,
        func: Any,
        given: list[Tensor],
        made: list[Tensor],
        flops: float,
    ) -> None:
        # A tensor that is read and written in place, or given twice, is moved once.
        moved = {}
        for tensor in (*given, *made):
            place = storage_id(tensor), tensor.storage_offset(), tensor.shape, tensor.stride()
            moved[place] = tensor.nbytes
        packet = func._overloadpacket
        # torch tags its elementwise operators. Whatever else has no FLOP counts as a copy.
        kind = "pointwise" if torch.Tag.pointwise in func.tags else "copy"
        if flops:
            kind = ATTENTION if ATTENTION in str(packet) else "matmul"
        operation = Operation(
            phase=self.phase,
            kind=kind,
            flops=flops,
            moved=sum(moved.values()),
            # An operation computes in the type that it is given, also where it casts its result.
            dtype=(given or made)[0].dtype,
            name=packet.__name__,
        )
        self.operations[operation] += 1

    def phase_of(self, found: Collective) -> str:
        """The phase of a message: one to the next stage of a pipeline counts as forward, whenever it is sent."""
        if found.kind != "send":
            return self.phase
        (tensor,) = found.tensors[0]
        return "forward" if storage_id(tensor) in self.sent_forward else "backward"

    def _sized(self, storage):
        """Note the size of a storage, which fully_shard may change; returns its number."""
        key = storage._cdata
        size = storage.nbytes()
        # An address may be used again. The weak reference tells when its storage is gone.
        if key not in self.storages:
            reference = weakref.ref(storage, lambda _: self._gone(key))
            self.storages[key] = next(self.numbers), 0, reference
        number, before, reference = self.storages[key]
        self.storages[key] = number, size, reference
        if size != before:
            self.events.append((number, size - before, self.phase))
        return number

    def _gone(self, key):
        number, size, _ = self.storages.pop(key)
        self.events.append((number, -size, self.phase))

    def __enter__(self):
        # fully_shard frees gathered parameters by this method, which no operation shows.
        resize = torch.UntypedStorage.resize_

        def resize_(storage, size):
            result = resize(storage, size)
            self._sized(storage)
            return result

        self.resizing = patch.object(torch.UntypedStorage, "resize_", resize_)
        self.resizing.start()
        self.events_before = len(self.events)
        return super().__enter__()

    def __exit__(self, *error):
        self.resizing.stop()
        return super().__exit__(*error)

    def memory(self, apart: Collection[str] = ()) -> Counter[str]:
        """{label: most bytes, each at its own moment}; "peak": most bytes at once, without the labels `apart`."""
        # A label may be told long after its storage was made, so that sizes are added up only now.
        now = Counter[str]()
        most = Counter[str]()
        for number, change, _ in self.events:
            label = self.labels.get(number, "temporaries")
            now[label] += change
            most[label] = max(most[label], now[label])
            # Labels that are apart, as of tensors in host memory, take nothing from the device.
            now["peak"] += change * (label not in apart)
            most["peak"] = max(most["peak"], now["peak"])
        return most

    def curve(self) -> list[tuple[str, int]]:
        """(phase, bytes at once) after each allocation and each release inside the context, in their order."""
        points: list[tuple[str, int]] = []
        held = 0
        # Earlier events give the level at which the curve begins.
        for number, (_, change, phase) in enumerate(self.events):
            held += change
            if number >= self.events_before:
                points.append((phase, held))
        return points


def _flops(
    func: Any,
    args: tuple,
    kwargs: dict[str, Any],
    result: Any,
) -> float:
    """FLOP of an operation by torch's formula for it; 0 where torch counts none."""
    packet = func._overloadpacket
    formula = flop_registry.get(LIKE.get(packet, packet))
    if formula is None:
        return 0
    # The formula counts the work of this rank, which is that on its part of each DTensor.
    own_args, own_kwargs, own_result = tree_map(own_part, (args, kwargs, result))
    return formula(*own_args, **own_kwargs, out_val=own_result)


def own_part(value: Any) -> Any:
    """The part of this rank of a DTensor, on which it computes; any other value as it is."""
    return value._local_tensor if is_dtensor(value) else value


def plain_tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among some values and in lists; for a DTensor, or another wrapper of tensors, the tensors inside."""
    for value in values:
        if isinstance(value, list | tuple):
            yield from plain_tensors(value)
        elif is_traceable_wrapper_subclass(value):
            names, _ = value.__tensor_flatten__()
            yield from plain_tensors([getattr(value, name) for name in names])
        elif isinstance(value, torch.Tensor):
            yield value


Messages = dict[str, dict[str, tuple[float, float]]]  # by phase and kind: collectives, bytes that a rank sends


def by_phase(*of_ranks: Counter[Message]) -> Messages:
    """{phase: {kind: (collectives, bytes)}} of counted Messages; of several ranks the most of each."""
    found: Messages = {phase: {} for phase in PASSES}
    for messages in of_ranks:
        calls = Counter[tuple[str, str]]()
        sent = Counter[tuple[str, str]]()
        for message, number in messages.items():
            calls[message.phase, message.kind] += number
            sent[message.phase, message.kind] += number * message.sent
        for phase, kind in sorted(calls):
            most_calls, most_sent = found[phase].get(kind, (0, 0))
            # The rank with the most calls need not be the one that sends the most bytes.
            most_calls = max(most_calls, calls[phase, kind])
            most_sent = max(most_sent, sent[phase, kind])
            found[phase][kind] = most_calls, most_sent
    return found
