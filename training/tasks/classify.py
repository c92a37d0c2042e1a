"""Classification of made images: waves, whose numbers along the axes are the class."""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from distributed.collectives import as_group, at_least_float32, replicated_loss
from distributed.parallel_model import ParallelModel
from training.tasks.task import Shape
from training.tasks.waves import WaveTask
from utils.errors import UsageError


class ClassifyTask(WaveTask):
    """Image to class: cross-entropy, accuracy.

    An image of class a * m + b has a waves along the first axis and b along the second.
    """

    scored = ("val_loss", "accuracy")
    shown = "accuracy {accuracy:.3f}"

    def check(self) -> None:
        """Classes are needed, and every rank needs all logits of its samples."""
        config = self.config
        if config.num_classes is None:
            raise UsageError(f"{config.config}: task classify needs num_classes")
        is_split = config.context_parallel > 1 or config.pipeline_parallel > 1
        if is_split or config.gradient_accumulation > 1:
            others = "context_parallel, pipeline_parallel and gradient_accumulation"
            raise UsageError(f"{config.config}: task classify goes without {others}")
        self.classes: int = config.num_classes
        # Numbers of waves along an axis: m of them, so that m x m is enough for all classes.
        self.most = math.ceil(math.sqrt(self.classes))

    def output_shape(self, samples: int) -> Shape:
        """One logit for each class."""
        return samples, self.classes

    def draw(self, random: torch.Generator) -> Tensor:
        """Those of a class; one wave along a third axis."""
        label = int(torch.randint(self.classes, (), generator=random))
        # The label gives both numbers of waves.
        first, second = divmod(label, self.most)
        axes = len(self.config.img_size)
        return torch.tensor([first, second, 1][:axes])

    def target(self, axes: Sequence[Tensor], numbers: Tensor, phases: Tensor) -> Tensor:
        """The classes, (B,)."""
        return numbers[:, 0] * self.most + numbers[:, 1]

    def loss(self, prediction: Tensor, target: Tensor, image_group: dist.ProcessGroup | None) -> Tensor:
        """Cross-entropy, in float32.

        All ranks that share the images have these logits. The gradient is multiplied by their number, which the mean
        over the ranks takes out again, as in context_parallel.l2_norms.
        """
        loss = F.cross_entropy(at_least_float32(prediction), target)
        return replicated_loss(loss, as_group(image_group))

    def scores(self, parallel: ParallelModel, x: Tensor, y: Tensor, count: int) -> Tensor:
        """Of each sample its cross-entropy, and 1 where the class is right."""
        # Samples beyond `count` only fill the batch.
        logits = parallel.model(x)[:count].float()  # (count, classes)
        y = y[:count]
        losses = F.cross_entropy(logits, y, reduction="none")
        is_right = logits.argmax(1) == y
        return torch.stack([losses, is_right.float()], 1)

    def random_batch(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Images of normal random numbers, and random classes."""
        x, _ = super().random_batch(generator)
        labels = torch.randint(self.classes, (len(x),), generator=generator)
        return x, labels
