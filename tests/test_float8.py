"""--amp_mode fp8: what torchao does on a GPU is emulated on the CPU, rounding for rounding."""

import subprocess
import sys
from importlib.util import find_spec
from os import environ

import pytest
import torch

from networks.vit import ViT
from tests.support.compilation import TRACED, compile_by
from tests.support.layout_parity import CPU, build, train, train_serially
from tests.support.refusals import refusal
from tests.test_data_parallel import assert_nearly_same_training
from tools.instruments.tracker import Operation
from tools.planner.hardware import load_gpu
from tools.planner.operation_time import OperationTimes
from tools.planner.plan import plan_layout
from tools.planner.textbook import textbook_traces
from tools.planner.trace import trace_step
from training.assembly import build_step
from training.step.float8 import has_float8, use_float8

torchao = pytest.mark.skipif(
    find_spec("torchao") is None and "CI" not in environ, reason="pip install -r requirements/fp8.txt"
)
SIZES = {"embed_dim": 64, "global_batch_size": 4, "lr": 0.01, "num_iters": 50, "warmup": 5}


def learn(config):
    """Losses of 50 steps over one batch, which can be learned."""
    step = build_step(config, CPU)
    x = torch.randn(config.global_batch_size, 20, *config.img_size, generator=torch.Generator().manual_seed(1))
    return [step(i, x, x.roll(1, -1)).loss.item() for i in range(50)]


@pytest.mark.slow("the loss of many steps")
@torchao
def test_the_loss_stays_within_two_percent_of_bf16(tiny_config):
    bf16, fp8 = (learn(tiny_config(**SIZES, amp_mode=mode)) for mode in ("bf16", "fp8"))
    assert bf16[-1] < 0.6 * bf16[0]
    assert fp8[-1] == pytest.approx(bf16[-1], rel=0.02)
    assert fp8[1:] != bf16[1:]  # other products


@torchao
def test_linear_layers_of_blocks_round_to_8_bits_and_nothing_else_does(tiny_config):
    model = build(tiny_config(**SIZES, amp_mode="fp8")).parallel.model
    changed = {name for name, m in model.named_modules() if type(m).__name__ == "Float8Linear"}
    names = "attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2"
    assert changed == {f"blocks.{i}.{name}" for i in range(2) for name in names}
    layer = model.blocks[0].mlp.fc1
    x = torch.randn(4, 64)
    error = (layer(x) - torch.nn.functional.linear(x, layer.weight, layer.bias)).norm() / layer(x).norm()
    assert 0.01 < error < 0.06  # e4m3 has 3 bits of mantissa


@torchao
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_it_trains_data_parallel_as_on_one_device(ranks, tiny_config, strategy):
    serial = train_serially(tiny_config, SIZES | {"amp_mode": "fp8"}, 10)
    config = tiny_config(**SIZES, amp_mode="fp8", data_parallel=strategy)
    assert_nearly_same_training(ranks(2, train, config), serial, config, tolerance=0.25)


@torchao
@pytest.mark.parametrize("checkpointing", ["full", "selective"])
def test_recomputed_blocks_give_the_same_losses(tiny_config, checkpointing):
    plain = train(tiny_config(**SIZES, amp_mode="fp8"))[0]
    assert torch.equal(train(tiny_config(**SIZES, amp_mode="fp8", activation_checkpointing=checkpointing))[0], plain)


@pytest.mark.slow("fp8 in compiled layers")
@torchao
def test_the_model_compiles_to_one_graph(tiny_config):
    with compile_by(TRACED):
        compiled = train(tiny_config(**SIZES, amp_mode="fp8", enable_jit=True), steps=2)[0]
    torch.testing.assert_close(compiled, train(tiny_config(**SIZES, amp_mode="fp8"), steps=2)[0], rtol=1e-4, atol=0)


@torchao
def test_sizes_that_the_kernels_do_not_take_stay_or_are_refused():
    model = ViT((16, 32), 4, 20, 20, 64, 1, 4, mlp_ratio=1.1)  # 70 hidden features
    use_float8(list(model.blocks), CPU)
    assert type(model.blocks[0].mlp.fc1).__name__ == "Linear" != type(model.blocks[0].attn.qkv).__name__
    with refusal("no linear layer in a block has sizes that are multiples of 16"):
        use_float8(list(ViT((16, 32), 4, 20, 20, 36, 1, 4).blocks), CPU)


@pytest.mark.slow("a python without the extra")
def test_a_missing_library_is_one_line_that_names_the_extra(tiny_options):
    missing = "import sys, runpy; sys.modules['torchao'] = None; runpy.run_path('train.py', run_name='__main__')"
    words = tiny_options(amp_mode="fp8")
    done = subprocess.run([sys.executable, "-c", missing, *words], capture_output=True, text=True, timeout=200)
    assert done.returncode == 2 and done.stderr.startswith("error: amp_mode fp8: torchao cannot be imported")
    assert "pip install -r requirements/fp8.txt" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("capability", "hip", "there"),
    [
        ((8, 0), None, False), ((8, 9), None, True), ((9, 0), None, True), ((10, 0), None, True),
        ((9, 0), "7.1", False), ((9, 4), "7.1", True), ((9, 5), "7.1", True), ((11, 0), "7.1", False),
    ],
)  # fmt: skip
def test_the_capability_says_whether_a_gpu_has_it(monkeypatch, capability, hip, there):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert has_float8(torch.device("cuda")) is there
    if not there:
        with refusal(r"amp_mode fp8: cuda has no 8-bit products .*: use --amp_mode bf16"):
            use_float8([], torch.device("cuda"))


def test_other_accelerators_are_refused():
    with refusal("amp_mode fp8: xpu has no 8-bit products"):
        use_float8([], torch.device("xpu"))


def test_the_planner_takes_the_rate_of_8_bits_where_the_gpu_has_one(tiny_config):
    def plan(mode, gpu):
        config = tiny_config(amp_mode=mode, embed_dim=1024, num_heads=16, img_size=[64, 128])
        layout = config.layout(1)
        return plan_layout(config, layout, load_gpu(gpu), traces=textbook_traces(config, layout))

    bf16, fp8 = plan("bf16", "h100"), plan("fp8", "h100")
    assert fp8.peak == bf16.peak and fp8.flops == bf16.flops
    product = Operation("forward", "matmul", 1e15, 1e9, torch.bfloat16)  # large: its casts are few beside it
    sixteen, eight = (OperationTimes(each.config, each.layout, each.gpu) for each in (bf16, fp8))
    assert eight.rate(product) == 2 * sixteen.rate(product)
    assert eight.seconds(product, None) == pytest.approx(sixteen.seconds(product, None) / 2, rel=0.1)
    assert fp8.time.parts["attention"] == bf16.time.parts["attention"]
    small = {"embed_dim": 64, "depth": 1}
    traced = [trace_step(tiny_config(**small, amp_mode=mode), tiny_config().layout(1)) for mode in ("bf16", "fp8")]
    assert traced[0] == traced[1]  # torchao is not needed
    with refusal("amp_mode fp8: a100-40gb has no 8-bit products"):
        plan("fp8", "a100-40gb")
