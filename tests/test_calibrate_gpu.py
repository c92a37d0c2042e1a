"""What --calibrate makes of a GPU, on which host and device work at the same time."""

from types import SimpleNamespace

import pytest
import torch

from tests.support.pretend_gpu import PretendGpu
from tests.test_plan_measured import made, settings_of
from tools.instruments import clock, operation_speed
from tools.planner import calibrate
from tools.planner.hardware import gpu_of
from tools.planner.step_time import step_time
from tools.planner.trace import trace_step

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
LAUNCH, KERNEL, PRODUCT = 10e-6, 2e-6, 1e-3  # seconds: of the host for a call, and of the device
OWN = 5e-6  # seconds of each operation of a tiny step on the device


def test_a_kernel_that_is_shorter_than_its_launch_is_measured_without_the_launch(monkeypatch):
    gpu = PretendGpu()

    def queue(seconds):
        gpu.now += LAUNCH
        gpu.main.work(seconds)

    def calls(number):
        for _ in range(number):
            queue(KERNEL)

    monkeypatch.setattr(clock, "device_module", lambda *_: gpu)
    monkeypatch.setattr(clock, "synchronize", gpu.synchronize)
    monkeypatch.setattr(clock.time, "perf_counter", gpu.perf_counter)
    monkeypatch.setattr(clock.torch, "mm", lambda *_: queue(PRODUCT))
    assert clock.timed(CPU, calls, 100)[0] == pytest.approx(100 * LAUNCH, rel=0.01)
    assert clock.device_seconds(CPU, calls, 100) == pytest.approx(100 * KERNEL, rel=0.01)


def test_a_step_that_waits_for_its_launches_is_planned_as_long_as_it_was_measured(monkeypatch):
    """Device and host overlap: what the device computes meanwhile does not make the host faster."""
    config, layout = settings_of("--config=quick")
    (trace,) = trace_step(config, layout)
    kinds = made()["measured"]["compute"]["1"]["operations"]
    operations = {
        name: {dtype: [(*size, OWN) for *size, _ in sizes] for dtype, sizes in types.items()}
        for name, types in kinds.items()
    }
    calls = dict.fromkeys(("forward", "backward", "update"), 0.0)
    for operation, count in trace.operations.items():
        calls[operation.phase] += count
    # A rate that is so high that computing takes next to nothing would hide the mistake: half of the step is computed.
    speeds = calibrate.Speeds(operations, {})
    computing = sum(n * speeds.seconds(op, "float32", 8) for op, n in trace.operations.items())
    phases = {phase: 2 * computing * count / sum(calls.values()) for phase, count in calls.items()}
    figures = {"operations": {1: operations}, "phases": {1: phases}, "points": {}, "steps": {}}
    monkeypatch.setattr(calibrate, "machine", lambda _: {"name": "pretend", "torch": "2", "threads": 1})
    alone = SimpleNamespace(config=config, layout=layout), trace
    found = calibrate.entry(figures, {"alone": alone}, GPU, 1)
    memory = {"memory_gib": 80.0, "overhead_gib": 1.0, "workspace_mib": 32.0}
    planned = step_time([trace], config, layout, gpu_of("here", found | memory))
    assert planned.seconds == pytest.approx(sum(phases.values()), rel=0.1)
    assert planned.bound == "launches"


def test_operations_that_are_measured_on_a_gpu_fill_it():
    """Of two heads, or of a few patches, an H100 computes a tenth of what it can."""
    accelerator = torch.device("meta")
    most = {}
    for operation, sets in operation_speed._operations(accelerator, torch.bfloat16):
        if operation is not operation_speed._backward:
            shape = sets[0][-1].shape if len(sets[0][-1].shape) == 4 else ()
            most[len(sets[0]), len(shape)] = max(most.get((len(sets[0]), len(shape)), 0), sets[0][1].numel())
    attention, convolution = most[4, 4], most[3, 4]
    assert attention == 64 * 2048 * 128 and convolution == 4 * 20 * (64 * 8) * (128 * 8)


@pytest.mark.parametrize(
    ("device", "capability", "hip", "mib"),
    [(CPU, None, None, 0.0), (GPU, (8, 0), None, 8.125), (GPU, (9, 0), None, 32.0), (GPU, (9, 0), "7.1", 32.0)],
)
def test_the_workspace_of_cublas_is_counted(monkeypatch, device, capability, hip, mib):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert calibrate.workspace_mib(device) == mib
