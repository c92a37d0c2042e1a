"""What is computed again in the backward pass changes no running statistics, no buffer and no random number."""

import pytest
import torch
from torch import nn

from tests.support.compilation import TRACED, compile_by
from tests.support.layout_parity import build, train_in_double, train_steps
from tests.support.marks import slow_but
from training.step.recomputation import checkpointed, copied_buffers, with_buffers


def own(name):
    return f"tests.support.stateful_models:{name}"


CASES = [
    ({"model": "tests.support.own_models:BatchNormNet"}, {"activation_checkpointing": "step"}),
    ({"model": "unet", "model_args": {"width": 4}}, {"activation_checkpointing": "step"}),
    ({"model": own("Everything")}, {"activation_checkpointing": "step", "gradient_accumulation": 2}),
    ({"model": own("LayerDrop"), "model_args": {"by": "numpy"}}, {"activation_checkpointing": "step"}),
    ({"model": own("NormBlocks")}, {"activation_checkpointing": "full"}),
    ({"model": own("NormBlocks")}, {"activation_checkpointing": "selective"}),
    ({"model": own("Everything")}, {"activation_checkpointing": "step", "rollout_steps": 2}),
]


@pytest.mark.parametrize(("model", "options"), CASES, ids=str)
def test_losses_and_state_are_those_without_recomputation(tiny_config, model, options):
    without = {**options, "activation_checkpointing": "none"}
    losses, state = train_in_double(tiny_config(**model, **without), 3)
    found, found_state = train_in_double(tiny_config(**model, **options), 3)
    assert torch.equal(found, losses)
    for name, value in state.items():
        assert torch.equal(found_state[name], value), name


@pytest.mark.parametrize(
    "recomputed", slow_but(["selective"], ["full", "selective", "step"], "whole blocks and whole steps")
)
def test_a_compiled_model_is_recomputed_too(tiny_config, recomputed):
    """torch.compile takes no contexts around a recomputed function but some of its own."""
    with compile_by(TRACED):
        losses, _ = train_in_double(tiny_config(enable_jit=True), 3)
        torch.compiler.reset()
        found, _ = train_in_double(tiny_config(enable_jit=True, activation_checkpointing=recomputed), 3)
    torch.testing.assert_close(found, losses, rtol=1e-12, atol=0)


@pytest.mark.parametrize("options", [{}, {"activation_checkpointing": "step"}], ids=["plain", "recomputed"])
def test_buffers_of_split_images_are_computed_again_as_they_were(ranks, tiny_config, options):
    model = {"model": own("Everything"), "img_size": [11, 14], "patch_size": 1}
    losses, _ = train_in_double(tiny_config(**model), 3)
    for found, _ in ranks(2, train_in_double, tiny_config(**model, domain_parallel=2, **options), 3):
        torch.testing.assert_close(found, losses, rtol=1e-12, atol=0)


class Counter(nn.Module):
    """Its output and its gradient depend on a buffer that it moves."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("constant", torch.ones(()))

    def forward(self, x):
        self.calls += 1
        return (x * self.calls).square() * self.constant


def test_several_calls_are_computed_again_each_with_the_buffers_that_it_found():
    """The gradients of (1 x)^2 and (2 x)^2 at x = 1."""
    model, x = Counter(), torch.ones(2, requires_grad=True)
    call = checkpointed(model.forward, model)
    (call(x) + call(x)).sum().backward()
    assert x.grad.tolist() == [10, 10] and model.calls == 2


def test_buffers_come_back_after_an_error():
    model = Counter()
    own_buffer = model.calls
    with pytest.raises(KeyError), with_buffers(copied_buffers(model)):
        model(torch.ones(1))
        raise KeyError
    assert model.calls is own_buffer and own_buffer == 0


def test_a_resumed_run_arranges_its_buckets_without_a_trace(ranks, tiny_config):
    config = tiny_config(model=own("Everything"), img_size=[11, 14], patch_size=1)
    assert ranks(2, settles_without_a_trace, config) == [True, True]


def settles_without_a_trace(config):
    step = build(config)
    train_steps(step, config, 0, 2)
    before = {name: buffer.clone() for name, buffer in step.parallel.model.named_buffers()}
    draws = step.streams.host.tensors()
    step.warm_up_ddp_buckets(*torch.randn(2, 2, 20, *config.img_size))
    same_buffers = all(torch.equal(value, before[name]) for name, value in step.parallel.model.named_buffers())
    same_draws = all(torch.equal(value, draws[name]) for name, value in step.streams.host.tensors().items())
    return same_buffers and same_draws
