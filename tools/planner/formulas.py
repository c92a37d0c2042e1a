"""What a rank holds, computes and sends in a training step, by formula.

The result is the trace of tools.planner.trace, in about a millisecond and without running the step.

b, n: samples of a micro-batch and tokens of this rank, N tokens of all ranks that share an image, D features; t, c, p
ranks of tp, of an image (cp or domain), of pp; r = mlp_ratio; m micro-batches; w bytes of a number in a matrix
product: 4, under mixed precision 2. s = 1/t with sequence parallelism, else 1. A block has 12 D^2 / t weights.

Memory: `tools.planner.memory_formulas`. A block keeps for the backward pass, in bytes for each of b n D:

| of a block | bytes |
|---|---|
| inputs of the two norms | 8 s |
| inputs of qkv and fc1 | 2 w |
| q, k, v, result of attention; log-sum-exp 4 for each head and token | 4 w / t |
| gather: also keys and values of all tokens | 2 w N / (n t) |
| all_to_all, instead: own heads of all tokens, and what comes back | (4 N / (n c) + 1) w / t |
| around the GELU | 2 r w / t |
| masks of dropout | 2 s + r / t |
| mixed precision: copies of the weights | 2 for each weight |
| recomputed: the input alone; selective: also the results of products and attention | 4 s; + (2 + (4 + r) / t) w |

Outside the blocks: the image in low precision, the last norm, the error of the loss (4 for each point). A rank of a
pipeline holds the micro-batches that its schedule has started, their outputs, and a buffer for each message to come.

The peak is the largest of these moments: the loss (two more errors); the last block's MLP in the backward pass
(gradients of the stream, 4 s, in low precision, w, and of the hidden features, r w / t); its attention (gradients, and
what is exchanged: gather (1 + 2 N / n) w / t, ring about (9 w + 40) / t); the gradients of a sharded block on their way
to their owners (twice 4 bytes for each weight); all gradients, where the batch is small; the update. With fsdp whole
parameters come on top: of a block, of the prefetched one, and of what no block holds.

Parameters, gradients, optimizer: those of ZeRO (Rajbhandari et al. 2020), with the padding of sharded rows, and
with zero1 of the rank that updates most.

Operations: `tools.planner.operation_formulas`. Of a block, forward; backward twice the products, 2.5 times attention:

| operation | FLOP | bytes for each of b n D |
|---|---|---|
| qkv, proj, fc1, fc2 | 2 b n D^2 (4 + 2 r) / t | |
| attention | 4 b n N D / t | |
| norms; casts to low precision; residuals | | 16 s; 2 (4 + w) s; 2 (8 + w) s |
| GELU | | 2 r w / t |

Messages: `tools.planner.message_formulas`, in numbers that a rank sends; d ranks of dp, P parameters of a rank. An
all-reduce of S numbers counts 2 (t-1)/t S, an all-gather or a reduce-scatter (t-1)/t S.

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

Sequence parallelism also adds up the gradients of norms and shared biases, (6 L + 2) D numbers, once a step. The code
counts exactly: uneven shares, what is computed again, DistributedDataParallel's buckets, padding of fully_shard.

Compared with the trace (tests/test_plan_formulas.py), activations, number and bytes of messages and
floating-point operations agree to rounding, and the peak to 1 %. Less exact are
    bytes of kernels that only move data: within 25 % in each phase. The copies of fully_shard into and out of its
        buffers are counted here only (with many weights and few tokens as much again). Ring attention counts as if
        all blocks were as long as the own one. Fewer of the smallest kernels are counted;
    the optimizer's state with zero1: here of the rank that has most, in the trace of the first rank;
    wrap_policy size, which counts as block; compression of gradients, whose copies are not counted; clipping of
        gradients, whose kernels and messages are not counted.
Memory of a forward pass without gradients (inference) is traced only. With cpu_offload parameters, gradients and
optimizer state lie in host memory: the peak is without them, as in a trace.
"""

from collections.abc import Iterable
from itertools import product

from tools.planner.memory_formulas import memory_of
from tools.planner.message_formulas import messages_of
from tools.planner.operation_formulas import operations_of
from tools.planner.rank_share import RankShare
from tools.planner.trace import Trace
from utils.errors import UsageError
from utils.layout import Layout
from utils.schema import Config

MODELS = ("vit", "classifier")  # that the formulas describe


def formula_traces(config: Config, layout: Layout, bands: Iterable[int] = (0,)) -> list[Trace]:
    """Traces of the ranks of which tools.planner.trace.trace_step gives them: of a pipeline its first and last one.

    config: of this layout. Whether the model can be split so is not checked, see tools.planner.layouts.
    bands: places along cp; the first band has the most tokens, but another one may send more.
    Raises UsageError for models that the formulas do not describe.
    """
    if config.model not in MODELS:
        raise UsageError(f"{config.config}: the formulas describe {' and '.join(MODELS)}, not model {config.model}")
    traces = []
    for stage, band in product(sorted({0, layout.pp - 1}), bands):
        share = RankShare(config, layout, stage, band)
        memory, held = memory_of(share)
        messages, groups = messages_of(share)
        traces.append(Trace(memory, held, None, operations_of(share), messages, groups))
    return traces
