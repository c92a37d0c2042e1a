"""What a run on GPUs does beside its steps, shown without a GPU: threads, limits of time, streams, what is told."""

import json
import threading
from types import SimpleNamespace

import pytest
import torch

from distributed.checks.usage import Usage
from tests.test_gpu_paths import Told
from training.assembly import build_step, random_batch
from training.run import report
from training.run.run import Run
from training.run.watchdog import Watchdog
from training.step import step
from utils import comm, connection, rank_failure

CPU = torch.device("cpu")


@pytest.fixture
def third_device(monkeypatch):
    """A machine with accelerators: this thread uses number 3, new ones begin on 0. Call: the number that one uses."""
    current = threading.local()
    for name, value in {
        "is_available": lambda: True,
        "current_device_index": lambda: getattr(current, "index", 0),
        "set_device_index": lambda index: setattr(current, "index", index),
    }.items():
        monkeypatch.setattr(torch.accelerator, name, value)
    torch.accelerator.set_device_index(3)
    return torch.accelerator.current_device_index


def test_threads_that_leave_a_group_or_watch_a_run_begin_on_the_device_of_the_rank(third_device, monkeypatch, tmp_path):
    used = []
    monkeypatch.setattr(comm.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(comm.dist, "destroy_process_group", lambda: used.append(third_device()))
    monkeypatch.setattr(connection, "_listener", None)
    connection.disconnect()
    monkeypatch.setattr(comm.dist, "is_initialized", lambda: False)
    watched = threading.Event()
    dog = Watchdog(60, tmp_path)
    monkeypatch.setattr(dog, "_watch", lambda: used.append(third_device()) or watched.set())
    with dog:
        assert watched.wait(20)
    assert used == [3, 3]


def test_calls_that_two_lists_of_torch_hold_are_told_once(monkeypatch):
    call = {"process_group": ["0"], "profiling_name": "nccl:all_reduce", "input_dtypes": [], "input_sizes": []}
    done = {"retired": True, "state": "completed", "is_p2p": False}
    entries = [call | done | {"collective_seq_id": n, "time_created_ns": n} for n in (1, 2, 3)]
    text = json.dumps({"entries": entries})
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        monkeypatch.setattr(torch._C._distributed_c10d, name, lambda: text, raising=False)
    assert [call["number"] for call in rank_failure._calls()] == [1, 2, 3]


@pytest.mark.parametrize("graphs", [True, False])
def test_ddp_sees_its_first_backward_pass_on_the_stream_of_graphs(tiny_config, monkeypatch, graphs):
    """Else it warns of another stream in the capture, and waits for both."""
    log = []
    built = build_step(tiny_config(), CPU)
    built.config = tiny_config(enable_cuda_graphs=graphs)
    built.parallel.replicated = True
    monkeypatch.setattr(step, "on_capture_stream", lambda: Told(log, "stream"))
    predict = built.task.predict
    monkeypatch.setattr(built.task, "predict", lambda *args: log.append("forward") or predict(*args))
    built.warm_up_ddp_buckets(*random_batch(built.task, CPU))
    one = ["in stream", "forward", "out of stream"] if graphs else ["forward"]
    assert log == 2 * one


@pytest.mark.parametrize(
    ("graphs", "ranks", "iteration", "limit"),
    [(True, 2, 50, 60), (True, 2, 5, None), (True, 1, 50, None), (False, 2, 50, None)],
)
def test_where_nccl_ends_no_wait_a_step_may_take_comm_timeout(
    tiny_config, monkeypatch, graphs, ranks, iteration, limit
):
    """The first steps compile and capture."""
    monkeypatch.setattr(comm, "world_size", lambda: ranks)
    settings = tiny_config(enable_cuda_graphs=graphs, comm_timeout=60)
    progress, checkpoints = SimpleNamespace(iteration=iteration), SimpleNamespace(began=0)
    run = SimpleNamespace(config=settings, progress=progress, checkpoints=checkpoints)
    assert Run._step_seconds(run) == limit


def test_a_limit_of_steps_ends_with_the_block(tmp_path):
    dog = Watchdog(1800, tmp_path)
    with dog.within(60):
        assert (dog.limit, dog.option) == (60, "comm_timeout")
    assert (dog.limit, dog.option) == (1800, "watchdog_timeout")
    for none in (None, 3600):
        with dog.within(none):
            assert (dog.limit, dog.option) == (1800, "watchdog_timeout")


@pytest.mark.parametrize(("strategy", "mode", "kind", "told"), [
    ("zero1", "fp16", "cuda", True), ("zero1", "bf16", "cuda", False), ("ddp", "fp16", "cuda", False),
    ("zero1", "fp16", "cpu", False),
])  # fmt: skip
def test_a_run_says_where_the_host_waits_in_each_step(tiny_config, monkeypatch, strategy, mode, kind, told):
    settings = tiny_config(data_parallel=strategy, amp_mode=mode)
    parts = SimpleNamespace(notes=(), facts=SimpleNamespace(usage=Usage()))
    step_parts = SimpleNamespace(device=torch.device(kind), task=parts, parallel=parts)
    lines = []
    monkeypatch.setattr(report.log, "info", lambda line, *_: lines.append(line))
    report.log_notes(settings, step_parts)
    assert any("the host waits for the device once a step" in line for line in lines) == told
