"""The plain design of a data loader, as most tutorials write it: the yardstick for ours."""

import h5py
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset


class PlainDataset(Dataset):
    """Two reads a sample, new arrays, normalised in numpy. Files are opened in the process that reads."""

    def __init__(self, paths, means, stds):
        self.paths, self.means, self.stds = paths, means, stds
        self.files = None
        self.index = []
        for number, path in enumerate(paths):
            with h5py.File(path, "r", locking=False) as file:
                self.index += [(number, t) for t in range(file["fields"].shape[0] - 1)]

    def __len__(self):
        return len(self.index)

    def __getitem__(self, i):
        if self.files is None:
            self.files = [h5py.File(path, "r", locking=False)["fields"] for path in self.paths]
        number, t = self.index[i]
        return tuple(torch.from_numpy(self._normalised(number, t + step)) for step in (0, 1))

    def _normalised(self, number, t):
        frame = self.files[number][t]
        frame -= self.means
        frame /= self.stds
        return np.ascontiguousarray(frame)


def plain_loader(dataset, statistics, batch_size, num_workers):
    """torch's DataLoader over the files of a FieldDataset, default collation, shuffled."""
    plain = PlainDataset([file.path for file in dataset.files], statistics.means, statistics.stds)
    return DataLoader(plain, batch_size, shuffle=True, drop_last=True, num_workers=num_workers)
