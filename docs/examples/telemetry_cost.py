"""Cost of a run's telemetry: CPU time of intervals of ten steps, with and without it, in turns.

    python -m docs.examples.telemetry_cost 20     pairs of intervals of the config quick

The parts are also timed alone, since two intervals differ by more than all of them together.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from training.assembly import build_step, random_batch
from training.run.loggers import Loggers, MetricsFile, TensorBoard
from training.run.telemetry import PHASES, Telemetry
from training.step.spans import LISTENERS
from utils.config import load_config

STEPS = 10  # of an interval
TIMES = 200  # that a part is called


def cpu_seconds(function: Callable[[], object], times: int = 1) -> float:
    """CPU time of one call, mean of several."""
    began = time.process_time()
    for _ in range(times):
        function()
    return (time.process_time() - began) / times


def main(pairs: int, folder: Path) -> None:
    """Print the ratio of intervals, and the parts."""
    config = load_config(["--config=quick", "--device=cpu"])
    cpu = torch.device("cpu")
    step = build_step(config, cpu)
    batch = random_batch(step.task, cpu)
    telemetry = Telemetry(config, step)
    loggers = Loggers()
    loggers.add(TensorBoard, folder, 1, {})
    loggers.add(MetricsFile, folder, 0, "cpu")

    def read() -> None:
        _, reading, _ = telemetry.read(STEPS, False)
        loggers.log(reading, STEPS)

    def interval(told: bool) -> None:
        LISTENERS[:] = [telemetry.times] if told else []
        losses = []
        telemetry.clock.start()
        for number in range(STEPS):
            output = step(number, *batch, log_norm=told and number == STEPS - 1)
            losses.append(output.loss)
            if told:
                telemetry.add(output)
        if told:
            read()
        else:
            *_, last = torch.stack(losses).tolist()
            loggers.log({"Loss/train": last}, STEPS)

    def only_read() -> None:
        telemetry.losses = [torch.tensor(1.0)] * STEPS
        telemetry.clock.start()
        read()

    def phases() -> None:
        for name in PHASES:
            telemetry.times.stop(name, telemetry.times.start(name))

    interval(True)
    whole = compare_intervals(interval, pairs)

    # The parts alone. A norm needs gradients.
    parts = {
        "a reading": cpu_seconds(only_read, TIMES) / STEPS,
        "timing of phases": cpu_seconds(phases, TIMES),
    }
    prediction = step.task.predict(step.parallel, *batch)
    step.loss(prediction, batch[1]).backward()
    parts["a norm"] = cpu_seconds(step.parallel.squared_norm, TIMES) / STEPS
    print_parts(parts, whole)
    loggers.close()


def compare_intervals(interval: Callable[[bool], None], pairs: int) -> float:
    """Print how intervals with telemetry compare with those without; returns the seconds of a step without it.

    interval: makes STEPS steps, with telemetry or not.
    """
    ratios = []
    seconds_of_step = []
    for pair in range(pairs):
        # Every other pair begins with the interval that has telemetry.
        first = bool(pair % 2)
        turn = {told: cpu_seconds(partial(interval, told)) for told in (first, not first)}
        ratios.append(turn[True] / turn[False])
        seconds_of_step.append(turn[False] / STEPS)
    low, median, high = statistics.quantiles(ratios, n=4)
    print(f"with / without: median {median:.3f}, quartiles {low:.3f} to {high:.3f}, of {pairs} pairs")
    return statistics.median(seconds_of_step)


def print_parts(parts: dict[str, float], whole: float) -> None:
    """Print the seconds of each part and their share of a step. whole: seconds of a step."""
    for name, seconds in parts.items():
        print(f"{name}: {seconds * 1e6:.0f} us of a step of {whole * 1e3:.0f} ms")
    print(f"together: {sum(parts.values()) / whole:.2%}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        main(int(sys.argv[1]), Path(made))
