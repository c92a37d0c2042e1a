"""What a rank holds in a training step, by arithmetic alone: the first tables of tools/planner/formulas.py."""

import heapq
import math
from collections.abc import Iterable

from tools.planner.rank_share import Part, Shape, Stage

FULL = 4  # bytes of a number that autocast leaves alone


def memory_of(part: Part) -> tuple[dict[str, float], dict[str, float], float]:
    """(memory, held, inference) of a Part as a Trace has them: bytes."""
    parameters, gradients, optimizer = states(part)
    inputs, outputs = (FULL * n * part.micro_batches for n in (part.inputs, part.outputs))
    buffers = _buffers_of_pipeline(part)
    here = 0 if part.config.cpu_offload else parameters + optimizer  # not in host memory
    always = here + inputs + outputs + buffers
    if part.replicated:  # in buckets, which are there all the time
        always += gradients - FULL * part.positions
    if part.p > 1:
        saved, most = _pipelined(part)
    else:
        (stage,) = part.stages
        saved, most = kept(part, stage), at_most(part, stage, part.micro_batches > 1)
    update = (FULL * part.positions if part.replicated else gradients) + (0 if part.config.enable_fused else parameters)
    peak = always + max(most, update if here else 0)
    input_is_kept = not part.low and part.first  # else a copy of it
    activations = saved + (inputs if input_is_kept else 0)
    batch = outputs + (0 if input_is_kept else inputs)
    memory = {
        "parameters": parameters, "gradients": gradients, "optimizer": optimizer, "activations": activations,
        "batch": batch, "buffers": buffers + gathered(part),
    }  # fmt: skip
    memory["temporaries"] = max(0, peak - here - activations - batch)
    held = {name: memory[name] for name in ("parameters", "gradients", "optimizer", "activations")}
    if part.config.data_parallel == "zero2":
        held["parameters"] += gathered(part)
    inference = (here + gradients if here else 0) + buffers + forward(part)
    return memory | {"peak": peak}, held, inference


def numbers(shapes: Iterable[Shape]) -> int:
    """How many numbers tensors of these shapes hold together."""
    return sum(map(math.prod, shapes))


def states(part: Part) -> tuple[int, int, int]:
    """(parameters, gradients, optimizer state) between two steps."""
    of_blocks, rest = part.shapes
    if part.sharded:  # rows of each parameter, as many on every rank
        own = [(-(-shape[0] // part.shards), *shape[1:]) for unit in (*of_blocks, rest) for shape in unit]
    else:
        own = [shape for unit in (*of_blocks, rest) for shape in unit]
    parameters = FULL * (numbers(own) + part.positions)
    updated = parameters
    if part.config.data_parallel == "zero1" and part.replicas > 1:
        updated = FULL * max(zero1_shares(part))
    return parameters, parameters, 2 * updated


def zero1_shares(part: Part) -> list[int]:
    """Numbers that each rank updates: ZeroRedundancyOptimizer gives the next largest to the rank that has least."""
    of_blocks, rest = part.shapes
    ranks = [(0, rank) for rank in range(part.replicas)]
    for number in sorted((math.prod(shape) for unit in (*of_blocks, rest) for shape in unit), reverse=True):
        least, rank = heapq.heappop(ranks)
        heapq.heappush(ranks, (least + number, rank))
    return [share for share, _ in ranks]


# What the backward pass needs of the forward pass.


def block(part: Part) -> float:
    """Kept of a block."""
    w, t = part.width, part.t
    hidden = part.samples * part.tokens * part.hidden / t
    norms = FULL * (2 * part.stream + 4 * part.samples * part.slice)  # their inputs, mean and deviation
    masks = 2 * part.stream + hidden if part.config.dropout else 0
    return norms + 2 * w * part.whole + attention(part) / t + 2 * w * hidden + masks + copies(part, part.block_shapes)


def copies(part: Part, shapes: Iterable[Shape]) -> int:
    """Weights in low precision."""
    return part.width * numbers(shape for shape in shapes if len(shape) > 1) if part.copies else 0


def attention(part: Part) -> float:
    """Kept of q, k, v, the result and the sums of exponentials, of all heads."""
    w, b, everything = part.width, part.samples, part.samples * part.all_tokens * part.d
    own = 4 * w * part.whole + FULL * b * part.tokens * part.heads
    if part.image == 1 or part.method == "ring":
        return own
    if part.method == "gather":
        return own + 2 * w * everything
    return (4 * w * everything + FULL * b * part.all_tokens * part.heads) / part.image + w * part.whole


def repeated_block(part: Part) -> float:
    """Kept of a block that is computed a second time."""
    if part.config.activation_checkpointing == "full":
        return FULL * part.stream
    w, t, calls = part.width, part.t, 1
    queries: float = part.tokens
    if part.image > 1 and part.method == "all_to_all":
        queries = part.all_tokens / part.image
    if part.image > 1 and part.method == "ring":
        calls = part.image
    products = w * (3 * part.whole + part.samples * part.tokens * part.hidden) / t + 2 * w * part.whole
    return FULL * part.stream + products + calls * part.samples * queries * (w * part.d + FULL * part.heads) / t


def ends(part: Part, stage: Stage) -> tuple[int, int, int]:
    """Kept (in front of the blocks, behind them, of the loss)."""
    begin = end = loss = 0
    if stage.first:
        begin = (part.width * part.inputs if part.low else 0) + copies(part, part.first_shapes[:1])
        begin += part.stream if part.config.dropout else 0
        begin += FULL * (part.whole - part.stream)  # a slice of the tokens keeps all of them
        if part.classifies:  # around norm and ReLU
            begin += 2 * FULL * (part.whole + part.samples * part.tokens)
    if stage.last:
        end = FULL * (part.stream + 2 * part.samples * part.slice)
        if not part.classifies:
            end += part.width * part.whole + copies(part, part.last_shapes)
        loss = FULL * part.outputs
    return begin, end, loss


def of_blocks(part: Part, stage: Stage) -> float:
    """Kept of the blocks of a stage."""
    return (stage.blocks - stage.repeated) * block(part) + stage.repeated * repeated_block(part)


def kept(part: Part, stage: Stage) -> float:
    """Kept of a micro-batch, less the batch itself."""
    return of_blocks(part, stage) + sum(ends(part, stage))


# The moments at which most is held.


def at_most(part: Part, stage: Stage, later: bool) -> float:
    """The most while one micro-batch computes, gradients that are on their way and gathered parameters included.

    later: whether other micro-batches have left their gradients.
    """
    w, t, (begin, _, loss) = part.width, part.t, ends(part, stage)
    hidden = w * part.samples * part.tokens * part.hidden / t
    lowered, handed = w * part.whole if part.low else 0, FULL * part.stream
    shapes, units = part.block_shapes, gathered(part, later)
    one, weights = block(part), FULL * numbers(shapes)
    whole = stage.blocks * weights + FULL * numbers(_rest(part, stage))
    there = whole if later and not part.replicated else 0
    growing = not (part.replicated or there)
    behind = FULL * numbers(part.last_shapes) if growing and stage.last else 0
    again = one - repeated_block(part) if stage.repeated else 0
    in_blocks = of_blocks(part, stage) + begin + again

    moments = [kept(part, stage) + 2 * loss + (units if part.config.data_parallel == "zero2" else 0)]  # the loss
    if again:  # copies of all weights are kept until the end of the forward pass
        moments.append(kept(part, stage) + (FULL + w) * part.outputs + stage.repeated * copies(part, shapes))
    norm = handed if again and part.low else 0  # its result, while the block is computed again
    mlp = handed + lowered + max(hidden, norm) + w * part.d * part.hidden / t + behind
    moments.append(in_blocks + mlp + units)  # the last block's MLP
    freed = 2 * hidden + w * part.whole + handed + copies(part, shapes[6:])
    gradients = FULL * numbers(shapes[4:]) + behind if growing else 0
    moments.append(in_blocks - freed + handed + (w * part.whole + exchanged(part)) / t + gradients + units)  # attention
    if growing and part.sharded:  # gradients of a block on their way to their owners
        moments.append(in_blocks - one + handed + 2 * weights + units)
    elif growing:  # those of the first block come last
        moments.append(one + begin + mlp - behind + whole - weights)
    return there + max(moments)


def exchanged(part: Part) -> float:
    """Held for a moment by the backward pass of attention over all ranks, of all heads."""
    w, whole, ranks = part.width, part.whole, part.image
    if ranks == 1:
        return 3 * w * whole
    everything = part.samples * part.all_tokens * part.d
    if part.method == "gather":
        return w * whole + 2 * w * everything
    if part.method == "all_to_all":
        return 3 * w * everything / ranks
    # In a step of the ring, of a block: keys and values, with four ranks the next ones too, the gradients of both twice
    # and once more where they were lower, zeros, what travels. Of own tokens: the own block's gradient, that of the
    # queries before and after, and its part.
    block = (8 if ranks > 3 else 6) * w + (2 if ranks == 2 else 4) * FULL + (2 * FULL if part.low else 0)
    return (4 * FULL + w + block * max(part.shares[1:]) / part.tokens) * whole


def gathered(part: Part, later: bool = False) -> int:
    """Whole parameters beside a rank's own: of the units under way, and of what no block holds.

    A pipeline keeps them from one backward pass to the next, if no forward pass comes between.
    """
    if not part.sharded:
        return 0
    config, (blocks, rest) = part.config, part.shapes
    stay = later and part.p > 1 and not (part.last and config.pp_schedule == "1f1b")
    if config.data_parallel == "zero2" or config.wrap_policy == "none" or stay:
        ahead = len(blocks)
    else:
        ahead = min(len(blocks), 1 + max(1, config.prefetch))
    return part.gathered_width * (numbers(rest) + ahead * numbers(part.block_shapes))


def _rest(part: Part, stage: Stage) -> list[Shape]:
    return (part.first_shapes if stage.first else []) + (part.last_shapes if stage.last else [])


def forward(part: Part) -> float:
    """The most of a forward pass without gradients, the input included."""
    w, t, low = part.width, part.t, part.low
    hidden = part.samples * part.tokens * part.hidden / t
    stage = part.stages[0]
    lowered = (part.blocks * copies(part, part.block_shapes)) if part.copies else 0
    x = FULL * (part.inputs if stage.first else part.stream)
    x += w * part.inputs if stage.first and low else 0
    mlp = 3 * FULL * part.stream + 2 * w * hidden
    across = 0.0
    if part.image > 1:
        everything = part.samples * part.all_tokens * part.d
        own = 3 * w * part.whole / t
        if part.method == "gather":
            copied = 4 if min(part.shares) < max(part.shares) else 2
            across = own + (2 * w * part.whole + copied * w * everything) / t
        elif part.method == "all_to_all":
            across = own + 4 * w * part.whole / t
        else:
            across = own + (6 * w + 4 * FULL) * part.whole / t
        across += 2 * FULL * part.stream + (w * part.whole if low else 0)
    head = 2 * FULL * part.stream + (w * part.whole if low else 0) + 2 * w * part.outputs if part.last else 0
    return x + lowered + max(mlp, across, head) + gathered(part)


# Pipelines.


def _buffers_of_pipeline(part: Part) -> int:
    """For what other stages send, one for each micro-batch, all the time."""
    if part.p == 1:
        return 0
    ends_elsewhere = sum((not stage.first) + (not stage.last) for stage in part.stages)
    return FULL * part.stream * part.micro_batches * ends_elsewhere


def _pipelined(part):
    """(kept at most, the most of all micro-batches with what comes beside it)."""
    handed, alternates = FULL * part.stream, part.config.pp_schedule == "1f1b"
    arrived = [0 if stage.first else handed for stage in part.stages]  # into a buffer, which is counted apart
    saved = [kept(part, stage) - buffer for stage, buffer in zip(part.stages, arrived, strict=True)]
    width = FULL if part.sharded else part.width
    sent = [width * part.outputs if stage.last else handed for stage in part.stages]  # kept until the backward pass
    held = sending = buffers = most_held = most = 0
    later = [False] * len(saved)
    for backward, i in part.schedule():
        stage, sign = part.stages[i], -1 if backward else 1
        held, sending = held + sign * saved[i], sending + sign * sent[i]
        if backward:
            # The gradient of what was sent lies in a buffer; what is sent back is still there a while.
            extra = (sent[i] if stage.last else 0) + (handed if later[i] and alternates and not stage.first else 0)
            most = max(most, held + sending + at_most(part, stage, later[i]) - arrived[i] + extra)
            later[i] = True
        else:
            buffers += arrived[i]
            most_held = max(most_held, held + buffers - ends(part, stage)[2])
    return most_held, most
