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
from training.loggers import Loggers, MetricsFile, TensorBoard
from training.telemetry import Telemetry
from training.timing import PHASES, PhaseTimes
from utils.config import load_config

STEPS, TIMES = 10, 200


def cpu_seconds(function: Callable[[], object], times: int = 1) -> float:
    """CPU time of one call, mean of several."""
    began = time.process_time()
    for _ in range(times):
        function()
    return (time.process_time() - began) / times


def main(pairs: int, folder: Path) -> None:
    """Print the ratio of intervals, and the parts."""
    config, cpu = load_config(["--config=quick", "--device=cpu"]), torch.device("cpu")
    step = build_step(config, cpu)
    batch = random_batch(step.task, cpu)
    telemetry, loggers = Telemetry(config, step), Loggers()
    loggers.add(TensorBoard, folder, 1, {})
    loggers.add(MetricsFile, folder, 0, "cpu")

    def read() -> None:
        _, reading, _ = telemetry.read(STEPS, False)
        loggers.log(reading, STEPS)

    def interval(told: bool) -> None:
        PhaseTimes.current, losses = telemetry.times if told else None, []
        telemetry.clock.start()
        for number in range(STEPS):
            output = step(number, *batch, log_norm=told and number == STEPS - 1)
            losses.append(output.loss)
            if told:
                telemetry.add(output)
        if told:
            read()
        else:
            loggers.log({"Loss/train": torch.stack(losses).tolist()[-1]}, STEPS)

    def only_read() -> None:
        telemetry.losses = [torch.tensor(1.0)] * STEPS
        telemetry.clock.start()
        read()

    def phases() -> None:
        for name in PHASES:
            telemetry.times.stop(name, telemetry.times.start(name))

    interval(True)
    found = []
    for pair in range(pairs):
        turn = {told: cpu_seconds(partial(interval, told)) for told in (bool(pair % 2), not pair % 2)}
        found.append((turn[True] / turn[False], turn[False] / STEPS))
    low, median, high = statistics.quantiles((ratio for ratio, _ in found), n=4)
    whole = statistics.median(seconds for _, seconds in found)
    print(f"with / without: median {median:.3f}, quartiles {low:.3f} to {high:.3f}, of {pairs} pairs")
    parts = {"a reading": cpu_seconds(only_read, TIMES) / STEPS, "timing of phases": cpu_seconds(phases, TIMES)}
    step.loss(step.task.predict(step.parallel, *batch), batch[1]).backward()
    parts["a norm"] = cpu_seconds(step.parallel.squared_norm, TIMES) / STEPS
    for name, seconds in parts.items():
        print(f"{name}: {seconds * 1e6:.0f} us of a step of {whole * 1e3:.0f} ms")
    print(f"together: {sum(parts.values()) / whole:.2%}")
    loggers.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        main(int(sys.argv[1]), Path(made))
