"""The time that a GPU waits for its batch, by a pretend GPU whose work ends when it would: no host's wait counts.

Time is a number here: whoever works or waits moves it on, so that the outcome is the same on every machine.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from tests.support.pretend_gpu import COPY, DEVICE, HOST, PretendGpu
from tools.benchmarks import ladder
from tools.instruments import clock
from tools.instruments.ranks import Process
from tools.planner import compare
from training.run import telemetry
from training.run.loggers import MetricsFile
from training.run.telemetry import PhaseTimes, Telemetry
from training.step.spans import listening, span
from training.step.step import StepOutput
from training.tasks import build_task
from utils import data_loader
from utils.data_loader import Slot

STEPS, LOG_EVERY = 40, 10
GPU = torch.device("cuda")


@pytest.fixture
def gpu(monkeypatch):
    """A pretend GPU in the place of the library of this one."""
    gpu = PretendGpu()
    for module in (data_loader, telemetry):
        monkeypatch.setattr(module, "device_module", lambda *_: gpu)
    for module in (telemetry, clock):
        monkeypatch.setattr(module, "synchronize", gpu.synchronize)
    monkeypatch.setattr(telemetry.time, "perf_counter", gpu.perf_counter)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    monkeypatch.setattr(data_loader, "Slot", lambda numbers, pinned: Slot(numbers, pinned=False))
    return gpu


@pytest.fixture
def reported(gpu, tiny_config, tmp_path, monkeypatch):
    """Call with workers, seconds of a read on the host, CUDA graphs or not: (data wait fraction, compare's figures).

    Loader, clock, telemetry, file of readings and comparison are the project's own.
    """
    monkeypatch.setattr(telemetry, "peak_memory_bytes", lambda _: 1)
    monkeypatch.setattr(telemetry, "peak_flops_per_sec", lambda *_: None)

    def run(workers: int, read: float, graphs: bool = False) -> tuple[float, dict[str, float]]:
        config = tiny_config(num_data_workers=workers, global_batch_size=1, num_iters=STEPS)
        step = SimpleNamespace(device=GPU, task=SimpleNamespace(facts=SimpleNamespace(flops=1.0)))
        told = Telemetry(config.model_copy(update={"enable_cuda_graphs": graphs}), step)
        readings = MetricsFile(tmp_path, 0, "pretend")
        with listening(told.times):
            told.clock.start()
            for iteration, _ in enumerate(batches(config, gpu, read), 1):
                told.add(StepOutput(gpu.step(), None))
                if iteration % LOG_EVERY == 0:
                    losses, reading, _ = told.read(iteration, False)
                    counts = {"iterations": len(losses), "since_start": told.clock.iterations, "ranks": 1}
                    readings.log(reading | counts, iteration)
                    told.clock.start()
        readings.close()
        return told.clock.data_wait_fraction(), compare.read_figures(tmp_path)

    return run


def loaded(config, gpu, read) -> Iterator[data_loader.Batch]:
    """The batches of the project's loader; the host takes some seconds to read a sample."""
    loader, _ = build_task(config).build_loaders(torch.device("cpu"))
    loader.gpu, loader.side_stream = gpu, gpu.side
    read_sample = loader.dataset.read

    def slow_read(index, out):
        gpu.now += read
        read_sample(index, out)

    loader.dataset.read = slow_read
    yield from loader.train(0, 0, STEPS)


def batches(config, gpu, read) -> Iterator[data_loader.Batch]:
    """As Run.batches gives them."""
    taken = loaded(config, gpu, read)
    for _ in range(STEPS):
        with span("data"):
            batch = next(taken)
        yield batch


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize(
    ("workers", "read"), [(2, 0.0), (0, 0.4 * DEVICE)], ids=["read ahead", "read while the device computes"]
)
def test_a_device_that_computes_all_the_time_waits_for_no_data(reported, workers, read, graphs):
    fraction, figures = reported(workers, read, graphs)
    assert fraction < 0.05  # the first batch of an interval has to be copied before anything can be computed
    assert 0.95 < figures["step_time_s"] / (DEVICE + HOST) < 1.05


def test_a_device_that_waits_for_the_host_to_read_waits_for_data(reported):
    read = 3 * DEVICE
    fraction, figures = reported(0, read)
    waits = read + COPY - DEVICE + HOST  # the host reads while the device computes, and then the device waits
    whole = read + HOST
    assert fraction == pytest.approx(waits / whole, rel=0.1)
    assert figures["step_time_s"] == pytest.approx(whole - waits, rel=0.1)


def test_the_ladder_tells_the_same(gpu, tiny_config, monkeypatch):
    for name in ("peak_memory_bytes", "matmul_flops_per_sec", "empty_cache", "device_module"):
        monkeypatch.setattr(ladder, name, lambda *_: None)
    config = tiny_config(num_data_workers=2, global_batch_size=1)
    step = mock.Mock(side_effect=lambda *_: StepOutput(gpu.step(), None), config=config)
    rank = Process(device=GPU)
    rank.kept = {"batches": loaded(config, gpu, 0.0), "step": step, "losses": [], "times": PhaseTimes(GPU)}
    turn = ladder._turn(rank, LOG_EVERY)
    assert turn["wait"] < 0.05 * turn["seconds"]
    assert turn["seconds"] == pytest.approx(LOG_EVERY * DEVICE, rel=0.05)
