"""Options that make the step faster or smaller compute the same thing."""

import signal
import threading

import pytest
import torch

from tests.support.refusals import refusal
from training.assembly import build_step
from training.step.speed_options import apply_speed_options, compiled
from utils.signals import STOP_SIGNALS

CPU = torch.device("cpu")


def build(config, device=CPU):
    step = build_step(config, device)
    return step.parallel.model, step


def batch(config, device=CPU):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, config.global_batch_size, 20, *config.img_size, generator=generator).to(device)


def losses_and_weights(config, steps=5, device=CPU):
    model, step = build(config, device)
    losses = torch.tensor([step(i, *batch(config, device)).loss.item() for i in range(steps)])
    return losses, torch.cat([p.detach().flatten().cpu() for p in model.parameters()])


@pytest.mark.parametrize(
    "options",
    [
        {"activation_checkpointing": "full"},
        {"activation_checkpointing": "selective"},
        {"activation_checkpointing": "full", "checkpointing_interval": 2},
        {"gradient_accumulation": 2},
        {"enable_channels_last": True},
        pytest.param(
            {"enable_jit": True}, marks=pytest.mark.slow("the optimizer with compiled layers, step after step")
        ),
        {"enable_fused": True},
    ],
    ids=str,
)
def test_options_give_the_same_training(tiny_config, options):
    plain, other = losses_and_weights(tiny_config()), losses_and_weights(tiny_config(**options))
    torch.testing.assert_close(other, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("amp_mode", ["bf16", "fp16"])
def test_selective_checkpointing_of_several_passes_in_half_precision_trains_alike(tiny_config, amp_mode):
    """In the second pass of a rollout autocast has the copies of the weights of the first, the recomputation not."""
    options = {"amp_mode": amp_mode, "rollout_steps": 2}
    losses, _ = losses_and_weights(tiny_config(**options, activation_checkpointing="selective"), steps=3)
    torch.testing.assert_close(losses, losses_and_weights(tiny_config(**options), steps=3)[0], rtol=1e-5, atol=0)
    assert torch.is_autocast_cache_enabled()


def test_checkpointing_with_dropout_recomputes_the_same_masks(tiny_config):
    plain = losses_and_weights(tiny_config(dropout=0.3))
    other = losses_and_weights(tiny_config(dropout=0.3, activation_checkpointing="full"))
    torch.testing.assert_close(other[0], plain[0], rtol=1e-5, atol=1e-5)


@pytest.mark.slow("generated code in turns with validation")
def test_the_whole_model_compiles_to_one_graph_and_alternating_with_validation_compiles_nothing_more(tiny_config):
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    model, step = build(tiny_config(enable_jit=True))
    x, y = batch(tiny_config())
    graphs = counters["stats"]
    step(0, x, y)
    assert graphs["unique_graphs"] == 1
    assert not counters["graph_break"]
    for i in range(3):
        model.eval()
        with torch.no_grad():
            model(x)
        model.train()
        assert graphs["unique_graphs"] == 2  # with and without gradients
        step(i, x, y)


@pytest.mark.slow("a signal in a compilation of C++")
def test_what_compiles_is_not_ended_by_the_signal_that_stops_a_run(tiny_config):
    """A scheduler signals every process of a job, and torch waits without end for a compiler that is gone."""
    compiled(torch.neg)
    torch._dynamo.reset()  # takes away all callbacks, those of the product too
    model, _ = build(tiny_config(enable_jit=True, depth=1))
    x, _ = batch(tiny_config())
    blocked = []

    def note(_):
        blocked.append(signal.pthread_sigmask(signal.SIG_BLOCK, ()))  # what processes that start now inherit

    torch._dynamo.callback.callback_handler.register_start_callback(note)
    try:
        with torch.no_grad():
            model(x)
    finally:
        torch._dynamo.callback.callback_handler.remove_start_callback(note)
    assert blocked and all(set(STOP_SIGNALS) <= each for each in blocked)
    assert not set(STOP_SIGNALS) & signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_a_forward_pass_that_branches_on_its_values_is_named_where_it_is_compiled(tiny_config):
    model = torch.nn.Identity()
    model.forward = lambda x: x if x.sum() > 0 else -x
    apply_speed_options(tiny_config(enable_jit=True), CPU, model)
    with refusal('enable_jit: .*, File ".*test_compute.py", line'):
        model(torch.ones(2))


def test_a_rank_that_compiled_leaves_no_semaphore_of_the_system():
    compiled(torch.sin)
    lock = torch.hub.tqdm.get_lock()
    assert type(lock) is type(threading.RLock())
