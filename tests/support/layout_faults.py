"""Faults planted into parallel training, as people make them, and what `plan.py check` has to say of each."""

from contextlib import contextmanager, nullcontext
from typing import NamedTuple
from unittest import mock

import torch
from torch.nn import functional as F

from distributed import collectives, data_parallel, model_parallel
from distributed.parallel_model import ParallelModel
from distributed.shard.core import halo
from distributed.shard.core.tensor import RULES, wrap
from training import assembly
from training.step import step
from training.tasks import Task
from utils import comm


def patched(target, replacement):
    return lambda: mock.patch(target, replacement)


def identity(x, *_):
    return x


def twice(function):
    return lambda x, group: function(function(x, group), group)


def own_norms(*tensors, group):
    return tuple(torch.linalg.vector_norm(t, dim=1) for t in tensors)


def own_tokens(q, k, v, dropout_p=0.0, **_):
    return F.scaled_dot_product_attention(q, k, v)


def own_block(block, sizes, group):
    yield 0, block


def after(owner, name, more):
    """Plant: what `more(arguments of owner.name, result)` does, after it."""

    def plant():
        real = getattr(owner, name)

        def function(*args, **kwargs):
            result = real(*args, **kwargs)
            more(*args)
            return result

        return mock.patch.object(owner, name, function)

    return plant


def scaled_gradients(factor):
    def scale(parallel):
        for parameter in parallel.model.parameters():
            parameter.grad *= factor

    return after(ParallelModel, "finish_gradients", scale)


def on_rank_1(change):
    return lambda *args: change(*args) if comm.rank() == 1 else None


def from_token_0(model, *_):
    n = model.pos_embed.tokens.stop - model.pos_embed.tokens.start
    model.pos_embed.tokens = slice(0, n)


def large_eps(model, *_):
    for module in model.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.eps = 1e-2


def other_buffers(parallel):
    for buffer in parallel.model.buffers():
        buffer += 1


def forgotten_moments(optimizer, *_):
    for state in optimizer.state.values():
        state["exp_avg"].zero_()


def divided_by_one(model, options, *_):
    for module in [model, *model.modules()]:
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(1.0)


def clip_by_own_norm(parallel, square, max_norm):
    for grads in parallel._gradients().values():
        torch._foreach_mul_(grads, (max_norm / square.sqrt()).clamp(max=1.0))


@contextmanager
def samples_of_rank_0():
    real = Task.own_part

    def part(task, whole):
        return real(task, whole.roll(len(whole) // 2, 0) if comm.rank() == 1 else whole)

    with mock.patch.object(Task, "own_part", part):
        yield


@contextmanager
def learning_rate(factor):
    real = step.learning_rate
    with mock.patch("training.step.step.learning_rate", lambda *args: real(*args) * factor()):
        yield


@contextmanager
def weights_of_another_seed():
    real = assembly.initial_weights

    def drawn(config):
        return real(config.model_copy(update={"seed": config.seed + comm.rank()}))

    with mock.patch("training.assembly.initial_weights", drawn):
        yield


@contextmanager
def no_halo():
    real = halo._packed
    with mock.patch("distributed.shard.core.halo._packed", lambda *args: real(*args) * 0):
        yield


@contextmanager
def norm_of_a_part():
    def group_norm(func, input, *args, **kwargs):
        return wrap(func(input.as_subclass(torch.Tensor), *args, **kwargs), input.spec)

    with mock.patch.dict(RULES, {F.group_norm: group_norm, torch.group_norm: group_norm}):
        yield


@contextmanager
def no_broadcast_of_updates():
    with mock.patch("torch.distributed.optim.ZeroRedundancyOptimizer._sync_params", lambda self: None):
        yield


class Fault(NamedTuple):
    """layout: its name. shared: options of one device too. name, cause: regular expressions."""

    plant: object
    layout: str
    stage: str
    name: str
    cause: str
    shared: dict = {}  # noqa: RUF012


CONV = {"model": "tests.support.own_models:GroupNormNet"}
NORMS = {"model": "tests.support.own_models:BatchNormNet"}
TIED = {"model": "tests.support.own_models:Tied"}
DROPS = {"model": "tests.support.own_models:DropoutNet"}
LAYERS = "distributed.layers"
FAULTS = {
    "tp: a sum is left out": Fault(
        patched(f"{LAYERS}.reduce_from_region", identity), "tp2",
        "forward pass", r"blocks.0.attn.proj$", r"not added up over tp"),
    "tp: a sum is taken twice": Fault(
        patched(f"{LAYERS}.reduce_from_region", twice(collectives.reduce_from_region)), "tp2",
        "forward pass", r"blocks.0.attn.proj$", r"^2 times .* over tp"),
    "tp: a sum is left out backward": Fault(
        patched(f"{LAYERS}.copy_to_region", identity), "tp2",
        "gradient", r"blocks.1.norm2", r"not added up over tp"),
    "sp: partial gradients are not summed": Fault(
        patched("distributed.parallel_model.reduce_partial_gradients", identity), "tp2,sequence_parallel",
        "gradient", r"^norm.bias", r"not added up over tp"),
    "tp: another eps": Fault(
        after(model_parallel, "tensor_parallel", large_eps), "tp2", "forward pass", r"blocks.0.norm1$", r"eps"),
    "tp: another seed": Fault(
        weights_of_another_seed, "tp2", "initial weights", r"", r"^rank 1 alone: other initial weights: its seed"),
    "cp: own keys alone": Fault(
        lambda: mock.patch.dict("distributed.context_parallel.METHODS", gather=own_tokens), "cp2",
        "forward pass", r"blocks.0.attn", r"attention does not see the keys and values of all ranks"),
    "cp: a ring of one block": Fault(
        patched("distributed.attention._blocks", own_block), "cp2,cp_method=ring",
        "forward pass", r"blocks.0.attn", r"attention does not see the keys and values of all ranks"),
    "cp: positions of another band": Fault(
        after(model_parallel, "context_parallel", from_token_0), "cp2",
        "forward pass", r"pos_embed$", r"^rank 1 alone: its PositionEmbedding works with another position"),
    "cp: a loss of parts": Fault(
        patched("training.forecasting.losses.l2_norms", own_norms), "cp2",
        "loss", r"of step 1", r"outputs are equal, the loss is"),
    "cp: the mean of parts of a sum": Fault(
        patched("distributed.collectives._times_size", identity), "cp2",
        "gradient", r"head.proj.bias", r"^1/2 of what it should be"),
    "domain: the mean of parts of a sum": Fault(
        patched("distributed.collectives._times_size", identity), "domain2",
        "gradient", r"head.proj.bias", r"^1/2 of what it should be"),
    "domain: a loss of uneven parts": Fault(
        patched("training.forecasting.losses.l2_norms", own_norms), "domain3",
        "loss", r"of step 1", r"outputs are equal, the loss is not"),
    "domain: an empty halo": Fault(
        no_halo, "domain2", "forward pass", r"", r"only rows beside a cut differ: the halo", CONV),
    "domain: a norm of a part": Fault(
        norm_of_a_part, "domain2", "forward pass", r"^1$", r"a norm: statistics of a rank's part", CONV),
    "dp: gradients are not reduced": Fault(
        nullcontext, "dp2,noddp", "gradient", r"head.proj.bias", r"not averaged over the data-parallel ranks"),
    "dp: a sum for a mean": Fault(
        scaled_gradients(2), "dp2", "gradient", r"head.proj.bias", r"^2 times .* dp .* its reduction is not"),
    "dp: the mean is taken twice": Fault(
        scaled_gradients(0.5), "dp2", "gradient", r"head.proj.bias", r"^1/2 of .* dp .* its reduction is not"),
    "dp: samples of another rank": Fault(
        samples_of_rank_0, "dp2", "batch", r"input", r"^rank 1 alone: other samples"),
    "dp: another learning rate": Fault(
        lambda: learning_rate(lambda: 1 + comm.rank()), "dp2",
        "weights after step 1", r"", r"^rank 1 alone: its learning rate"),
    "dp: another learning rate on all ranks": Fault(
        lambda: learning_rate(comm.world_size), "dp2",
        "weights after step 1", r"", r"gradients are equal: the optimizer or its learning rate"),
    "dp: moments of a rank are lost": Fault(
        after(step, "set_learning_rate", on_rank_1(forgotten_moments)), "dp2",
        "weights after step 2", r"", r"^rank 1 alone: its optimizer state"),
    "dp: BatchNorm of own samples": Fault(
        nullcontext, "dp2,sync_batchnorm=false", "forward pass", r"^1$", r"give --sync_batchnorm", NORMS),
    "dp: buffers of a rank": Fault(
        after(ParallelModel, "finish_gradients", on_rank_1(other_buffers)), "dp2",
        "buffers", r"running", r"^rank 1 alone: its buffers", NORMS | {"sync_batchnorm": True}),
    "domain: random numbers of its own": Fault(
        nullcontext, "domain2", "forward pass", r"^1$", r"^random numbers", DROPS),
    "dp: random numbers of its own": Fault(
        nullcontext, "dp2", "forward pass", r"^1$", r"^random numbers", DROPS),
    "dp: tied weights come apart": Fault(
        lambda: mock.patch("distributed.data_parallel.keep_ties", lambda model: nullcontext()), "dp2",
        "initial weights", r"second.weight", r"a weight that several layers share has come apart", TIED),
    "zero1: updates are not broadcast": Fault(
        no_broadcast_of_updates, "dp2,data_parallel=zero1",
        "weights after step 1", r"", r"alone: its learning rate, or a missing broadcast of updated weights"),
    "fsdp: a sum for a mean": Fault(
        after(data_parallel, "fully_shard_model", divided_by_one), "dp2,data_parallel=fsdp",
        "gradient", r"head.proj.bias", r"^2 times what it should be"),
    "fsdp: clipping by a norm of a part": Fault(
        lambda: mock.patch.object(ParallelModel, "clip_gradients", clip_by_own_norm), "dp2,data_parallel=fsdp",
        "clipped gradient", r"", r"gradients are equal before they are clipped", {"clip_grad_norm": 0.01}),
    "pp: micro-batches count as batches": Fault(
        lambda: mock.patch.object(step.TrainingStep, "loss", lambda self, prediction, target: self.task.loss(
            prediction, target, comm.get_group("image"))), "pp2,gradient_accumulation=2",
        "loss", r"of step 1", r"^2 times what it should be|the loss is not"),
}  # fmt: skip
