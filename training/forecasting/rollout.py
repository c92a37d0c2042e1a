"""A forecast of several steps: what the network gives after one step is what it takes for the next.

Trained over several steps, a model sees inputs that it has made itself, and learns not to let their errors grow. The
gradient runs back through all steps (Keisler 2022, arXiv:2202.07575; Lam et al. 2023, GraphCast, arXiv:2212.12794).
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from distributed.collectives import at_least_float32
from utils.errors import UsageError
from utils.schema import Config, count_forcings

Network = Callable[..., Tensor]  # of an image and, in an ensemble, of noise


class Rollout:
    """The forecasts of a network whose inputs and outputs are those of a config.

    A batch of inputs holds the channels of the n latest frames, the present one first, the forcings that stay, and
    those that change, one step after the other: (B, n n_in + fixed + k timed, h, w).
    change_scale: (C, 1, 1) on the device, where the network gives the change of the state, in units of its own.
    """

    def __init__(self, config: Config, change_scale: Tensor | None = None):
        self.n_in = config.n_in_channels
        self.n_out = config.n_out_channels
        self.channels = config.state_channels  # those of all frames of the input, n n_in
        self.fixed, self.timed = count_forcings(config.forcings)
        self.change_scale = change_scale

    def inputs(self, frames: Tensor, x: Tensor, step: int) -> Tensor:
        """The network's input for a step, counted from 0: (B, n n_in + fixed + timed, h, w).

        frames: the latest ones. x: a batch of inputs.
        """
        if not self.fixed and not self.timed:
            return frames
        first_timed = self.channels + self.fixed
        begin = first_timed + step * self.timed
        end = first_timed + (step + 1) * self.timed
        fixed = x[:, self.channels : first_timed]  # (B, fixed, h, w)
        timed = x[:, begin:end]  # (B, timed, h, w), of this step
        return torch.cat([frames, fixed, timed], 1)

    def next_state(self, state: Tensor, output: Tensor) -> Tensor:
        """The state one step later, (B, n_out, h, w) in at least float32, of the network's output."""
        output = at_least_float32(output)
        if self.change_scale is None:
            return output
        # The network gives the change of the channels that it forecasts.
        return torch.addcmul(state[:, : self.n_out], output, self.change_scale)

    def moved_on(self, frames: Tensor, state: Tensor) -> Tensor:
        """The latest frames one step later, (B, n n_in, h, w): the new state first, the oldest one left out."""
        newest = state[:, : self.n_in]
        kept = self.channels - self.n_in  # channels of the frames that stay
        if not kept:
            return newest
        return torch.cat([newest, frames[:, :kept]], 1)

    def steps(
        self,
        network: Network,
        x: Tensor,
        count: int,
        last: Network | None = None,
        noise: Tensor | None = None,
    ) -> Iterator[Tensor]:
        """Yield the state after each of `count` steps: (B, n_out, h, w), normalised, float32.

        last: called in place of `network` in the last step. noise: of each step, (B, count, K), which the network takes
        beside the image; None: it takes none.
        """
        frames = x[:, : self.channels]
        for step in range(count):
            is_last = step == count - 1
            call = last if last and is_last else network
            beside = () if noise is None else (noise[:, step],)  # (B, K)
            version = frames._version
            output = call(self.inputs(frames, x, step), *beside)
            is_needed = self.change_scale is not None or self.channels > self.n_in
            if is_needed and frames._version != version:
                raise UsageError(
                    "the model writes to its input, of which the next state is made: let it begin with x = x.clone()"
                )
            state = self.next_state(frames, output)  # (B, n_out, h, w)
            yield state
            frames = self.moved_on(frames, state)

    def forecast(
        self,
        network: Network,
        x: Tensor,
        count: int,
        last: Network | None = None,
        noise: Tensor | None = None,
    ) -> Tensor:
        """All steps, one after the other: (B, count n_out, h, w). Arguments as of `steps`."""
        states = list(self.steps(network, x, count, last, noise))
        if count == 1:  # nothing to join, and no copy
            return states[0]
        return torch.cat(states, 1)
