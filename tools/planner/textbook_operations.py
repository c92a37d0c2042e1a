"""Operations of a training step of one rank by textbook formulas: products, attention and kernels that move data."""

from collections import Counter

import torch

from tools.instruments.tracker import ATTENTION, Operation
from tools.planner.symbols import FULL, Symbols
from training.step.step import AMP_DTYPES


def operations(s: Symbols) -> Counter[Operation]:
    """Operations of a step: products, attention, and kernels that only move data, several alike."""
    counted = Counter[Operation]()
    _count_products_of_blocks(s, counted)
    _count_attention(s, counted)
    _count_other_kernels_of_blocks(s, counted)

    # The embedding of the first stage; the head and the loss of the last one.
    if s.is_first:
        _count_product(s, counted, s.inputs, s.D, s.passes)
    if s.is_last and s.states:
        _count_product(s, counted, s.D, s.outputs, s.passes)
    # Five kernels of the loss move 20 bytes for each number of a forecast state: five numbers in float32.
    _count_moves(counted, "forward", 20 * s.states, 5, s.passes)
    _count_moves(counted, "backward", 20 * s.states, 5, s.passes)

    _count_update(s, counted)
    return counted


def _compute_dtype(s: Symbols) -> torch.dtype:
    """The type in which matrices are multiplied."""
    return AMP_DTYPES[s.config.amp_mode] or torch.float32


def calls_of_blocks(s: Symbols) -> tuple[int, int]:
    """Calls of blocks in a step: (forward, computed again in the backward pass)."""
    return s.passes * s.L, s.passes * s.recomputed


def _products_again(s: Symbols) -> int:
    """Calls of blocks whose products are computed again: with selective their results are kept."""
    if s.config.activation_checkpointing == "selective":
        return 0
    return calls_of_blocks(s)[1]


def _count_product(
    s: Symbols,
    counted: Counter[Operation],
    inner: float,
    columns: float,
    calls: int,
    again: int = 0,
) -> None:
    """Count a product of all tokens, (b n, inner) x (inner, columns), and the two of its backward pass.

    again: calls that the backward pass repeats.
    """
    tokens = s.b * s.n
    # Each product of two numbers comes with an addition.
    flops = 2 * tokens * inner * columns
    moved = s.w * (tokens * (inner + columns) + inner * columns)
    dtype = _compute_dtype(s)
    counted[Operation("forward", "matmul", flops, moved, dtype)] += calls
    counted[Operation("backward", "matmul", flops, moved, dtype)] += 2 * calls + again


def _count_moves(
    counted: Counter[Operation],
    phase: str,
    moved: float,
    kernels: int,
    calls: int,
) -> None:
    """Count kernels that together move so many bytes, as so many of the same size."""
    operation = Operation(phase, "pointwise", 0, moved / kernels, torch.float32)
    counted[operation] += kernels * calls


def _count_products_of_blocks(s: Symbols, counted: Counter[Operation]) -> None:
    """Queries, keys and values in one product, the output of attention, and the two layers of the MLP."""
    calls, _ = calls_of_blocks(s)
    inside = s.D * s.config.mlp_ratio / s.t  # features of a rank inside the MLP
    layers = [
        (s.D, 3 * s.D / s.t),  # queries, keys and values
        (s.D / s.t, s.D),  # the output of attention
        (s.D, inside),  # into the MLP
        (inside, s.D),  # out of it
    ]
    for inner, columns in layers:
        _count_product(s, counted, inner, columns, calls, _products_again(s))


def _count_attention(s: Symbols, counted: Counter[Operation]) -> None:
    """Two products of every token of the rank with every token of the image, for the rank's heads."""
    calls, _ = calls_of_blocks(s)
    dtype = _compute_dtype(s)
    flops = 4 * s.layer * s.N / s.t
    moved = 4 * s.w * s.layer / s.t  # queries, keys, values and the output
    counted[Operation("forward", ATTENTION, flops, moved, dtype)] += calls
    counted[Operation("backward", ATTENTION, flops, moved, dtype)] += _products_again(s)
    # The backward pass computes the scores again: five products in place of two. Dao 2023 (arXiv:2307.08691).
    counted[Operation("backward", ATTENTION, 2.5 * flops, 2 * moved, dtype)] += calls


def _count_other_kernels_of_blocks(s: Symbols, counted: Counter[Operation]) -> None:
    """Norms, residuals, casts and biases of a block; the GELU; what an exchange of tokens copies. Backward twice."""
    # Fourteen float32 numbers of the residual stream, and two of the hidden layer in the type of products.
    moved = 56 * s.stream + 2 * s.w * s.hidden
    if s.is_mixed:
        moved += (FULL + s.w) * s.matrices  # weights are read in float32 and written in low precision
    if s.config.sequence_parallel and s.t > 1:
        moved += 8 * s.w * s.layer
    if s.c > 1:
        # Bytes of copies for each number of a layer.
        exchange = {
            "gather": 4 * s.w * s.c,
            "ring": 28 * s.c,
            "all_to_all": 14 * s.w,
        }
        moved += exchange[s.method] * s.layer / s.t
    kernels = 18 if s.is_mixed else 9

    calls, again = calls_of_blocks(s)
    _count_moves(counted, "forward", moved, kernels, calls)
    _count_moves(counted, "backward", moved, kernels, 2 * calls + again)


def _count_update(s: Symbols, counted: Counter[Operation]) -> None:
    """Gradients on their way into the buckets of DDP, and the optimizer."""
    if s.uses_ddp:
        _count_moves(counted, "backward", 2 * FULL * s.parameters, 12 * s.L, 1)

    optimizer = s.config.optimizer_kind
    numbers, kernels = optimizer.moved, optimizer.kernels
    # A fused kernel does all of it in one pass.
    if s.config.enable_fused:
        numbers, kernels = optimizer.moved_if_fused, 1
    _count_moves(counted, "update", numbers * FULL * s.updated, kernels, 1)

    if s.muon:
        _count_orthogonalization(s, counted)


def _count_orthogonalization(s: Symbols, counted: Counter[Operation]) -> None:
    """Muon: five times three products of each whole matrix, which the ranks of a copy share out."""
    blocks = s.muon / s.matrices / s.t  # whose matrices this rank takes
    inside = s.D * s.config.mlp_ratio  # features inside the MLP
    widths = [3 * s.D, s.D, inside, inside]
    for width in widths:
        # The products are with the transposed matrix, so the shorter side counts most.
        rows, columns = sorted((s.D, width))
        flops = 4 * rows**2 * columns + 2 * rows**3
        moved = s.w * (5 * rows * columns + 6 * rows**2)
        product = Operation("update", "matmul", flops / 3, moved / 3, _compute_dtype(s))
        counted[product] += round(5 * 3 * blocks)
