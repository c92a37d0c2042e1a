"""Images for the classifier, made as they are asked for: waves, whose numbers along the axes are the class.

Every rank computes the points of its own part alone, from the number of the sample; nothing is read or sent.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn import functional as F

from distributed.parallel_model import ParallelModel
from utils import comm
from utils.data_loader import Batch, BatchLoader, Indices
from utils.errors import UsageError
from utils.schema import Config
from utils.tiles import own_window

SAMPLES = {"train": 4096, "valid": 256}  # where limit_nsamples does not say otherwise


class ClassImages:
    """Samples (image, class): a wave in every channel, cos(2 pi (a y + b x) + phase), of class a * m + b.

    window: this rank's slice of each axis. seed: of the phases, which are random.
    """

    def __init__(
        self, count: int, img_size: Sequence[int], channels: int, classes: int, window: Sequence[slice], seed: int
    ):
        self.count, self.channels, self.classes, self.seed = count, channels, classes, seed
        self.waves = math.ceil(math.sqrt(classes))
        self.axes = [torch.arange(n)[part] / n for n, part in zip(img_size, window, strict=True)]

    def __len__(self):
        return self.count

    def sample(self, index: int) -> tuple[Tensor, int]:
        """(C, *window) float32, and the class."""
        random = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        label = int(torch.randint(self.classes, (), generator=random))
        phases = torch.rand(self.channels, generator=random)
        numbers = [label // self.waves, label % self.waves, *[1] * (len(self.axes) - 2)]
        turns = sum(
            n * x.view(-1, *[1] * i) for i, (n, x) in enumerate(zip(numbers[::-1], self.axes[::-1], strict=True))
        )
        return torch.cos(2 * math.pi * (turns + phases.view(-1, *[1] * len(self.axes)))), label


class ClassImageLoader(BatchLoader):
    """Batches of images (B, C, ...) and classes (B,)."""

    def __init__(self, images: ClassImages, batch_size: int, device: torch.device):
        self.images, self.batch_size, self.device = images, batch_size, device

    @property
    def num_samples(self) -> int:
        """Images that there are."""
        return len(self.images)

    def close(self) -> None:
        """Nothing is open."""
        pass

    def _shared_batches(self, indices: Indices, iterations: range) -> Iterator[Batch]:
        for iteration in iterations:
            images, labels = zip(*(self.images.sample(int(i)) for i in indices(iteration)), strict=True)
            yield torch.stack(images).to(self.device), torch.tensor(labels, device=self.device)


def build_class_loaders(config: Config, device: torch.device) -> list[BatchLoader]:
    """Training and validation loader."""
    window, batch_size = own_window(config.img_size, config.patch_size), config.global_batch_size
    counts = config.limit_nsamples or SAMPLES["train"], config.limit_nsamples_val or SAMPLES["valid"]
    if batch_size > counts[0]:
        raise UsageError(f"global_batch_size {batch_size} is larger than the training data: {counts[0]} samples")
    classes = config.num_classes or 0  # check_config has asked for them
    loaders: list[BatchLoader] = []
    for part, count in enumerate(counts):
        seed = 2 * config.seed + part  # training and validation images are different, for any config.seed
        images = ClassImages(count, config.img_size, config.n_in_channels, classes, window, seed)
        loaders.append(ClassImageLoader(images, batch_size // comm.get_size("dp"), device))
    return loaders


class ClassValidator:
    """Loss and accuracy over every sample of `loader` exactly once."""

    names = units = ()

    def __init__(self, loader: BatchLoader):
        self.loader = loader
        self.figures: dict[str, Figure] = {}

    @torch.no_grad()
    def run(self, parallel: ParallelModel, stop: Callable[[], bool] = lambda: False) -> dict[str, Any] | None:
        """Scores of one pass of a ParallelModel, or None where `stop()` became true on the way."""
        parallel.model.eval()
        try:
            scores = []
            for x, y, count in self.loader.valid():
                if stop():
                    return None
                logits = parallel.model(x)[:count].float()
                right = (logits.argmax(1) == y[:count]).float()
                scores.append(torch.stack([F.cross_entropy(logits, y[:count], reduction="none"), right], 1))
        finally:
            parallel.model.train()
        loss, accuracy = comm.global_mean(torch.cat(scores)).tolist()
        return {"val_loss": loss, "accuracy": accuracy}
