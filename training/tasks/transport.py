"""Transport: waves in a box of two or three dimensions, and where a constant wind has carried them. Image to image."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from distributed.parallel_model import ParallelModel
from training.forecasting.losses import relative_l2
from training.tasks.waves import WaveTask, waves
from utils.errors import UsageError

WIND = (1 / 16, 1 / 8, 1 / 16)  # of the box, along each axis
MOST_WAVES = 3  # along an axis


class TransportTask(WaveTask):
    """Image to image, in two or three dimensions: relative L2 loss, beside that of leaving everything where it is."""

    scored = ("val_loss", "persistence_loss")
    shown = "relative error {val_loss:.3f}, of no motion {persistence_loss:.3f}"

    def check(self) -> None:
        """The output has the waves of the input."""
        config = self.config
        if config.n_in_channels != config.n_out_channels:
            # The wind moves waves, and makes none.
            counts = f"n_in_channels {config.n_in_channels} and n_out_channels {config.n_out_channels}"
            raise UsageError(f"{config.config}: task transport: {counts} are the same waves: give the same number")

    def draw(self, random: torch.Generator) -> Tensor:
        """Waves in any direction."""
        axes = len(self.config.img_size)
        return torch.randint(-MOST_WAVES, MOST_WAVES + 1, (axes,), generator=random)

    def target(self, axes: Sequence[Tensor], numbers: Tensor, phases: Tensor) -> Tensor:
        """The same waves later, as images: what is at a point now was upwind of it."""
        upwind = [x - speed for x, speed in zip(axes, WIND, strict=False)]
        return waves(upwind, numbers, phases)

    def loss(self, prediction: Tensor, target: Tensor, image_group: dist.ProcessGroup | None) -> Tensor:
        """The relative L2 loss of neural operators."""
        return relative_l2(prediction, target, image_group).mean()

    def scores(self, parallel: ParallelModel, x: Tensor, y: Tensor, count: int) -> Tensor:
        """Both errors of each sample."""
        # Every rank scores whole images. Those beyond `count` only fill the batch.
        prediction = parallel.predict(x, y.shape[1])
        prediction = parallel.whole_images(prediction)[:count]
        x = parallel.whole_images(x)[:count]
        y = parallel.whole_images(y)[:count]
        error = relative_l2(prediction, y)
        persistence_error = relative_l2(x, y)
        return torch.stack([error, persistence_error], 1)
