"""The interface of a data set for the loaders: any class with these methods can be loaded. weather/ has ours."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:  # DALI's worker processes do without torch, which takes seconds to import
    from torch import Tensor


class Dataset(Protocol):
    """Samples of several frames each: the n of the input, oldest first, and the targets of every step of a forecast.

    One whose `read` may raise ConnectionLostError says so by an attribute `is_remote`, which is true.
    """

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of one sample of this rank: (n + steps, C, h, w)."""

    def __len__(self) -> int:
        """Count the samples."""

    def open(self) -> None:
        """Open the files where they are not open: a data set travels to another process without them."""

    def read(self, index: int, out: np.ndarray) -> None:
        """Read a sample, or its first frames, into `out`, contiguous float32."""

    def dates(
        self,
        indices: Sequence[int] | np.ndarray,
        steps: int,
    ) -> np.ndarray:
        """The dates at which `steps` steps start, (len(indices), steps) datetime64[s]: from the present frame on."""

    def check_finite(self, index: int) -> None:
        """Raise UsageError, naming the place, where a sample has a value that is not finite."""

    def listing(self) -> dict[str, str]:
        """{name: what this rank sees of it} of the files, which ranks compare."""

    def close(self) -> None:
        """Close the files."""


class ChannelStatistics(Protocol):
    """Mean and standard deviation of each channel, (C, 1, 1) float32."""

    @property
    def means(self) -> np.ndarray:
        """Means."""

    @property
    def stds(self) -> np.ndarray:
        """Standard deviations, all positive."""


class ForcingChannels(Protocol):
    """Further input channels that are known for any date and place."""

    def channels(self, steps: int) -> int:
        """Count the channels for so many steps of a forecast."""

    def __call__(self, dates: np.ndarray) -> "Tensor":
        """The forcings of k dates for each sample, (B, k): (B, channels(k), h, w) on the device."""
