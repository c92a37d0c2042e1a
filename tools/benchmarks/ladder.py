"""The steps of the first rung, one after another, and what each gains.

Each step of the ladder is a process that trains with its own options; all start from the same weights and read the same
batches. The processes take turns: in a round each trains a few iterations while the others wait, so that a slow minute
of the machine slows all of them alike. In the first round each one starts right before its turn. Who waits holds only
what its model needs, so that all of them fit one GPU.
"""

import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from pandas import DataFrame

from tools.benchmarks.cases import in_turns
from tools.instruments.clock import timed
from tools.instruments.ranks import Process, Teams
from tools.pictures import draw_bars, finish, panels, save
from tools.tables import GIB, format_tables, installed, machine
from training.assembly import build_step
from training.models.info import training_flops
from training.run.telemetry import PHASES, PhaseTimes
from training.step.float8 import has_float8
from training.step.spans import listening, span
from training.step.step import AMP_DTYPES
from training.tasks import build_task
from utils.config import load_config
from utils.device import device_module, empty_cache, peak_memory_bytes, select_device
from utils.errors import UsageError, first_line
from utils.files import write_json
from utils.schema import Config
from utils.yaml_files import read_mappings

TRIED = "DALI", "fp8", "deterministic"  # steps that are not kept: later ones go on from the step before
STEPS = "tools/benchmarks/ladder.yaml"
LEAD_IN = 4  # untimed iterations of each turn: they use up the batches that were read ahead
# The side of the smallest square product that is timed, and the seconds from which on a product is large enough.
SMALLEST_PRODUCT, ENOUGH_SECONDS = 256, 0.2


def ladder(
    config: Config,
    workers: int,
) -> list[tuple[str, dict[str, Any], str | None]]:
    """Steps as (name, options that it adds, reason to skip it or None).

    Those of TRIED are measured in their place but not kept.
    """
    device = select_device(config.device)
    # A step that this machine cannot run stays in the list, so that the output says why it was skipped.
    reasons = {
        "DALI": None if installed("nvidia.dali") else "not installed (requirements/dali.txt)",
        "TF32": None if device.type != "cpu" else "needs a GPU",
        "fp8": None if installed("torchao") else "not installed (requirements/fp8.txt)",
        "deterministic": None if device.type != "cpu" else "needs a GPU: a CPU's kernels repeat their numbers",
        "CUDA graphs": None if device.type == "cuda" else "needs a GPU",
    }
    # A missing GPU is the better reason: an installed package would not help there.
    if not has_float8(device):
        reasons["fp8"] = "needs a GPU with 8-bit products"
    # The first two steps differ in their data workers alone. A file has the options of the others.
    steps = {f"{number} workers": {"num_data_workers": number} for number in (0, workers)}
    return [(name, extra, reasons.get(name)) for name, extra in (steps | read_mappings(STEPS, "steps")).items()]


@dataclass
class Climb:
    """What is known of the ladder. It is printed and written step by step: who measures may run out of time.

    steps: timed in one turn.
    path: of the figures as JSON, None for no file. turns: figures of every turn, by step. failed: {step: why}.
    """

    config: Config
    steps: int
    path: str | None
    turns: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def rows(self) -> list[dict[str, Any]]:
        """A row of the table for each step that has been measured."""
        rows: list[dict[str, Any]] = []
        kept = None  # speed of the step that the next ones go on from
        previous = None  # its name
        samples = self.steps * self.config.global_batch_size
        flops_per_sample = training_flops(self.config)
        for name, turns in self.turns.items():
            speeds = [samples / turn["seconds"] for turn in turns]
            # The median leaves out a turn that the machine has slowed down.
            speed = statistics.median(speeds)
            # Two steps that are closer to each other than this are not told apart.
            spread = (max(speeds) - min(speeds)) / speed if len(speeds) > 1 else None
            seconds = sum(turn["seconds"] for turn in turns)
            waited = sum(turn["wait"] for turn in turns)
            flops = speed * flops_per_sample
            # A measured peak is never too high, so the best of all turns counts.
            peak = max(turn["matmul_flops_per_sec"] for turn in turns)
            losses = turns[-1]["losses"]  # every iteration so far has one
            rows.append(
                {
                    "step": name,
                    "samples_per_sec": speed,
                    "spread": spread,
                    "of_previous": speed / kept if kept else None,
                    "previous": previous,
                    "of_first": speed / rows[0]["samples_per_sec"] if rows else 1.0,
                    "data_wait": waited / seconds,
                    "tera": flops / 1e12,
                    "mfu": flops / peak,
                    "gib": max(turn["peak_memory_bytes"] for turn in turns) / GIB,
                    "losses": losses,
                    "loss": losses[-1],
                }
            )
            # The next step is compared with the last one that was kept.
            if name not in TRIED:
                kept = speed
                previous = name
        return rows

    def figures(self) -> dict[str, Any]:
        """All that is known, as JSON has it."""
        device = select_device(self.config.device)
        return {
            "config": self.config.config,
            "machine": machine(device),
            "steps": self.rows(),
            "failed": self.failed,
        }

    def tell(self, name: str) -> None:
        """Print the row of a step on stderr, where its turns are told, and write all figures to the file."""
        (row,) = [row for row in self.rows() if row["step"] == name]
        header, rule, line = format_tables("ladder", [row]).splitlines()
        # The header stands once, above the first step.
        if len(self.turns) == 1:
            print(header, rule, sep="\n", file=sys.stderr)
        print(line, file=sys.stderr, flush=True)
        if self.path:
            write_json(self.path, self.figures())


def run(
    words: list[str],
    workers: int,
    steps: int,
    rounds: int,
    read_delay_ms: float = 0.0,
    json: str | None = None,
) -> dict[str, Any]:
    """Measure the ladder and print its table; returns the figures, as JSON has them.

    workers: of the steps after the first. steps: timed in one turn. read_delay_ms: added to the reading of each sample;
    only the steps that read without and with workers are measured then. json: file for the figures, which is written
    anew after each step. A step that fails is left out, and named under `failed`; later ones go on from the step
    before. Raises UsageError where the first one fails: the others rest on it.
    """
    config = load_config(words)
    climbed = ladder(config, workers)[: 2 if read_delay_ms else None]
    options: dict[str, Any] = {}
    teams: dict[str, Teams] = {}
    known = Climb(config, steps, json)
    with ExitStack() as stack:
        able = {name: extra for name, extra, reason in climbed if not reason}
        for number, name, extra in in_turns(able, rounds, known.failed):
            try:
                # The options of a step depend on which earlier ones have worked, so it is built only here.
                if number == 0:
                    own = config.model_copy(update={**options, **extra})
                    teams[name] = stack.enter_context(Teams(own, whole_machine=True))
                    teams[name].call(1, _start, own, read_delay_ms / 1000)
                before = known.turns.get(name, [])
                known.turns[name] = before + teams[name].call(1, _turn, steps)
                known.tell(name)
            except UsageError as error:
                if not known.turns:
                    raise
                known.failed[name] = first_line(error)
                known.turns.pop(name, None)
            # Later steps add to the options of every step that works and is kept.
            if number == 0 and name not in (*TRIED, *known.failed):
                options |= extra
        for name in known.turns:
            teams[name].call(1, _end)

    rows = known.rows()
    print(format_tables("ladder", rows))
    batch, count = config.global_batch_size, len(rows[0]["losses"])
    print(f"batch {batch}; loss after {count} iterations; MFU against the matrix products measured on this device")
    if rounds == 1:
        print("one round is a trial: without a spread nobody knows which of these steps are noise; give --rounds 5")
    if read_delay_ms:
        print(f"each sample is read {read_delay_ms:g} ms late, on purpose")
    for name, _, reason in climbed:
        if reason:
            print(f"{name}: skipped, {reason}")
    for name, reason in known.failed.items():
        print(f"{name}: failed, {reason}")
    return known.figures()


def write_picture(path: str, figures: dict[str, Any]) -> None:
    """Samples/s of each step."""
    speeds = DataFrame({"samples/s": {step["step"]: step["samples_per_sec"] for step in figures["steps"]}})
    figure, (axes,) = panels(len(speeds))
    draw_bars(axes, speeds)
    finish(axes, title=f"{figures['config']}: step by step", xlabel="samples/s")
    # The file keeps its numbers, so that a page can be held to show one run in table and picture.
    save(figure, path, note=speeds["samples/s"].round(2).to_json())


def _start(rank: Process, config: Config, delay: float = 0.0) -> None:
    """In the process of a step: build loader and training step, and train until compilation is over.

    delay: seconds that each read of a sample takes longer.
    """
    loader, valid_loader = build_task(config).build_loaders(rank.device)
    valid_loader.close()  # only training is timed
    if delay:
        loader.dataset.read = partial(_read_late, loader.dataset.read, delay)  # type: ignore[method-assign]
    step = build_step(config, rank.device, config.config)
    batches = loader.train(config.seed, 0, 10**9)  # more iterations than any ladder makes
    # A CUDA graph queues its work at once, so that its phases cannot be told apart.
    times = PhaseTimes(rank.device, not config.enable_cuda_graphs)
    rank.kept = {"step": step, "loader": loader, "batches": batches, "losses": [], "times": times}
    _train(rank, LEAD_IN + 1)
    # Steps that wait share the GPU with the one that trains, so none keeps what compilation has allocated.
    empty_cache(rank.device)


def _read_late(read: Callable[..., None], delay: float, *args: Any) -> None:
    time.sleep(delay)
    read(*args)


def _train(rank: Process, steps: int) -> None:
    """Make so many steps."""
    kept = rank.kept
    for _ in range(steps):
        with span("data"):
            x, y = next(kept["batches"])
        output = kept["step"](len(kept["losses"]), x, y)
        kept["losses"].append(output.loss)


def _turn(rank: Process, steps: int) -> dict[str, Any]:
    """One turn of so many timed steps: seconds, those of them waited for data, memory, and all losses so far."""
    # Batches that were read while other steps trained would make this one look faster.
    _train(rank, LEAD_IN)
    times: PhaseTimes = rank.kept["times"]
    with listening(times):
        seconds, _ = timed(rank.device, _train, rank, steps)
    by_phase = dict(zip(PHASES, times.read(steps), strict=True))
    peak = peak_memory_bytes(rank.device)  # without the products below
    dtype = AMP_DTYPES[rank.kept["step"].config.amp_mode] or torch.float32
    matmul = matmul_flops_per_sec(rank.device, dtype)
    empty_cache(rank.device)
    # The next turn counts its own peak, without these products.
    if gpu := device_module(rank.device, "reset_peak_memory_stats"):
        gpu.reset_peak_memory_stats(rank.device)
    losses = torch.stack(rank.kept["losses"]).tolist()  # (iterations,)
    return {
        "seconds": seconds,
        "wait": by_phase["data"] * steps,
        "peak_memory_bytes": peak,
        "matmul_flops_per_sec": matmul,
        "losses": losses,
    }


def _end(rank: Process) -> None:
    """Stop reading."""
    rank.kept["batches"].close()
    rank.kept["loader"].close()


def matmul_flops_per_sec(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of the fastest of some square matrix products, the measured peak of the device.

    float32 products use TF32 where that is switched on.
    """
    largest = 8192 if device.type != "cpu" else 2048
    n = SMALLEST_PRODUCT
    # Larger products come nearer to the peak. A CPU without bfloat16 takes minutes for the largest ones.
    while True:
        a, b = torch.randn(2, n, n, device=device).to(dtype)
        seconds, _ = timed(device, torch.mm, a, b)
        if n == largest or seconds > ENOUGH_SECONDS:
            break
        n *= 2
    # Whatever else the machine does only slows a product down, so the fastest one is the peak.
    times = [timed(device, torch.mm, a, b)[0] for _ in range(5)]
    return 2 * n**3 / min(times)  # n^3 multiplications and as many additions
