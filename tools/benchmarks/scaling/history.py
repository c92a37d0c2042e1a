"""The history of a run, from the TensorBoard events in its folder: speed of every few steps, error of every validation.

A run that was stopped and continued has several event files. TensorBoard's reader joins them and drops steps that were
computed twice.
"""

from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

from training.clock import WARMUP_ITERATIONS

ALL = 0  # events to keep


@dataclass(frozen=True)
class History:
    """Readings of a run, by iteration, ascending.

    speeds: (iteration, samples/s of the steps since the reading before). epochs: their last iterations.
    errors: {field: (iteration, RMSE)} of every validation.
    """

    batch: int
    speeds: list[tuple[int, float]]
    epochs: list[int]
    errors: dict[str, list[tuple[int, float]]]

    def steps(self) -> list[tuple[int, int, float]]:
        """(first iteration - 1, last iteration, seconds) from reading to reading.

        Steps whose reading was lost with a killed process count with the speed of the next reading.
        """
        ends = [(0, 0.0), *self.speeds]
        return [(before, done, (done - before) * self.batch / speed) for (before, _), (done, speed) in pairwise(ends)]

    def seconds_at(self, iteration: int) -> float:
        """Time in training steps up to an iteration: without validations, checkpoints and the start of processes."""
        return sum(seconds for _, done, seconds in self.steps() if done <= iteration)

    def epoch_speeds(self) -> list[float]:
        """Samples/s in each epoch, without the first WARMUP_ITERATIONS steps, unless the run has no others."""
        steps = self.steps()
        steady = [step for step in steps if step[0] >= WARMUP_ITERATIONS] or steps
        samples, seconds = [0] * (len(self.epochs) + 1), [0.0] * (len(self.epochs) + 1)
        for before, done, took in steady:
            epoch = bisect_left(self.epochs, done)  # a reading ends with each epoch: none is in two
            samples[epoch] += (done - before) * self.batch
            seconds[epoch] += took
        return [count / took for count, took in zip(samples, seconds, strict=True) if took]

    def error_over_time(self, field: str) -> list[tuple[float, float]]:
        """(seconds in training steps, RMSE) of every validation."""
        return [(self.seconds_at(iteration), error) for iteration, error in self.errors[field]]

    def seconds_to(self, field: str, target: float) -> float | None:
        """Seconds in training steps until the RMSE of a field first falls to `target`; None where it never does.

        The RMSE is interpolated linearly between two validations. A run whose first validation is below the target has
        reached it then.
        """
        earlier: tuple[float, float] | None = None
        for seconds, error in self.error_over_time(field):
            if error <= target:
                if earlier is None:
                    return seconds
                share = (earlier[1] - target) / (earlier[1] - error)
                return earlier[0] + share * (seconds - earlier[0])
            earlier = seconds, error
        return None


def read_history(folder: Path, batch: int) -> History:
    """The History in the events of a run folder. batch: samples of an optimizer step."""
    events = EventAccumulator(str(folder), {SCALARS: ALL})
    events.Reload()

    def scalars(tag: str) -> list[tuple[int, float]]:
        return [(event.step, event.value) for event in events.Scalars(tag)] if tag in tags else []

    tags = events.Tags()[SCALARS]
    errors = {tag.partition("_")[2]: scalars(tag) for tag in tags if tag.startswith("rmse/")}
    ends = [iteration for iteration, _ in scalars("loss/train_epoch")]
    return History(batch, scalars("speed/samples_per_sec"), ends, errors)
