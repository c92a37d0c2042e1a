"""The history of a run, from the TensorBoard events in its folder: speed of every few steps, error of every validation.

A run that was stopped and continued has several event files. TensorBoard's reader joins them and drops steps that were
computed twice.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy
from pandas import DataFrame, Series
from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

from training.clock import WARMUP_ITERATIONS

ALL = 0  # events to keep


@dataclass(frozen=True)
class History:
    """Readings of a run.

    steps: the training steps from reading to reading, indexed by the last iteration of each piece; columns `samples`,
    `seconds`, `first` (iteration - 1) and `epoch`. errors: {field: RMSE of every validation, by iteration}.
    """

    steps: DataFrame
    errors: dict[str, Series]

    def seconds_at(self, iteration: int) -> float:
        """Time in training steps up to an iteration: without validations, checkpoints and the start of processes."""
        return float(self.steps.loc[self.steps.index <= iteration, "seconds"].sum())

    def epoch_speeds(self) -> list[float]:
        """Samples/s in each epoch, without the first WARMUP_ITERATIONS steps, unless the run has no others."""
        steady = self.steps[self.steps["first"] >= WARMUP_ITERATIONS]
        epochs = (self.steps if steady.empty else steady).groupby("epoch")[["samples", "seconds"]].sum()
        return (epochs["samples"] / epochs["seconds"]).tolist()

    def error_over_time(self, field: str) -> list[tuple[float, float]]:
        """(seconds in training steps, RMSE) of every validation."""
        return [(self.seconds_at(iteration), error) for iteration, error in self.errors[field].items()]

    def seconds_to(self, field: str, target: float) -> float | None:
        """Seconds in training steps until the RMSE of a field first falls to `target`; None where it never does.

        The RMSE is interpolated linearly between two validations. A run whose first validation is below the target has
        reached it then.
        """
        seconds, errors = numpy.array(self.error_over_time(field)).T
        if not (errors <= target).any():
            return None
        first = int((errors <= target).argmax())
        around = slice(max(0, first - 1), first + 1)
        return float(numpy.interp(-target, -errors[around], seconds[around]))  # the errors fall, interp wants a rise


def read_history(folder: Path, batch: int) -> History:
    """The History in the events of a run folder. batch: samples of an optimizer step.

    Steps whose reading was lost with a killed process count with the speed of the next reading.
    """
    events = EventAccumulator(str(folder), {SCALARS: ALL})
    events.Reload()
    tags = events.Tags()[SCALARS]

    def scalars(tag: str) -> Series:
        read = events.Scalars(tag) if tag in tags else []
        return Series([event.value for event in read], index=[event.step for event in read], dtype=float)

    speeds, ends = scalars("speed/samples_per_sec"), scalars("loss/train_epoch").index
    steps = DataFrame({"first": [0, *speeds.index[:-1]][: len(speeds)]}, index=speeds.index)
    steps["samples"] = (steps.index - steps["first"]) * batch
    steps["seconds"] = steps["samples"] / speeds
    steps["epoch"] = ends.searchsorted(steps.index)  # a reading ends with each epoch: none is in two
    return History(steps, {tag.partition("_")[2]: scalars(tag) for tag in tags if tag.startswith("rmse/")})
