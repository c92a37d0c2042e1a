"""Random numbers that a model draws on the host, by Python's `random` and numpy, apart from everybody else's.

Libraries draw from the same two generators, on one rank more often than on another: a logger for the name of a run, a
client of a store for the pause before it asks again. Ranks that share an image would then draw different layers. So a
model's draws come from streams of their own, which are put in place while it computes.
"""

import ctypes
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.random.mtrand import get_bit_generator, set_bit_generator
from torch import Tensor

MERSENNE_BYTES = 4 * (624 + 1)  # the words of a Mersenne twister, and its place among them
PYTHON_VERSION = 3  # of the tuple that random.getstate gives


class HostRandom:
    """States of `random` and numpy. Inside `with host_random:` whatever draws, draws from them, and moves them on."""

    def __init__(self, seed: int):
        self.python: Any = random.Random(seed).getstate()
        self.numpy = np.random.MT19937(seed)
        self._outside: list[tuple[Any, Any]] = []  # generators of everybody else, one for each `with` that is open

    def __enter__(self) -> "HostRandom":
        """Put these generators in place."""
        # A `with` may stand inside another: the generators outside are put on a stack.
        outside = random.getstate(), get_bit_generator()
        self._outside.append(outside)
        random.setstate(self.python)
        set_bit_generator(self.numpy)  # numpy's get_state and set_state take a tenth of a millisecond each
        return self

    def __exit__(self, *_error: Any) -> None:
        """Keep the states as they are now, and put the generators of before back."""
        self.python = random.getstate()
        python, from_numpy = self._outside.pop()
        random.setstate(python)
        set_bit_generator(from_numpy)

    def states(self) -> tuple[Any, Any]:
        """The states of this moment, for `drawn_again`, while these generators are not in place."""
        return self.python, np.random.RandomState(self.numpy).get_state()

    def tensors(self) -> dict[str, Tensor]:
        """The states as tensors of fixed sizes; all their whole numbers are below 2^53, exact in float64."""
        _, words, spare = self.python  # spare: the second of two normal numbers that are drawn together, or None
        # The numbers of a tensor have one type, so whether there is a spare is a number too.
        python = [*words, float(spare is not None), spare or 0.0]
        state: Any = self.numpy.state["state"]
        from_numpy = [*state["key"], state["pos"]]
        return {
            "python": torch.tensor(python, dtype=torch.float64),
            "numpy": torch.tensor(from_numpy, dtype=torch.float64),
        }

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Put back what `tensors` has given, or a part of it."""
        if "python" in tensors:
            # The reverse of `tensors`.
            *numbers, has_spare, spare = tensors["python"].tolist()
            words = tuple(map(int, numbers))
            self.python = PYTHON_VERSION, words, spare if has_spare else None
        if "numpy" in tensors:
            *numbers, position = tensors["numpy"].tolist()
            key = np.array(numbers, dtype=np.uint32)
            state: Any = {"key": key, "pos": int(position)}
            self.numpy.state = {"bit_generator": "MT19937", "state": state}


def host_generators() -> tuple[Any, ...]:
    """The states of the generators of Python, numpy and torch on the host, to be compared."""
    return random.getstate(), _state_of_numpy(), torch.get_rng_state().numpy().tobytes()


def _state_of_numpy():
    """The memory of numpy's generator: what its own `state` says of it takes as long as a small layer computes."""
    # Somebody may have put another generator in place of numpy's own.
    generator = get_bit_generator()
    if isinstance(generator, np.random.MT19937):
        return ctypes.string_at(generator.ctypes.state_address, MERSENNE_BYTES)
    return repr(generator.state)


def host_states() -> tuple[Any, Any]:
    """The states of `random` and numpy at this moment, for `drawn_again`."""
    return random.getstate(), np.random.get_state()


@contextmanager
def drawn_again(states: tuple[Any, Any]) -> Iterator[None]:
    """Inside, `random` and numpy draw what they drew after `states`; afterwards they go on as if nothing had been."""
    now = host_states()
    _set(states)
    try:
        yield
    finally:
        _set(now)


def _set(states):
    random.setstate(states[0])
    np.random.set_state(states[1])
