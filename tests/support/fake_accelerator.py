"""An accelerator that is not there: a rank trains on it, with shapes and devices but no data, in seconds.

    python -m tests.support.fake_accelerator train.py 2 --config=quick --data_parallel=fsdp

Its tensors are FakeTensors on a device of the type "gpu" (PrivateUse1), and messages go to a fake process group. An
operation that mixes host and device tensors raises, and so does reading a number back (`.item()`, `bool(tensor)`).
`install` changes torch for the whole process, which therefore ends with the case. MUTANT=item or buffer in the
environment puts a mistake into the step.
"""

import contextlib
import os
import sys
import types
from contextlib import ExitStack

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer  # noqa: F401  its import does not bear fake_rank
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from distributed.data_parallel import DataParallelOptions, data_parallel
from tools.planner.fake import fake_rank, pipeline_shapes
from training.assembly import random_batch, split_as_configured
from training.forecasting.ensemble import one_member
from training.models.build import build_model
from training.run.telemetry import PhaseTimes
from training.step.optimizer import build_optimizer
from training.step.spans import listening
from training.step.speed_options import apply_speed_options
from training.step.step import TrainingStep
from training.tasks import task_of
from utils.config import SCRIPTS, load_config

DEVICE_COUNT = 4


class _Stream:
    """A stream, or an event, of work that is not done: everybody waits in vain, at once."""

    device = torch.device("cpu")
    stream_id = device_index = device_type = 0

    def __init__(self, *_, **__):
        pass

    def __getattr__(self, name):
        return lambda *_, **__: self


def _pin_memory(tensor, *_):
    if tensor.device.type != "cpu":
        raise RuntimeError("only dense CPU tensors can be pinned")
    return tensor  # a fake one is nowhere


def install():
    """Make "gpu" a device of torch, and the accelerator of this process."""
    module = types.ModuleType("torch.gpu")
    module.device_count = lambda: DEVICE_COUNT
    module.is_available = module.is_initialized = lambda: True
    module.current_device = lambda: 0
    module.get_rng_state = lambda device=None: torch.empty(16, dtype=torch.uint8)
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16, torch.float32]
    module._is_in_bad_fork = lambda: False
    module.Stream = module.Event = _Stream
    module.stream = contextlib.nullcontext
    module.current_stream = lambda device=None: _Stream()
    for name in ("set_rng_state", "manual_seed", "manual_seed_all", "synchronize", "set_device"):
        setattr(module, name, lambda *_: None)
    _setup_privateuseone_for_python_backend("gpu", backend_module=module)
    torch.Tensor.pin_memory = _pin_memory
    install.library = torch.library.Library("_", "IMPL", "AutocastPrivateUse1")
    install.library.fallback(torch.library.fallthrough_kernel)


def run_a_rank(config, layout, rank=0, mutate=None, steps=2):
    """Build what a training script builds on a rank of a Layout, make steps, and forecast.

    mutate: called with the TrainingStep before the first one. Raises what an operation between devices, or one that
    reads a number, raises.
    """
    there = torch.device("gpu", 0)
    device = there if config.device == "auto" else torch.device(config.device)
    with ExitStack() as stack:
        fake = stack.enter_context(fake_rank(layout, rank, "cpu", "gpu"))
        model = build_model(config)
        split = split_as_configured(model, config)
        apply_speed_options(config, device, model)
        task = task_of(config)
        usage = task.usage
        stack.enter_context(pipeline_shapes(config, layout))
        stack.enter_context(fake)
        parallel = data_parallel(model, config.options(DataParallelOptions), device, [], usage, split)
        step = TrainingStep(config, device, parallel, build_optimizer(config, parallel, device), task)
        if mutate:
            mutate(step)
        times = PhaseTimes(device)
        stack.enter_context(listening(times))
        x, y = random_batch(task, device)
        for iteration in range(steps):
            output = step(iteration, x, y, log_norm=True)  # as in a run, before a reading
            assert output.loss.device == output.grad_norm_squared.device == there
        assert times.steps == steps
        if config.task == "forecast" and not parallel.pipeline:
            parallel.model.eval()
            images, *noise = one_member(config, x)
            with step.autocast():
                assert parallel.predict(images, config.n_out_channels, *noise).device == there


def _read_the_loss(step):
    loss = step.task.loss
    step.task.loss = lambda *args: loss(*args) * (1 if loss(*args).item() > 0 else 2)


def _put_a_buffer_on_the_host(step):
    forward, offset = step.parallel.model.forward, torch.zeros(1, 1)
    step.parallel.model.forward = lambda x: forward(x) + offset


MUTANTS = {"item": _read_the_loss, "buffer": _put_a_buffer_on_the_host}


if __name__ == "__main__":
    name, ranks, *words = sys.argv[1:]
    install()
    script, size = SCRIPTS[name], int(ranks)
    settings = load_config(words, None, size, script.yaml_config, script.splits)
    run_a_rank(settings, settings.layout(size, max(1, size // 2)), mutate=MUTANTS.get(os.environ.get("MUTANT")))
