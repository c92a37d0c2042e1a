"""The steps of the first rung, one after another: what each gains.

Each step of the ladder is a process of its own that trains with its options, all from the same weights over the same
batches. The processes take turns: one round lets each train a few iterations while the others wait, so that a slow
minute of the machine slows all of them alike.
"""

import importlib.util
import multiprocessing
import statistics
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

import torch

from distributed.data_parallel import DataParallelOptions, data_parallel
from tools.instruments.flops import training_flops
from tools.tables import format_table, machine, write_bars, write_json
from training.model import build_model, initial_weights
from training.optimizer import build_optimizer
from training.speed_options import apply_speed_options
from training.step import AMP_DTYPES, TrainingStep
from training.tasks import build_task
from utils.device import peak_memory_bytes, select_device, synchronize
from utils.errors import UsageError
from utils.schema import Config

LEAD_IN = 4  # iterations of each turn that are not timed: batches read while the others trained are used up


def ladder(config: Config, workers: int) -> list[tuple[str, dict[str, Any], str | None]]:
    """Steps as (name, options that come on top, reason to skip it or None).

    DALI is tried in its place but not kept: the steps after it go on with the native loader.
    """
    device = select_device(config.device)
    no_gpu = None if device.type == "cuda" else "needs a GPU"
    no_dali = None if importlib.util.find_spec("nvidia.dali") else "not installed (requirements-dali.txt)"
    return [
        ("0 workers", {"num_data_workers": 0}, None),
        (f"{workers} workers", {"num_data_workers": workers}, None),
        ("DALI", {"data_loader_config": "dali"}, no_dali),
        ("TF32", {"enable_tf32": True}, no_gpu),
        ("channels last", {"enable_channels_last": True}, None),
        ("bf16", {"amp_mode": "bf16"}, None),
        ("fused Adam", {"enable_fused": True}, None),
        ("compile", {"enable_jit": True}, None),
        ("CUDA graphs", {"enable_cuda_graphs": True}, no_gpu),
    ]


def run(
    config: Config,
    workers: int = 2,
    steps: int = 10,
    rounds: int = 3,
    json_path: str | None = None,
    png_path: str | None = None,
) -> dict[str, Any]:
    """Measure the ladder and print its table; returns what json_path gets.

    workers: of the steps after the first. steps: timed in one turn. Raises UsageError where a step fails.
    """
    climbers: list[Climber] = []
    options: dict[str, Any] = {}
    skipped = []
    try:
        for name, extra, reason in ladder(config, workers):
            if reason:
                skipped.append(f"{name}: skipped, {reason}")
                continue
            climbers.append(Climber(name, config.model_copy(update={**options, **extra})))
            if name != "DALI":
                options |= extra
        turns = [[climber.train(steps) for climber in climbers] for _ in range(rounds)]
        ends = [climber.end() for climber in climbers]
    finally:
        for climber in climbers:
            climber.process.terminate()
            climber.process.join()

    results = []
    for climber, end, *own in zip(climbers, ends, *turns, strict=True):
        speed = statistics.median(turn["samples"] / turn["seconds"] for turn in own)
        flops = speed * training_flops(config)
        results.append({
            "step": climber.name,
            "samples_per_sec": speed,
            "data_wait": sum(turn["wait"] for turn in own) / sum(turn["seconds"] for turn in own),
            "flops_per_sec": flops,
            "mfu": flops / end["matmul_flops_per_sec"],
            **end,
        })  # fmt: skip
    _print(results, skipped, config)
    summary = {"config": config.config, "machine": machine(select_device(config.device)), "steps": results}
    if json_path:
        write_json(json_path, summary)
    if png_path:
        names = [result["step"] for result in results]
        write_bars(png_path, f"{config.config}: samples/s, step by step", names,
                   [result["samples_per_sec"] for result in results], "samples/s")  # fmt: skip
    return summary


def _print(results: list[dict[str, Any]], skipped: list[str], config: Config) -> None:
    columns = {
        "step": "", "samples/s": ".2f", "x previous": ".2f", "x first": ".2f", "data wait": ".1%", "TFLOP/s": ".3f",
        "MFU": ".1%", "peak memory GiB": ".2f", "loss": ".4f",
    }  # fmt: skip
    rows, kept = [], None
    for result in results:
        speed = result["samples_per_sec"]
        rows.append((
            result["step"], speed, speed / kept if kept else None, speed / results[0]["samples_per_sec"],
            result["data_wait"], result["flops_per_sec"] / 1e12, result["mfu"], result["peak_memory_bytes"] / 2**30,
            result["losses"][-1],
        ))  # fmt: skip
        kept = kept if result["step"] == "DALI" else speed
    print(format_table(columns, rows))
    batch, count = config.global_batch_size, len(results[0]["losses"])
    print(f"batch {batch}; loss after {count} iterations; MFU against the matrix products measured on this device")
    for line in skipped:
        print(line)


class Climber:
    """A process that trains with one config when told to."""

    def __init__(self, name: str, config: Config):
        self.name = name
        context = multiprocessing.get_context("spawn")
        self.pipe, far_end = context.Pipe()
        self.process = context.Process(target=_climb, args=(far_end, config))
        self.process.start()
        far_end.close()
        self._answer()  # set up

    def train(self, steps: int) -> dict[str, float]:
        """One turn of so many timed steps: seconds, those of them waited for data, samples."""
        self.pipe.send(steps)
        return self._answer()

    def end(self) -> dict[str, Any]:
        """Let the process end: its peak memory, the measured peak of the device, all losses."""
        self.pipe.send(None)
        return self._answer()

    def _answer(self) -> Any:
        try:
            answer = self.pipe.recv()
        except EOFError:
            raise UsageError(f"{self.name}: the process ended without an answer (out of memory?)") from None
        if isinstance(answer, UsageError):
            raise answer
        return answer


def _climb(pipe: Connection, config: Config) -> None:
    """In the child: train in turns until told to end."""
    try:
        _serve(pipe, config)
    except UsageError as error:
        pipe.send(error)
    except Exception as error:
        traceback.print_exc()
        pipe.send(UsageError(f"a step of the ladder failed: {error}"))


def _serve(pipe: Connection, config: Config) -> None:
    device = select_device(config.device)
    loader, valid_loader = build_task(config).build_loaders(device)
    valid_loader.close()
    model = build_model(config)
    apply_speed_options(config, device, model)
    parallel = data_parallel(model, config.options(DataParallelOptions), device, initial_weights(config))
    step = TrainingStep(config, device, parallel, build_optimizer(config, model, device), build_task(config).loss)
    batches = loader.train(config.seed, 0, 10**9)
    losses: list[torch.Tensor] = []
    wait = 0.0

    def train(steps: int) -> None:
        nonlocal wait
        for _ in range(steps):
            asked = time.perf_counter()
            x, y = next(batches)
            wait += time.perf_counter() - asked
            losses.append(step(len(losses), x, y))
        synchronize(device)

    dtype, peak = AMP_DTYPES.get(config.amp_mode, torch.float32), 0.0
    train(LEAD_IN + 1)  # compilation, allocation
    pipe.send("ready")
    while (steps := pipe.recv()) is not None:
        train(LEAD_IN)
        wait, started = 0.0, time.perf_counter()
        train(steps)
        seconds = time.perf_counter() - started
        peak = max(peak, matmul_flops_per_sec(device, dtype))
        pipe.send({"seconds": seconds, "wait": wait, "samples": steps * config.global_batch_size})
    batches.close()
    loader.close()
    values = torch.stack(losses).tolist()
    pipe.send({"peak_memory_bytes": peak_memory_bytes(device), "matmul_flops_per_sec": peak, "losses": values})


def matmul_flops_per_sec(device: torch.device, dtype: torch.dtype, repeats: int = 5) -> float:
    """FLOP/s of the fastest of some square matrix products, the measured peak of the device.

    float32 products use TF32 where that is switched on.
    """
    n = 8192 if device.type == "cuda" else 2048
    a, b = torch.randn(2, n, n, device=device).to(dtype)
    best = float("inf")
    for _ in range(repeats + 1):
        synchronize(device)
        started = time.perf_counter()
        torch.mm(a, b)
        synchronize(device)
        best = min(best, time.perf_counter() - started)
    return 2 * n**3 / best
