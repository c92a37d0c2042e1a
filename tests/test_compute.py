"""Options that make the step faster or smaller compute the same thing."""

import pytest
import torch

from training.assembly import build_step

CPU = torch.device("cpu")


def build(config, device=CPU):
    step = build_step(config, device)
    return step.parallel.model, step


def batch(config, device=CPU):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, config.global_batch_size, 20, *config.img_size, generator=generator).to(device)


def losses_and_weights(config, steps=5, device=CPU):
    model, step = build(config, device)
    losses = [step(i, *batch(config, device)).item() for i in range(steps)]
    return torch.tensor(losses), torch.cat([p.detach().flatten().cpu() for p in model.parameters()])


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
    ids=lambda options: next(iter(options)),
)
def test_options_give_the_same_training(tiny_config, options):
    for plain, other in zip(losses_and_weights(tiny_config()), losses_and_weights(tiny_config(**options)), strict=True):
        torch.testing.assert_close(other, plain, rtol=1e-5, atol=1e-5)


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

    def validate():
        model.eval()
        with torch.no_grad():
            model(x)
        model.train()

    step(0, x, y)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    validate()
    graphs = counters["stats"]["unique_graphs"]
    assert graphs == 2  # with and without gradients
    for i in range(1, 4):
        step(i, x, y)
        validate()
    assert counters["stats"]["unique_graphs"] == graphs
