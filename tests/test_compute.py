"""Options that make the step faster or smaller compute the same thing."""

import pytest
import torch

from networks.vit import ViT
from tools.instruments.assembly import build_step
from training.speed_options import checkpoint_activations
from utils.errors import UsageError

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


def saved_bytes(model, x):
    """Bytes of distinct tensors that the forward pass keeps for the backward pass, weights left out."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = (storage.nbytes(), tensor)  # kept alive: no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(x).sum()
    return sum(size for size, _ in saved.values())


def test_checkpointing_keeps_the_input_of_each_block_only():
    def model(depth, checkpointed):
        vit = ViT((16, 32), 4, 20, 20, 64, depth, 4)
        if checkpointed:
            checkpoint_activations(vit.blocks)
        return vit

    x = torch.randn(4, 20, 16, 32)
    one_input = 4 * 32 * 64 * 4  # (B, N, D) float32
    per_block = {kept: saved_bytes(model(6, kept), x) - saved_bytes(model(3, kept), x) for kept in (False, True)}
    assert per_block[True] <= 3 * one_input * 1.05
    assert per_block[False] > 8 * per_block[True]


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


def test_cuda_graphs_on_the_cpu_are_refused(tiny_config):
    with pytest.raises(UsageError, match="--enable_cuda_graphs needs a GPU with CUDA or ROCm; this run is on cpu"):
        build(tiny_config(enable_cuda_graphs=True))


def test_cuda_graphs_with_fp16_need_the_fused_optimizer(tiny_config):
    with pytest.raises(UsageError, match="enable_cuda_graphs with amp_mode fp16 needs enable_fused"):
        tiny_config(enable_cuda_graphs=True, amp_mode="fp16")


GPU_OPTIONS = [
    {},
    {"amp_mode": "bf16"},
    {"amp_mode": "fp16", "enable_fused": True},
    {"clip_grad_norm": 0.1},
    {"enable_fused": True, "enable_jit": True},
]


@pytest.mark.gpu
@pytest.mark.parametrize("options", GPU_OPTIONS, ids=str)
def test_a_captured_step_trains_like_an_eager_one(tiny_config, options):
    device = torch.device("cuda")
    eager = losses_and_weights(tiny_config(**options), 10, device)
    captured = losses_and_weights(tiny_config(enable_cuda_graphs=True, **options), 10, device)
    for a, b in zip(eager, captured, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
def test_a_captured_step_refuses_another_batch_shape(tiny_config):
    device = torch.device("cuda")
    config = tiny_config(enable_cuda_graphs=True)
    _, step = build(config, device)
    x, y = batch(config, device)
    for i in range(5):
        step(i, x, y)
    with pytest.raises(ValueError, match="every batch must have the same shape"):
        step(5, x[:2], y[:2])


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("options", GPU_OPTIONS, ids=str)
def test_the_steady_state_step_never_waits_for_the_gpu(tiny_config, options, graphs):
    device = torch.device("cuda")
    config = tiny_config(enable_cuda_graphs=graphs, **options)
    _, step = build(config, device)
    x, y = batch(config, device)
    for i in range(6):
        step(i, x, y)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for i in range(6, 10):
            step(i, x, y)
    finally:
        torch.cuda.set_sync_debug_mode("default")
