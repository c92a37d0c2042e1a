"""Norms of fake tensors have outputs of the shapes and types that the kernels of a CPU give."""

import pytest
import torch

from tools.planner.fake import fake_rank
from utils.layout import Layout

aten = torch.ops.aten
CHANNELS = 4


def layer_norm(x, weight):
    return aten.native_layer_norm(x, x.shape[-1:], torch.ones(x.shape[-1], dtype=weight.dtype), None, 1e-5)


def group_norm(x, weight):
    return aten.native_group_norm(x, weight, None, len(x), CHANNELS, x[0, 0].numel(), 2, 1e-5)


def batch_norm(x, weight, training=True):
    mean, variance = torch.zeros_like(weight), torch.ones_like(weight)
    return aten.native_batch_norm(x, weight, None, mean, variance, training, 0.1, 1e-5)


def evaluated_batch_norm(x, weight):
    return batch_norm(x, weight, training=False)


@pytest.mark.parametrize("norm", [layer_norm, group_norm, batch_norm, evaluated_batch_norm])
@pytest.mark.parametrize("of_weights", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_outputs_are_those_of_kernels(norm, of_weights, memory_format):
    dtypes = [of_weights] if of_weights == torch.float64 else [of_weights, torch.bfloat16]
    for dtype in dtypes:
        x = torch.ones(2, CHANNELS, 3, 5, dtype=dtype).to(memory_format=memory_format)
        weight = torch.ones(CHANNELS, dtype=of_weights)
        real = norm(x, weight)
        with fake_rank(Layout(1), device_type="cpu") as mode, mode:
            fake = norm(mode.from_tensor(x), mode.from_tensor(weight))
        for found, wanted in zip(fake, real, strict=True):
            assert (found.dtype, found.shape, found.stride()) == (wanted.dtype, wanted.shape, wanted.stride())


def test_on_a_gpu_statistics_have_four_bytes():
    x = torch.ones(2, CHANNELS, 3, 5, dtype=torch.bfloat16)
    weight = torch.ones(CHANNELS, dtype=torch.bfloat16)
    for norm in (layer_norm, group_norm, batch_norm):
        with fake_rank(Layout(1), device_type="cuda") as mode, mode:
            _, mean, rstd = norm(mode.from_tensor(x), mode.from_tensor(weight))
        assert mean.dtype == rstd.dtype == torch.float32
