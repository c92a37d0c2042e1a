"""What a layout of rung 3 makes a rank hold and send, by arithmetic alone.

What a step has to send at least (`predicted_messages`), in numbers that one rank sends. b, n: samples and tokens of
this rank, D features, a block has 12 D^2 weights; t, c, p, d ranks of tp, cp, pp, dp; m micro-batches; P parameters
that this rank holds. An all-reduce of S numbers is worth 2 (t-1)/t S, an all-gather or a reduce-scatter (t-1)/t S.

| | forward | backward |
|---|---|---|
| tensor | 2 all-reduces of b n D a block | the same |
| sequence | 2 all-gathers, 2 reduce-scatters of b n D a block: the same numbers; 1 all-gather at the end | the same |
| context, gather | 1 all-gather a block: 2 (c-1) b n D / t | 1 reduce-scatter: the same |
| context, ring | c-1 exchanges a block: the same as gather | 2 (c-1) exchanges: twice that |
| context, all_to_all | 2 all-to-alls a block: 4 (c-1)/c b n D / t | the same |
| context, the loss | 1 all-reduce of 2 b numbers | nothing |
| pipeline | b n D for each boundary of stages, in m messages | the same |
| gradients | with fsdp, all-gathers of P | 1 reduction of P over the d c ranks that share parameters |

With sequence parallelism the gradients of norms and shared biases, (6 L + 2) D numbers, are added up once a step too.
"""

import math

from distributed.collectives import shard_sizes
from distributed.data_parallel import SHARDED, sharded_units
from tools.benchmarks.data_parallel import predicted_bytes
from training.model import build_model
from utils.layout import Layout
from utils.schema import Config

PHASES = ("forward", "backward", "update")


def grid(config: Config) -> list[int]:
    """Rows and columns of patches."""
    return [points // config.patch_size for points in config.img_size]


def local_parameters(config: Config, layout: Layout) -> int:
    """Parameters of the rank that holds most, before data parallelism: split over tp and pp, whole over cp."""
    d, patch, hidden = config.embed_dim, config.patch_size**2, int(config.embed_dim * config.mlp_ratio)
    split = 4 * d * d + 2 * d * hidden + 3 * d + hidden  # qkv, proj, fc1, fc2 and biases of qkv, fc1
    block = split // layout.tp + 6 * d  # norms and biases of proj, fc2
    first = (config.n_in_channels * patch + 1) * d + math.prod(grid(config)) * d  # patch and position embedding
    last = 2 * d + (d + 1) * config.n_out_channels * patch  # norm, head
    ends = first + last if layout.pp == 1 else max(first, last)
    return block * config.depth // layout.pp + ends


def predicted_activations(config: Config, layout: Layout) -> float | None:
    """Bytes that a rank keeps for the backward pass; None where the formula does not hold.

    In a block, in units of b n D float32 numbers: inputs of both norms 2, their results 2, q, k, v 3, attention 1, and
    2 mlp_ratio around the GELU. Tensor parallelism splits the last three, sequence parallelism the first one as well.
    Of context-parallel methods, gather adds 2 for the keys and values of all tokens; all_to_all keeps q, k, v and
    attention of all tokens of its heads, and 1 for what comes back.
    """
    plain = config.activation_checkpointing == "none" and not (config.enable_jit or config.dropout)
    if not plain or config.amp_mode != "none":
        return None
    t, c, p, m = layout.tp, layout.cp, layout.pp, config.gradient_accumulation
    rows, columns = grid(config)
    samples = config.global_batch_size / layout.dp
    tokens = shard_sizes(rows, c)[0] * columns
    unit = samples * tokens * config.embed_dim * 4
    sliced = t if config.sequence_parallel else 1
    block = 2 / sliced + 2 + (4 + 2 * config.mlp_ratio) / t
    if c > 1:
        share = rows * columns / tokens  # of this rank's tokens, all tokens are so many times
        block += {"gather": 2 * share, "ring": 0, "all_to_all": 4 * share / c - 3}[config.cp_method] / t
    images, final = samples * tokens * config.patch_size**2 * 4, unit * (1 / sliced + 1)  # final: at the last norm
    inputs, outputs = images * config.n_in_channels, images * config.n_out_channels
    if p > 1:  # micro-batches whose activations are held, on the first and on the last rank
        first, last = {"gpipe": (m, m), "1f1b": (min(p, m), 1), "interleaved": (min(3 * p - 1, 2 * m) / 2, 1)}[
            config.pp_schedule
        ]
        stage = unit * config.depth / p * block
        loss = (last - 1) * outputs  # that of the last one comes later
        return max(first * stage / m + inputs, (last * (stage + final) + loss) / m)
    ends = inputs + outputs + final
    return (unit * config.depth * block + ends) / m


def predicted_messages(config: Config, layout: Layout) -> dict[str, dict[str, tuple[float, float]]]:
    """{phase: {kind: (collectives, bytes)}} of a step, of the rank that sends most: the table at the top."""
    t, c, p, m = layout.tp, layout.cp, layout.pp, config.gradient_accumulation
    rows, columns = grid(config)
    samples, blocks, d = config.global_batch_size / layout.dp, config.depth / p, config.embed_dim
    bands = [n * columns for n in shard_sizes(rows, c)]
    width = 4 if config.amp_mode == "none" else 2  # bytes of an activation
    stream = samples * bands[0] * d  # numbers in the residual stream of this rank
    piece = samples * shard_sizes(bands[0], t)[0] * d  # and in a slice of it
    sent: dict[str, dict[str, tuple[float, float]]] = {phase: {} for phase in PHASES}

    def add(phases: str, kind: str, calls: float, size: float) -> None:
        for phase in phases.split():
            before = sent[phase].get(kind, (0, 0))
            if calls:
                sent[phase][kind] = before[0] + calls, before[1] + size

    if t > 1 and config.sequence_parallel:
        gathered = (t - 1) * piece
        add("forward backward", "all_gather", 2 * blocks * m, 2 * blocks * gathered * width)
        add("forward backward", "reduce_scatter", 2 * blocks * m, 2 * blocks * gathered * width)
        add("forward", "all_gather", m, gathered * width)  # after the last norm
        add("backward", "all_gather", m, gathered * 4)  # in front of the first block
        add("backward", "all_reduce", 1, 2 * (t - 1) / t * (6 * blocks + 2) * d * 4)
    elif t > 1:
        add("forward backward", "all_reduce", 2 * blocks * m, 2 * blocks * 2 * (t - 1) / t * stream * width)
    if c > 1:
        kv, others = samples * 2 * d / t * blocks, [sum(bands) - n for n in bands]
        if config.cp_method == "gather":
            add("forward", "all_gather", blocks * m, (c - 1) * bands[0] * kv * width)
            add("backward", "reduce_scatter", blocks * m, (c - 1) * bands[0] * kv * width)
        elif config.cp_method == "ring":  # a rank never sends the block of the next one, nor gradients of its own
            back = max(others[(i + 1) % c] * width + n * 4 for i, n in enumerate(others))
            add("forward", "all_to_all", (c - 1) * blocks * m, max(others) * kv * width)
            add("backward", "all_to_all", 2 * (c - 1) * blocks * m, back * kv)
        else:  # q, k, v of own tokens, attention of own heads; backward their gradients go the other way
            own = [(c - 1) / c * n for n in bands]
            for phase, a, b in (("forward", 3, 1), ("backward", 1, 3)):
                most = max(a * x + b * y / c for x, y in zip(own, others, strict=True))
                add(phase, "all_to_all", 2 * blocks * m, most * kv / 2 * width)
        add("forward", "all_reduce", m, 2 * (c - 1) / c * 2 * samples * 4)
    if p > 1:
        stages = 2 if config.pp_schedule == "interleaved" else 1
        handed = piece if config.sequence_parallel else stream
        add("forward backward", "send", stages * m, stages * handed * 4)
    shared = Layout(layout.dp * c, shard=layout.shard and layout.shard * c)
    gathers = m if p == 1 else 1  # a pipeline keeps the gathered parameters for the next micro-batch if it can
    units = len(sharded_units(build_model(config), config.wrap_policy, config.wrap_min_params)) / p + 1
    for kind, size in predicted_bytes(config, local_parameters(config, layout), shared).items():
        if config.data_parallel not in SHARDED:
            phase, calls = ("update", shared.dp) if kind == "broadcast" else ("backward", 1)
            add(phase, kind, calls, size)
        elif kind != "all_gather":
            add("backward", kind, units, size)
        elif config.data_parallel == "zero2":
            add("forward", kind, units * gathers, size * gathers / m)
        else:
            add("forward backward", kind, units * gathers, size * gathers / m / 2)
    return sent
