"""Operations and messages of a training step of one rank by textbook formulas.

Operations: products, attention and kernels that move data. Messages: dimension by dimension of the mesh.
"""

import math
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import torch

from tools.instruments.counting import bytes_sent
from tools.instruments.tracker import ATTENTION, Message, Operation
from tools.planner.symbols import FULL, Symbols
from training.step.step import AMP_DTYPES
from utils.comm import COMBINED
from utils.layout import Layout


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


@dataclass
class Messages:
    """Messages of a step of a layout. groups: {name: ranks} of the groups in which they travel."""

    layout: Layout
    counted: Counter[Message] = field(default_factory=Counter)
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def add(
        self,
        phase: str,
        kind: str,
        group: str,
        size: float,
        calls: float,
    ) -> None:
        """Count collectives in a group of utils.comm. size: bytes of the tensor that the collective is given."""
        if not calls:
            return
        ranks = self.ranks_of(group)
        if len(ranks) > 1:
            self.groups[group] = ranks
            sent = round(bytes_sent(kind, size, len(ranks)))
            self.counted[Message(phase, kind, group, sent)] += int(calls)

    def ranks_of(self, group: str) -> tuple[int, ...]:
        """Ranks of the group that rank 0 is in: those that differ from it in the group's dimensions alone."""
        dimensions = COMBINED.get(group, {group})
        places = np.arange(self.layout.world_size).reshape(*self.layout.mesh_dims.values())
        index = tuple(slice(None) if name in dimensions else 0 for name in self.layout.mesh_dims)
        return tuple(places[index].ravel().tolist())


def messages(s: Symbols) -> Messages:
    """Messages of a step, dimension by dimension of the mesh."""
    sent = Messages(s.layout)
    _add_tensor_parallel(s, sent)
    _add_exchange_of_tokens(s, sent)
    _add_exchange_of_members(s, sent)
    _add_pipeline(s, sent)
    _add_gradients(s, sent)
    _add_orthogonalization(s, sent)
    if s.is_sharded:
        _add_sharded_parameters(s, sent)
    return sent


def _add_tensor_parallel(s: Symbols, sent: Messages) -> None:
    """Two sums of a layer in a block, forward and backward: Shoeybi et al. 2019 (arXiv:1909.08053)."""
    sums_forward = 2 * s.L * s.passes
    sums_backward = (2 * s.L + s.recomputed) * s.passes
    for phase, calls in ("forward", sums_forward), ("backward", sums_backward):
        if s.config.sequence_parallel:
            # An all-reduce in two halves, which send the same bytes.
            sent.add(phase, "reduce_scatter", "tp", s.w * s.layer, calls)
            sent.add(phase, "all_gather", "tp", s.w * s.layer / s.t, calls)
        else:
            sent.add(phase, "all_reduce", "tp", s.w * s.layer, calls)


def _add_exchange_of_tokens(s: Symbols, sent: Messages) -> None:
    """Ranks of an image: each token attends to those of the other ranks.

    Keys and values of all ranks are gathered, or pass round a ring (Liu et al. 2023, arXiv:2310.01889), or heads are
    exchanged for tokens (Jacobs et al. 2023, arXiv:2309.14509).
    """
    group = "cp" if s.layout.cp > 1 else "domain"
    both = 2 * s.w * s.layer / s.t  # bytes of this rank's keys and values
    once, again = calls_of_blocks(s)
    if s.method == "gather":
        sent.add("forward", "all_gather", group, both, once)
        sent.add("backward", "all_gather", group, both, again)
        sent.add("backward", "reduce_scatter", group, both * s.c, once)
    elif s.method == "ring":
        rounds = s.c - 1
        sent.add("forward", "all_to_all", group, both, rounds * once)
        sent.add("backward", "all_to_all", group, both, rounds * (once + again))
        # The gradients of keys and values pass round as well, in float32.
        sent.add("backward", "all_to_all", group, both * FULL / s.w, rounds * once)
    else:
        leaves = both * (s.c - 1) / s.c  # a rank keeps its own share
        sent.add("forward", "all_to_all", group, leaves, 2 * once)
        sent.add("backward", "all_to_all", group, leaves, 2 * (once + again))


def _add_exchange_of_members(s: Symbols, sent: Messages) -> None:
    """Each rank scores a part of the points for all members: its members go to the others, and gradients come back."""
    ranks = s.layout.ens
    width = s.w if s.rollout == 1 and s.config.predict == "state" else FULL  # a rollout goes on in float32
    of_a_member = width * s.states / s.members * s.rollout / ranks  # at the points of one rank
    others = s.config.ensemble_size - s.members
    sent.add("forward", "all_to_all", "ens", of_a_member * s.members * (ranks - 1), s.m)
    sent.add("backward", "all_to_all", "ens", of_a_member * others, s.m)


def _add_pipeline(s: Symbols, sent: Messages) -> None:
    """The residual stream at each boundary of stages: the last stage has no next one, the first none before it."""
    sent.add("forward", "send", "pp", FULL * s.stream, s.m * (s.chunks - s.is_last))
    sent.add("backward", "send", "pp", FULL * s.stream, s.m * (s.chunks - s.is_first))


def _replica_group(s: Symbols) -> str:
    """Name of the group of all ranks with the same weights."""
    return "grad_reduce" if s.c * s.layout.ens > 1 else "dp"


def _shard_group(s: Symbols) -> str:
    """Name of the group over which fully_shard cuts parameters: of hsdp a part of the replicas."""
    group = _replica_group(s)
    if s.config.data_parallel == "hsdp":
        return group.replace("dp", "dp_shard")
    return group


def _add_gradients(s: Symbols, sent: Messages) -> None:
    """Gradients of whole parameters, once a step; of zero1 also the updated parameters."""
    if s.uses_ddp:
        size = FULL * s.parameters
        buckets = math.ceil(size / (s.config.bucket_cap_mb * 2**20))
        compression = 0.5 if s.config.gradient_compression == "bf16" else 1
        sent.add("backward", "all_reduce", _replica_group(s), compression * size / buckets, buckets)
    if s.config.data_parallel == "zero1":
        sent.add("update", "broadcast", _replica_group(s), FULL * s.updated, s.replicas)


def _add_orthogonalization(s: Symbols, sent: Messages) -> None:
    """Muon: pieces of matrices to the ranks that orthogonalize them, and back."""
    if not s.muon:
        return
    # Each matrix is whole on the rank that orthogonalizes it: a rank sends its pieces of all others.
    size = s.w * s.muon
    if s.is_sharded:
        sent.add("update", "all_to_all", _shard_group(s), size * (s.shards - 1) / s.shards, 2)
    sent.add("update", "all_to_all", "tp", size * (s.t - 1) / s.t, 2)


def _add_sharded_parameters(s: Symbols, sent: Messages) -> None:
    """Parameters are gathered as often as blocks compute; gradients are reduced to their owners once a step."""
    # Passes for which parameters are gathered.
    forward: float = s.passes
    backward = s.passes
    if s.layout.pp > 1:
        # What a backward pass has gathered serves the next forward pass.
        forward = s.in_flight
        backward = 1 if s.config.pp_schedule == "gpipe" else s.m
    if s.config.data_parallel == "zero2":
        # Parameters stay gathered between the passes.
        forward = 1 if s.layout.pp > 1 else s.passes
        backward = 0

    group = _shard_group(s)
    units = s.L + 1  # the blocks, and what is in no block
    own = s.parameters / s.shards / units  # numbers of this rank in a unit
    sent.add("forward", "all_gather", group, s.gathered_bytes * own, units * forward)
    sent.add("backward", "all_gather", group, s.gathered_bytes * own, units * backward)
    sent.add("backward", "reduce_scatter", group, FULL * s.parameters / units, units)
    if s.config.data_parallel == "hsdp":
        # Copies of the model add up their shares.
        sent.add("backward", "all_reduce", "dp_replicate", FULL * own, units)
