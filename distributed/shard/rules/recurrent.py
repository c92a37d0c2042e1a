"""Recurrent layers: time and features are whole on every rank, samples may be split."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from distributed.shard.operands import copied, fitted, global_shape, reduced, shared
from distributed.shard.rules.along import made_whole
from distributed.shard.spec import whole
from distributed.shard.tensor import ShardTensor, local, no_rule, rule, wrap


@rule(torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
def recurrent(
    func: Callable, input: Tensor, hx: Any, weights: Any, biases: Any, layers: Any = None, dropout: Any = 0.0,
    train: Any = False, bidirectional: Any = False, batch_first: Any = False,
) -> tuple[ShardTensor, ...]:  # fmt: skip
    """(B, T, D) or (T, B, D) -> the same with other features, and the last states (layers, B, D)."""
    states: Sequence[Tensor] = [hx] if isinstance(hx, Tensor) else list(hx)
    if not isinstance(weights, list | tuple) or not isinstance(train, bool) or (dropout and train):
        raise no_rule(func, (input, *states), {}, "packed sequences, or dropout between layers")
    batch = 0 if batch_first else 1
    like = next(x for x in (input, *states) if isinstance(x, ShardTensor))
    x = made_whole(copied(input, like.spec), (1 - batch, 2))
    of_states = x.spec.with_dims((whole(global_shape(states[0])[0]), x.spec.dims[batch], ()))
    parts = []
    for state in states:
        spec = of_states.with_axes(2, whole(global_shape(state)[2]))
        parts.append(fitted(reduced(state) if isinstance(state, ShardTensor) else state, spec))
    part, empty = local(x), x.spec.local_shape[batch] == 0
    if empty:  # a placeholder, because the plain function rejects a batch of nothing
        part, parts = part.sum(batch, keepdim=True), [state.sum(1, keepdim=True) for state in parts]
    own = [shared(weight, x.spec) for weight in weights]
    first = parts[0] if isinstance(hx, Tensor) else parts
    y, *last = func(part, first, own, biases, layers, dropout, train, bidirectional, batch_first)
    if empty:
        y, last = y.narrow(batch, 0, 0), [state.narrow(1, 0, 0) for state in last]
    out = wrap(y, x.spec.with_axes(2, whole(y.shape[2])))
    return out, *[wrap(state, of_states.with_axes(2, whole(state.shape[2]))) for state in last]
