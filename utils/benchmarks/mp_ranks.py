"""The ranks of `benchmark.py mp`: what a step of each layout takes, holds and sends."""

from collections import Counter
from contextlib import ExitStack, contextmanager

import torch

from distributed.context_parallel import latitude_band
from distributed.counting import CollectiveCounter
from distributed.data_parallel import data_parallel
from distributed.model_parallel import split_model
from utils import comm
from utils.benchmarks import team
from utils.benchmarks.memory import SavedTensors, memory_of_a_step, nbytes
from utils.compute import apply_compute_options
from utils.errors import reported_as_usage_error
from utils.model import build_model, initial_weights
from utils.optim import build_optimizer
from utils.training_step import TrainingStep


class Ranks(team.Team):
    """The ranks of a Team, which hold Cases of utils.benchmarks.model_parallel.

    turn: seconds of some steps, of the slowest rank.
    """

    combine = max  # a step takes as long as on its slowest rank

    def __init__(self, size, cases):
        super().__init__(size, cases, _serve)


def _serve(pipe, cases):
    config = cases[0].config
    device = comm.init(config.device, config.comm_timeout)
    if device.type == "cpu":
        torch.set_num_threads(1)
    random = torch.Generator().manual_seed(config.seed)
    shapes = [(config.global_batch_size, n, *config.img_size) for n in (config.n_in_channels, config.n_out_channels)]
    batch = [torch.randn(shape, generator=random) for shape in shapes]
    meshes, built = {}, []
    for case in cases:
        built.append(RankCase(case, device, batch, meshes))
    pipe.send([case.figures for case in built])
    while (turn := pipe.recv()) is not None:
        case, steps = turn
        built[case].use_mesh()
        pipe.send(built[case].seconds(steps))
    comm.shutdown()


class RankCase(team.Case):
    """One layout on one rank. meshes: {layout: groups}, of all cases of this process."""

    def __init__(self, case, device, batch, meshes):
        config, self.device = case.config, device
        self.before = torch.cuda.memory_allocated() if device.type == "cuda" else None
        if case.layout not in meshes:
            comm.build_mesh(device, case.layout)
            meshes[case.layout] = comm.swap_meshes({})
        self.meshes = meshes[case.layout]
        self.use_mesh()
        rows = latitude_band(config.img_size, config.patch_size, comm.get_rank("cp"), comm.get_size("cp"))
        self.x, self.y = (t[comm.get_rank("dp") :: comm.get_size("dp"), :, rows].to(device).clone() for t in batch)
        model = build_model(config)
        with reported_as_usage_error(ValueError, f"layout '{case.name}'"):
            split = split_model(model, config)
        apply_compute_options(config, device, model)
        parallel = data_parallel(model, config, device, initial_weights(config), split)
        self.step = TrainingStep(config, device, parallel, build_optimizer(config, model, device))
        torch.manual_seed(config.seed + comm.dropout_stream(config.sequence_parallel))
        self.figures = self.measure()
        if config.tp_backend == "dtensor":  # a saved DTensor has the size of the whole, not of its part
            self.figures["memory"]["activations"] = None

    def use_mesh(self):
        """The groups of this case are those of the process."""
        comm.swap_meshes(self.meshes)

    def measure(self):
        """Memory and messages of a step on this rank."""
        cuda = self.device.type == "cuda"
        self.train(team.WARMUP_STEPS - 1)
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        self.train(1)
        allocated = torch.cuda.max_memory_allocated() - self.before if cuda else None
        measure = memory_of_a_pipeline_step if self.step.parallel.pipeline else memory_of_a_step
        memory = measure(self.step, self.x, self.y) | {"allocated at most": allocated}
        return {"memory": memory, "messages": messages_of_a_step(self.step, self.x, self.y)}


def memory_of_a_pipeline_step(step, x, y):
    """As memory_of_a_step. Activations are the most that is held after the forward pass of a micro-batch."""
    model, stages = step.parallel.model, stages_of(step.parallel.pipeline)
    own = [p for group in step.optimizer.param_groups for p in group["params"]]
    held, saved = Counter(), SavedTensors(model)

    def after_forward(forward, *args, **kwargs):
        output = forward(*args, **kwargs)
        held["activations"] = max(held["activations"], saved.nbytes())
        held["parameters"] = max(held["parameters"], nbytes([*own, *model.parameters()]))
        return output

    def before_update(update, *args, **kwargs):
        held["gradients"] = nbytes([p.grad for p in own if p.grad is not None])
        return update(*args, **kwargs)

    with ExitStack() as stack:
        for stage in stages:
            stack.enter_context(_around(stage, "forward_one_chunk", after_forward))
        stack.enter_context(_around(step.scaler, "step", before_update))
        stack.enter_context(saved)
        step(0, x, y)
    optimizer = getattr(step.optimizer, "optim", step.optimizer)
    states = [value for state in optimizer.state.values() for value in state.values()]
    held["optimizer"] = nbytes([value for value in states if isinstance(value, torch.Tensor)])
    return dict(held)


def messages_of_a_step(step, x, y):
    """{phase: {kind: (collectives, bytes)}} that this rank sends in step(0, x, y).

    forward: what is sent inside the forward pass and the loss, and to the next stage. update: inside the optimizer.
    backward: all else, the reduction of gradients included.
    """
    total, forward, update = (CollectiveCounter() for _ in range(3))
    parallel, pipeline = step.parallel, step.parallel.pipeline

    def counted(function, *args, **kwargs):
        with forward:
            return function(*args, **kwargs)

    def sends(function, *args):
        made = function(*args)
        forward.calls["send"] += len(made)
        forward.bytes["send"] += nbytes([one.tensor for one in made])
        return made

    def spans(function, x, y, loss, micro_batches, forward_span, backward_span):
        @contextmanager
        def counted_span():
            with forward_span(), forward:
                yield

        def counted_loss(*args):
            return counted(loss, *args)

        return function(
            x,
            y,
            *((counted_loss, micro_batches, forward_span) if pipeline else (loss, micro_batches, counted_span)),
            backward_span,
        )

    def updates(function, *args, **kwargs):
        with update:
            return function(*args, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(_around(parallel, "forward_backward", spans))
        stack.enter_context(_around(step.scaler, "step", updates))
        for stage in stages_of(pipeline) if pipeline else ():
            stack.enter_context(_around(stage, "forward_one_chunk", counted))
            stack.enter_context(_around(stage, "get_fwd_send_ops", sends))
        with total:
            step(0, x, y)

    def table(calls, size):
        return {kind: (calls[kind], size[kind]) for kind in calls if calls[kind] and kind != "recv"}

    return {
        "forward": table(forward.calls, forward.bytes),
        "backward": table(total.calls - forward.calls - update.calls, total.bytes - forward.bytes - update.bytes),
        "update": table(update.calls, update.bytes),
    }


def stages_of(pipeline):
    """torch's stages of this rank: a schedule holds one or several."""
    return getattr(pipeline.schedule, "_stages", None) or [pipeline.schedule._stage]


@contextmanager
def _around(owner, name, function):
    """Inside, owner.name(...) is function(the method, ...)."""
    method = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: function(method, *args, **kwargs))
    try:
        yield
    finally:
        delattr(owner, name)
