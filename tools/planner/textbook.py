"""A training step of one rank by textbook formulas: what it holds, computes and sends.

The search compares thousands of layouts by them, each in less than a millisecond, and then traces the best ones
(tools/planner/trace.py), which is exact. docs/reference/formulas.md is the page of this module.
"""

import math
from collections import Counter

import numpy as np
import torch

from distributed.data_parallel import SHARDED
from networks.vit import patch_grid
from tools.instruments.counting import bytes_sent
from tools.instruments.tracker import ATTENTION, Message, Operation
from tools.planner.trace import Trace
from training.step import AMP_DTYPES
from utils.comm import COMBINED
from utils.errors import UsageError
from utils.layout import Layout
from utils.schema import Config

MODELS = "vit", "classifier"  # that the formulas describe
FULL = 4  # bytes of a float32 number
Groups = dict[str, tuple[int, ...]]  # by name: the ranks among which messages travel


def textbook_traces(config: Config, layout: Layout) -> list[Trace]:
    """Traces, as trace_step gives them, of the first and the last rank of a pipeline, else of rank 0.

    config: of this layout. Raises UsageError for models that the formulas do not describe.
    """
    if config.model not in MODELS:
        raise UsageError(f"{config.config}: the formulas describe {' and '.join(MODELS)}, not model {config.model}")
    traces = []
    for stage in sorted({0, layout.pp - 1}):
        share = Share(config, layout, stage)
        memory = memory_of(share)
        traces.append(Trace(memory, memory, None, operations_of(share), *messages_of(share)))
    return traces


class Share:
    """The part of the model and of the batch that a rank has, in numbers, not in bytes."""

    def __init__(self, config: Config, layout: Layout, stage: int):
        self.config, self.layout, self.stage = config, layout, stage
        self.first, self.last = stage == 0, stage == layout.pp - 1
        self.t = layout.tp  # tensor-parallel ranks
        self.c = layout.cp * math.prod(layout.domain)  # ranks that share an image
        self.method = config.cp_method if layout.cp > 1 else config.domain_method

        # The batch: m micro-batches of b samples, n tokens of this rank out of N of the image.
        self.m = config.gradient_accumulation
        self.b = config.global_batch_size // layout.dp // self.m
        rows, columns, *deep = patch_grid(config.img_size, config.patch_size)[0]
        rows_here = math.ceil(rows / (layout.cp * layout.domain[0]))
        self.n = rows_here * math.ceil(columns / layout.domain[1]) * math.prod(deep)
        self.N = rows * columns * math.prod(deep)
        points = config.patch_size ** (2 + len(deep))  # of a patch
        self.inputs = points * config.model_in_channels  # of a token
        self.classifies = config.model == "classifier"
        self.outputs = config.num_classes or 0 if self.classifies else points * config.n_out_channels
        self.states = 0 if self.classifies else self.b * self.n * self.outputs
        self.steps = config.longest_rollout  # of a forecast

        # Activations of L blocks with D features: of a layer, of the residual stream between layers, inside the MLP.
        self.D, self.L = config.embed_dim, config.depth // layout.pp
        self.layer = self.b * self.n * self.D
        self.stream = self.layer / (self.t if config.sequence_parallel else 1)
        self.hidden = self.layer * config.mlp_ratio / self.t
        self.low = config.amp_mode != "none"
        self.w = 2 if self.low else FULL  # bytes of a number in a product of matrices
        self.again = self.L // config.checkpointing_interval  # blocks that are computed again in the backward pass
        if config.activation_checkpointing == "none":
            self.again = 0
        self.passes = self.m * self.steps  # forward passes of an optimizer step

        # Parameters of a block, and of the embeddings and the head.
        self.matrices = (4 + 2 * config.mlp_ratio) * self.D**2 / self.t  # 12 D^2, most often
        self.block = self.matrices + (3 + config.mlp_ratio) * self.D / self.t + 6 * self.D
        self.rest = self.first * (self.inputs + 1 + self.N) * self.D
        self.rest += self.last * (2 * self.D + (self.D + 1) * self.outputs)
        self.parameters = self.L * self.block + self.rest

        # Data parallelism: ranks with the same weights, and ranks over which fully_shard cuts them.
        self.replicas = layout.dp * self.c
        self.sharded = config.data_parallel in SHARDED and self.replicas > 1
        self.shards = (layout.shard or layout.dp) * self.c if self.sharded else 1
        self.reduced = self.replicas > 1 and not self.sharded and not config.noddp  # by DistributedDataParallel
        self.updated = self.parameters / self.shards / (self.replicas if config.data_parallel == "zero1" else 1)
        self.gathered = FULL if config.gather_dtype == "none" else 2  # bytes of a gathered parameter

        # The pipeline: stages of this rank, and micro-batches of which it keeps activations.
        # Narayanan et al. 2021 (arXiv:2104.04473).
        later = layout.pp - stage
        self.chunks, self.in_flight = 1, float(min(self.m, later))
        if layout.pp > 1 and config.pp_schedule == "gpipe":
            self.in_flight = self.m
        elif layout.pp > 1 and config.pp_schedule == "interleaved":
            self.chunks, self.in_flight = 2, min(self.m, (layout.pp + 2 * later - 1) / 2)


def memory_of(share: Share) -> dict[str, float]:
    """{label: bytes} as a Trace has them, and the most at once as "peak"."""
    config, w = share.config, share.w
    # ZeRO: Rajbhandari et al. 2020 (arXiv:1910.02054). Adam has two moments.
    parameters = gradients = FULL * share.parameters / share.shards
    optimizer = 2 * FULL * share.updated
    gathered = 0.0  # a block and the next one, and what is in no block
    if share.sharded:
        blocks = share.L if config.data_parallel == "zero2" else min(share.L, 2)
        gathered = share.gathered * (blocks * share.block + share.rest)
    image, error = FULL * share.b * share.n * share.inputs, FULL * share.states
    batch = share.m * (image + share.steps * error)
    boundaries = 2 * share.chunks - share.first - share.last  # a buffer for each message that comes
    buffers = gathered + FULL * share.stream * share.m * boundaries

    block, repeated = block_activations(share), repeated_activations(share)
    kept = (share.L - share.again) * block + share.again * repeated
    kept += share.first * share.low * image / 2 + share.last * (FULL * share.stream + w * share.layer + error)
    kept *= share.in_flight * share.steps
    if share.steps > 1:  # all states of a forecast are joined
        kept += share.steps * (error + image)

    # The largest moment of the backward pass: the loss, the MLP of a block with the gradient of its residual stream, or
    # the gradients of a block's weights, whole and on their way to their owners.
    mlp = (FULL + share.low * w) * share.stream + w * share.hidden
    moment = max(2 * error, mlp + (block - repeated) * (share.again > 0))
    if share.sharded:
        moment = max(moment, 2 * FULL * share.block - block)
    if not share.reduced and share.m > 1:  # of earlier micro-batches, whole
        moment += FULL * share.parameters
    most = kept + moment + buffers
    if not share.reduced and not share.sharded:  # gradients come while activations go
        most = max(most, block + gradients)
    if share.reduced:  # in buckets, which stay allocated
        most += gradients
    peak = batch + most
    if not config.cpu_offload:
        updating = gradients + (0 if config.enable_fused else parameters)
        peak = batch + parameters + optimizer + max(most, updating)
    return {
        "parameters": parameters, "gradients": gradients, "optimizer": optimizer, "activations": kept, "batch": batch,
        "buffers": buffers, "temporaries": moment, "peak": peak,
    }  # fmt: skip


def block_activations(share: Share) -> float:
    """Bytes that a block keeps: Korthikanti et al. 2022 (arXiv:2205.05198); fused attention keeps nothing of N^2."""
    attention = {"gather": 4 + 2 * share.c, "ring": 4, "all_to_all": 5}[share.method] if share.c > 1 else 4
    norms = 2 * FULL * share.stream  # the residual stream is in float32
    products = share.w * (2 * share.layer + attention * share.layer / share.t + 2 * share.hidden)
    masks = 2 * share.stream + share.hidden if share.config.dropout else 0
    return norms + products + masks + share.low * share.w * share.matrices  # autocast keeps copies of weights


def repeated_activations(share: Share) -> float:
    """Bytes that a block keeps which is computed again: its input; with selective also results of products."""
    results = 2 * share.layer + (4 * share.layer + share.hidden) / share.t
    return FULL * share.stream + share.w * results * (share.config.activation_checkpointing == "selective")


def operations_of(share: Share) -> Counter[Operation]:
    """Operations of a step: products, attention, and kernels that only move data, several alike."""
    config, w, D, t = share.config, share.w, share.D, share.t
    dtype = AMP_DTYPES.get(config.amp_mode, torch.float32)
    forward, again = share.passes * share.L, share.passes * share.again  # calls of a block
    counted: Counter[Operation] = Counter()

    def product(inner: float, columns: float, calls: float, repeated: float = 0) -> None:
        """Count a product, and the two of its backward pass."""
        rows = share.b * share.n
        moved = w * (rows * (inner + columns) + inner * columns)
        for phase, times in ("forward", calls), ("backward", 2 * calls + repeated):
            counted[Operation(phase, "matmul", 2 * rows * inner * columns, moved, dtype)] += int(times)

    def moves(phase: str, moved: float, kernels: int, calls: float) -> None:
        counted[Operation(phase, "pointwise", 0, moved / kernels, torch.float32)] += int(kernels * calls)

    products_again = 0 if config.activation_checkpointing == "selective" else again
    inside = D * config.mlp_ratio / t
    for inner, columns in (D, 3 * D / t), (D / t, D), (D, inside), (inside, D):
        product(inner, columns, forward, products_again)
    flops, moved = 4 * share.layer * share.N / t, 4 * w * share.layer / t
    counted[Operation("forward", ATTENTION, flops, moved, dtype)] += forward
    counted[Operation("backward", ATTENTION, flops, moved, dtype)] += products_again
    counted[Operation("backward", ATTENTION, 2.5 * flops, 2 * moved, dtype)] += forward  # Dao 2023, arXiv:2307.08691

    # Norms, residuals, casts and biases of a block; the GELU; what an exchange of tokens copies. Backward twice.
    moved = 56 * share.stream + 2 * w * share.hidden + share.low * (FULL + w) * share.matrices
    moved += 8 * w * share.layer * (config.sequence_parallel and t > 1)
    if share.c > 1:
        exchange = {"gather": 4 * w * share.c, "ring": 28 * share.c, "all_to_all": 14 * w}
        moved += exchange[share.method] * share.layer / t
    kernels = 18 if share.low else 9
    moves("forward", moved, kernels, forward)
    moves("backward", moved, kernels, 2 * forward + again)
    if share.first:
        product(share.inputs, D, share.passes)
    if share.last and not share.classifies:
        product(D, share.outputs, share.passes)
    moves("forward", 20 * share.states, 5, share.passes)  # the loss
    moves("backward", 20 * share.states, 5, share.passes)
    if share.reduced:  # gradients into buckets
        moves("backward", 2 * FULL * share.parameters, 12 * share.L, 1)
    numbers, kernels = (4, 1) if config.enable_fused else (12, 7)  # of Adam, for each parameter
    moves("update", numbers * FULL * share.updated, kernels, 1)
    return counted


def messages_of(share: Share) -> tuple[Counter[Message], Groups]:
    """(messages of a step, groups in which they travel)."""
    config, layout, c, passes = share.config, share.layout, share.c, share.passes
    messages: Counter[Message] = Counter()
    groups: Groups = {}
    places = np.arange(layout.world_size).reshape(*layout.mesh_dims.values())

    def add(phase: str, kind: str, group: str, size: float, calls: float) -> None:
        """Count collectives in a group of utils.comm. size: bytes of the tensor that the collective is given."""
        along = COMBINED.get(group, {group})
        ranks = places[tuple(slice(None) if name in along else 0 for name in layout.mesh_dims)].ravel()
        if len(ranks) > 1 and calls:
            groups[group] = tuple(ranks.tolist())
            messages[Message(phase, kind, group, round(bytes_sent(kind, size, len(ranks))))] += int(calls)

    # Tensor parallelism: two sums of a layer in a block, forward and backward. Shoeybi et al. 2019 (arXiv:1909.08053).
    size = share.w * share.layer
    for phase, calls in ("forward", 2 * share.L * passes), ("backward", (2 * share.L + share.again) * passes):
        if config.sequence_parallel:  # the same bytes in two halves
            add(phase, "reduce_scatter", "tp", size, calls)
            add(phase, "all_gather", "tp", size / share.t, calls)
        else:
            add(phase, "all_reduce", "tp", size, calls)

    # Ranks of an image: keys and values of all of them are gathered, or pass round a ring (Liu et al. 2023,
    # arXiv:2310.01889), or heads are exchanged for tokens (Jacobs et al. 2023, arXiv:2309.14509).
    image, both = "cp" if layout.cp > 1 else "domain", 2 * share.w * share.layer / share.t
    once, again = passes * share.L, passes * share.again
    if share.method == "gather":
        add("forward", "all_gather", image, both, once)
        add("backward", "all_gather", image, both, again)
        add("backward", "reduce_scatter", image, both * c, once)
    elif share.method == "ring":  # backward also their gradients, in float32
        add("forward", "all_to_all", image, both, (c - 1) * once)
        add("backward", "all_to_all", image, both, (c - 1) * (once + again))
        add("backward", "all_to_all", image, both * FULL / share.w, (c - 1) * once)
    else:
        add("forward", "all_to_all", image, both * (c - 1) / c, 2 * once)
        add("backward", "all_to_all", image, both * (c - 1) / c, 2 * (once + again))

    # Pipeline: the residual stream at each boundary of stages.
    add("forward", "send", "pp", FULL * share.stream, share.m * (share.chunks - share.last))
    add("backward", "send", "pp", FULL * share.stream, share.m * (share.chunks - share.first))

    # Data parallelism: gradients once a step, and sharded parameters as often as blocks compute.
    size, group = FULL * share.parameters, "dp_image" if c > 1 else "dp"
    if share.reduced:
        buckets = math.ceil(size / (config.bucket_cap_mb * 2**20))
        width = 0.5 if config.gradient_compression == "bf16" else 1
        add("backward", "all_reduce", group, width * size / buckets, buckets)
    if config.data_parallel == "zero1":
        add("update", "broadcast", group, FULL * share.updated, share.replicas)
    if share.sharded:
        hybrid, units = config.data_parallel == "hsdp", share.L + 1
        group = group.replace("dp", "dp_shard") if hybrid else group
        forward = backward = float(passes)
        if layout.pp > 1:  # what a backward pass has gathered serves the next pass
            forward, backward = share.in_flight, 1.0 if config.pp_schedule == "gpipe" else share.m
        if config.data_parallel == "zero2":  # kept between the passes
            forward, backward = 1.0 if layout.pp > 1 else float(passes), 0.0
        own = share.parameters / share.shards / units
        add("forward", "all_gather", group, share.gathered * own, units * forward)
        add("backward", "all_gather", group, share.gathered * own, units * backward)
        add("backward", "reduce_scatter", group, size / units, units)
        if hybrid:
            add("backward", "all_reduce", "dp_replicate", FULL * own, units)
    return messages, groups
