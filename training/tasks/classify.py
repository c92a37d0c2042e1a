"""Classification of made images: waves, whose numbers along the axes are the class."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from distributed.parallel_model import ParallelModel
from training.losses import classification_loss
from training.tasks.task import Shape, Task, Validator
from training.waves import WaveLoader, Waves
from utils import comm
from utils.data_loader import Batch, BatchLoader
from utils.errors import UsageError

SAMPLES = {"train": 4096, "valid": 256}  # where limit_nsamples does not say otherwise


class ClassImages(Waves):
    """Samples (image, class): an image of class a * m + b has a waves along the first axis and b along the second.

    The first arguments are those of Waves.
    """

    def __init__(self, *args: Any, classes: int):
        super().__init__(*args)
        self.classes, self.waves = classes, math.ceil(math.sqrt(classes))

    def draw(self, random: torch.Generator) -> tuple[Tensor, Tensor]:
        """The class, (), and the phases, (C,)."""
        return torch.randint(self.classes, (), generator=random), torch.rand(self.channels, generator=random)

    def make(self, *drawn: Tensor) -> Batch:
        """(B, C, *window) float32, and the classes, (B,)."""
        labels, phases = drawn
        rest = [torch.ones_like(labels)] * (len(self.axes) - 2)
        return self.image(torch.stack([labels // self.waves, labels % self.waves, *rest], 1), phases), labels


class ClassValidator(Validator):
    """Loss and accuracy."""

    def describe(self, summary: dict[str, Any]) -> str:
        """The accuracy."""
        return f"accuracy {summary['accuracy']:.3f}"

    def score(self, parallel: ParallelModel, stop: Callable[[], bool]) -> dict[str, Any] | None:
        """{"val_loss", "accuracy"}."""
        scores = []
        for x, y, count in self.loader.valid():
            if stop():
                return None
            logits = parallel.model(x)[:count].float()
            right = (logits.argmax(1) == y[:count]).float()
            scores.append(torch.stack([F.cross_entropy(logits, y[:count], reduction="none"), right], 1))
        loss, accuracy = comm.global_mean(torch.cat(scores)).tolist()
        return {"val_loss": loss, "accuracy": accuracy}


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
        """Loaders of images that are made on the way."""
        config, window = self.config, self.own_window()
        counts = config.limit_nsamples or SAMPLES["train"], config.limit_nsamples_val or SAMPLES["valid"]
        self.check_batch(counts[0], "")
        loaders: list[BatchLoader] = []
        for part, count in enumerate(counts):
            seed = 2 * config.seed + part  # training and validation images are different, for any config.seed
            images = ClassImages(count, config.img_size, config.n_in_channels, window, seed, classes=self.classes)
            loaders.append(WaveLoader(images, config.global_batch_size // comm.get_size("dp"), device))
        return loaders

    def loss(self, prediction: Tensor, target: Tensor, image_group: dist.ProcessGroup | None) -> Tensor:
        """Cross-entropy."""
        return classification_loss(prediction, target, image_group)

    def build_validator(self, loader: BatchLoader) -> Validator:
        """Loss and accuracy."""
        return ClassValidator(loader)

    def random_batch(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Images of normal random numbers, and random classes."""
        config = self.config
        x = torch.randn(config.global_batch_size, config.n_in_channels, *config.img_size, generator=generator)
        return x, torch.randint(self.classes, (config.global_batch_size,), generator=generator)
