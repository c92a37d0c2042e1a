"""A training step of one rank by textbook formulas: what it holds, computes and sends.

The search compares thousands of layouts by them, each in less than a millisecond, and then traces the best ones
(tools/planner/trace.py), which is exact. The formulas of memory are here, those of operations in
textbook_operations.py, and those of messages in textbook_messages.py. docs/reference/formulas.md is their page.
"""

from tools.planner.symbols import FULL, Symbols
from tools.planner.textbook_counts import messages, operations
from tools.planner.trace import Trace
from training.forecasting.crps import MOST_IN_PAIRS
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
    # ZeRO: Rajbhandari et al. 2020 (arXiv:1910.02054). Adam has two moments, Muon one of its matrices.
    own = FULL * s.parameters / s.shards  # this rank's parameters, and as much for their gradients
    moments = s.config.optimizer_kind.moments
    optimizer = FULL * (moments * s.updated - s.muon)
    batch = s.m * (image_bytes(s) + s.rollout * state_bytes(s)) / s.members  # members share it

    kept = kept_activations(s)
    buffers = buffer_bytes(s)
    moment = largest_moment(s)

    # The most at once in the forward and the backward pass, beside parameters, optimizer and batch.
    passes = kept + moment + buffers
    if s.uses_ddp:
        # Gradients lie in DDP's buckets, which stay allocated.
        passes += own
    elif not s.is_sharded:
        # Gradients come while activations go: at the end all gradients and the activations of the first block.
        passes = max(passes, block_activations(s) + own)

    # With cpu_offload, host memory holds parameters and optimizer, and the host makes the update.
    peak = batch + passes
    if not s.config.cpu_offload:
        # Else the peak is in these passes, or in the update, which has temporaries of its own.
        peak = batch + own + optimizer + max(passes, update_temporaries(s, own))
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
