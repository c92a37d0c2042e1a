"""Training, validation and test apart: scores on what was trained on tell nothing."""

from pathlib import Path

import numpy as np

from utils.errors import UsageError
from weather.checks.statistics import ANYWAY
from weather.fields.time_axis import show
from weather.years.dataset import FieldDataset

REMEDY = f"its scores would tell nothing; move one of the files away, or, {ANYWAY}"


def check_apart(dataset: FieldDataset, train: FieldDataset) -> list[str]:
    """Hold the files and dates of a data set against those of the training; returns notes on what is let pass.

    A data set that is the training's own folder is meant to be so, and a single date in both, where a year ends with
    the first frame of the next one, matters little. Raises UsageError for anything else that is in both.
    """
    # A small trial may validate on its training years on purpose.
    if _real(dataset.folder) == _real(train.folder):
        return [f"{dataset.folder}: is the folder of the training too: its scores say nothing of other data"]
    notes = []
    # Links may give one file two names.
    real_files = {_real(path): path for path in train.paths}
    for path, axis in zip(dataset.paths, dataset.axes, strict=True):
        same = real_files.get(_real(path))
        if same is not None:
            raise UsageError(f"{path}: is the same file as {same}: {REMEDY}")
        for train_path, train_axis in zip(train.paths, train.axes, strict=True):
            if axis is None or train_axis is None:
                continue
            # Files of different names may still hold the same dates.
            shared = np.intersect1d(axis.dates, train_axis.dates)
            # Years often end with the first frame of the next one.
            if len(shared) == 1:
                notes.append(f"{path}: {show(shared[0])} is in {train_path} too")
            elif len(shared):
                more = len(shared) - 1
                raise UsageError(
                    f"{path}: {show(shared[0])} and {more} more of its dates are in {train_path} too: {REMEDY}"
                )
    return notes


def _real(path: object) -> str:
    """What a path stands for, past links; an address stands for itself."""
    return str(path.resolve()) if isinstance(path, Path) else str(path)
