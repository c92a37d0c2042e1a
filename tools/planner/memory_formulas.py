"""Memory of a rank in a training step, by formula: the first tables of docs/reference/formulas.md."""

import heapq
import math
from collections.abc import Iterable

from tools.planner.rank_share import RankShare, Shape, Stage

FULL = 4  # bytes of a float32 number


def memory_of(share: RankShare) -> tuple[dict[str, float], dict[str, float]]:
    """(memory, held) of a RankShare as a Trace has them: bytes."""
    parameters, gradients, optimizer = states(share)
    inputs, outputs = (FULL * n * share.micro_batches for n in (share.inputs, share.outputs * share.steps))
    # Receive buffers of a pipeline, one for each micro-batch, for the whole run.
    elsewhere = sum((not stage.first) + (not stage.last) for stage in share.stages)
    buffers = FULL * share.stream * share.micro_batches * elsewhere
    here = 0 if share.config.cpu_offload else parameters + optimizer  # not in host memory
    always = here + inputs + outputs + buffers
    if share.replicated:  # in buckets, which are there all the time
        always += gradients - FULL * share.positions
    if share.p > 1:
        saved, most = _pipelined(share)
    else:
        (stage,) = share.stages
        saved, most = kept(share, stage), at_most(share, stage, share.micro_batches > 1)
        # A step of a forecast adds its input to those of its network, where no copy of it is kept.
        between = 0 if share.low and not share.repeats_steps else FULL * share.inputs
        earlier = (share.steps - 1) * (between + (0 if share.repeats_steps else saved))
        joined = FULL * share.outputs * share.steps if share.steps > 1 else 0  # all states, or their gradient
        saved, most = earlier + saved, earlier + most + joined
    update = (FULL * share.positions if share.replicated else gradients) + (
        0 if share.config.enable_fused else parameters
    )
    peak = always + max(most, update if here else 0)
    input_is_kept = not share.low and share.first  # else a copy of it
    activations = saved + (inputs if input_is_kept else 0)
    batch = outputs + (0 if input_is_kept else inputs)
    memory = {
        "parameters": parameters, "gradients": gradients, "optimizer": optimizer, "activations": activations,
        "batch": batch, "buffers": buffers + gathered(share),
    }  # fmt: skip
    memory["temporaries"] = max(0, peak - here - activations - batch)
    held = {name: memory[name] for name in ("parameters", "gradients", "optimizer", "activations")}
    if share.config.data_parallel == "zero2":
        held["parameters"] += gathered(share)
    return memory | {"peak": peak}, held


def numbers(shapes: Iterable[Shape]) -> int:
    """Total size of tensors of these shapes, in numbers."""
    return sum(map(math.prod, shapes))


def states(share: RankShare) -> tuple[int, int, int]:
    """Bytes of (parameters, gradients, optimizer state) between two steps."""
    of_blocks, rest = share.shapes
    # Where parameters are sharded, rows of each, as many on every rank.
    own = [(-(-shape[0] // share.shards), *shape[1:]) for unit in (*of_blocks, rest) for shape in unit]
    parameters = FULL * (numbers(own) + share.positions)
    updated = parameters
    if share.config.data_parallel == "zero1" and share.replicas > 1:
        updated = FULL * max(zero1_shares(share))
    return parameters, parameters, 2 * updated


def zero1_shares(share: RankShare) -> list[int]:
    """Numbers that each rank updates: ZeroRedundancyOptimizer gives the next largest to the rank that has least."""
    of_blocks, rest = share.shapes
    ranks = [(0, rank) for rank in range(share.replicas)]
    for number in sorted((math.prod(shape) for unit in (*of_blocks, rest) for shape in unit), reverse=True):
        least, rank = heapq.heappop(ranks)
        heapq.heappush(ranks, (least + number, rank))
    return [numbers for numbers, _ in ranks]


# What the forward pass keeps for the backward pass, in bytes.


def block(share: RankShare) -> float:
    """Bytes that a block keeps."""
    w, t = share.width, share.t
    hidden = share.samples * share.tokens * share.hidden / t
    norms = FULL * (2 * share.stream + 4 * share.samples * share.slice)  # their inputs, mean and deviation
    masks = 2 * share.stream + hidden if share.config.dropout else 0
    return (
        norms + 2 * w * share.whole + attention(share) / t + 2 * w * hidden + masks + copies(share, share.block_shapes)
    )


def copies(share: RankShare, shapes: Iterable[Shape]) -> int:
    """Bytes of the low-precision copies of weights."""
    return share.width * numbers(shape for shape in shapes if len(shape) > 1) if share.copies else 0


def attention(share: RankShare) -> float:
    """Bytes that attention keeps for all heads: q, k, v, the result and the log-sum-exp."""
    w, b, everything = share.width, share.samples, share.samples * share.all_tokens * share.d
    own = 4 * w * share.whole + FULL * b * share.tokens * share.heads
    if share.image == 1 or share.method == "ring":
        return own
    if share.method == "gather":
        return own + 2 * w * everything
    return (4 * w * everything + FULL * b * share.all_tokens * share.heads) / share.image + w * share.whole


def repeated_block(share: RankShare) -> float:
    """Bytes that a block keeps which is computed again in the backward pass."""
    if share.config.activation_checkpointing == "full":
        return FULL * share.stream
    w, t, calls = share.width, share.t, 1
    queries: float = share.tokens
    if share.image > 1 and share.method == "all_to_all":
        queries = share.all_tokens / share.image
    if share.image > 1 and share.method == "ring":
        calls = share.image
    products = w * (3 * share.whole + share.samples * share.tokens * share.hidden) / t + 2 * w * share.whole
    return FULL * share.stream + products + calls * share.samples * queries * (w * share.d + FULL * share.heads) / t


def ends(share: RankShare, stage: Stage) -> tuple[int, int, int]:
    """Bytes kept (before the blocks, after the blocks, by the loss)."""
    begin = end = loss = 0
    if stage.first:
        begin = (share.width * share.inputs if share.low else 0) + copies(share, share.first_shapes[:1])
        begin += share.stream if share.config.dropout else 0
        if share.classifies:  # around norm and ReLU
            begin += 2 * FULL * (share.whole + share.samples * share.tokens)
    if stage.last:
        end = FULL * (share.stream + 2 * share.samples * share.slice)
        if not share.classifies:
            end += share.width * share.whole + copies(share, share.last_shapes)
        loss = FULL * share.outputs
    return begin, end, loss


def of_blocks(share: RankShare, stage: Stage) -> float:
    """Bytes that the blocks of a stage keep."""
    return (stage.blocks - stage.repeated) * block(share) + stage.repeated * repeated_block(share)


def kept(share: RankShare, stage: Stage) -> float:
    """Bytes kept for a micro-batch, without the batch itself."""
    return of_blocks(share, stage) + sum(ends(share, stage))


# The moments at which a rank holds most.


def at_most(share: RankShare, stage: Stage, later: bool) -> float:
    """Most bytes held while a micro-batch computes, including gathered parameters and gradients not yet reduced.

    later: whether earlier micro-batches have left their gradients.
    """
    w, t, (begin, _, loss) = share.width, share.t, ends(share, stage)
    hidden = w * share.samples * share.tokens * share.hidden / t
    lowered, handed = w * share.whole if share.low else 0, FULL * share.stream
    shapes, units = share.block_shapes, gathered(share, later)
    one, weights = block(share), FULL * numbers(shapes)
    rest = (share.first_shapes if stage.first else []) + (share.last_shapes if stage.last else [])
    whole = stage.blocks * weights + FULL * numbers(rest)
    there = whole if later and not share.replicated else 0
    growing = not (share.replicated or there)
    behind = FULL * numbers(share.last_shapes) if growing and stage.last else 0
    again = one - repeated_block(share) if stage.repeated else 0
    in_blocks = of_blocks(share, stage) + begin + again

    moments = [kept(share, stage) + 2 * loss + (units if share.config.data_parallel == "zero2" else 0)]  # the loss
    if again:  # copies of all weights are kept until the end of the forward pass
        moments.append(kept(share, stage) + (FULL + w) * share.outputs + stage.repeated * copies(share, shapes))
    norm = handed if again and share.low else 0  # its result, while the block is computed again
    mlp = handed + lowered + max(hidden, norm) + w * share.d * share.hidden / t + behind
    moments.append(in_blocks + mlp + units)  # the last block's MLP
    freed = 2 * hidden + w * share.whole + handed + copies(share, shapes[6:])
    gradients = FULL * numbers(shapes[4:]) + behind if growing else 0
    moments.append(
        in_blocks - freed + handed + (w * share.whole + exchanged(share)) / t + gradients + units
    )  # attention
    if growing and share.sharded:  # gradients of a block on their way to their owners
        moments.append(in_blocks - one + handed + 2 * weights + units)
    elif growing:  # those of the first block come last
        moments.append(one + begin + mlp - behind + whole - weights)
    return there + max(moments)


def exchanged(share: RankShare) -> float:
    """Bytes that the backward pass of attention holds for a moment, for all heads."""
    w, whole, ranks = share.width, share.whole, share.image
    if ranks == 1:
        return 3 * w * whole
    everything = share.samples * share.all_tokens * share.d
    if share.method == "gather":
        return w * whole + 2 * w * everything
    if share.method == "all_to_all":
        return 3 * w * everything / ranks
    # A step of the ring holds, for a block: keys and values (with four ranks the next ones too), the gradients of both
    # twice, once more in low precision, the sum of two, and the message under way. For the own tokens: the gradients of
    # the own block and of the queries; with few ranks the step's part of the latter too.
    block = (8 if ranks > 3 else 6) * w + (2 if ranks == 2 else 4) * FULL + (2 * FULL if share.low else 0)
    return ((3 if ranks > 3 else 4) * FULL + w + block * max(share.shares[1:]) / share.tokens) * whole


def gathered(share: RankShare, later: bool = False) -> int:
    """Bytes of gathered parameters: the units in use, and the parameters outside the blocks.

    A pipeline keeps them from one backward pass to the next, unless a forward pass comes between.
    """
    if not share.sharded:
        return 0
    config, (blocks, rest) = share.config, share.shapes
    stay = later and share.p > 1 and not (share.last and config.pp_schedule == "1f1b")
    if config.data_parallel == "zero2" or config.wrap_policy == "none" or stay:
        ahead = len(blocks)
    else:
        ahead = min(len(blocks), 1 + max(1, config.prefetch))
    return share.gathered_width * (numbers(rest) + ahead * numbers(share.block_shapes))


# Pipelines.


def _pipelined(share):
    """(most bytes kept by all micro-batches, most bytes with the temporaries)."""
    handed, alternates = FULL * share.stream, share.config.pp_schedule == "1f1b"
    arrived = [0 if stage.first else handed for stage in share.stages]  # into a buffer, which is counted apart
    saved = [kept(share, stage) - buffer for stage, buffer in zip(share.stages, arrived, strict=True)]
    width = FULL if share.sharded else share.width
    sent = [width * share.outputs if stage.last else handed for stage in share.stages]  # kept until the backward pass
    held = sending = buffers = most_held = most = 0
    later = [False] * len(saved)
    for backward, i in share.schedule():
        stage, sign = share.stages[i], -1 if backward else 1
        held, sending = held + sign * saved[i], sending + sign * sent[i]
        if backward:
            # The gradient of what was sent lies in a buffer; what is sent back is still there a while.
            extra = (sent[i] if stage.last else 0) + (handed if later[i] and alternates and not stage.first else 0)
            most = max(most, held + sending + at_most(share, stage, later[i]) - arrived[i] + extra)
            later[i] = True
        else:
            buffers += arrived[i]
            most_held = max(most_held, held + buffers - ends(share, stage)[2])
    return most_held, most
