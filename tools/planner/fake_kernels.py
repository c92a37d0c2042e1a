"""Operations on fake tensors, whose statistics have the type that kernels give them.

torch's own stand-ins for norms have the mean and the deviation in the type of x. Kernels have them in float32 on a GPU,
and on a CPU where the weights are: under autocast, x has two bytes a number and the weights four. In torch 2.11 the
stand-in for attention on a CPU has its sums in float32, where the kernel has those of float64 in float64.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

aten = torch.ops.aten


def kernels_with_statistics(device_type: str) -> dict[Any, Callable[..., Any]]:
    """{operation: what computes it on fake tensors} for a device of this type."""
    batch_norm = partial(_batch_norm, device_type)
    return {
        aten.native_layer_norm.default: partial(_layer_norm, device_type),
        aten.native_group_norm.default: partial(_group_norm, device_type),
        aten.native_batch_norm.default: batch_norm,
        aten._native_batch_norm_legit.default: batch_norm,
        aten._scaled_dot_product_flash_attention_for_cpu.default: _cpu_attention,
    }


def _layer_norm(device_type, mode, func, x, normalized_shape, weight, bias, eps):
    """(output, mean, 1 / standard deviation) over the last dimensions, (..., *normalized_shape)."""
    outer = x.shape[: x.dim() - len(normalized_shape)]
    shape = (*outer, *[1] * len(normalized_shape))
    with mode:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        return _with_statistics(device_type, out, x, weight, shape)


def _group_norm(device_type, mode, func, x, weight, bias, samples, channels, points, groups, eps):
    """(output, mean, 1 / standard deviation) of the groups of channels of each sample."""
    with mode:
        out = torch.empty_like(x)
        return _with_statistics(device_type, out, x, weight, (samples, groups))


def _batch_norm(device_type, mode, func, x, weight, bias, mean, variance, training, momentum, eps):
    """(output, mean, 1 / standard deviation) of the channels of x, (B, C, ...); none in evaluation."""
    channels = x.shape[1] if training else 0
    with mode:
        out = torch.empty_like(x)
        return _with_statistics(device_type, out, x, weight, (channels,))


def _with_statistics(device_type, out, x, weight, shape):
    """The output of a norm, and two statistics of this shape."""
    is_wide = device_type != "cpu" or (weight is not None and weight.dtype == torch.float32)
    dtype = torch.promote_types(x.dtype, torch.float32) if is_wide else x.dtype
    mean = x.new_empty(shape, dtype=dtype)
    rstd = x.new_empty(shape, dtype=dtype)
    return out, mean, rstd


def _cpu_attention(mode, func, query, key, value, *args, **kwargs):
    """(output, logarithms of the sums of weights) of queries (B, heads, N, D): (B, heads, N, D) and (B, heads, N)."""
    samples, heads, count, _ = query.shape
    dtype = torch.promote_types(query.dtype, torch.float32)
    with mode:
        out = torch.empty_like(query)
        sums = query.new_empty((samples, count, heads), dtype=dtype).transpose(1, 2)
    return out, sums
