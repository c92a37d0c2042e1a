"""Common parts of the checks: random values, comparisons that say what is wrong, recorded collectives."""

import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tools.instruments.counting import collective


class Wrong(Exception):
    """The learner's result is not right; the message says why."""


def expect(condition: Any, message: str) -> None:
    """Raises Wrong with this message where the condition is false."""
    if not condition:
        raise Wrong(message)


class Draw:
    """Random values of a run of the check, the same on all ranks; `of(rank)` for those of one rank."""

    def __init__(self, *seed: int):
        self.seed = seed
        self.random = random.Random(repr(seed))
        self.generator = torch.Generator().manual_seed(self.random.randrange(2**31))

    def of(self, rank: int) -> "Draw":
        """The values of one rank, which no other one has."""
        return Draw(*self.seed, rank)

    def integer(self, first: int, last: int) -> int:
        """From first to last, both included."""
        return self.random.randint(first, last)

    def tensor(self, *shape: int) -> Tensor:
        """Normally distributed, of this shape."""
        return torch.randn(shape, generator=self.generator)


def same(a: Tensor, b: Tensor, tolerance: float = 1e-4) -> bool:
    """Equal up to rounding; nan is never equal."""
    return a.shape == b.shape and torch.allclose(a, b, rtol=tolerance, atol=tolerance)


def expect_same(got: Tensor, want: Tensor, what: str, hint: str, hints: dict[str, Tensor]) -> None:
    """Equal, or Wrong. hints: {what to say: the wrong result that it explains}; hint: of any other."""
    if same(got, want):
        return
    for text, wrong in hints.items():
        if same(got, wrong):
            raise Wrong(f"{what}: {text}")
    raise Wrong(f"{what}: {hint}")


def expect_tensor(value: Any, shape: Sequence[int], what: str) -> Tensor:
    """A tensor of this shape, or Wrong."""
    if value is None:
        raise Wrong(f"{what} is None, expected a tensor of {tuple(shape)}: is something returned?")
    is_tensor = isinstance(value, torch.Tensor)
    expect(is_tensor, f"{what} is {type(value).__name__}, expected a tensor of {tuple(shape)}")
    expect(value.shape == tuple(shape), f"{what} has the shape {tuple(value.shape)}, expected {tuple(shape)}")
    return value


def ratio(got: Tensor, want: Tensor) -> float | None:
    """The number got / want where it is one for the whole tensor, else None."""
    scale = (got * want).sum() / (want * want).sum()  # of least squares
    is_one_number = same(got, want * scale) and scale.isfinite()
    return scale.item() if is_one_number else None


def factor(got: Tensor, want: Tensor, size: int) -> str | None:
    """How a tensor differs from the right one by the number of ranks: "half of", "2 times", or None."""
    scale = ratio(got, want)
    if scale is None:
        return None
    if abs(scale * size - 1) < 1e-3:
        words = {2: "half of", 3: "a third of"}
        return words.get(size, f"1/{size} of")
    is_multiple = abs(scale / size - 1) < 1e-3
    return f"{size} times" if is_multiple else None


class Call(NamedTuple):
    """A collective that was called."""

    kind: str
    sent: int  # bytes that this rank sends at least
    values: torch.Tensor  # that it put in, flat


class Recorder(TorchDispatchMode):
    """Context: the collectives that this rank calls, in `calls`, as in tools/instruments/counting.py."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and importing the compiler takes each rank seconds

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        found = collective(func, args, kwargs)
        if found:
            # A copy, since a collective writes into its tensors.
            values = [tensor.detach().clone().flatten() for tensor in _flat(found.tensors)]
            together = torch.cat(values) if values else torch.empty(0)
            self.calls.append(Call(found.kind, found.sent, together))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def kinds(self) -> list[str]:
        """The kind of each call, in order."""
        return [call.kind for call in self.calls]


def _flat(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        else:
            yield from _flat(value)
