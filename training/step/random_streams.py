"""The random numbers of a rank: who draws the same ones, and how a checkpoint keeps them.

Streams have numbers, and ranks with the same number draw the same: in a checkpoint a state stands under the number of
its stream, and not of a rank. So ranks that share an image draw alike also after a resume in another layout.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from utils import comm
from utils.host_random import HostRandom


class RandomStreams:
    """torch's generators, seeded, and those of Python and numpy that the model draws from.

    seed: None leaves torch's generators as they are. Dropout differs wherever ranks hold different activations. What
    is drawn by Python's `random` or numpy is alike on all ranks that share an image, since it may decide which layers
    compute; it differs over the data-parallel ranks.
    host: the context in which the model's draws from `random` and numpy come from their own streams.
    """

    def __init__(self, seed: int | None = None, sequence_parallel: bool = False):
        self.device_stream = comm.dropout_stream(sequence_parallel)
        self.host_stream = comm.get_rank("dp")
        # Ranks that share an image draw alike on the host.
        self.host = HostRandom((seed or 0) + self.host_stream)
        # Programs that only read weights leave the generators alone.
        if seed is not None:
            torch.manual_seed(seed + self.device_stream)
            random.seed(seed + comm.rank())  # of everything but the model
            np.random.seed((seed + comm.rank()) % 2**32)

    def tensors(self) -> dict[str, Tensor]:
        """The states, each under a kind and the number of its stream."""
        states = {f"cpu{self.device_stream}": torch.get_rng_state()}
        device = accelerator()
        if device:
            states[f"{device.type}{self.device_stream}"] = torch.get_device_module(device).get_rng_state()
        for kind, state in self.host.tensors().items():
            states[f"{kind}{self.host_stream}"] = state
        return states

    def restore(self, states: dict[str, Tensor]) -> None:
        """Put back what `tensors` has given; a stream that was not there before goes on as it was seeded."""
        for kind, setter in self._setters().items():
            state = states.get(f"{kind}{self.device_stream}")
            if state is not None:
                setter(state)
        # Python's and numpy's states belong to another stream than torch's.
        host_states: dict[str, Tensor] = {}
        for kind in ("python", "numpy"):
            state = states.get(f"{kind}{self.host_stream}")
            if state is not None:
                host_states[kind] = state
        self.host.restore(host_states)

    @contextmanager
    def unmoved(self) -> Iterator[None]:
        """Inside, numbers may be drawn; afterwards the streams are where they were."""
        before = self.tensors()
        try:
            yield
        finally:
            # To set a generator of a GPU costs more than to look at it.
            now = self.tensors()
            moved = any(not torch.equal(state, now[name]) for name, state in before.items())
            if moved:
                self.restore(before)

    def _setters(self):
        setters = {"cpu": torch.set_rng_state}
        device = accelerator()
        if device:
            setters[device.type] = torch.get_device_module(device).set_rng_state
        return setters


def accelerator() -> torch.device | None:
    """The kind of device beside the CPU, None where there is none."""
    if not torch.accelerator.is_available():
        return None
    return torch.accelerator.current_accelerator()
