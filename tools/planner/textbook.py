"""A training step of one rank by textbook formulas: what it holds, computes and sends.

The search compares thousands of layouts by them, each in less than a millisecond, and then traces the best ones
(tools/planner/trace.py), which is exact. docs/reference/formulas.md is the page of this module.
"""

import math
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import torch

from tools.instruments.counting import bytes_sent
from tools.instruments.tracker import ATTENTION, Message, Operation
from tools.planner.symbols import FULL, Symbols
from tools.planner.trace import Trace
from training.crps import MOST_IN_PAIRS
from training.step import AMP_DTYPES
from utils.comm import COMBINED
from utils.errors import UsageError
from utils.layout import Layout
from utils.schema import Config

MODELS = "vit", "classifier"  # that the formulas describe


def textbook_traces(config: Config, layout: Layout) -> list[Trace]:
    """Traces, as trace_step gives them, of the first and the last rank of a pipeline, else of rank 0.

    config: of this layout. Raises UsageError for models that the formulas do not describe.
    """
    if config.model not in MODELS:
        raise UsageError(f"{config.config}: the formulas describe {' and '.join(MODELS)}, not model {config.model}")
    stages = sorted({0, layout.pp - 1})
    return [textbook_trace(Symbols(config, layout, stage)) for stage in stages]


def textbook_trace(s: Symbols) -> Trace:
    """The Trace of a rank."""
    held = memory(s)
    sent = messages(s)
    return Trace(held, held, operations(s), sent.counted, sent.groups)


# Memory.


def memory(s: Symbols) -> dict[str, float]:
    """{label: bytes} as a Trace has them, and the most at once as "peak"."""
    # ZeRO: Rajbhandari et al. 2020 (arXiv:1910.02054). Adam has two moments, Muon one.
    own = FULL * s.parameters / s.shards  # of parameters, and of gradients
    optimizer = FULL * (2 * s.updated - s.muon)
    batch = s.m * (image_bytes(s) + s.rollout * state_bytes(s)) / s.members  # members share it

    kept = kept_activations(s)
    buffers = buffer_bytes(s)
    moment = largest_moment(s)

    # The most at once in the forward and the backward pass.
    most = kept + moment + buffers
    if s.uses_ddp:
        # Gradients lie in DDP's buckets, which stay allocated.
        most += own
    elif not s.is_sharded:
        # Gradients come while activations go: at the end all gradients and the activations of the first block.
        most = max(most, block_activations(s) + own)

    peak = batch + most
    if not s.config.cpu_offload:
        # The optimizer's state stays on the device. The update has temporaries of its own.
        peak = batch + own + optimizer + max(most, update_temporaries(s, own))
    return {
        "parameters": own,
        "gradients": own,
        "optimizer": optimizer,
        "activations": kept,
        "batch": batch,
        "buffers": buffers,
        "temporaries": moment,
        "peak": peak,
    }


def image_bytes(s: Symbols) -> int:
    """Bytes of the input of a micro-batch."""
    return FULL * s.b * s.n * s.inputs


def state_bytes(s: Symbols) -> int:
    """Bytes of a forecast state of a micro-batch, which the target and the error are as large as."""
    return FULL * s.states


def loss_bytes(s: Symbols) -> float:
    """Bytes that the loss of a step keeps: the error of each number; of an ensemble also what keeps members apart."""
    members = s.config.ensemble_size
    if members == 1:
        return state_bytes(s)
    # The points of a sample are shared out; a rank scores its part of them for all members.
    points = s.states / s.members / s.layout.ens
    pairs = members * (members - 1) / 2
    apart = pairs if members <= MOST_IN_PAIRS else 2 * members  # differences, or indices of eight bytes
    return FULL * points * (members + apart)


def block_activations(s: Symbols) -> float:
    """Bytes that a block keeps: Korthikanti et al. 2022 (arXiv:2205.05198); fused attention has nothing of N^2."""
    attention = 4  # queries, keys, values and the output
    if s.c > 1:
        of_methods = {"gather": 4 + 2 * s.c, "ring": 4, "all_to_all": 5}
        attention = of_methods[s.method]
    # The inputs of two norms, then those of products: of a product after each norm, of attention, of the MLP.
    norms = 2 * FULL * s.stream  # the residual stream is in float32
    products = s.w * (2 * s.layer + attention * s.layer / s.t + 2 * s.hidden)
    masks = 2 * s.stream + s.hidden if s.config.dropout else 0  # one byte for each number
    copies = s.w * s.matrices if s.is_mixed else 0  # autocast keeps copies of weights
    return norms + products + masks + copies


def recomputed_activations(s: Symbols) -> float:
    """Bytes that a block keeps which is computed again: its input; with selective also the results of products."""
    block_input = FULL * s.stream
    if s.config.activation_checkpointing != "selective":
        return block_input
    results = 2 * s.layer + (4 * s.layer + s.hidden) / s.t
    return block_input + s.w * results


def kept_activations(s: Symbols) -> float:
    """Bytes that the stage keeps for the backward pass, of all micro-batches in flight and all steps of a forecast."""
    kept = (s.L - s.recomputed) * block_activations(s)
    kept += s.recomputed * recomputed_activations(s)

    # The embedding keeps autocast's copy of its input, in two bytes a number.
    embedding = image_bytes(s) / 2 if s.is_first and s.is_mixed else 0
    if s.config.ensemble_size > 1 and not s.is_mixed:
        # The batch has each sample once, and the embedding sees it once for each member.
        embedding = image_bytes(s)
    # The head keeps the input of the last norm, its output, and the error.
    head = FULL * s.stream + s.w * s.layer + loss_bytes(s) if s.is_last else 0
    kept += embedding + head

    kept *= s.in_flight * s.rollout
    if s.rollout > 1:
        # All states of a forecast are joined.
        kept += s.rollout * (state_bytes(s) + image_bytes(s))
    return kept


def buffer_bytes(s: Symbols) -> float:
    """Bytes of buffers: of the messages that a pipeline receives, and of gathered parameters."""
    boundaries = 2 * s.chunks - s.is_first - s.is_last  # each with a buffer for each message that comes
    buffers = FULL * s.stream * s.m * boundaries
    if s.is_sharded:
        # Gathered are a block and the next one, which is fetched ahead, and what is in no block.
        blocks = min(s.L, 2)
        if s.config.data_parallel == "zero2":
            blocks = s.L
        buffers += s.gathered_bytes * (blocks * s.block + s.rest)
    return buffers


def largest_moment(s: Symbols) -> float:
    """Bytes of the largest moment of the backward pass, beside the activations that are kept anyway.

    It is one of three: the loss; the MLP of a block with the gradient of its residual stream; the gradients of a
    block's weights, whole and on their way to their owners.
    """
    loss = 2 * state_bytes(s)

    bytes_of_stream = FULL + s.w if s.is_mixed else FULL
    mlp = bytes_of_stream * s.stream + s.w * s.hidden
    if s.recomputed:
        # All of the block's activations are there again.
        mlp += block_activations(s) - recomputed_activations(s)

    moment = max(loss, mlp)
    if s.is_sharded:
        # By then the block's activations are gone.
        weight_gradients = 2 * FULL * s.block - block_activations(s)
        moment = max(moment, weight_gradients)
    if not s.uses_ddp and s.m > 1:
        # Whole gradients of earlier micro-batches.
        moment += FULL * s.parameters
    return moment


def update_temporaries(s: Symbols, own: float) -> float:
    """Bytes that the update needs for a while. own: bytes of this rank's parameters."""
    if s.muon:
        # The steps of matrices; over several ranks also pieces that are sent and received, and whole matrices.
        over_ranks = s.is_sharded or s.t > 1
        return s.w * s.muon * (5 if over_ranks else 3)
    return own if s.config.enable_fused else 2 * own


# Operations.


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
    _count_moves(counted, "forward", 20 * s.states, 5, s.passes)
    _count_moves(counted, "backward", 20 * s.states, 5, s.passes)

    _count_update(s, counted)
    return counted


def _compute_dtype(s: Symbols) -> torch.dtype:
    """The type in which matrices are multiplied."""
    return AMP_DTYPES.get(s.config.amp_mode, torch.float32)


def _calls_of_blocks(s: Symbols) -> tuple[int, int]:
    """Calls of blocks in a step: (forward, computed again in the backward pass)."""
    return s.passes * s.L, s.passes * s.recomputed


def _products_again(s: Symbols) -> int:
    """Calls of blocks whose products are computed again: with selective their results are kept."""
    if s.config.activation_checkpointing == "selective":
        return 0
    return _calls_of_blocks(s)[1]


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
    calls, _ = _calls_of_blocks(s)
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
    calls, _ = _calls_of_blocks(s)
    dtype = _compute_dtype(s)
    flops = 4 * s.layer * s.N / s.t
    moved = 4 * s.w * s.layer / s.t  # queries, keys, values and the output
    counted[Operation("forward", ATTENTION, flops, moved, dtype)] += calls
    counted[Operation("backward", ATTENTION, flops, moved, dtype)] += _products_again(s)
    # The backward pass computes the scores again: five products in place of two. Dao 2023 (arXiv:2307.08691).
    counted[Operation("backward", ATTENTION, 2.5 * flops, 2 * moved, dtype)] += calls


def _count_other_kernels_of_blocks(s: Symbols, counted: Counter[Operation]) -> None:
    """Norms, residuals, casts and biases of a block; the GELU; what an exchange of tokens copies. Backward twice."""
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

    calls, again = _calls_of_blocks(s)
    _count_moves(counted, "forward", moved, kernels, calls)
    _count_moves(counted, "backward", moved, kernels, 2 * calls + again)


def _count_update(s: Symbols, counted: Counter[Operation]) -> None:
    """Gradients on their way into the buckets of DDP, and the optimizer."""
    if s.uses_ddp:
        _count_moves(counted, "backward", 2 * FULL * s.parameters, 12 * s.L, 1)

    # Adam reads and writes so many numbers for each parameter. A fused kernel does all of it in one pass.
    numbers, kernels = 12, 7
    if s.config.enable_fused:
        numbers, kernels = 4, 1
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


# Messages.


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
            # The same bytes in two halves.
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
    once, again = _calls_of_blocks(s)
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
