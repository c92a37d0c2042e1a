"""What a model was trained on, kept apart from data that it is scored on: scores on the training tell nothing.

A checkpoint remembers the data of its training, so that other data are told from them later.
"""

from pathlib import Path
from typing import Any

import numpy as np

from utils.errors import UsageError
from weather.checks.statistics import ANYWAY
from weather.fields.time_axis import show, show_step
from weather.years.dataset import FieldDataset

Record = dict[str, Any]
REMEDY = f"its scores would tell nothing; move one of the files away, or, {ANYWAY}"


def make_record(dataset: FieldDataset) -> Record:
    """The record of a data set, as JSON: its channels, seconds between frames, and the dates without a gap."""
    # Stretches without a gap take less room than all dates.
    stretches = []
    for axis in dataset.axes:
        if axis is not None:
            stretches += [[str(first), str(last)] for first, last in axis.stretches()]
    return {
        "channels": dataset.description.names,
        "step_seconds": dataset.step_seconds,
        "stretches": stretches,
    }


def check_same_kind(record: Record, dataset: FieldDataset, where: Path | str) -> None:
    """Raise UsageError where a data set has another time step or other channels. where: what the record is of."""
    step = dataset.step_seconds
    trained_step = record.get("step_seconds")
    # Data without dates have no step to compare.
    if step and trained_step and step != trained_step:
        raise UsageError(
            f"{dataset.folder}: its frames are {show_step(step)} apart; {where} was trained on frames "
            f"{show_step(trained_step)} apart, and a step of the model is {dataset.dt} of them"
        )
    # Records of earlier versions have no channels.
    names = dataset.description.names
    trained_names = record.get("channels") or names
    for number, (name, trained) in enumerate(zip(names, trained_names, strict=False)):
        if name != trained:
            raise UsageError(
                f"{dataset.folder}: channel {number} is '{name}'; {where} was trained with '{trained}' in its place"
            )


def check_unseen(record: Record, dataset: FieldDataset, where: Path | str) -> None:
    """Raise UsageError where a date of a data set is one of the training. where: what the record is of."""
    stretches = np.array(record.get("stretches") or np.empty((0, 2)), "datetime64[s]")
    for path, axis in zip(dataset.paths, dataset.axes, strict=True):
        if axis is None:
            continue
        # Dates are compared, since files may be cut in other ways than before.
        for first, last in stretches:
            is_seen = (axis.dates >= first) & (axis.dates <= last)
            seen = axis.dates[is_seen]
            if len(seen):
                raise UsageError(
                    f"{path}: {show(seen[0])} is a date that {where} was trained on: its scores would tell nothing; "
                    f"{ANYWAY}"
                )


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
