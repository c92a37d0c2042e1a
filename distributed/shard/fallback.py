"""Operations on whole tensors: the answer of set_fallback("gather") to an operation that no rule computes.

Every rank gathers all ShardTensors among the arguments, runs the operation on whole tensors, and keeps its own part of
each result. Numbers and gradients are exact; time and memory are those of the whole. Every call is counted.

Where all of them are whole on every rank already, nothing is gathered, and the operation is computed in any case.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from distributed.shard import tensor as shard_tensor
from distributed.shard.guards import SEES_PARTS
from distributed.shard.operands import check_writable, replicate, scale_grad_by_replicas, to_spec
from distributed.shard.spec import Mesh, Spec, unsplit_axes
from distributed.shard.tensor import ShardTensor, dispatch, local, made_whole, name_of, wrap
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
calls: Counter[str] = Counter()  # of each operation since set_fallback
gathered: Counter[str] = Counter()  # bytes of the whole tensors that they were computed on


def set_fallback(fallback: str) -> None:
    """Choose what happens to an operation that no rule computes: "error", or "gather" (see above); count from 0."""
    if fallback not in FALLBACKS:
        raise ValueError(f"fallback: no '{fallback}', there are {', '.join(FALLBACKS)}")
    calls.clear()
    gathered.clear()
    made_whole.clear()
    shard_tensor.on_refusal = on_whole_tensors if fallback == "gather" else where_whole


def fallback_lines() -> list[str]:
    """Lines that say which operations were computed on whole tensors, and which rules have given whole results."""
    found = {
        "Operations on whole tensors (--domain_fallback gather)": [
            f"{name}: {n} calls, {gathered[name] / 1e6:.1f} MB gathered" for name, n in calls.most_common()
        ],
        "Results that every rank has whole": [
            f"{name}: {size / 1e6:.1f} MB" for name, size in made_whole.most_common()
        ],
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
    for x in leaves:
        if isinstance(x, ShardTensor) and (x.spec.split_dims or x.spec.partial):
            raise refusal
    return on_whole_tensors(func, args, kwargs, refusal)


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
    sparse = [x for x in leaves if isinstance(x, Tensor) and x.layout != torch.strided and x.requires_grad]
    if not given or sparse or func in SEES_PARTS or getattr(func, "__name__", "") in OF_MEMORY:
        raise refusal
    mesh = given[0].spec.mesh
    everywhere = Spec(mesh, ())
    # In memory of their own, which func may change.
    wholes = [
        local(replicate(x)).clone() if isinstance(x, ShardTensor) else scale_grad_by_replicas(x, everywhere)
        for x in leaves
    ]
    name = name_of(func)
    if not torch.compiler.is_compiling():
        _count(name, leaves, wholes)
    tensors = [(x, w, w._version) for x, w in zip(leaves, wholes, strict=True) if isinstance(w, Tensor)]
    whole_args, whole_kwargs = tree_unflatten(wholes, structure)
    out = func(*whole_args, **whole_kwargs)
    for x, w, version in tensors:
        if w._version != version:
            _write_back(x, w, refusal)
    owners = {id(w): x for x, w, _ in tensors}
    storages = {storage_id(w) for _, w, _ in tensors}

    def part(y: Any) -> Any:
        if not isinstance(y, Tensor):
            return y
        if y.layout != torch.strided:
            raise refusal
        if id(y) in owners:
            if y.shape != owners[id(y)].shape:
                raise refusal
            return owners[id(y)]
        own = _split(y, [x.spec for x in given], mesh)
        if storage_id(y) in storages:
            own.copied_from = name
        return own

    return tree_map(part, out)


def _count(name, leaves, wholes):
    """Count a call, and the bytes of what was gathered for it; nothing where all was whole already."""
    made = 0
    for x, whole_x in zip(leaves, wholes, strict=True):
        if isinstance(x, ShardTensor) and (x.spec.split_dims or x.spec.partial):
            made += whole_x.nbytes
    if made:
        calls[name] += 1
        gathered[name] += made


def _write_back(x, w, refusal):
    """Give the argument of an in-place function its new values."""
    if not isinstance(x, ShardTensor):  # a plain tensor; every rank has changed it alike
        if w.requires_grad:
            raise refusal
    elif x.spec.partial or w.shape != x.spec.shape:
        raise refusal
    else:
        dispatch(Tensor.copy_, check_writable(x), to_spec(_as_copy(w, x.spec.mesh), x.spec))


def _as_copy(y, mesh):
    """A whole tensor that every rank has, as a ShardTensor."""
    return wrap(y, Spec(mesh, tuple(map(unsplit_axes, y.shape))))


def _split(y: Tensor, specs: Sequence[Spec], mesh: Mesh) -> ShardTensor:
    """This rank's part of a result that every rank has whole, in memory of its own."""
    copy = _as_copy(y, mesh)
    for spec in specs:
        dims = list(copy.spec.dims)
        for d in spec.split_dims:
            same = [i for i, n in enumerate(y.shape) if n == spec.shape[d]]
            at = d if d in same and y.dim() == len(spec.dims) else same[0] if len(same) == 1 else None
            if at is not None and dims[at] == copy.spec.dims[at]:
                dims[at] = spec.dims[d]
        if dims != list(copy.spec.dims):
            part = to_spec(copy, Spec(mesh, tuple(dims)))
            return wrap(local(part).clone(), part.spec)
    return copy


set_fallback("error")
