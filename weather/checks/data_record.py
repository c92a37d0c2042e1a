"""What a checkpoint remembers of the data that it was trained on, so that other data are told from them later."""

from pathlib import Path
from typing import Any

import numpy as np

from utils.errors import UsageError
from weather.checks.statistics import ANYWAY
from weather.fields.time_axis import show, show_step
from weather.years.dataset import FieldDataset

Record = dict[str, Any]


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
