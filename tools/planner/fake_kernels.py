"""Operations on fake tensors of a CPU as a device has them: types of statistics, and the mixed precision of a GPU.

torch's own stand-ins for norms have the mean and the deviation in the type of x. Kernels have them in float32 on a GPU,
and on a CPU where the weights are: under autocast, x has two bytes a number and the weights four. In torch 2.11 the
stand-in for attention on a CPU has its sums in float32, where the kernel has those of float64 in float64.

The autocast of a CPU differs (it leaves LayerNorm in low precision), and the autocast of a GPU acts on tensors of a GPU
only. The lists of operations: "CUDA Ops that can autocast" in the documentation of torch.amp.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial, wraps
from typing import Any
from unittest.mock import patch

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from distributed.shard.core.tensor import rules_apply

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


# CudaAutocast looks functions up here as Python code calls them.
LOW_PRECISION = {
    F.linear,
    F.conv1d,
    F.conv2d,
    F.conv3d,
    F.scaled_dot_product_attention,
    torch.matmul,
    torch.Tensor.matmul,
    torch.Tensor.__matmul__,
    torch.mm,
    torch.bmm,
    torch.addmm,
    torch.baddbmm,
    torch.einsum,
}
# Sums, exponentials and powers would lose too many digits in 16 bits.
FULL_PRECISION = {
    F.layer_norm,
    F.group_norm,
    F.softmax,
    torch.softmax,
    F.log_softmax,
    F.cross_entropy,
    F.nll_loss,
    F.mse_loss,
    F.l1_loss,
    torch.exp,
    torch.log,
    torch.pow,
    torch.sum,
    torch.Tensor.sum,
    torch.norm,
    torch.linalg.vector_norm,
}


class CudaAutocast(TorchFunctionMode):
    """Context: each operation runs in `dtype`, in float32 or as it is, as under torch.autocast("cuda").

    dtype: None leaves every dtype as it is. Dropout keeps a mask of one byte for each number, as on a GPU.

    The low-precision copy of a parameter is made once and kept until the context ends. The object is a decorator too:
    activation checkpointing calls a block again in the backward pass, outside of the context, which is then re-entered.
    """

    def __init__(self, dtype: torch.dtype | None):
        super().__init__()
        self.dtype = dtype
        self.active = False  # True inside the context
        self.copies: dict[torch.Tensor, torch.Tensor] = {}  # {parameter: its copy in `dtype`}

    @contextmanager
    def ahead_of_collectives(self) -> Iterator[None]:
        """Inside, tensor parallelism casts to `dtype` as well; it would ask for the autocast of its device."""

        def cast(x: torch.Tensor) -> torch.Tensor:
            return x.to(self.dtype) if self.dtype else x

        # Both modules have a name of their own for the function.
        of_layers = patch("distributed.layers.to_compute_dtype", cast)
        of_tensor_parallel = patch("distributed.tensor_parallel.to_compute_dtype", cast)
        with of_layers, of_tensor_parallel:
            yield

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, run inside this context."""

        @wraps(function)
        def within(*args, **kwargs):
            # A call from inside the context must not enter it again.
            context = nullcontext() if self.active else self
            with context:
                return function(*args, **kwargs)

        return within

    def __enter__(self):
        self.active = True
        return super().__enter__()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        # An operation in neither set keeps the types of its inputs.
        wanted = self.dtype
        if wanted and func not in LOW_PRECISION:
            wanted = torch.float32 if func in FULL_PRECISION else None
        sharded = next((t for t in args if hasattr(t, "spec")), None)
        if sharded is not None and rules_apply():
            # The rule of a ShardTensor computes on local parts, and these operations come here again.
            super().__enter__()
            try:
                return type(sharded).__torch_function__(func, types, args, kwargs)
            finally:
                super().__exit__(None, None, None)
        # A CPU would keep the mask of a dropout in the type of its input.
        if func is F.dropout:
            return _dropout(*args, **kwargs)
        if wanted is None:
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            args, kwargs = tree_map(partial(self._cast, wanted), (args, kwargs))
        return func(*args, **kwargs)

    def _cast(self, dtype, value):
        if not isinstance(value, torch.Tensor):
            return value
        if not value.is_floating_point() or value.dtype == dtype:
            return value
        # A leaf that takes a gradient counts as a parameter, as in torch.autocast, and its copy is kept.
        is_kept = value.is_leaf and value.requires_grad and torch.is_autocast_cache_enabled()
        if not is_kept:
            return value.to(dtype)
        if value not in self.copies:
            self.copies[value] = value.to(dtype)
        return self.copies[value]

    def __exit__(self, *error):
        # The optimizer changes the parameters, so their copies must not outlive a step.
        self.copies.clear()
        self.active = False
        return super().__exit__(*error)


def _dropout(x, p=0.5, training=True, inplace=False):
    if not training or not p:
        return x
    out, _ = torch.native_dropout(x, p, True)  # the mask has one byte for each number
    return out
