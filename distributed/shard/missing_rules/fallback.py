"""Operations on whole tensors: the answer of set_fallback("gather") to an operation that no rule computes.

Every rank gathers all ShardTensors among the arguments, runs the operation on whole tensors, and keeps its own part of
each result. Numbers and gradients are exact; time and memory are those of the whole. Every call is counted.

Where all of them are whole on every rank already, nothing is gathered, and the operation is computed in any case.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from distributed.shard.core import tensor as shard_tensor
from distributed.shard.core.axes import unsplit_axes
from distributed.shard.core.calls import name_of
from distributed.shard.core.operands import check_writable, replicate, to_spec, whole_weight
from distributed.shard.core.spec import Mesh, Spec
from distributed.shard.core.tensor import ShardTensor, dispatch, local, made_whole, no_rule, wrap
from distributed.shard.missing_rules.guards import SEES_PARTS
from utils.torch_private import storage_id

FALLBACKS = "error", "gather"
# What these change or return is memory, which no copy can stand for.
OF_MEMORY = {
    "__set__",
    "__delete__",
    "untyped_storage",
    "storage",
    "_typed_storage",
    "__dlpack__",
    "set_",
    "as_strided",
    "as_strided_",
    "backward",
    "grad",
}
RESIZED = "it gives its argument another shape, which the parts cannot follow"
calls: Counter[str] = Counter()  # of each operation since set_fallback
gathered: Counter[str] = Counter()  # bytes of the whole tensors that they were computed on


def set_fallback(fallback: str) -> None:
    """Choose what happens to an operation that no rule computes: "error", or "gather" (see above); count from 0."""
    if fallback not in FALLBACKS:
        raise ValueError(f"fallback: no '{fallback}', there are {', '.join(FALLBACKS)}")
    # The counts belong to the choice: lines of a report speak of one choice alone.
    calls.clear()
    gathered.clear()
    made_whole.clear()
    shard_tensor.computes_on_whole = fallback == "gather"
    shard_tensor.on_refusal = on_whole_tensors if fallback == "gather" else where_whole


def fallback_lines() -> list[str]:
    """Lines that say which operations were computed on whole tensors, and which rules have given whole results."""
    computed = []
    for name, n in calls.most_common():
        megabytes = gathered[name] / 1e6
        computed.append(f"{name}: {n} calls, {megabytes:.1f} MB gathered")
    whole_results = [f"{name}: {size / 1e6:.1f} MB" for name, size in made_whole.most_common()]
    found = {
        "Operations on whole tensors (--domain_fallback gather)": computed,
        "Results that every rank has whole": whole_results,
    }
    return [f"{title}: {'; '.join(operations)}" for title, operations in found.items() if operations]


def where_whole(
    func: Callable,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    refusal: Exception,
) -> Any:
    """As `on_whole_tensors`, of ShardTensors that every rank has whole; raises `refusal` for any others."""
    leaves, _ = tree_flatten((tuple(args), kwargs))
    # What every rank has whole needs no message, so that it is computed whatever the choice.
    if any(_needs_gather(x) for x in leaves):
        raise refusal
    return on_whole_tensors(func, args, kwargs, refusal)


def _needs_gather(x):
    """Tell whether an argument is a ShardTensor that ranks do not hold whole."""
    return isinstance(x, ShardTensor) and bool(x.spec.split_dims or x.spec.partial)


def on_whole_tensors(
    func: Callable,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    refusal: Exception,
) -> Any:
    """The result of func(*args, **kwargs), computed by every rank on whole tensors; each ShardTensor of it is split.

    A result has the cuts of the first ShardTensor in whose place, or in whose size alone, it has a dimension of the
    same size; else it is whole on every rank. What func changes in place changes. Raises `refusal` where that cannot
    be: for what changes its shape, is partial, or is a plain tensor with a gradient, and for sparse tensors that need a
    gradient or come out.
    """
    leaves, structure = tree_flatten((tuple(args), kwargs))
    given = [x for x in leaves if isinstance(x, ShardTensor)]
    why = _why_not_gathered(func, leaves)
    refuse = partial(_refusal, refusal, func, args, kwargs)
    if why or not given:
        raise refuse(why)

    mesh = given[0].spec.mesh
    wholes = _gather_all(leaves, mesh)
    name = name_of(func)
    _count(name, leaves, wholes)
    tensors = []  # (argument, its whole, the version of this before the call)
    for x, w in zip(leaves, wholes, strict=True):
        if isinstance(w, Tensor):
            tensors.append((x, w, w._version))

    # torch counts a version of each tensor up with every change in place.
    whole_args, whole_kwargs = tree_unflatten(wholes, structure)
    out = func(*whole_args, **whole_kwargs)
    changed = [(x, w) for x, w, version in tensors if w._version != version]
    _write_back(changed, refuse)
    # Results may be arguments themselves, or views of them.
    owners = {id(w): x for x, w, _ in tensors}
    storages = {storage_id(w) for _, w, _ in tensors}

    def part(y: Any) -> Any:
        """A result as this rank's part of it; what is one of the arguments is that argument again."""
        if not isinstance(y, Tensor):
            return y
        # Only a strided result can be cut into parts.
        if y.layout != torch.strided:
            raise refuse("a sparse result has no parts")
        # An in-place function returns its argument.
        if id(y) in owners:
            if y.shape != owners[id(y)].shape:
                raise refuse(RESIZED)
            return owners[id(y)]
        specs = [x.spec for x in given]
        own = _split(y, specs, mesh)
        is_view = storage_id(y) in storages
        if is_view:  # torch's result would change with the argument
            own.copied_from = name
        return own

    return tree_map(part, out)


def _gather_all(leaves, mesh):
    """The arguments with every ShardTensor gathered into memory of its own, which a function may change."""
    everywhere = Spec(mesh, ())
    wholes: list[Any] = []
    for x in leaves:
        if isinstance(x, ShardTensor):
            wholes.append(local(replicate(x)).clone())
        else:
            # Every rank computes the whole gradient of a plain tensor.
            wholes.append(whole_weight(x, everywhere))
    return wholes


def _is_sparse_with_grad(x):
    """Tell whether an argument is a sparse tensor that needs a gradient, which has no parts."""
    return isinstance(x, Tensor) and x.layout != torch.strided and x.requires_grad


def _count(name, leaves, wholes):
    """Count a call, and the bytes of what was gathered for it; nothing where all was whole already."""
    made = 0  # bytes
    for x, whole_x in zip(leaves, wholes, strict=True):
        if _needs_gather(x):
            made += whole_x.nbytes
    if made:
        calls[name] += 1
        gathered[name] += made


def _refusal(refusal, func, args, kwargs, why):
    """The error for what cannot be computed on whole tensors either: where that was chosen, it says why."""
    return no_rule(func, args, kwargs, why) if shard_tensor.computes_on_whole else refusal


def _why_not_gathered(func, leaves):
    """Why a function of these arguments cannot be computed on whole tensors; "" where it can."""
    name = getattr(func, "__name__", "")
    if any(map(_is_sparse_with_grad, leaves)):
        return "a sparse tensor that needs a gradient has no parts"
    is_of_memory = func in SEES_PARTS or name in OF_MEMORY
    if is_of_memory:
        return "it is about memory, of which a rank has its part alone"
    # Compiled code knows neither versions nor memory, by which changes are seen.
    return "compiled code computes nothing on whole tensors" if torch.compiler.is_compiling() else ""


def _why_not_written(x, w):
    """Why an argument that an in-place function has changed cannot get its new values; "" where it can."""
    if not isinstance(x, ShardTensor):  # a plain tensor; every rank has changed it alike
        return "it writes to a plain tensor whose gradient is needed" if w.requires_grad else ""
    if x.spec.partial:
        return "it writes to a tensor of which every rank holds a part of the sum"
    return RESIZED if w.shape != x.spec.shape else ""


def _write_back(changed, refuse):
    """Give the arguments of an in-place function their new values. changed: pairs of an argument and its whole."""
    for x, w in changed:
        why = _why_not_written(x, w)
        if why:
            raise refuse(why)
        if not isinstance(x, ShardTensor):
            continue
        target = check_writable(x)
        copy = _as_copy(w, x.spec.mesh)
        dispatch(Tensor.copy_, target, to_spec(copy, x.spec))


def _as_copy(y, mesh):
    """A whole tensor that every rank has, as a ShardTensor."""
    dims = tuple(map(unsplit_axes, y.shape))
    return wrap(y, Spec(mesh, dims))


def _split(y: Tensor, specs: Sequence[Spec], mesh: Mesh) -> ShardTensor:
    """This rank's part of a result that every rank has whole, in memory of its own."""
    # The first argument with a dimension that fits decides on the split.
    copy = _as_copy(y, mesh)
    whole_dims = list(copy.spec.dims)
    for spec in specs:
        dims = list(whole_dims)
        for d in spec.split_dims:
            at = _same_dim(y, spec, d)
            if at is not None and dims[at] == whole_dims[at]:
                dims[at] = spec.dims[d]
        if dims != whole_dims:
            part = to_spec(copy, Spec(mesh, tuple(dims)))
            return wrap(local(part).clone(), part.spec)  # a view would keep the whole
    return copy


def _same_dim(y, spec, d):
    """The dimension of a result that takes the split of dimension d of an argument, by its place or its size alone."""
    same_size = [i for i, n in enumerate(y.shape) if n == spec.shape[d]]
    # The place of a dimension counts more than its size: a square image has two of one size.
    same_dims = y.dim() == len(spec.dims)
    if same_dims and d in same_size:
        return d
    return same_size[0] if len(same_size) == 1 else None


set_fallback("error")
