"""Changes in place of one row of a split dimension: h[:, :, 0] *= 0.5.

The rank that holds the row changes it, in its part of the tensor; the others hold zeros for it. These take part in the
backward pass all the same: what they did not use has a gradient there, which is summed over the ranks.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from distributed.shard.operands import check_writable, gradient_spec, local_operand, sum_partial
from distributed.shard.tensor import ShardTensor


def change_row(
    func: Callable,
    row: ShardTensor,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> ShardTensor:
    """Call func(row, *args, **kwargs), an elementwise function that changes the row in place, and the tensor with it.

    row: as indexing gives it, of which row_of is the tensor and is_own_row tells whether this rank holds it.
    """
    spec = gradient_spec(row.spec)

    def fit(operand: Any) -> Any:
        if not isinstance(operand, Tensor):
            return operand
        # Only the rank that holds the row uses its copy of an operand.
        operand = sum_partial(operand)
        return local_operand(operand, spec, row.spec)

    # All ranks prepare the operands, because that may communicate.
    own_args = [fit(operand) for operand in args]
    own_kwargs = {name: fit(operand) for name, operand in kwargs.items()}
    if row.is_own_row:
        func(row, *own_args, **own_kwargs)
        return check_writable(row)
    assert row.row_of is not None
    operands = [*own_args, *own_kwargs.values()]
    # The ranks without the row stand in its backward pass all the same.
    take_part(row.row_of, operands)
    take_part(row, operands)
    return check_writable(row)


def take_part(x: Tensor, operands: Sequence[Any]) -> None:
    """Give operands that this rank does not use a place in the backward pass of x, with a gradient of zero."""
    flat = x.reshape(1) if x.dim() == 0 else x
    for operand in operands:
        if isinstance(operand, Tensor) and operand.requires_grad:
            # The sum over no elements is 0, also where the operand is not finite.
            nothing = operand.reshape(-1)[:0].sum()
            flat[:0].add_(nothing)
