"""Classification of made images: plane waves in boxes of two or three dimensions, whose numbers are the class.

Every rank computes the points of its own part alone, from the number of the sample; nothing is read or sent.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from distributed.collectives import alike_on_ranks, as_group, at_least_float32
from distributed.parallel_model import ParallelModel
from training.tasks.task import Shape, Task, Validator
from utils import comm
from utils.data_loader import Batch, BatchLoader
from utils.device import to_device
from utils.errors import UsageError
from utils.sample_order import Order

SAMPLES = 4096, 256  # of training and validation, where limit_nsamples does not say otherwise


class Trained(Task):
    """Image to class: cross-entropy, accuracy."""

    def check(self) -> None:
        """Classes are needed, and every rank needs all logits of its samples."""
        config = self.config
        if config.num_classes is None:
            raise UsageError(f"{config.config}: task classify needs num_classes")
        if config.context_parallel > 1 or config.pipeline_parallel > 1 or config.gradient_accumulation > 1:
            others = "context_parallel, pipeline_parallel and gradient_accumulation"
            raise UsageError(f"{config.config}: task classify goes without {others}")
        self.classes: int = config.num_classes

    def output_shape(self, samples: int) -> Shape:
        """One logit for each class."""
        return samples, self.classes

    def build_loaders(self, device: torch.device) -> list[BatchLoader]:
        """Loaders of images that are made on the way; training and validation images differ, for any seed."""
        config = self.config
        counts = config.limit_nsamples or SAMPLES[0], config.limit_nsamples_val or SAMPLES[1]
        self.check_batch(counts[0])
        batch, window = config.global_batch_size // comm.get_size("dp"), self.own_window()
        return [
            WaveLoader(self, count, window, 2 * config.seed + part, batch, device) for part, count in enumerate(counts)
        ]

    def loss(self, prediction: Tensor, target: Tensor, image_group: dist.ProcessGroup | None) -> Tensor:
        """Cross-entropy, in float32.

        All ranks that share the images have these logits. The gradient is multiplied by their number, which the mean
        over the ranks takes out again, as in context_parallel.l2_norms.
        """
        return alike_on_ranks(F.cross_entropy(at_least_float32(prediction), target), as_group(image_group))

    def build_validator(self, loader: BatchLoader) -> Validator:
        """Means over all samples."""
        return ClassValidator(loader)

    def random_batch(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Images of normal random numbers, and random classes."""
        x, _ = super().random_batch(generator)
        return x, torch.randint(self.classes, (len(x),), generator=generator)


def waves(axes: Sequence[Tensor], numbers: Tensor, phases: Tensor) -> Tensor:
    """A wave in every channel, cos(2 pi (n_0 x_0 + n_1 x_1 + ..) + phase): (B, C, h, w, ..) float32.

    axes: the points along each axis, in lengths of the box. numbers: of waves along each axis, (B, axes). phases: in
    turns, (B, C).
    """
    ones, left = [1] * len(axes), range(len(axes))[::-1]  # axes after each
    along = [n.view(-1, *ones, 1) * x.view(-1, *ones[:i]) for i, n, x in zip(left, numbers.T, axes, strict=True)]
    return torch.cos(2 * math.pi * (sum(along) + phases.view(*phases.shape, *ones)))


class WaveLoader(BatchLoader):
    """Batches of images, (B, C, h, w, ..) float32, and their classes, (B,).

    An image of class a * m + b has a waves along the first axis and b along the second; phases are random.
    window: this rank's slice of each axis. seed: of what is random in a sample.
    """

    def __init__(
        self, task: Trained, count: int, window: Sequence[slice], seed: int, batch_size: int, device: torch.device
    ):
        self.classes, self.channels, self.count, self.seed = task.classes, task.config.n_in_channels, count, seed
        self.batch_size, self.device = batch_size, device
        sides = zip(task.config.img_size, window, strict=True)
        self.axes = [(torch.arange(n)[part] / n).to(device) for n, part in sides]

    @property
    def num_samples(self) -> int:
        """Number of samples."""
        return self.count

    def batch(self, samples: Iterable[int]) -> Batch:
        """The samples of these numbers: drawn on the host, and made on the device."""
        labels, phases = [], []
        for sample in samples:
            random = torch.Generator().manual_seed(self.seed * 1_000_003 + int(sample))
            labels.append(torch.randint(self.classes, (), generator=random))
            phases.append(torch.rand(self.channels, generator=random))
        label, phase = (to_device(torch.stack(drawn), self.device) for drawn in (labels, phases))
        m = math.ceil(math.sqrt(self.classes))
        rest = [torch.ones_like(label)] * (len(self.axes) - 2)
        return waves(self.axes, torch.stack([label // m, label % m, *rest], 1), phase), label

    def listing(self) -> dict[str, str]:
        """There are no files."""
        return {}

    def close(self) -> None:
        """Nothing is open."""

    def check_finite(self, samples: Iterable[int]) -> None:
        """Made numbers are finite."""

    def _shared_batches(self, order: Order, iterations: range) -> Iterator[Batch]:
        return map(self.batch, map(order.samples, iterations))


class ClassValidator(Validator):
    """Mean cross-entropy, and the share of images whose class is right."""

    def describe(self, summary: dict[str, Any]) -> str:
        """The accuracy."""
        return f"accuracy {summary['accuracy']:.3f}"

    def score(self, parallel: ParallelModel, beat: Callable[[], None]) -> dict[str, Any]:
        """{"val_loss", "accuracy"}."""
        scores = []
        for x, y, count in self.loader.valid():
            beat()
            logits, y = parallel.model(x)[:count].float(), y[:count]
            right = (logits.argmax(1) == y).float()
            scores.append(torch.stack([F.cross_entropy(logits, y, reduction="none"), right], 1))
        return dict(zip(("val_loss", "accuracy"), comm.global_mean(torch.cat(scores)).tolist(), strict=True))
