"""Neighborhood attention of a split grid: of networks/neighborhood.py, and by the library NATTEN, which a model brings.

Each query sees the keys of a window around it, and those of other ranks come as a halo.

NATTEN's functions never ask the class of their arguments. Where a program has imported them, `find_natten` lets them
look for ShardTensors first. Nothing here imports the library.

Each rank fetches the rows that its queries see, and calls the library on this region: a GPU runs NATTEN's kernel. The
library moves windows inwards at the region's edges, as it does at the edges of the whole. The region holds the whole
window of each query of this rank, so no such window is moved. Rows of the region that are another rank's have queries
of 0, whose outputs are dropped. On a CPU, where NATTEN has no backward pass, networks/neighborhood.py answers.
"""

# mypy: allow-redefinition
# (query, key and value are ShardTensors, then their local parts)

import inspect
import sys
from collections.abc import Callable
from functools import partial, wraps
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils._pytree import tree_leaves

from distributed.shard.core.halo import Interval
from distributed.shard.core.operands import sum_partial
from distributed.shard.core.tensor import (
    LIBRARIES,
    RULES,
    ShardTensor,
    dispatch,
    local,
    no_rule,
    rule,
    wrap,
)
from distributed.shard.ops.windows import no_outputs, ntuple, request
from networks.neighborhood import attend_windows, neighborhood_attention, per_axis, window_starts
from networks.vit import PerAxis

NAMES = "na1d", "na2d", "na3d", "neighborhood_attention_generic"
WITHOUT_BACKWARD = ("cpu",)  # types of devices on which NATTEN cannot train


@rule(neighborhood_attention)
def attend(
    func: Callable,
    q: ShardTensor,
    k: ShardTensor,
    v: ShardTensor,
    kernel_size: PerAxis,
    dilation: PerAxis = 1,
    scale: float | None = None,
) -> ShardTensor:
    """Attention of q, k, v (B, heads, *spatial, d), which split samples, heads and spatial axes in the same way.

    Each query sees the keys of a window around it: they come as a halo. Raises no_rule for another split, or a split of
    the features d.
    """
    if not all(isinstance(x, ShardTensor) for x in (q, k, v)):
        raise no_rule(func, (q, k, v), {}, "q, k and v must be ShardTensors")
    q = sum_partial(q)
    k = sum_partial(k)
    v = sum_partial(v)
    spec = q.spec
    out = v.spec
    split_alike = k.spec == spec and out.dims[:-1] == spec.dims[:-1]
    splits_features = spec.is_split(-1) or out.is_split(-1)
    if not split_alike or splits_features:
        raise no_rule(func, (q, k, v), {}, "they must be split in the same way, and not along features")

    # Fetch the keys and values that this rank's queries see, along each split axis.
    q = local(q)  # (b, heads, *own spatial, d)
    keys = torch.cat([local(k), local(v)], -1)  # (b, heads, *own spatial, d + d of v): one exchange for both
    count = len(spec.dims) - 3
    kernels = per_axis(kernel_size, count)
    steps = per_axis(dilation, count)
    starts = []  # for each axis, the first key of each query's window
    for dim, kernel, step in zip(range(2, 2 + count), kernels, steps, strict=True):
        first = window_starts(spec.shape[dim], kernel, step)
        split = spec.split(dim)
        if split is not None:
            reach = (kernel - 1) * step + 1

            def seen(low, high, first=first, reach=reach):
                """Rows of the keys that the queries [low, high) see."""
                of_queries = first[low:high]
                return min(of_queries), max(of_queries) + reach

            sizes, _ = split  # of the queries, which are split as the keys
            pending, (low, high), (first_fetched, _) = request(keys, dim, split, sizes, seen, fill=None)
            keys = pending.rows()
            first = [row - first_fetched for row in first[low:high]]  # counted in the rows that were fetched
        starts.append(first)
    has_queries = all(starts)
    if not has_queries:
        return wrap(no_outputs(keys, out.local_shape, q), out)
    features = q.shape[-1]
    k, v = keys.split([features, keys.shape[-1] - features], -1)
    y = attend_windows(q, k, v, kernel_size, starts, dilation, scale)
    return wrap(y, out)


class Neighborhood(NamedTuple):
    """The windows along one axis, as NATTEN defines them.

    Points whose index has the same remainder by `dilation` form an axis of their own. On it, each `stride` queries in
    a row share the window around one of them; causal: the window that ends with the last of them.
    """

    kernel: int
    stride: int = 1
    dilation: int = 1
    causal: bool = False

    def check(self, length: int) -> None:
        """Raise ValueError for a window longer than an axis of `length` points, and for numbers below 1."""
        if min(self.kernel, self.stride, self.dilation) < 1:
            raise ValueError(f"kernel_size {self.kernel}, stride {self.stride}, dilation {self.dilation}: below 1")
        if self.kernel * self.dilation > length:
            raise ValueError(
                f"kernel_size {self.kernel} with dilation {self.dilation} is longer than the axis, {length} points"
            )

    def region(self, length: int, first: int, last: int) -> Interval:
        """Rows of an axis of `length` points that hold the windows of the queries [first, last), at least one.

        In a region that begins with a group of `stride` queries, the groups are those of the whole axis.
        """
        group = self.stride * self.dilation if self.stride > 1 else 1
        span = self.kernel * self.dilation
        ahead = self.kernel - 1 if self.causal else self.kernel // 2
        behind = self.kernel - 1 - ahead
        # The first window, moved inwards at the end of the axis, from the beginning of its group.
        first_of_group = first // group * group
        start = first_of_group - ahead * self.dilation
        start = min(start, length - span)
        start = max(start, 0)
        start = start // group * group

        # The last window, likewise at the beginning of the axis. The library takes no axis shorter than a window.
        end_of_group = _round_up(last, group)
        end = end_of_group + behind * self.dilation
        end = max(end, start + span)
        end = _round_up(end, group)
        return start, min(end, length)


def _round_up(number, multiple):
    """The next multiple that is not below the number."""
    return -(-number // multiple) * multiple


def find_natten() -> None:
    """Let NATTEN's functions go by a rule, in NATTEN and in every module that has imported them by these names."""
    library = sys.modules.get("natten.functional")
    for name in NAMES:
        function = getattr(library, name, None)
        if function is None or getattr(function, "__wrapped__", None) in RULES:
            continue
        rule(function)(partial(attend_natten, function))
        asking = _asking(function)
        # Modules that said `from natten.functional import ...` hold the function themselves.
        for module in list(sys.modules.values()):
            if not isinstance(module, ModuleType):
                continue
            if vars(module).get(name) is function:
                setattr(module, name, asking)


LIBRARIES.append(find_natten)


def _asking(function):
    """The function, which asks the classes of its arguments first."""

    @wraps(function)
    def asking(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        relevant = (query, key, value, *args, *kwargs.values())
        if has_torch_function(relevant):
            return handle_torch_function(function, relevant, query, key, value, *args, **kwargs)
        return function(query, key, value, *args, **kwargs)

    return asking


def attend_natten(
    library: Callable,
    func: Callable,
    query: ShardTensor,
    key: ShardTensor,
    value: ShardTensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Attention of query (B, *spatial, heads, d) to key and value, split alike along samples, heads, spatial axes.

    library: the function of NATTEN. Heads of key and value may be fewer if they are whole. Other arguments are those of
    the library, of its releases since 0.17; tensors among them are refused. Returns (B, *spatial, heads, d of value),
    with return_lse also (B, *spatial, heads). Raises ValueError for a window longer than its axis.
    """
    # Messages name what the caller has given.
    given = (query, key, value)
    settings = _settings(library, args, kwargs)
    if not all(isinstance(x, ShardTensor) for x in given):
        raise no_rule(func, given, {}, "query, key and value must be ShardTensors")
    for name, setting in settings.items():
        if any(isinstance(x, Tensor) for x in tree_leaves(setting)):
            raise no_rule(func, given, {}, f"{name} on a split grid")
    query = sum_partial(query)
    key = sum_partial(key)
    value = sum_partial(value)
    spec = query.spec
    axes = _neighborhoods(settings, spec.shape[1:-2])

    # The exchange moves rows of the spatial axes only, so all else must lie on the same ranks already.
    same_grid = key.spec.dims[:-2] == spec.dims[:-2]
    split_alike = same_grid and value.spec.dims[:-1] == key.spec.dims[:-1]
    same_heads = key.spec.dims[-2] == spec.dims[-2]
    whole_heads = not (spec.is_split(-2) or key.spec.is_split(-2))
    whole_features = not any(x.spec.is_split(-1) for x in (query, key, value))
    heads_fit = same_heads or whole_heads
    if not (split_alike and heads_fit and whole_features):
        raise no_rule(func, given, {}, "they must be split in the same way, and not along features")

    # Our own implementation knows odd windows around each query.
    odd_kernels = all(a.kernel % 2 == 1 for a in axes)
    centred = not any(a.stride > 1 or a.causal for a in axes)
    ours = odd_kernels and centred and key.spec == spec and not settings.get("return_lse")
    if ours and query.device.type in WITHOUT_BACKWARD:
        q = dispatch(torch.movedim, query, -2, 1)  # (B, heads, *spatial, d)
        k = dispatch(torch.movedim, key, -2, 1)
        v = dispatch(torch.movedim, value, -2, 1)
        kernel_size = [a.kernel for a in axes]
        dilation = [a.dilation for a in axes]
        result = attend(func, q, k, v, kernel_size, dilation, settings["scale"])
        return dispatch(torch.movedim, result, 1, -2)
    return _on_region(library, query, key, value, axes, settings)


def _on_region(library, query, key, value, axes, settings):
    """The library's result for this rank's queries, computed on the region that they see."""
    spec = query.spec
    value_features = value.spec.dims[-1]
    output = value.spec.with_dims((*spec.dims[:-1], value_features))
    log_sum = spec.with_dims(spec.dims[:-1])  # of the exponentials of each query's scores
    query = local(query)  # (b, *spatial, heads, d)
    key = local(key)
    value = local(value)

    # Fetch the rows of keys and values that the queries see; the queries get rows of 0 there.
    features = [key.shape[-1], value.shape[-1]]
    keys = torch.cat([key, value], -1)  # one exchange for both
    own_rows = {}  # {dimension: (first, number) of this rank's queries in the region}
    for dim, axis in enumerate(axes, 1):
        split = spec.split(dim)
        if split is None:
            continue
        sizes, _ = split
        region = partial(axis.region, spec.shape[dim])
        pending, (first, last), (start, end) = request(keys, dim, split, sizes, region, fill=None)
        keys = pending.rows()
        if first < last:
            # F.pad takes a pair (before, after) for each dimension, the last dimension first.
            later_dims = [0, 0] * (query.dim() - 1 - dim)
            query = F.pad(query, [*later_dims, first - start, end - last])
        own_rows[dim] = (first - start, last - first)

    # Call the library, and drop the outputs of the other ranks' rows.
    if not spec.local_shape.numel():
        results = [no_outputs(keys, output.local_shape, query), keys.new_zeros(log_sum.local_shape)]
    else:
        key, value = keys.split(features, -1)
        found = library(query, key, value, **settings)
        results = list(found) if isinstance(found, tuple) else [found]
        for dim, (first, count) in own_rows.items():
            results = [x.narrow(dim, first, count) for x in results]
    # The log-sum-exp has no features.
    if settings.get("return_lse"):
        return wrap(results[0], output), wrap(results[1], log_sum)
    return wrap(results[0], output)


def _settings(library, args, kwargs):
    """The arguments behind query, key and value by their names, with the defaults of the library."""
    signature = inspect.signature(library)
    _, _, _, *parameters = signature.parameters.values()
    settings = {}
    for parameter in parameters:
        if parameter.default is not inspect.Parameter.empty:
            settings[parameter.name] = parameter.default
    for parameter, value in zip(parameters, args, strict=False):
        settings[parameter.name] = value
    return settings | kwargs


def _neighborhoods(settings, lengths):
    """The Neighborhood along each axis."""
    names = ("kernel_size", "stride", "dilation", "is_causal")
    defaults = {"stride": 1, "is_causal": False}  # releases before 0.20 have no stride
    values = []
    for name in names:
        given = settings.get(name, defaults.get(name))
        values.append(ntuple(given, len(lengths)))
    axes = [Neighborhood(*axis) for axis in zip(*values, strict=True)]
    for axis, length in zip(axes, lengths, strict=True):
        axis.check(length)
    return axes
