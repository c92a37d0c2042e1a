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


def textbook_traces(config: Config, layout: Layout) -> list[Trace]:
    """Traces, as trace_step gives them, of the first and the last rank of a pipeline, else of rank 0.

    config: of this layout. Raises UsageError for models that the formulas do not describe.
    """
    if config.model not in MODELS:
        raise UsageError(f"{config.config}: the formulas describe {' and '.join(MODELS)}, not model {config.model}")
    return [textbook_trace(config, layout, stage) for stage in sorted({0, layout.pp - 1})]


def textbook_trace(config: Config, layout: Layout, stage: int) -> Trace:
    """The Trace of a rank of a stage of the pipeline. Names are those of the page; numbers are counted, not bytes."""
    first, last = stage == 0, stage == layout.pp - 1
    t = layout.tp  # tensor-parallel ranks
    c = layout.cp * math.prod(layout.domain)  # ranks that share an image
    method = config.cp_method if layout.cp > 1 else config.domain_method

    # The batch: m micro-batches of b samples, n tokens of this rank out of N of the image.
    m = config.gradient_accumulation
    b = config.global_batch_size // layout.dp // m
    rows, columns, *deep = patch_grid(config.img_size, config.patch_size)[0]
    rows_here = math.ceil(rows / (layout.cp * layout.domain[0]))
    n = rows_here * math.ceil(columns / layout.domain[1]) * math.prod(deep)
    N = rows * columns * math.prod(deep)
    points = config.patch_size ** (2 + len(deep))  # of a patch
    inputs = points * config.model_in_channels  # of a token
    classifies = config.model == "classifier"
    outputs = config.num_classes or 0 if classifies else points * config.n_out_channels
    states = 0 if classifies else b * n * outputs
    steps = config.longest_rollout  # of a forecast

    # Activations of L blocks with D features: of a layer, of the residual stream between layers, inside the MLP.
    D, L = config.embed_dim, config.depth // layout.pp
    layer = b * n * D
    stream = layer / (t if config.sequence_parallel else 1)
    hidden = layer * config.mlp_ratio / t
    low = config.amp_mode != "none"
    w = 2 if low else FULL  # bytes of a number in a product of matrices
    again = L // config.checkpointing_interval  # blocks that are computed again in the backward pass
    if config.activation_checkpointing == "none":
        again = 0
    passes = m * steps  # forward passes of an optimizer step

    # Parameters of a block, and of the embeddings and the head.
    matrices = (4 + 2 * config.mlp_ratio) * D**2 / t  # 12 D^2, most often
    block = matrices + (3 + config.mlp_ratio) * D / t + 6 * D
    rest = first * (inputs + 1 + N) * D + last * (2 * D + (D + 1) * outputs)
    parameters = L * block + rest

    # Data parallelism: ranks with the same weights, and ranks over which fully_shard cuts them.
    replicas = layout.dp * c
    sharded = config.data_parallel in SHARDED and replicas > 1
    shards = (layout.shard or layout.dp) * c if sharded else 1
    reduced = replicas > 1 and not sharded and not config.noddp  # by DistributedDataParallel
    updated = parameters / shards / (replicas if config.data_parallel == "zero1" else 1)
    gathered = FULL if config.gather_dtype == "none" else 2  # bytes of a gathered parameter

    # Of the matrices of hidden layers Muon keeps one moment; a rank has so many of their numbers.
    orthogonal = L * matrices * (config.optimizer == "Muon") * updated / parameters

    # The pipeline: stages of this rank, and micro-batches of which it keeps activations.
    # Narayanan et al. 2021 (arXiv:2104.04473).
    later = layout.pp - stage
    chunks, in_flight = 1, float(min(m, later))
    if layout.pp > 1 and config.pp_schedule == "gpipe":
        in_flight = m
    elif layout.pp > 1 and config.pp_schedule == "interleaved":
        chunks, in_flight = 2, min(m, (layout.pp + 2 * later - 1) / 2)

    def block_activations():
        """Bytes that a block keeps: Korthikanti et al. 2022 (arXiv:2205.05198); fused attention has nothing of N^2."""
        attention = {"gather": 4 + 2 * c, "ring": 4, "all_to_all": 5}[method] if c > 1 else 4
        norms = 2 * FULL * stream  # the residual stream is in float32
        products = w * (2 * layer + attention * layer / t + 2 * hidden)
        masks = 2 * stream + hidden if config.dropout else 0
        return norms + products + masks + low * w * matrices  # autocast keeps copies of weights

    def repeated_activations():
        """Bytes that a block keeps which is computed again: its input; with selective also results of products."""
        results = 2 * layer + (4 * layer + hidden) / t
        return FULL * stream + w * results * (config.activation_checkpointing == "selective")

    def memory():
        """{label: bytes} as a Trace has them, and the most at once as "peak"."""
        # ZeRO: Rajbhandari et al. 2020 (arXiv:1910.02054). Adam has two moments.
        own = FULL * parameters / shards  # of parameters, and of gradients
        optimizer = FULL * (2 * updated - orthogonal)
        image, error = FULL * b * n * inputs, FULL * states
        batch = m * (image + steps * error)
        boundaries = 2 * chunks - first - last  # a buffer for each message that comes
        buffers = FULL * stream * m * boundaries
        if sharded:  # a block and the next one, and what is in no block
            blocks = L if config.data_parallel == "zero2" else min(L, 2)
            buffers += gathered * (blocks * block + rest)

        whole, repeated = block_activations(), repeated_activations()
        kept = (L - again) * whole + again * repeated
        kept += first * low * image / 2 + last * (FULL * stream + w * layer + error)
        kept *= in_flight * steps
        if steps > 1:  # all states of a forecast are joined
            kept += steps * (error + image)

        # The largest moment of the backward pass: the loss, the MLP of a block with the gradient of its residual
        # stream, or the gradients of a block's weights, whole and on their way to their owners.
        mlp = (FULL + low * w) * stream + w * hidden
        moment = max(2 * error, mlp + (whole - repeated) * (again > 0))
        if sharded:
            moment = max(moment, 2 * FULL * block - whole)
        if not reduced and m > 1:  # of earlier micro-batches, whole
            moment += FULL * parameters
        most = kept + moment + buffers
        if not reduced and not sharded:  # gradients come while activations go
            most = max(most, whole + own)
        if reduced:  # in buckets, which stay allocated
            most += own
        peak = batch + most
        if not config.cpu_offload:
            updating = own if config.enable_fused else 2 * own
            if orthogonal:  # steps of matrices; pieces that are sent and received, and whole matrices
                updating = w * orthogonal * (5 if sharded or t > 1 else 3)
            peak = batch + own + optimizer + max(most, updating)
        return {
            "parameters": own, "gradients": own, "optimizer": optimizer, "activations": kept, "batch": batch,
            "buffers": buffers, "temporaries": moment, "peak": peak,
        }  # fmt: skip

    def operations():
        """Operations of a step: products, attention, and kernels that only move data, several alike."""
        dtype, counted = AMP_DTYPES.get(config.amp_mode, torch.float32), Counter()
        calls, repeated = passes * L, passes * again  # of a block

        def product(inner, columns, calls, repeated=0):
            """Count a product, and the two of its backward pass."""
            moved = w * (b * n * (inner + columns) + inner * columns)
            for phase, times in ("forward", calls), ("backward", 2 * calls + repeated):
                counted[Operation(phase, "matmul", 2 * b * n * inner * columns, moved, dtype)] += int(times)

        def moves(phase, moved, kernels, calls):
            counted[Operation(phase, "pointwise", 0, moved / kernels, torch.float32)] += int(kernels * calls)

        products_again = 0 if config.activation_checkpointing == "selective" else repeated
        inside = D * config.mlp_ratio / t
        for inner, columns in (D, 3 * D / t), (D / t, D), (D, inside), (inside, D):
            product(inner, columns, calls, products_again)
        flops, moved = 4 * layer * N / t, 4 * w * layer / t
        counted[Operation("forward", ATTENTION, flops, moved, dtype)] += calls
        counted[Operation("backward", ATTENTION, flops, moved, dtype)] += products_again
        counted[Operation("backward", ATTENTION, 2.5 * flops, 2 * moved, dtype)] += calls  # Dao 2023, arXiv:2307.08691

        # Norms, residuals, casts and biases of a block; the GELU; what an exchange of tokens copies. Backward twice.
        moved = 56 * stream + 2 * w * hidden + low * (FULL + w) * matrices
        moved += 8 * w * layer * (config.sequence_parallel and t > 1)
        if c > 1:
            exchange = {"gather": 4 * w * c, "ring": 28 * c, "all_to_all": 14 * w}
            moved += exchange[method] * layer / t
        kernels = 18 if low else 9
        moves("forward", moved, kernels, calls)
        moves("backward", moved, kernels, 2 * calls + repeated)
        if first:
            product(inputs, D, passes)
        if last and states:
            product(D, outputs, passes)
        moves("forward", 20 * states, 5, passes)  # the loss
        moves("backward", 20 * states, 5, passes)
        if reduced:  # gradients into buckets
            moves("backward", 2 * FULL * parameters, 12 * L, 1)
        numbers, kernels = (4, 1) if config.enable_fused else (12, 7)  # of Adam, for each parameter
        moves("update", numbers * FULL * updated, kernels, 1)
        if orthogonal:  # five times three products of whole matrices, of which the ranks of a copy share the work
            share = orthogonal / matrices / t
            for long in 3 * D, D, D * config.mlp_ratio, D * config.mlp_ratio:
                n_rows, n_columns = sorted((D, long))
                flops = 4 * n_rows**2 * n_columns + 2 * n_rows**3
                moved = w * (5 * n_rows * n_columns + 6 * n_rows**2)
                counted[Operation("update", "matmul", flops / 3, moved / 3, dtype)] += round(5 * 3 * share)
        return counted

    def messages():
        """(messages of a step, {name: ranks} of the groups in which they travel)."""
        counted, groups = Counter(), {}
        places = np.arange(layout.world_size).reshape(*layout.mesh_dims.values())

        def add(phase, kind, group, size, calls):
            """Count collectives in a group of utils.comm. size: bytes of the tensor that the collective is given."""
            along = COMBINED.get(group, {group})
            ranks = places[tuple(slice(None) if name in along else 0 for name in layout.mesh_dims)].ravel()
            if len(ranks) > 1 and calls:
                groups[group] = tuple(ranks.tolist())
                counted[Message(phase, kind, group, round(bytes_sent(kind, size, len(ranks))))] += int(calls)

        # Tensor parallelism: two sums of a layer in a block, forward and backward. Shoeybi et al. 2019
        # (arXiv:1909.08053).
        for phase, calls in ("forward", 2 * L * passes), ("backward", (2 * L + again) * passes):
            if config.sequence_parallel:  # the same bytes in two halves
                add(phase, "reduce_scatter", "tp", w * layer, calls)
                add(phase, "all_gather", "tp", w * layer / t, calls)
            else:
                add(phase, "all_reduce", "tp", w * layer, calls)

        # Ranks of an image: keys and values of all of them are gathered, or pass round a ring (Liu et al. 2023,
        # arXiv:2310.01889), or heads are exchanged for tokens (Jacobs et al. 2023, arXiv:2309.14509).
        image, both = "cp" if layout.cp > 1 else "domain", 2 * w * layer / t
        once, repeated = passes * L, passes * again
        if method == "gather":
            add("forward", "all_gather", image, both, once)
            add("backward", "all_gather", image, both, repeated)
            add("backward", "reduce_scatter", image, both * c, once)
        elif method == "ring":  # backward also their gradients, in float32
            add("forward", "all_to_all", image, both, (c - 1) * once)
            add("backward", "all_to_all", image, both, (c - 1) * (once + repeated))
            add("backward", "all_to_all", image, both * FULL / w, (c - 1) * once)
        else:
            add("forward", "all_to_all", image, both * (c - 1) / c, 2 * once)
            add("backward", "all_to_all", image, both * (c - 1) / c, 2 * (once + repeated))

        # Pipeline: the residual stream at each boundary of stages.
        add("forward", "send", "pp", FULL * stream, m * (chunks - last))
        add("backward", "send", "pp", FULL * stream, m * (chunks - first))

        # Data parallelism: gradients once a step, and sharded parameters as often as blocks compute.
        size, group = FULL * parameters, "dp_image" if c > 1 else "dp"
        if reduced:
            buckets = math.ceil(size / (config.bucket_cap_mb * 2**20))
            width = 0.5 if config.gradient_compression == "bf16" else 1
            add("backward", "all_reduce", group, width * size / buckets, buckets)
        if config.data_parallel == "zero1":
            add("update", "broadcast", group, FULL * updated, replicas)
        if orthogonal and sharded:  # pieces of matrices to their owners, and back
            inside = group.replace("dp", "dp_shard") if config.data_parallel == "hsdp" else group
            add("update", "all_to_all", inside, w * orthogonal * (shards - 1) / shards, 2)
        add("update", "all_to_all", "tp", w * orthogonal * (t - 1) / t, 2 * (orthogonal > 0))
        if sharded:
            hybrid, units = config.data_parallel == "hsdp", L + 1
            group = group.replace("dp", "dp_shard") if hybrid else group
            forward = backward = passes
            if layout.pp > 1:  # what a backward pass has gathered serves the next pass
                forward, backward = in_flight, 1 if config.pp_schedule == "gpipe" else m
            if config.data_parallel == "zero2":  # kept between the passes
                forward, backward = 1 if layout.pp > 1 else passes, 0
            own = parameters / shards / units
            add("forward", "all_gather", group, gathered * own, units * forward)
            add("backward", "all_gather", group, gathered * own, units * backward)
            add("backward", "reduce_scatter", group, size / units, units)
            if hybrid:
                add("backward", "all_reduce", "dp_replicate", FULL * own, units)
        return counted, groups

    held = memory()
    return Trace(held, held, operations(), *messages())
