"""A step captured as a CUDA graph: what is refused, in which order it is made, that it trains as the eager one."""

import contextlib
import gc
import random
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distributed import collectives, data_parallel
from distributed.collectives import all_gather, all_to_all, as_group, reduce_from_region, reduce_scatter, start_shift
from distributed.data_parallel import DataParallelOptions
from distributed.parallel_model import ParallelModel
from distributed.split import Split
from networks.vit import ViT
from tests.support.refusals import refusal
from tests.test_compute import batch, build, losses_and_weights
from training.run import run as run_module
from training.run.run import Run
from training.step.cuda_graphs import DDP_WARMUP_STEPS, WARMUP_STEPS, CapturedStep, check_capture
from training.step.optimizer import build_optimizer
from training.step.speed_options import checkpoint_activations
from training.step.step import TrainingStep
from training.tasks import build_task
from utils import comm
from utils.device import capture_stream, on_capture_stream

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_cuda_graphs_on_the_cpu_are_refused(tiny_config):
    with refusal("--enable_cuda_graphs needs a GPU with CUDA or ROCm; this run is on cpu"):
        build(tiny_config(enable_cuda_graphs=True))


def test_cuda_graphs_with_fp16_need_the_fused_optimizer(tiny_config):
    with refusal("enable_cuda_graphs with amp_mode fp16 needs enable_fused"):
        tiny_config(enable_cuda_graphs=True, amp_mode="fp16")


@pytest.mark.parametrize(
    ("sizes", "options", "line"),
    [
        ({"grad_reduce": 2}, {"data_parallel": "fsdp"}, "goes without --data_parallel=fsdp"),
        ({"grad_reduce": 2}, {"data_parallel": "zero1"}, "goes without --data_parallel=zero1"),
        ({"pp": 2}, {}, "goes without pipeline_parallel"),
        ({"domain": 2}, {}, "goes without domain_parallel"),
        ({"tp": 2}, {"tp_backend": "dtensor"}, "with tensor_parallel goes without tp_backend dtensor"),
        ({"tp": 2}, {"dropout": 0.1}, "with dropout and tensor_parallel needs sequence_parallel"),
        ({}, {"dropout": 0.1, "activation_checkpointing": "full"}, "goes without activation_checkpointing"),
        ({}, {"data_loader_config": "dali"}, "goes without --data_loader_config=dali"),
    ],
    ids=str,
)
def test_what_cannot_be_captured_is_refused(tiny_config, monkeypatch, sizes, options, line):
    monkeypatch.setattr(comm, "get_size", lambda name: sizes.get(name, 1))
    with refusal(f"--enable_cuda_graphs {line}"):
        check_capture(tiny_config(enable_cuda_graphs=True, **options), CUDA, nn.Linear(2, 2))


@pytest.mark.parametrize(
    "sizes", [{}, {"grad_reduce": 4}, {"tp": 2, "grad_reduce": 2}, {"cp": 2, "grad_reduce": 2}], ids=str
)
def test_replicas_tensor_and_context_parallel_ranks_are_captured(tiny_config, monkeypatch, sizes):
    monkeypatch.setattr(comm, "get_size", lambda name: sizes.get(name, 1))
    check_capture(tiny_config(enable_cuda_graphs=True, activation_checkpointing="full"), CUDA, nn.Linear(2, 2))
    with refusal("dropout"):
        check_capture(tiny_config(enable_cuda_graphs=True, activation_checkpointing="full"), CUDA, nn.Dropout(0.1))


def test_checkpointed_blocks_leave_generators_alone(monkeypatch):
    """A capture refuses to read the state of a generator."""
    model = ViT((8, 16), 4, 20, 20, embed_dim=16, depth=2, num_heads=2)
    checkpoint_activations(model.blocks, generators=False)
    monkeypatch.setattr(torch, "get_rng_state", lambda: pytest.fail("a generator was read"))
    model(torch.randn(1, 20, 8, 16)).sum().backward()


@pytest.fixture
def fake_cuda(monkeypatch):
    """torch.cuda's streams and graphs as words in a list, in the order of the calls."""
    calls, current = [], ["main"]

    class Stream:
        def __init__(self, name="side"):
            self.name = name

        def wait_stream(self, other):
            calls.append(f"{self.name} waits for {other.name}")

    class Graph:
        def replay(self):
            calls.append("replay")

    @contextlib.contextmanager
    def on(stream):
        current.append(stream.name)
        yield
        current.pop()

    @contextlib.contextmanager
    def graph(graph, stream, capture_error_mode):
        calls.append(f"capture {capture_error_mode}")
        with on(stream):
            yield

    names = {"Stream": Stream, "CUDAGraph": Graph, "stream": on, "graph": graph}
    for name, value in names.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream(current[-1]))
    capture_stream.cache_clear()
    yield SimpleNamespace(calls=calls, current=current)
    capture_stream.cache_clear()


@pytest.mark.parametrize(("replicated", "warmups"), [(False, WARMUP_STEPS), (True, DDP_WARMUP_STEPS)])
def test_a_step_is_warmed_up_captured_and_replayed_in_that_order(fake_cuda, replicated, warmups):
    def step(x):
        fake_cuda.calls.append(f"step on {fake_cuda.current[-1]}")
        return x.sum()

    captured = CapturedStep(replicated)
    for value in range(warmups + 2):
        captured(step, torch.full((2,), float(value)))
    eager = ["side waits for main", "step on side", "main waits for side"]
    assert fake_cuda.calls == [*eager * warmups, "capture thread_local", "step on side", "replay", "replay"]
    assert captured.inputs[0].tolist() == [warmups + 1.0] * 2  # what the replay reads


def test_a_step_that_cannot_be_captured_ends_in_one_line(fake_cuda):
    def step(x):
        if "capture thread_local" in fake_cuda.calls:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore")
        return x.sum()

    captured = CapturedStep()
    with refusal("cannot be captured: CUDA error: operation not permitted.*capturing$"):
        for _ in range(WARMUP_STEPS + 1):
            captured(step, torch.zeros(2))


@pytest.mark.parametrize(
    "draw", [random.random, np.random.rand, lambda: torch.rand(1)], ids=["random", "numpy", "torch"]
)
@pytest.mark.parametrize("first", [0, WARMUP_STEPS], ids=["warm-up", "capture"])
def test_a_step_that_draws_on_the_host_is_refused(fake_cuda, draw, first):
    """Its replays would repeat one draw. A model may draw in some steps alone."""
    calls = []

    def step(x):
        calls.append(x)
        if len(calls) > first:
            draw()
        return x.sum()

    captured = CapturedStep()
    with refusal("--enable_cuda_graphs: the step draws random numbers on the host"):
        for _ in range(WARMUP_STEPS + 1):
            captured(step, torch.zeros(2))
    assert len(calls) == first + 1


def captured_step(config):
    """A TrainingStep on the CPU that will be captured."""
    _, step = build(config)
    step.config = config.model_copy(update={"enable_cuda_graphs": True})
    return step


@contextlib.contextmanager
def no_collection():
    gc.disable()
    yield
    gc.enable()


def graphs_of(step):
    return [weakref.ref(captured.graph) for captured in step.captured.values()]


def test_a_graph_ends_with_its_step(tiny_config, fake_cuda):
    step = captured_step(tiny_config())
    for i in range(WARMUP_STEPS + 2):
        step(i, *batch(step.config))
    (graph,) = graphs_of(step)
    assert graph()
    with no_collection():
        del step
        assert graph() is None


@pytest.mark.parametrize("error", [None, ValueError])
def test_a_run_has_a_graph_for_each_length_of_a_rollout_and_drops_them_when_it_closes(
    tiny_config, fake_cuda, monkeypatch, error
):
    """Also after an error, then without waiting for a device that may wait for other ranks."""
    steps = WARMUP_STEPS + 2
    config = tiny_config(num_iters=2 * steps, rollout_schedule=[[steps, 2]])
    step, task, waits = captured_step(config), build_task(config), []
    monkeypatch.setattr(run_module, "synchronize", waits.append)
    with no_collection(), pytest.raises(error) if error else contextlib.nullcontext():
        with Run(config, step, task, task.loaders(CPU)) as run:
            for iteration in run.iterations():
                with iteration:
                    iteration.finish(step(iteration.number, *iteration.batch()))
            graphs = graphs_of(step)
            assert len(graphs) == 2 and all(graph() for graph in graphs)
            if error:
                raise error
    assert [graph() for graph in graphs] == [None, None] and waits == ([] if error else [CPU])


@pytest.mark.parametrize("graphs", [False, True])
def test_replicas_are_made_on_the_stream_of_the_capture(fake_cuda, monkeypatch, graphs):
    made_on = []

    class Replica:
        _set_params_and_buffers_to_ignore_for_model = staticmethod(lambda *args: None)

        def __init__(self, *args, **options):
            made_on.append(fake_cuda.current[-1])

    monkeypatch.setattr(data_parallel, "DistributedDataParallel", Replica)
    data_parallel.replicate(nn.Linear(2, 2), DataParallelOptions(enable_cuda_graphs=graphs), CPU, Split())
    assert made_on == ["side" if graphs else "main"]


@pytest.fixture
def nccl():
    """A process group of one rank."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0))
    yield as_group(dist.group.WORLD)
    dist.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"amp_mode": "fp16", "enable_fused": True}, {"clip_grad_norm": 0.01}], ids=str)
def test_a_captured_replica_trains_like_an_eager_one(tiny_config, nccl, options):
    def losses(graphs):
        config = tiny_config(enable_cuda_graphs=graphs, **options)
        model, _ = build(config, CUDA)
        with on_capture_stream() if graphs else contextlib.nullcontext():
            ddp = DistributedDataParallel(model, device_ids=[0], gradient_as_bucket_view=True, static_graph=True)
        parallel = ParallelModel(model, ddp, Split(), replicated=True)
        step = TrainingStep(config, CUDA, parallel, build_optimizer(config, parallel, CUDA), build_task(config))
        return torch.stack([step(i, *batch(config, CUDA)).loss for i in range(DDP_WARMUP_STEPS + 9)]).cpu()

    torch.testing.assert_close(losses(True), losses(False), rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
def test_collectives_are_captured(nccl, monkeypatch):
    """Those of tensor and context parallelism, forward and backward; one rank alone would leave them out."""
    always = lambda forward, backward, x, *args: collectives._Pair.apply(x, forward, backward, *args)  # noqa: E731
    monkeypatch.setattr(collectives, "_apply", always)

    def step(x):
        x = x.detach().requires_grad_()
        y = reduce_from_region(x * 2, nccl) + all_gather(x, 0, [len(x)], nccl) * 3
        y = y + reduce_scatter(x, 0, [len(x)], nccl) + all_to_all(x, [len(x)], [len(x)], nccl)
        y = y + start_shift(x.detach(), x.shape, nccl)()
        y.square().sum().backward()
        return x.grad.sum() + y.sum()

    captured = CapturedStep()
    for value in range(WARMUP_STEPS + 3):
        x = torch.full((4, 3), float(value), device="cuda")
        torch.testing.assert_close(captured(step, x), step(x))


GPU_OPTIONS = [
    {},
    {"amp_mode": "bf16"},
    {"amp_mode": "fp16", "enable_fused": True},
    {"clip_grad_norm": 0.01},
    {"enable_fused": True, "enable_jit": True},
]


@pytest.mark.gpu
@pytest.mark.parametrize("options", GPU_OPTIONS, ids=str)
def test_a_captured_step_trains_like_an_eager_one(tiny_config, options):
    device = torch.device("cuda")
    eager = losses_and_weights(tiny_config(**options), 10, device)
    captured = losses_and_weights(tiny_config(enable_cuda_graphs=True, **options), 10, device)
    for a, b in zip(eager, captured, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("options", GPU_OPTIONS, ids=str)
def test_the_steady_state_step_never_waits_for_the_gpu(tiny_config, options, graphs):
    device = torch.device("cuda")
    config = tiny_config(enable_cuda_graphs=graphs, **options)
    _, step = build(config, device)
    x, y = batch(config, device)
    for i in range(6):
        step(i, x, y)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for i in range(6, 10):
            step(i, x, y)
    finally:
        torch.cuda.set_sync_debug_mode("default")
