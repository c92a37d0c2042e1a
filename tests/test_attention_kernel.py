"""The log of a run names the kernel of its attention."""

import pytest
import torch

import train
from distributed.checks.usage import AttentionCall, Usage
from training.models.info import inspect_model
from training.step import attention_kernel
from training.step.attention_kernel import attention_notes

CPU = torch.device("cpu")


def test_a_run_names_the_kernel_of_its_attention(tiny_options, tmp_path):
    train.main(tiny_options(num_iters=1, warmup=0))
    assert "Attention of heads of 16: kernel FLASH_ATTENTION\n" in (tmp_path / "logs/quick/00/out.log").read_text()


def test_every_form_of_attention_of_a_model_is_known(tiny_config):
    assert inspect_model(tiny_config()).usage.attention == {AttentionCall(16, 32, False)}
    masked = inspect_model(tiny_config(model="neighborhood", model_args={"kernel_size": 3})).usage.attention
    assert masked and all(call.masked for call in masked)
    assert inspect_model(tiny_config(model="afno")).usage.attention == set()


@pytest.mark.parametrize(
    ("method", "said"), [("gather", "FLASH_ATTENTION"), ("ring", "FLASH_ATTENTION (ring attention)")]
)
def test_ring_attention_calls_its_kernel_itself(tiny_config, monkeypatch, method, said):
    monkeypatch.setattr(attention_kernel.comm, "get_size", lambda name: 2)
    config = tiny_config(context_parallel=2, cp_method=method, domain_method=method)
    assert attention_kernel.kernel_name(config, CPU, AttentionCall(16, 32, False)) == said


@pytest.mark.parametrize(
    ("version", "keys", "masked", "warned"),
    [
        ((2, 13), 192, True, True),
        ((2, 13), 256, True, False),
        ((2, 13), 192, False, False),
        ((2, 14), 192, True, False),
    ],
)
def test_lengths_whose_gradients_cudnn_gets_wrong_are_told(tiny_config, monkeypatch, version, keys, masked, warned):
    monkeypatch.setattr(attention_kernel, "VERSION", version)
    monkeypatch.setattr(attention_kernel.torch, "_fused_sdp_choice", lambda *_: 3)
    first, *others = attention_notes(tiny_config(), CPU, Usage(attention={AttentionCall(64, keys, masked)}))
    assert first.endswith("kernel CUDNN_ATTENTION")
    assert ["enable_cudnn_sdp(False)" in line for line in others] == [True] * warned
