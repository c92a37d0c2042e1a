"""Recurrent layers: LSTM, GRU, RNN. Each step needs the one before, so samples alone are split (see along.py)."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from distributed.shard.core.axes import unsplit_axes
from distributed.shard.core.operands import (
    as_replicated,
    global_shape,
    local_operand,
    sum_partial,
    whole_weight,
)
from distributed.shard.core.tensor import ShardTensor, dispatch, no_rule, rule
from distributed.shard.ops.along import on_whole, unshard_dims


@rule(torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
def recurrent(
    func: Callable,
    input: Tensor,
    hx: Any,
    weights: Any,
    biases: Any,
    layers: Any = None,
    dropout: Any = 0.0,
    train: Any = False,
    bidirectional: Any = False,
    batch_first: Any = False,
) -> tuple[ShardTensor, ...]:
    """(B, T, D) or (T, B, D) -> the same with other features, and the last states (layers, B, D).

    Only the samples B stay split: every rank computes all steps T of its own. Raises no_rule for packed sequences, and
    for dropout between layers.
    """
    states: Sequence[Tensor] = [hx] if isinstance(hx, Tensor) else list(hx)
    is_packed = not isinstance(weights, list | tuple) or not isinstance(train, bool)
    if is_packed or (dropout and train):
        raise no_rule(func, (input, *states), {}, "packed sequences, or dropout between layers")
    like = next(x for x in (input, *states) if isinstance(x, ShardTensor))
    # The input may be plain, where only the states are split.
    x = as_replicated(input, like.spec)
    if batch_first:
        x = dispatch(torch.transpose, x, 0, 1)
    # Each step needs the state of the one before, and all features.
    x = unshard_dims(x, (0, 2))  # (T, B, D), of which only B may be split
    # The states take the split of the samples.
    batch = x.spec.dims[1]
    parts = []  # (layers, b, D) each
    for state in states:
        count, _, features = global_shape(state)
        of_state = x.spec.with_dims((unsplit_axes(count), batch, unsplit_axes(features)))
        parts.append(local_operand(sum_partial(state), of_state))
    # Weights are plain: ranks with the same samples share their gradient.
    own_weights = [whole_weight(weight, x.spec) for weight in weights]

    def compute(part: Tensor) -> tuple[Tensor, ...]:
        """(T, b, D) of this rank's samples -> their outputs (T, b, D'), and their last states (layers, b, D')."""
        first_states = []  # before the first step
        for state in parts:
            # A rank without samples computes with the row of a placeholder, see on_whole.
            is_placeholder = state.shape[1] < part.shape[1]
            first_states.append(state.sum(1, keepdim=True) if is_placeholder else state)
        hidden = first_states[0] if isinstance(hx, Tensor) else first_states
        return func(part, hidden, own_weights, biases, layers, dropout, train, bidirectional, False)

    y, *last = on_whole(x, (0, 2), compute)
    if batch_first:
        y = dispatch(torch.transpose, y, 0, 1)
    return y, *last
