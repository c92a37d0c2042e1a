"""Neighborhood attention by the functions of the library NATTEN, which a model brings: na1d, na2d and na3d.

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

from distributed.halo import Interval
from distributed.shard.operands import sum_partial
from distributed.shard.rules.attention import attend
from distributed.shard.rules.windows import no_outputs, request, spatial
from distributed.shard.tensor import LIBRARIES, RULES, ShardTensor, dispatch, local, no_rule, rule, wrap

NAMES = "na1d", "na2d", "na3d", "neighborhood_attention_generic"
WITHOUT_BACKWARD = ("cpu",)  # types of devices on which NATTEN cannot train


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
        start = first // group * group - ahead * self.dilation
        start = max(min(start, length - span), 0)  # a window at the end of the axis is moved inwards
        start = start // group * group
        end = -(-last // group) * group + behind * self.dilation
        end = max(end, start + span)  # likewise at its beginning; and the library takes no shorter axis
        end = -(-end // group) * group
        return start, min(end, length)


def find_natten() -> None:
    """Let NATTEN's functions go by a rule, in NATTEN and in every module that has imported them by these names."""
    library = sys.modules.get("natten.functional")
    for name in NAMES:
        function = getattr(library, name, None)
        if function is None or getattr(function, "__wrapped__", None) in RULES:
            continue
        rule(function)(partial(attend_natten, function))
        asking = _asking(function)
        for module in list(sys.modules.values()):
            if isinstance(module, ModuleType) and vars(module).get(name) is function:
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
    given = (query, key, value)
    settings = _settings(library, args, kwargs)
    if not all(isinstance(x, ShardTensor) for x in given):
        raise no_rule(func, given, {}, "query, key and value must be ShardTensors")
    for name, setting in settings.items():
        if any(isinstance(x, Tensor) for x in tree_leaves(setting)):
            raise no_rule(func, given, {}, f"{name} on a split grid")
    query, key, value = sum_partial(query), sum_partial(key), sum_partial(value)
    spec = query.spec
    axes = _neighborhoods(settings, spec.shape[1:-2])
    split_alike = key.spec.dims[:-2] == spec.dims[:-2] and value.spec.dims[:-1] == key.spec.dims[:-1]
    same_heads = key.spec.dims[-2] == spec.dims[-2]
    whole_heads = not (spec.is_split(-2) or key.spec.is_split(-2))
    whole_features = not any(x.spec.is_split(-1) for x in (query, key, value))
    if not (split_alike and (same_heads or whole_heads) and whole_features):
        raise no_rule(func, given, {}, "they must be split in the same way, and not along features")

    plain = all(a.kernel % 2 == 1 and a.stride == 1 and not a.causal for a in axes)
    ours = plain and key.spec == spec and not settings.get("return_lse")
    if ours and query.device.type in WITHOUT_BACKWARD:
        q, k, v = (dispatch(torch.movedim, x, -2, 1) for x in (query, key, value))  # (B, heads, *spatial, d)
        kernel_size = [a.kernel for a in axes]
        dilation = [a.dilation for a in axes]
        result = attend(func, q, k, v, kernel_size, dilation, settings["scale"])
        return dispatch(torch.movedim, result, 1, -2)
    return _on_region(library, query, key, value, axes, settings)


def _on_region(library, query, key, value, axes, settings):
    """The library's result for this rank's queries, computed on the region that they see."""
    spec = query.spec
    output = value.spec.with_dims((*spec.dims[:-1], value.spec.dims[-1]))
    log_sum = spec.with_dims(spec.dims[:-1])  # of the exponentials of each query's scores
    query, key, value = local(query), local(key), local(value)
    features = [key.shape[-1], value.shape[-1]]
    keys = torch.cat([key, value], -1)  # one exchange for both
    own_rows = {}
    for dim, axis in enumerate(axes, 1):
        split = spec.split(dim)
        if split is None:
            continue
        region = partial(axis.region, spec.shape[dim])
        pending, (first, last), (start, end) = request(keys, dim, split, split[0], region, fill=None)
        keys = pending.rows()
        others = [0, 0] * (query.dim() - 1 - dim)
        query = F.pad(query, [*others, first - start, end - last]) if first < last else query
        own_rows[dim] = first - start, last - first
    if not spec.local_shape.numel():
        results = [no_outputs(keys, output.local_shape, query), keys.new_zeros(log_sum.local_shape)]
    else:
        key, value = keys.split(features, -1)
        found = library(query, key, value, **settings)
        results = list(found) if isinstance(found, tuple) else [found]
        for dim, rows in own_rows.items():
            results = [x.narrow(dim, *rows) for x in results]
    if settings.get("return_lse"):
        return wrap(results[0], output), wrap(results[1], log_sum)
    return wrap(results[0], output)


def _settings(library, args, kwargs):
    """The arguments behind query, key and value by their names, with the defaults of the library."""
    parameters = list(inspect.signature(library).parameters.values())[3:]
    settings = {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}
    for parameter, value in zip(parameters, args, strict=False):
        settings[parameter.name] = value
    return settings | kwargs


def _neighborhoods(settings, lengths):
    """The Neighborhood along each axis."""
    names = ("kernel_size", "stride", "dilation", "is_causal")
    defaults = {"stride": 1, "is_causal": False}  # releases before 0.20 have no stride
    values = [spatial(settings.get(name, defaults.get(name)), len(lengths)) for name in names]
    axes = [Neighborhood(*axis) for axis in zip(*values, strict=True)]
    for axis, length in zip(axes, lengths, strict=True):
        axis.check(length)
    return axes
