"""Linear layers and matrix products.

A product sums over the dimensions that its result does not have. If such a dimension is split, each rank sums over its
part, and the result is partial. A result of images (B, C, ...) that is about as large as a rank's part of them is
summed up and split along another dimension at once: spherical harmonics would be whole on every rank otherwise. If one
mesh dimension splits two dimensions, one of them is gathered first.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from distributed.shard.core.axes import mesh_dims_of, unsplit_axes
from distributed.shard.core.operands import (
    common_spec,
    global_shape,
    joint_axes,
    local_operand,
    sum_partial,
    whole_weight,
)
from distributed.shard.core.plans import Plan, as_it_is, fit_of, fitted, planned_of_tensors
from distributed.shard.core.spec import Spec, part_of
from distributed.shard.core.tensor import (
    ShardTensor,
    dispatch,
    named,
    no_rule,
    rule,
    wrap,
)
from distributed.shard.ops.along import split_again, unshard_dims

LEAST_OF_A_PART = 4  # a sum that has a quarter of the elements of a rank's part, or more, is split again


def contraction(
    compute: Callable[..., Tensor],
    operands: Sequence[Tensor],
    labels: Sequence[Sequence[str]],
    result: Sequence[str],
    bias: Tensor | None = None,
    names: Sequence[str] = (),
) -> Plan:
    """compute(*local operands), for a function that is linear in each of its operands.

    labels: as in an einsum, one label for each dimension of each operand; equal labels mean the same dimension, and
    size 1 broadcasts. result: labels of the result; what it lacks is summed. bias: over the last dimension of the
    result, one more argument of compute. names: of the arguments, by which they may be given. Raises RuntimeError where
    sizes of a label differ.
    """
    parts = [(x.spec, own) for x, own in zip(operands, labels, strict=True) if isinstance(x, ShardTensor)]
    first_spec, _ = parts[0]
    mesh = first_spec.mesh
    # A product of two sums is not the sum of the products: only one operand may be partial.
    partial = first_spec.partial if len(parts) == 1 else ()

    # The split of each label, and of the result: partial over what splits the labels that it does not have.
    sizes = common_sizes(operands, labels)
    axes = joint_axes(parts, sizes, set(partial))  # {label: axes}
    summed_axes = [a for label, a in axes.items() if label not in result]
    summed = mesh_dims_of(*summed_axes)
    out_partial = tuple(sorted(summed.union(partial)))
    out = Spec(mesh, tuple([axes[label] for label in result]), out_partial)

    # Each operand takes the split of its labels. The result's spec says which ranks use their copies for other parts.
    fits = []
    for x, own in zip(operands, labels, strict=True):
        wanted = out.with_dims([axes[label] for label in own], partial)
        fits.append(fit_of(x, wanted, out))
    if bias is not None:
        is_used_whole = fit_of(bias, out) is as_it_is and not out.partial
        fits.append(as_it_is if is_used_whole else lambda bias: own_bias(bias, out))
    named_fits = dict(zip(names, fits, strict=False))
    product = fitted(compute, *fits, **named_fits)

    # All ranks decide alike, by sizes of whole tensors: of those that are split, and not of tables beside them, which
    # may be larger (Legendre polynomials of all orders). A transform may leave out the higher degrees.
    elements = [spec.shape.numel() for spec, _ in parts]
    elements_of_copies = out.shape.numel() * mesh.joint.size
    is_of_images = len(result) > 3
    is_large = LEAST_OF_A_PART * elements_of_copies >= max(elements)
    if summed and is_of_images and is_large:

        def in_parts(*args: Any, **kwargs: Any) -> ShardTensor:
            y = wrap(product(*args, **kwargs), out)
            return split_again(y)

        return Plan(in_parts, None)
    return Plan(product, out)


def common_sizes(
    operands: Sequence[Tensor],
    labels: Sequence[Sequence[str]],
) -> dict[str, int]:
    """The size of each label."""
    sizes: dict[str, int] = {}
    for x, names in zip(operands, labels, strict=True):
        for name, size in zip(names, global_shape(x), strict=True):
            before = sizes.get(name, 1)
            broadcasts = 1 in (before, size)
            if before != size and not broadcasts:
                raise RuntimeError(f"sizes {before} and {size} of one dimension of a product differ")
            sizes[name] = size if before == 1 else before
    return sizes


def own_bias(bias: Tensor, out: Spec) -> Tensor:
    """This rank's part of a bias. For a partial result each rank adds an equal share of it."""
    # The shares of a partial result add up to one bias.
    bias = whole_weight(bias, out)
    if out.is_split(-1):
        of_features = out.with_dims(out.dims[-1:], ())
        bias = part_of(bias, of_features)
    for mesh_dim in out.partial:
        bias = bias / out.mesh.groups[mesh_dim].size
    return bias


@rule(F.linear)
@planned_of_tensors
def linear(
    func: Callable,
    input: Any,
    weight: Tensor,
    bias: Tensor | None = None,
) -> Plan:
    """(..., D) x (E, D) -> (..., E). If D is split, the result is partial."""
    if weight.dim() != 2:
        raise no_rule(func, (input, weight, bias), {}, "the weight must be a matrix")
    # The common case is told at once, for which torch.compile needs a quarter of the time.
    if not any(isinstance(x, ShardTensor) for x in (weight, bias)) and not input.spec.is_split(-1):
        out = input.spec.with_dims((*input.spec.dims[:-1], unsplit_axes(weight.shape[0])))
        if out.copies == 1 and not out.partial:  # the weight is used as it is
            return Plan(F.linear, out)
    batch = [f"b{i}" for i in range(input.dim() - 1)]
    labels = ([*batch, "d"], ["e", "d"])
    names = ("input", "weight", "bias")
    return contraction(F.linear, (input, weight), labels, [*batch, "e"], bias, names)


def labels_of_matmul(input: Tensor, other: Tensor) -> tuple[tuple[list[str], list[str]], list[str]]:
    """(labels of both operands, labels of the result): n rows, d summed, m columns; vectors lack n or m."""
    has_rows = input.dim() > 1
    has_columns = other.dim() > 1
    first = [*_batch(input), "n", "d"] if has_rows else ["d"]
    second = [*_batch(other), "d", "m"] if has_columns else ["d"]
    longer = input if input.dim() > other.dim() else other
    result = _batch(longer)
    if has_rows:
        result.append("n")
    if has_columns:
        result.append("m")
    return (first, second), result


@rule(*named("matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv", "dot"))
@planned_of_tensors
def matmul(func: Callable, input: Tensor, other: Tensor) -> Plan:
    """(..., N, D) x (..., D, M) -> (..., N, M) with broadcast batches; vectors as in torch."""
    is_reversed = func.__name__ == "__rmatmul__"
    if is_reversed:
        input, other = other, input
    labels, result = labels_of_matmul(input, other)
    plan = contraction(torch.matmul, (input, other), labels, result, names=("input", "other"))
    return Plan(lambda other, input: plan.compute(input, other), plan.spec) if is_reversed else plan


@rule(torch.cdist)
def distances(
    func: Callable,
    x1: Tensor,
    x2: Tensor,
    p: float = 2.0,
    compute_mode: str = "use_mm_for_euclid_dist_if_necessary",
) -> ShardTensor:
    """Distances of all pairs: (..., N, D) x (..., M, D) -> (..., N, M), where D is made whole."""

    def with_whole_features(x: Tensor) -> Tensor:
        return unshard_dims(x, (x.dim() - 1,)) if isinstance(x, ShardTensor) else x

    x1 = with_whole_features(x1)
    x2 = with_whole_features(x2)
    # Rows and columns are apart, and features are whole, so nothing is summed over ranks.
    labels = (
        [*_batch(x1), "n", "d"],
        [*_batch(x2), "m", "d"],
    )
    longer = x1 if x1.dim() > x2.dim() else x2
    batch = _batch(longer)
    of_parts = functools.partial(torch.cdist, p=p, compute_mode=compute_mode)
    compute, spec = contraction(of_parts, (x1, x2), labels, [*batch, "n", "m"])
    return wrap(compute(x1, x2), spec)


def _batch(x):
    """Labels of the batch dimensions, numbered from the last one."""
    count = x.dim() - 2
    return [f"b{i}" for i in range(count, 0, -1)]


@rule(*named("addmm", "baddbmm", "addmv"))
def add_product(
    func: Callable,
    input: Tensor,
    first: Tensor,
    second: Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> ShardTensor:
    """The result of beta * input + alpha * first @ second."""
    if not isinstance(first, ShardTensor) and not isinstance(second, ShardTensor):
        raise no_rule(func, (input, first, second), {}, "a product of plain tensors")
    # The rules of addition and product do the rest.
    product = matmul(torch.matmul, first, second)
    # A factor of a partial product keeps it partial.
    if alpha != 1:
        product = dispatch(torch.mul, product, alpha)
    if beta == 1:
        return dispatch(torch.add, product, input)
    return dispatch(torch.add, product, input, alpha=beta)


@rule(*named("outer", "ger"))
@planned_of_tensors
def outer(func: Callable, input: Tensor, vec2: Tensor) -> Plan:
    """(N,) x (M,) -> (N, M)."""
    labels = (["n"], ["m"])
    return contraction(torch.outer, (input, vec2), labels, ["n", "m"], names=("input", "vec2"))


@rule(torch.einsum)
@planned_of_tensors
def einsum(func: Callable, equation: str, *operands: Any) -> Plan:
    """Contract by an equation in which no operand repeats a letter."""
    tensors, labels, result = labels_of_einsum(func, equation, operands)
    of_parts = functools.partial(torch.einsum, equation)
    plan = contraction(of_parts, tensors, labels, result)
    if plan.compute is of_parts:  # the operands are used as they are
        return Plan(func, plan.spec)

    def compute(equation: str, *operands: Any) -> Any:
        is_list = isinstance(operands[0], list | tuple)
        return plan.compute(*operands[0]) if is_list else plan.compute(*operands)

    return Plan(compute, plan.spec)


def labels_of_einsum(
    func: Callable,
    equation: str,
    operands: Sequence[Any],
) -> tuple[Sequence[Any], list[list[str]], list[str]]:
    """(operands, labels of each, labels of the result)."""
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = tuple(operands[0])
    if not isinstance(equation, str):
        raise no_rule(func, operands, {}, "give the equation as a string")
    left, arrow, right = equation.replace(" ", "").partition("->")  # "bij,bjk->bik"
    terms = left.split(",")
    if len(terms) != len(operands):
        raise RuntimeError(f"einsum: {len(operands)} operands for '{equation}'")

    # Each letter is a label; the dimensions of "..." are numbered from the last one, because they broadcast.
    counts = []  # of the dimensions that "..." stands for in each term
    for term, x in zip(terms, operands, strict=True):
        letters = len(term) - 3
        count = x.dim() - letters if "..." in term else 0
        counts.append(count)
    most = max(counts)
    dots = [f"b{i}" for i in range(most, 0, -1)]
    labels = []
    for term, n in zip(terms, counts, strict=True):
        of_term = dots[most - n :]
        names = _letters(term, of_term)
        repeats_a_letter = len(set(names)) != len(names)
        if repeats_a_letter:
            raise no_rule(func, operands, {}, f"a diagonal, '{equation}'")
        labels.append(names)

    # Without an arrow the result has the letters that stand once, in the order of the alphabet.
    if not arrow:
        every = left.replace("...", "").replace(",", "")
        once = [letter for letter in set(every) if every.count(letter) == 1]
        ellipsis = "..." if "..." in left else ""
        right = ellipsis + "".join(sorted(once))
    return operands, labels, _letters(right, dots)


def _letters(term, dots):
    """The labels of a term. dots: those that its "..." stands for."""
    before, ellipsis, after = term.partition("...")
    if not ellipsis:
        return list(before)
    return [*before, *dots, *after]


@rule(*named("cross"))
def cross(
    func: Callable,
    input: Tensor,
    other: Tensor,
    dim: int | None = None,
) -> ShardTensor:
    """The cross product of vectors along a dimension of size 3, which every rank has whole."""
    operands = [sum_partial(input), sum_partial(other)]
    if dim is None and func is torch.linalg.cross:
        dim = -1
    elif dim is None:
        shape = list(global_shape(input))
        if 3 not in shape:
            raise RuntimeError(f"cross: no dimension of {tuple(shape)} has size 3")
        dim = shape.index(3)
    # The dimension is counted from the end, since the operands may have unlike numbers of dimensions.
    most_dims = max(x.dim() for x in operands)
    from_end = dim if dim < 0 else dim - most_dims
    # The product of a vector needs all three numbers.
    vectors: list[Tensor] = []
    for x in operands:
        if isinstance(x, ShardTensor):
            x = unshard_dims(x, (x.dim() + from_end,))
        vectors.append(x)  # (..., 3, ...)
    # The vectors broadcast against each other.
    spec = common_spec(vectors)
    parts = [local_operand(x, spec) for x in vectors]
    product = torch.linalg.cross(*parts, dim=from_end)
    return wrap(product, spec)
