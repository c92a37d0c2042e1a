"""A layout of rung 3 or 4 against one device: the losses and the weights of the same training."""

from contextlib import nullcontext
from functools import cache
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

from distributed.collectives import shard
from distributed.parallel_model import make_buffers_whole
from distributed.shard_tensor import wrap
from distributed.weight_shards import global_view, take_parts
from tests.support.compilation import GENERATED, compile_by
from tests.support.temporary import make_folder
from tests.support.workers import PATIENCE_SECONDS
from tools.benchmarks.cases import OPTIONS, parse_layout, split_words
from tools.instruments.counting import CollectiveCounter
from tools.instruments.ranks import Case, Process
from tools.layout_check import check
from training.assembly import build_step
from training.checkpoints.folder import CheckpointFolder
from training.checkpoints.state import collect_extra, collect_state, later_names, restore_state
from training.tasks import build_task, task_of
from utils import comm
from utils.yaml_files import yaml

CPU = torch.device("cpu")
COMPILATION_PATIENCE_SECONDS = 280  # every rank compiles for itself, on shared cores
RECOMPUTED = {"activation_checkpointing": "selective"}
COMPILED = {"enable_jit": True}
_serial = {}  # {options and steps: losses, weights, or options: a file}


def ranks_and_options(layout):
    """Of a layout by the name that `benchmark.py layouts` has for it: "tp2xdp2,data_parallel=fsdp"; or "serial".

    A pipeline has twice as many micro-batches as stages.
    """
    if layout == "serial":
        return 1, {}
    dims, *words = layout.split(",")
    sizes, ranks = parse_layout(dims, (*OPTIONS, "dp"))
    stages = int(sizes["pp"])
    options = {"gradient_accumulation": 2 * stages} if stages > 1 else {}
    for word in [*split_words(sizes), *words]:
        name, _, value = word.removeprefix("--").partition("=")
        options[name] = yaml().load(value or "true")
    return ranks, options


def build(config):
    comm.build_mesh(CPU, config.layout(comm.world_size()))
    return build_step(config, CPU)


def window_of(config):
    """Rows and columns of images that this rank has."""
    return task_of(config).own_window()


def own_part(batch, config, window=None):
    """This rank's samples of a global batch, and its part of them. window: of the config, where it is known already."""
    rows, columns = window or window_of(config)
    return batch[comm.get_rank("dp") :: comm.get_size("dp"), :, rows, columns]


def train_steps(step, config, start, stop):
    """Losses of the steps from start to stop, averaged over the ranks; a step's batch is the same in every layout."""
    random, losses, window, task = torch.Generator().manual_seed(1), [], window_of(config), build_task(config)
    for i in range(stop):
        batch = task.random_batch(random)
        if i >= start:
            x, y = (own_part(part, config, window) for part in batch)
            losses.append(step(i, x, y).loss)
    return comm.all_reduce(torch.stack(losses)) / comm.world_size()


def train(config, steps=10, backend=GENERATED):
    """Losses, this rank's part of the weights: {name: (value, dim that is split over tp or None)}, tp rank and size.

    backend: of torch.compile, where layers are compiled.
    """
    with compile_by(backend):
        step, whole = build(config), {}
    losses, split = train_steps(step, config, 0, steps), step.parallel.split
    for name, p in step.parallel.model.named_parameters():
        value = p.detach().full_tensor() if isinstance(p, DTensor) else p.detach()
        if name in split.specs:
            value = wrap(value, split.specs[name]).full_tensor()
        whole[name] = value.clone(), split.dims.get(name)
    return losses, whole, comm.get_rank("tp"), comm.get_size("tp")


def train_from(config, folder, start, stop):
    """Resume at step `start`, from the checkpoint that another layout left, train to `stop` and save.

    Returns the losses of these steps.
    """
    step = build(config)
    model, optimizer, split = step.parallel.model, step.optimizer, step.parallel.split
    checkpoints = CheckpointFolder(folder, keep=9)
    if start:
        tensors = collect_state(model, optimizer, step.streams)
        view = global_view(tensors, split)
        marker = checkpoints.load_newest(view)
        assert marker["iteration"] == start
        take_parts(tensors, view, split)
        tensors |= {"random": view["random"]}
        restore_state(tensors, model, optimizer, step.streams, marker["trainer"]["extra"])
        del tensors, view  # a buffer that others see cannot become a part of a split one
    losses = train_steps(step, config, start, stop)
    step.parallel.share_buffers()
    tensors = global_view(collect_state(model, optimizer, step.streams), split)
    checkpoints.save(stop, tensors, {"extra": collect_extra(model), "tied": later_names(model)}, wait=True)
    return losses


def train_serially(tiny_config, options, steps):
    """Losses and weights of one device, computed once."""
    key = repr(sorted(options.items())), steps
    if key not in _serial:
        losses, weights, *_ = train(tiny_config(**options), steps)
        _serial[key] = losses, {name: value for name, (value, _) in weights.items()}
    return _serial[key]


def assert_serial(results, serial, tolerance=1e-5):
    """Every rank holds the serial run's weights, or its part of them, and together they hold all."""
    seen = set()
    for losses, weights, rank, size in results:
        seen |= set(weights)
        for name, (value, dim) in weights.items():
            expected = serial[1][name] if dim is None else shard(serial[1][name], dim, rank, size)
            error = (value - expected).norm() / expected.norm().clamp_min(1e-3)
            assert error < tolerance, (name, error)
        torch.testing.assert_close(losses, serial[0], rtol=tolerance, atol=0)
    assert seen == set(serial[1])


def check_training(ranks, tiny_config, layout, options, steps=10, backend=GENERATED, **extra):
    """Losses and weights are those of one device.

    layout: its name. options: of the layout and of one device. extra: of the layout alone. backend: of torch.compile.
    """
    size, own = ranks_and_options(layout)
    config = tiny_config(**options, **own, **extra)
    patience = COMPILATION_PATIENCE_SECONDS if config.enable_jit else PATIENCE_SECONDS
    results = ranks(size, train, config, steps, backend, timeout=patience)
    assert_serial(results, train_serially(tiny_config, options, steps))


def check_mixed_precision(ranks, tiny_config, layout, options, amp_mode):
    """Losses are those of one device in the same precision; layout and options as in check_training."""
    (size, own), steps = ranks_and_options(layout), 4
    mixed = options | {"amp_mode": amp_mode}
    serial, _ = train_serially(tiny_config, mixed, steps)
    results = ranks(size, train, tiny_config(**mixed, **own), steps=steps)
    for losses, *_ in results:
        torch.testing.assert_close(losses, serial, rtol=2e-4, atol=0)
    with pytest.raises(AssertionError):  # it is on
        assert_serial(results, train_serially(tiny_config, options, steps), tolerance=1e-4)


def check_chain(ranks, tiny_config, layouts, options, folder):
    """Each of the layouts trains three steps from the checkpoint of the one before: the losses are those of one run."""
    losses, serial = [], train_serially(tiny_config, options, 3 * len(layouts))[0]
    for part, (size, own) in enumerate(map(ranks_and_options, layouts)):
        losses.append(ranks(size, train_from, tiny_config(**options, **own), folder, 3 * part, 3 * part + 3)[0])
    torch.testing.assert_close(torch.cat(losses), serial, rtol=1e-5, atol=0)


def overflow_on_the_last_rank(config):
    """(whether weights change, loss scale) of a step in which only the last rank's part of a gradient overflows."""
    step = build(config)
    parameters = list(step.parallel.model.parameters())
    before, unscale = [local(p).clone() for p in parameters], step.scaler.unscale_

    def overflow(optimizer):
        if comm.rank() == comm.world_size() - 1:
            local(step.parallel.model.blocks[0].mlp.fc1.weight.grad)[0, 0] = torch.inf
        unscale(optimizer)

    step.scaler.unscale_ = overflow
    step(0, *(own_part(part, config) for part in torch.randn(2, config.global_batch_size, 20, *config.img_size)))
    return all(torch.equal(a, local(b)) for a, b in zip(before, parameters, strict=True)), step.scaler.get_scale()


def local(tensor):
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def collectives_of_a_step(config):
    """Calls and bytes by kind in the fifth optimizer step, when everything has settled."""
    step = build(config)
    batch = build_task(config).random_batch(torch.Generator().manual_seed(1))
    x, y = (own_part(part, config).clone() for part in batch)
    for i in range(4):
        step(i, x, y)
    with CollectiveCounter() as counted:
        step(4, x, y)
    return dict(counted.calls), dict(counted.bytes)


def train_in_double(config, steps=10):
    """Losses and whole state, running statistics too. A gradient that is zero but for rounding decides Adam's sign."""
    torch.set_default_dtype(torch.float64)
    try:
        step = build(config)
        losses = train_steps(step, config, 0, steps)
        make_buffers_whole(step.parallel.model)
        state = global_view(collect_state(step.parallel.model, step.optimizer), step.parallel.split)["model"]
        whole = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in state.items()}
        return losses, {name: t.detach().clone() for name, t in whole.items()}
    finally:
        torch.set_default_dtype(torch.float32)


def record_in_double(config, file, read_data=False):
    case = Case("one device", check.plain(config), config.layout(1))
    check.record_serially(Process(device=CPU), case, Path(file), "float64", read_data)


def compare_in_double(config, file, plant=nullcontext, read_data=False):
    """On a rank: the Result of `plan.py check` for its layout. plant: makes a context, in which it is computed."""
    case = Case("layout", check.plain(config), config.layout(comm.world_size()))
    with plant():
        return check.compare(Process(device=CPU), case, Path(file), "float64", read_data)


@cache
def _folder():
    """The folder of what one device gives, which only the process of the tests needs."""
    return make_folder("one-device-")


def check_in_double(ranks, tiny_config, layout, options):
    """All that `plan.py check` compares is equal in float64: outputs of modules, gradients, weights, buffers."""
    key, (size, own) = repr(sorted(options.items())), ranks_and_options(layout)
    if key not in _serial:
        _serial[key] = f"{_folder()}/{len(_serial)}.pt"
        record_in_double(tiny_config(**options), _serial[key])
    result = ranks(size, compare_in_double, tiny_config(**options, **own), _serial[key])[0]
    assert result.equal and not result.skipped, result
