"""Messages, activations and calls of domain parallelism: exact numbers, of training steps of the forecasting ViT."""

import unittest.mock
from collections import Counter

import pytest
import torch
import torch._dynamo.testing
from torch.distributed.device_mesh import init_device_mesh

from distributed.attention import METHODS
from distributed.collectives import shard_sizes
from distributed.data_parallel import DataParallelOptions, data_parallel
from distributed.domain_parallel import DomainOptions, domain_parallel, shard_parameters, split_images
from distributed.shard.core.axes import unsplit_axes
from distributed.shard_tensor import ShardTensor
from distributed.split import per_axis
from networks.vit import ViT
from tests.dispatch import OPERATIONS, python_calls, tiny_tensors
from tests.support.layout_parity import CPU, build, own_part, train
from tests.support.marks import needs_torch, slow_but, slow_rows_but
from tests.support.parity import error
from tools.instruments.counting import CollectiveCounter
from tools.instruments.tracker import by_phase
from tools.planner.trace import observe_step
from training.models.build import build_model, initial_weights
from training.step.optimizer import build_optimizer
from training.step.step import TrainingStep
from training.tasks import build_task
from utils import comm
from utils.layout import Layout, tile_counts

FLOAT = 4  # bytes
# 9 x 10 patches: rows that no number of ranks divides. 12 heads: all_to_all can split them over 2, 3 and 4 ranks.
SIZES = {
    "img_size": [36, 40],
    "embed_dim": 48,
    "num_heads": 12,
    "depth": 2,
    "global_batch_size": 4,
    "num_iters": 50,
}


def batch_of(config):
    random = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, config.global_batch_size, 20, *config.img_size, generator=random)
    return own_part(x, config).clone(), own_part(y, config).clone()  # a view would keep the whole batch


def counted_step(config):
    """(calls, bytes) of this rank in a later training step: of the forward pass, and of all that follows."""
    step, (x, y) = build(config), batch_of(config)
    for i in range(4 if config.data_parallel == "ddp" else 2):  # DDP has arranged its buckets
        step(i, x, y)
    found = {"forward": Ledger(), "backward": Ledger()}
    for phase, messages in by_phase(observe_step(step, x, y).messages).items():
        for kind, (calls, sent) in messages.items():
            found["forward" if phase == "forward" else "backward"].add(kind, sent, calls)
    return tuple((ledger.calls, ledger.bytes) for ledger in found.values())


class Ledger:
    """The collectives that a rank should make: ledger.add(kind, bytes)."""

    def __init__(self):
        self.calls, self.bytes = Counter(), Counter()

    def add(self, kind, sent, calls=1):
        self.calls[kind] += calls
        self.bytes[kind] += sent

    def all_reduce(self, size, ranks):
        self.add("all_reduce", 2 * size * (ranks - 1) // ranks)


def attention(method, tokens, rank, token_bytes, forward, backward):
    """Bytes that attention sends between ranks of so many tokens each; a rank's q, k or v are token_bytes per token."""
    ranks, own = len(tokens), tokens[rank]
    if method == "gather":  # keys and values, shorter pieces padded
        sent = 2 * max(tokens) * token_bytes * (ranks - 1)
        forward.add("all_gather", sent)
        backward.add("reduce_scatter", sent)
    elif method == "ring":  # backward: the blocks again, and their gradients, which end at their owners
        blocks = [2 * tokens[(rank - step) % ranks] * token_bytes for step in range(ranks)]
        forward.add("all_to_all", sum(blocks[:-1]), ranks - 1)
        backward.add("all_to_all", sum(blocks[:-1]) + sum(blocks[1:]), 2 * (ranks - 1))
    else:  # q, k and v of other ranks' heads; the result of own heads for other ranks' tokens
        there, back = own * (ranks - 1) * token_bytes // ranks, (sum(tokens) - own) * token_bytes // ranks
        forward.add("all_to_all", 3 * there + back, 2)
        backward.add("all_to_all", there + 3 * back, 2)


def expected_step(config, rank, world_size):
    """(calls, bytes) as counted_step gives them, by arithmetic alone."""
    forward, backward = Ledger(), Ledger()
    grid = [n // p for n, p in zip(config.img_size, per_axis(config.patch_size, len(config.img_size)), strict=True)]
    rows, columns = (shard_sizes(n, ranks) for n, ranks in zip(grid, tile_counts(config.domain_parallel), strict=True))
    tokens = [row * column for row in rows for column in columns]
    domain = len(tokens)
    samples = config.global_batch_size * domain // world_size
    for _ in range(config.depth):
        token_bytes = samples * config.embed_dim * FLOAT
        attention(config.domain_method, tokens, rank % domain, token_bytes, forward, backward)
    forward.all_reduce(2 * samples * FLOAT, domain)  # the squares of the loss
    model = build_model(config)
    shared = {name: p for name, p in model.named_parameters() if name != "pos_embed.weight"}
    if config.data_parallel == "ddp":  # one bucket
        backward.all_reduce(sum(p.numel() for p in shared.values()) * FLOAT, world_size)
    else:
        blocks = [[p for name, p in shared.items() if name.startswith(f"blocks.{i}.")] for i in range(config.depth)]
        rest = [p for name, p in shared.items() if not name.startswith("blocks.")]
        for unit in (*blocks, rest):
            pieces = sum(-(-len(p) // world_size) * p[:1].numel() for p in unit) * FLOAT  # padded
            for part, kind in ((forward, "all_gather"), (backward, "all_gather"), (backward, "reduce_scatter")):
                part.add(kind, pieces * (world_size - 1))
    if world_size > domain:  # the position embedding is split over the domain ranks, and copied over dp
        backward.all_reduce(tokens[rank % domain] * config.embed_dim * FLOAT, world_size // domain)
    return (forward.calls, forward.bytes), (backward.calls, backward.bytes)


LAYOUTS = [(2, 2), (3, 3), (4, 4), ("2x2", 4), (2, 4)]  # domain_parallel, ranks; the last with dp 2
COUNTED = [(*layout, method, strategy) for layout in LAYOUTS for method in METHODS for strategy in ("ddp", "fsdp")]


QUICK = [
    (3, 3, "gather", "ddp"), (3, 3, "ring", "fsdp"), (3, 3, "all_to_all", "fsdp"), ("2x2", 4, "ring", "fsdp"),
]  # fmt: skip


@pytest.mark.parametrize(
    "case", slow_but(QUICK, COUNTED, "all layouts, methods and strategies"), ids=lambda case: "-".join(map(str, case))
)
def test_a_step_sends_attention_loss_and_gradients_and_nothing_else(ranks, tiny_config, case):
    domain, size, method, strategy = case
    config = tiny_config(**SIZES, domain_parallel=domain, domain_method=method, data_parallel=strategy)
    for rank, (forward, backward) in enumerate(ranks(size, counted_step, config)):
        expected_forward, expected_backward = expected_step(config, rank, size)
        assert forward == expected_forward, rank
        assert backward == expected_backward, rank


def counts_without_a_domain(config, script):
    """Collectives and losses of five steps of a script's model, and how often a ShardTensor was made."""
    comm.build_mesh(CPU, config.layout(comm.world_size()))
    as_subclass, found = torch.Tensor.as_subclass, []

    def noted(self, cls):
        found.append(cls)
        return as_subclass(self, cls)

    def used(*args, **kwargs):
        raise AssertionError("a ShardTensor was used")

    with (
        unittest.mock.patch.object(torch.Tensor, "as_subclass", noted),
        unittest.mock.patch.object(ShardTensor, "__torch_function__", used),
        CollectiveCounter() as counted,
    ):
        model = build_model(config)
        split = split_images(model, config.options(DomainOptions)) if script == "train_shard" else None
        task = build_task(config)
        options = config.options(DataParallelOptions)
        parallel = data_parallel(model, options, CPU, initial_weights(config), task.usage, split)
        step = TrainingStep(config, CPU, parallel, build_optimizer(config, parallel, CPU), task)
        losses = [step(i, *batch_of(config)).loss for i in range(5)]
    return counted.calls, counted.bytes, torch.stack(losses), found.count(ShardTensor)


@pytest.mark.parametrize(
    ("size", "strategy"), slow_rows_but([2], [(1, "ddp"), (2, "ddp"), (2, "fsdp")], "whole weights, and a single rank")
)
def test_a_domain_of_one_rank_is_plain_tensors_all_the_way(ranks, tiny_config, size, strategy):
    config = tiny_config(**SIZES, data_parallel=strategy)
    plain, domain = (ranks(size, counts_without_a_domain, config, script) for script in ("train", "train_shard"))
    for (calls, sent, losses, _), (found_calls, found_sent, found, made) in zip(plain, domain, strict=True):
        assert made == 0
        assert (found_calls, found_sent) == (calls, sent)
        assert torch.equal(found, losses)


def weights_after(config, steps):
    _, weights, *_ = train(config, steps)
    return {name: value for name, (value, _) in weights.items()}


@pytest.mark.parametrize(
    ("size", "domain", "method"),
    slow_rows_but([1], [(2, 2, "ring"), (3, 3, "all_to_all"), (4, 2, "gather")], "the other methods of attention"),
)
def test_shared_weights_stay_equal_to_the_bit(ranks, tiny_config, size, domain, method):
    short = SIZES | {"img_size": [20, 16], "depth": 1}
    config = tiny_config(**short, domain_parallel=domain, domain_method=method)
    one, *others = ranks(size, weights_after, config, 50)
    for other in others:
        for name, value in one.items():
            assert torch.equal(value, other[name]), name


def compiled_as_one_graph(domain, method):
    """Graphs of the whole model's forward pass, and relative errors of output and gradients against eager."""
    img_size, patch_size = (36, 40), 4
    comm.build_mesh(CPU, Layout(comm.world_size(), domain=tile_counts(domain)))
    torch.manual_seed(0)
    model = ViT(img_size, patch_size, 3, 3, embed_dim=48, depth=1, num_heads=12)
    split = domain_parallel(model, img_size, patch_size, method)
    shard_parameters(model, split.mesh, {"pos_embed.weight": (split.token_axes(), unsplit_axes(48))})
    x = torch.randn(split.spec(2, 3).local_shape, requires_grad=True)
    compiler = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    results = []
    for forward in (model.forward, torch.compile(model.forward, backend=compiler, fullgraph=True)):
        y = forward(x)
        results.append([y, *torch.autograd.grad(y.square().sum(), [x, *model.parameters()])])
    return compiler.frame_count, max(error(*pair) for pair in zip(*results, strict=True))


GRAPHS = [(3, 3, "all_to_all"), (3, 3, "gather"), ("2x2", 4, "ring")]


@pytest.mark.slow("a whole compiled model")
@needs_torch((2, 13), "cannot trace the rules of ShardTensor in a model")
@pytest.mark.parametrize("case", slow_but(GRAPHS[:1], GRAPHS, "one graph with the other methods of attention"))
def test_the_whole_model_is_one_graph(ranks, case):
    domain, size, method = case
    for graphs, worst in ranks(size, compiled_as_one_graph, domain, method):
        assert graphs == 1
        assert worst < 1e-6


# Of these, pad's, einsum's and layer_norm's are in part functions of torch. What makes a plan anew takes twice as many.
PYTHON_CALLS = {
    "x * 2": 6, "x + x": 6, "x + plain": 9, "where": 12, "gelu": 5, "x[..., 1:]": 11, "x[:, 1:]": 12, "sum": 8,
    "mean": 8, "var": 8, "softmax": 9, "unsqueeze": 8, "flatten": 8, "permute": 8, "chunk": 12, "cat": 13, "pad": 16,
    "x @ plain": 8, "x @ x": 8, "einsum": 13, "linear": 8, "layer_norm": 9,
}  # fmt: skip


def python_calls_of_operations():
    mesh = init_device_mesh("cpu", (comm.world_size(),))
    _, x = tiny_tensors(mesh)
    return {name: python_calls(function, x) for name, function in OPERATIONS.items()}


def test_an_operation_takes_few_python_calls(ranks):
    """The deterministic part of its cost; python -m tests.dispatch measures the microseconds."""
    for calls in ranks(2, python_calls_of_operations):
        assert calls.keys() == PYTHON_CALLS.keys()
        for name, most in PYTHON_CALLS.items():
            assert calls[name] <= most, (name, calls)
