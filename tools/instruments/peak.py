"""Peak memory of tensors, on devices whose allocator does not report it."""

import weakref
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from tools.instruments.watching import Watch

OUT_OF_MEMORY = "out of memory", "not enough memory", "can't allocate memory", "cannot allocate memory"


class PeakMemory(Watch):
    """Context: `peak` is the largest number of bytes in distinct storages after any operation inside.

    tensors: those that exist before. limit: bytes above which a MemoryError is raised. Memory that an operation holds
    only while it runs is not seen.
    """

    def __init__(self, tensors: Iterable[Tensor] = (), limit: float | None = None):
        super().__init__()
        self.limit, self.peak = limit, 0
        self.storages: dict[int, weakref.ref[UntypedStorage]] = {}
        self.note(tensors)

    def note(self, tensors: Iterable[Any]) -> None:
        """Count the storages of the tensors among some values. Raises MemoryError above the limit."""
        new = False
        for tensor in plain_tensors(tensors):
            storage = tensor.untyped_storage()
            if storage._cdata not in self.storages:
                new = True
                self.storages[storage._cdata] = weakref.ref(storage, partial(self._forget, storage._cdata))
        if new:  # fully_shard empties storages that stay: sizes are read, not remembered
            now = sum(alive.nbytes() for ref in list(self.storages.values()) if (alive := ref()) is not None)
            self.peak = max(self.peak, now)
            if self.limit is not None and now > self.limit:
                raise MemoryError(f"{now} bytes of tensors: the limit is {self.limit:.0f}")

    def _forget(self, key: int, _: object) -> None:
        self.storages.pop(key, None)

    def saw(self, func: Any, args: tuple, kwargs: dict[str, Any], result: Any) -> None:
        """Count the tensors of an operation."""
        self.note(tree_leaves((args, kwargs, result)))


def plain_tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among some values; for a DTensor, or another wrapper of tensors, the tensors inside."""
    for value in values:
        if is_traceable_wrapper_subclass(value):
            yield from plain_tensors([getattr(value, name) for name in value.__tensor_flatten__()[0]])
        elif isinstance(value, torch.Tensor):
            yield value


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory has run out, on any device."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(words in str(error).lower() for words in OUT_OF_MEMORY)
    )
