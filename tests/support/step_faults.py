"""More faults for `plan.py check`: in what a step does besides its collectives, in evaluation, and in saved states.

Some are those that users of other programs report: a loss divided by the ranks twice, a norm that counts copies twice,
a clip in front of the reduction, a last micro-batch left out, moments of a resharded weight in another order.
"""

from contextlib import contextmanager
from unittest import mock

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from distributed import batch_norm, data_parallel, weight_shards
from distributed.attention import METHODS
from distributed.parallel_model import ParallelModel
from distributed.pipeline import Pipeline
from distributed.shard.core import halo
from distributed.shard.ops import normalization, writing
from distributed.shard.ops.writing import on_shard_tensors
from tests.support.layout_faults import (
    CONV,
    NORMS,
    Fault,
    after,
    clip_by_own_norm,
    on_rank_1,
    patched,
    scaled_gradients,
)
from tools.layout_check import recording, saving
from training.step import step
from training.tasks import Task
from utils import comm

GATHER = METHODS["gather"]
SYNCHRONIZED = NORMS | {"sync_batchnorm": True}
CLIPPED = {"clip_grad_norm": 0.01}
SCALED = {"model": "tests.support.own_models:Scaled"}
WRITES = {"model": "tests.support.writing_models:WritesInPlace", "img_size": [11, 14]}
ACCUMULATED = {"gradient_accumulation": 2, "global_batch_size": 8}


def instead(owner, name, change):
    """Plant: `change(result of owner.name, its arguments)` in place of the result."""

    def plant():
        real = getattr(owner, name)

        def function(*args, **kwargs):
            return change(real(*args, **kwargs), *args)

        return mock.patch.object(owner, name, function)

    return plant


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def is_rank_1():
    return comm.rank() == 1


def silent_block(model, *_):
    """A rank leaves a block out; its weights stay in the graph."""
    block = model.blocks[1]
    forward = block.forward
    block.forward = lambda x: x + 0 * forward(x)


def without_a_gradient(parallel):
    parallel.model.head.proj.weight.grad.zero_()


def clamped_gradients(module, *_):
    for parameter in module.parameters():
        parameter.register_hook(lambda grad: grad.clamp(-1e-4, 1e-4))


@contextmanager
def an_ignored_scale():
    ignore = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model

    def more(module, names):
        ignore(module, [*names, ".scale"])  # as DDP calls a parameter of the model itself

    name = "_set_params_and_buffers_to_ignore_for_model"
    with mock.patch.object(DistributedDataParallel, name, more):
        yield


@contextmanager
def swapped_micro_batches():
    real = ParallelModel.micro_batches

    def micro_batches(parallel, count, *batch):
        others = [each.roll(len(each) // 2, 0) for each in batch]
        return real(parallel, count, *others)

    with mock.patch.object(ParallelModel, "micro_batches", micro_batches):
        yield


@contextmanager
def gradients_of_the_last_micro_batch():
    real = ParallelModel.micro_batches

    def micro_batches(parallel, count, *batch):
        for part in real(parallel, count, *batch):
            for parameter in parallel.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.zero_()
            yield part

    with mock.patch.object(ParallelModel, "micro_batches", micro_batches):
        yield


@contextmanager
def a_last_loss_of_zero():
    real = Pipeline.step

    def run(pipeline, x, y, loss, scale):
        calls = []

        def counted(prediction, target):
            calls.append(None)
            is_last = len(calls) % pipeline.micro_batches == 0
            return loss(prediction, target) * (not is_last)

        return real(pipeline, x, y, counted, scale)

    with mock.patch.object(Pipeline, "step", run):
        yield


@contextmanager
def another_schedule():
    real = step.learning_rate
    with mock.patch("training.step.step.learning_rate", lambda config, i: real(config, i) * (1 + i)):
        yield


@contextmanager
def another_eps_of_adam():
    real = step.set_learning_rate

    def rate(optimizer, value):
        real(optimizer, value)
        for group in optimizer.param_groups:
            group["eps"] = 1e-2 if is_rank_1() else 1e-8

    with mock.patch("training.step.step.set_learning_rate", rate):
        yield


def rounded_weights(training, *_):
    with torch.no_grad():
        for parameter in training.parallel.model.parameters():
            parameter.copy_(parameter.type("torch.BFloat16Tensor"))  # a comparison widens bfloat16()


def rounded_buffers(parallel):
    for buffer in parallel.model.buffers():
        if buffer.is_floating_point():
            buffer.copy_(buffer.type("torch.BFloat16Tensor"))


def own_loss_alone(loss, *_):
    return loss * (comm.get_rank("dp") == 0)


def of_other_ranks(part, *_):
    return part.flip(0) if is_rank_1() else part


def other_rows(part, whole, *_):
    return part.flip(2) if is_rank_1() and part.dim() == 4 else part


def exchanged_targets():
    def batches(training):
        for x, y in real(training):
            yield x, y.roll(1, 0) if is_rank_1() else y

    real = recording.random_batches
    return mock.patch.object(recording, "random_batches", batches)


def shard_of_another(value, dim, rank, size):
    return value.chunk(size, dim)[size - 1 - rank]


def exchanged_keys(q, k, v, **options):
    return GATHER(q, k.roll(1, 2), v, **options)


def zero_buffers(fresh, _):
    for buffer in fresh.parallel.model.buffers():
        buffer.zero_()


def mixed_moments(fresh, _):
    for state in fresh.optimizer.state.values():
        moment = local(state["exp_avg"])
        moment.copy_(moment.flip(0))


def zero_moments(fresh, _):
    for state in getattr(fresh.optimizer, "optim", fresh.optimizer).state.values():
        local(state["exp_avg_sq"]).zero_()


def zero_weights(fresh, _):
    for parameter in fresh.parallel.model.parameters():
        local(parameter.detach()).zero_()


def other_halo(packed, *_):
    return packed.flip(-1)


def other_points(function, x, mask, *more):
    is_wrong = function is writing._fill and is_rank_1()
    return on_shard_tensors(function, x, mask.flip(0) if is_wrong else mask, *more)


def no_evaluation(model, *_):
    return model


RIGHT_BUT = r"gradients are equal before they are clipped: the norm counts a part twice"
READ_BACK, MOMENTS = "weights and buffers read back", "moments read back"
MORE_FAULTS = {
    "dp: the loss is divided by the ranks as well": Fault(
        instead(step.TrainingStep, "loss", lambda loss, *_: loss / comm.get_size("dp")), "dp2",
        "loss", r"of step 1", r"^1/2 of .* dp"),
    "dp: the loss of one rank counts": Fault(
        instead(step.TrainingStep, "loss", own_loss_alone), "dp2",
        "loss", r"of step 1", r"outputs are equal, the loss is not"),
    "dp: micro-batches count as batches": Fault(
        instead(step.TrainingStep, "loss", lambda loss, *_: loss * 4), "dp2",
        "loss", r"of step 1", r"micro-batches \(4\)", {"gradient_accumulation": 4, "global_batch_size": 8}),
    "dp: the last micro-batch alone": Fault(
        gradients_of_the_last_micro_batch, "dp2",
        "gradient", r"head.proj.bias", r"micro-batches are left out", ACCUMULATED),
    "dp: micro-batches of other samples": Fault(
        swapped_micro_batches, "dp2", "forward pass", r"^0$", r"micro-batches hold other samples", SYNCHRONIZED | {
            "gradient_accumulation": 2}),
    "dp: a rank leaves a layer out": Fault(
        after(data_parallel, "fully_shard_model", on_rank_1(silent_block)), "dp2",
        "forward pass", r"^blocks.1$", r"^rank 1 alone: its Block works with another"),
    "dp: a weight of a rank is without use": Fault(
        after(ParallelModel, "finish_gradients", on_rank_1(without_a_gradient)), "dp2",
        "gradient", r"head.proj.weight", r"^rank 1 alone: its gradient did not take part"),
    "dp: a weight is not reduced": Fault(
        an_ignored_scale, "dp2", "gradient", r"^scale$", r"not averaged over the data-parallel ranks", SCALED),
    "dp: clipped before the reduction": Fault(
        after(data_parallel, "replicate", clamped_gradients), "dp2",
        "gradient", r"head.proj.bias", r"backward pass"),
    "dp: the norm counts copies twice": Fault(
        instead(ParallelModel, "squared_norm", lambda square, *_: square * 4), "dp2",
        "clipped gradient", r"", r"^1/2 of|" + RIGHT_BUT, CLIPPED),
    "dp: gradients are not clipped": Fault(
        patched("distributed.parallel_model.ParallelModel.clip_gradients", lambda *_: None), "dp2",
        "clipped gradient", r"", RIGHT_BUT, CLIPPED),
    "tp: clipping by a norm of a part": Fault(
        lambda: mock.patch.object(ParallelModel, "clip_gradients", clip_by_own_norm), "tp2",
        "clipped gradient", r"", r"by a norm of its own part|" + RIGHT_BUT, CLIPPED),
    "tp: parts of another rank": Fault(
        patched("distributed.weight_shards.shard", shard_of_another), "tp2",
        "initial weights", r"blocks.0.attn.qkv", r"the weights that training begins with"),
    "sp: the mean of partial gradients": Fault(
        after(ParallelModel, "finish_gradients", lambda parallel: [
            parameter.grad.mul_(0.5) for name, parameter in parallel.model.named_parameters() if "norm" in name]),
        "tp2,sequence_parallel", "gradient", r"^norm", r"^1/2 of .* tp"),
    "fsdp: the mean is taken twice": Fault(
        scaled_gradients(0.5), "dp2,data_parallel=fsdp", "gradient", r"head.proj.bias", r"^1/2 of .* dp"),
    "domain: a sum for a mean": Fault(
        scaled_gradients(2), "domain2", "gradient", r"head.proj.bias", r"^2 times .* domain"),
    "cp: keys in another order": Fault(
        lambda: mock.patch.dict("distributed.context_parallel.METHODS", gather=exchanged_keys), "cp2",
        "forward pass", r"blocks.0.attn", r"or in another order"),
    "domain: a halo of the other side": Fault(
        instead(halo, "_packed", other_halo), "domain2", "forward pass", r"", r"only rows beside a cut", CONV),
    "domain: a row is left as it was": Fault(
        patched("distributed.shard.ops.elementwise.change_row", lambda func, row, *_: row), "domain2",
        "forward pass", r"^mix$", r"what the model computes in front of this Conv2d", WRITES),
    "domain: a mask of other points": Fault(
        patched("distributed.shard.ops.writing.on_shard_tensors", other_points), "domain2",
        "forward pass", r"^mix$", r"what the model computes in front of this Conv2d", WRITES),
    "domain: another part of the image": Fault(
        instead(Task, "own_part", other_rows), "domain2",
        "batch", r"input", r"^rank 1 alone: .* part of the image"),
    "dp: targets of other samples": Fault(
        exchanged_targets, "dp2", "batch", r"target", r"^rank 1 alone: other samples"),
    "domain: rows of another tile": Fault(
        instead(weight_shards, "part_of", of_other_ranks), "domain2",
        "initial weights", r"pos_embed", r"^rank 1 alone: other initial weights"),
    "pp: the last micro-batch is left out": Fault(
        a_last_loss_of_zero, "pp2,gradient_accumulation=2",
        "loss", r"of step 1", r"outputs are equal, the loss is not"),
    "dp: another eps of the optimizer": Fault(
        another_eps_of_adam, "dp2", "weights after step 1", r"", r"^rank 1 alone: its learning rate"),
    "dp: weights are rounded": Fault(
        after(step.TrainingStep, "update", rounded_weights), "dp2",
        "weights after step 1", r"", r"gradients are equal: the optimizer"),
    "dp: another schedule on all ranks": Fault(
        another_schedule, "dp2", "weights after step 2", r"", r"the first step is equal: .* schedule"),
    "dp: running statistics are updated twice": Fault(
        after(batch_norm, "update", normalization.update), "dp2",
        "buffers", r"running", r"updated twice", SYNCHRONIZED),
    "dp: buffers are rounded": Fault(
        after(ParallelModel, "finish_gradients", rounded_buffers), "dp2",
        "buffers", r"running", r"running statistics", SYNCHRONIZED),
    "dp: evaluation as in training": Fault(
        patched("torch.nn.Module.eval", no_evaluation), "dp2",
        "evaluation", r"output", r"training is equal", SYNCHRONIZED),
    "dp: a rank evaluates other samples": Fault(
        instead(ParallelModel, "predict", of_other_ranks), "dp2",
        "evaluation", r"output", r"^rank 1 alone: its buffers or weights"),
    "dp: buffers are not saved": Fault(
        after(saving, "load_state", zero_buffers), "dp2",
        READ_BACK, r"running", r"what was saved is not what is read back", SYNCHRONIZED),
    "fsdp: moments in another order": Fault(
        after(saving, "load_state", mixed_moments), "dp2,data_parallel=fsdp", MOMENTS, r"exp_avg of", r"another order"),
    "zero1: moments of a rank are not read": Fault(
        after(saving, "load_state", on_rank_1(zero_moments)), "dp2,data_parallel=zero1",
        MOMENTS, r"exp_avg_sq of", r"^rank 1 alone: its part of the saved moments"),
    "tp: weights of a rank are not read": Fault(
        after(saving, "load_state", on_rank_1(zero_weights)), "tp2",
        READ_BACK, r"", r"^rank 1 alone: its part of a saved state"),
}  # fmt: skip
