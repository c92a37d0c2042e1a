"""The plain design of a data loader, as in most tutorials: the yardstick for ours."""

from collections.abc import Sequence
from pathlib import Path

import h5py
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from weather.dataset import FieldDataset, Statistics


class PlainDataset(Dataset):
    """Reads twice for each sample, into new arrays, and normalises in numpy. The reading process opens the files."""

    def __init__(self, paths: Sequence[Path], means: np.ndarray, stds: np.ndarray):
        self.paths, self.means, self.stds = paths, means, stds
        self.files: list[h5py.Dataset] | None = None
        self.index: list[tuple[int, int]] = []  # file, frame
        for number, path in enumerate(paths):
            with h5py.File(path, "r", locking=False) as file:
                self.index += [(number, t) for t in range(file["fields"].shape[0] - 1)]

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, i: int) -> tuple[Tensor, ...]:
        if self.files is None:
            self.files = [h5py.File(path, "r", locking=False)["fields"] for path in self.paths]
        number, t = self.index[i]
        return tuple(torch.from_numpy(self._normalised(self.files[number][t + step])) for step in (0, 1))

    def _normalised(self, frame: np.ndarray) -> np.ndarray:
        frame -= self.means
        frame /= self.stds
        return np.ascontiguousarray(frame)


def plain_loader(
    dataset: FieldDataset, statistics: Statistics, batch_size: int, num_workers: int
) -> DataLoader[tuple[Tensor, ...]]:
    """The DataLoader of torch over the files of a FieldDataset, default collation, shuffled."""
    plain = PlainDataset([file.path for file in dataset.files], statistics.means, statistics.stds)
    return DataLoader(plain, batch_size, shuffle=True, drop_last=True, num_workers=num_workers)
