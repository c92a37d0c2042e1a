"""Transport: waves in a box of two or three dimensions, and where a constant wind has carried them. Image to image."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from distributed.parallel_model import ParallelModel
from training.losses import relative_l2
from training.tasks.waves import WaveTask, waves
from utils.data_loader import Batch
from utils.errors import UsageError

WIND = (1 / 16, 1 / 8, 1 / 16)  # of the box, along each axis
MOST_WAVES = 3  # along an axis


class Trained(WaveTask):
    """Image to image, in two or three dimensions: relative L2 loss, beside that of leaving everything where it is."""

    scored = ("val_loss", "persistence_loss")
    shown = "relative error {val_loss:.3f}, of no motion {persistence_loss:.3f}"

    def check(self) -> None:
        """The identity: the output is the input."""
        config = self.config
        if config.n_in_channels != config.n_out_channels:
            raise UsageError(
                f"{config.config}: task transport: n_in_channels {config.n_in_channels} and n_out_channels "
                f"{config.n_out_channels} are the same waves: give the same number"
            )

    def draw(self, random: torch.Generator) -> tuple[Tensor, Tensor]:
        """Numbers of waves, (axes,), and phases, (C,)."""
        numbers = torch.randint(-MOST_WAVES, MOST_WAVES + 1, (len(self.config.img_size),), generator=random)
        return numbers, torch.rand(self.config.n_in_channels, generator=random)

    def make(self, axes: Sequence[Tensor], *drawn: Tensor) -> Batch:
        """An image, and the same waves later: two batches, (B, C, h, w, ..) float32."""
        numbers, phases = drawn
        turned = sum(n * speed for n, speed in zip(numbers.T, WIND, strict=False))
        return waves(axes, numbers, phases), waves(axes, numbers, phases - turned.view(-1, 1))

    def loss(self, prediction: Tensor, target: Tensor, image_group: dist.ProcessGroup | None) -> Tensor:
        """The relative L2 loss of neural operators."""
        return relative_l2(prediction, target, image_group).mean()

    def scores(self, parallel: ParallelModel, x: Tensor, y: Tensor, count: int) -> Tensor:
        """Both errors of each sample."""
        images = parallel.predict(x, y.shape[1]), x, y
        prediction, x, y = (parallel.whole_images(image)[:count] for image in images)
        return torch.stack([relative_l2(prediction, y), relative_l2(x, y)], 1)
