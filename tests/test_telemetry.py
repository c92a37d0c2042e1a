"""The readings of a run: the same in every layout, in every tracker, and whatever happens to the run."""

import json
import math
from types import SimpleNamespace

import pytest
import torch

import train
from tests.support import programs
from tests.support.launch import wait_until
from tests.support.layout_parity import build, own_part
from tests.support.refusals import refusal
from tests.test_training import scalars, stop_after
from training.models import info
from training.run.loggers import Logger, Loggers, MetricsFile, read_metrics
from training.run.telemetry import PHASES
from training.step.step import TrainingStep
from training.tasks import build_task
from utils import comm
from utils.errors import NonFiniteLossError

CPU = torch.device("cpu")
STEPS = 3
SIZES = {"img_size": [36, 40], "num_heads": 4, "depth": 2, "global_batch_size": 4}


def norms(config):
    """Norms of the gradients of some steps, over all ranks."""
    step, random, squares = build(config), torch.Generator().manual_seed(1), []
    for i in range(STEPS):
        x, y = (own_part(part, config) for part in build_task(config).random_batch(random))
        squares.append(step(i, x, y, log_norm=True).grad_norm_squared)
    return comm.all_reduce(torch.stack(squares)).sqrt()


def norms_by_torch(config):
    """The same on one device, of gradients that torch itself measures before each step."""
    step, random, found = build(config), torch.Generator().manual_seed(1), []
    for i in range(STEPS):
        x, y = build_task(config).random_batch(random)
        with step.autocast():
            loss = step.loss(step.task.predict(step.parallel, x, y), y)
        loss.backward()
        found.append(torch.nn.utils.get_total_norm([p.grad for p in step.parallel.model.parameters()]))
        step.optimizer.zero_grad()
        step(i, x, y)
    return torch.stack(found)


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [({"clip_grad_norm": 1e-3}, 1e-5), ({"amp_mode": "fp16", "enable_fused": True}, 2e-2)],
    ids=["before clipping", "without the factor of the scaler"],
)
def test_the_norm_is_that_of_the_loss_alone(ranks, tiny_config, options, tolerance):
    config = tiny_config(**SIZES, **options)
    (expected,) = ranks(1, norms_by_torch, config)
    for found in ranks(2, norms, config):
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=0)


@pytest.fixture
def run(tiny_options, tmp_path):
    """Train in this process; returns the status, the run's folder, and its readings."""

    def start(**overrides):
        status = train.main(tiny_options(**{"log_every": 4, **overrides}))
        folder = tmp_path / "logs/quick" / str(overrides.get("run_num", "00"))
        return SimpleNamespace(status=status, folder=folder, readings=read_metrics(folder / "metrics-rank0.jsonl"))

    return start


def iterations(readings):
    return [reading["iteration"] for reading in readings]


def test_every_reading_is_a_line_and_a_point_of_each_curve(run):
    done = run(num_iters=12)  # an epoch ends after 10 steps
    assert iterations(done.readings) == [4, 8, 10, 12]
    lines = (done.folder / "metrics-rank0.jsonl").read_text().splitlines()
    assert [json.loads(line, parse_constant=pytest.fail) for line in lines] == done.readings
    for reading in done.readings:
        assert reading["gradient/norm"] > 0 and reading["memory/peak_bytes"] > 2**20 and reading["ranks"] == 1
        assert reading["speed/flops_per_sec"] > 0 and reading["speed/mfu"] is None  # of a CPU no peak is known
        phases = [reading[f"time/{phase}"] for phase in PHASES]
        assert [phase is None for phase in phases] == [phase == "pipeline" for phase in PHASES]
        assert 0 < sum(phase or 0 for phase in phases) <= reading["time/step"]
    for name in ("gradient/norm", "memory/peak_bytes", "time/backward", "Loss/train"):
        curve = scalars(done.folder, name)
        found = {reading["iteration"]: pytest.approx(reading[name]) for reading in done.readings}
        assert {iteration: curve[iteration] for iteration in found} == found
    assert len(scalars(done.folder, "Loss/train")) == 12


def test_every_rank_has_a_file_and_all_name_the_same_slowest_rank(tiny_options, tmp_path):
    words = ["train.py", *tiny_options(log_every=4)]
    for status, output in programs.run_ranks(words, ranks=2)[0:1]:
        assert status == 0, output
    files = sorted((tmp_path / "logs/quick/00").glob("metrics-rank*.jsonl"))
    assert [file.name for file in files] == ["metrics-rank0.jsonl", "metrics-rank1.jsonl"]
    first, second = map(read_metrics, files)
    for a, b in zip(first, second, strict=True):
        shared = ("iteration", "Loss/train", "gradient/norm", "time/slowest_rank", "memory/most_bytes")
        assert {name: a[name] for name in shared} == {name: b[name] for name in shared}
        assert max(a["memory/peak_bytes"], b["memory/peak_bytes"]) == a["memory/most_bytes"]


def test_a_resumed_run_has_each_iteration_once(run, monkeypatch):
    options = {"num_iters": 24, "checkpoint_every": 8}
    with monkeypatch.context() as patch:
        stop_after(patch, 14)
        stopped = run(**options)
    assert stopped.status == 75 and iterations(stopped.readings)[-1] == 14
    # Killed after more steps, in the middle of a line; and a rank that is no more.
    with open(stopped.folder / "metrics-rank0.jsonl", "a") as file:
        file.write('{"iteration": 16, "Loss/train": 1}\n{"iteration": 18, "lo')
    (stopped.folder / "metrics-rank7.jsonl").write_text('{"iteration": 8}\n{"iteration": 16}\n')
    whole, expected = run(**options), run(run_num="whole", **options)
    assert iterations(whole.readings) == sorted({*iterations(expected.readings), 14})
    assert iterations(read_metrics(whole.folder / "metrics-rank7.jsonl")) == [8]


def test_lines_survive_kill_9(tiny_options, tmp_path):
    program = programs.start(["train.py", *tiny_options(log_every=1, num_iters=10_000, validate_every=10_000)])
    file = tmp_path / "logs/quick/00/metrics-rank0.jsonl"
    wait_until(lambda: file.exists() and file.read_bytes().count(b"\n") > 5)
    program.kill()
    program.wait()
    found = read_metrics(file)
    assert iterations(found) == list(range(1, len(found) + 1)) and len(found) > 5


def test_a_loss_that_is_no_number_is_null(run, monkeypatch, tmp_path):
    step = TrainingStep.__call__

    def poisoned(self, iteration, *batch, **options):
        output = step(self, iteration, *batch, **options)
        return output._replace(loss=output.loss * (math.nan if iteration == 5 else 1))

    monkeypatch.setattr(TrainingStep, "__call__", poisoned)
    with pytest.raises(NonFiniteLossError, match="iteration 6"):
        run(log_every=3)
    lines = (tmp_path / "logs/quick/00/metrics-rank0.jsonl").read_text().splitlines()
    assert [json.loads(line, parse_constant=pytest.fail)["Loss/train"] is None for line in lines] == [False, True]


def test_a_full_disk_ends_the_file_with_one_warning_and_a_whole_line(tmp_path, caplog):
    loggers = Loggers()
    loggers.add(MetricsFile, tmp_path, 0, "cpu")
    loggers.log({"a": 1.0, "b": math.inf}, 1)
    (file,) = loggers.open
    real, room = file.file, 5

    def write(line):
        return real.write(line[:room])

    file.file = SimpleNamespace(write=write, tell=real.tell, truncate=real.truncate, close=real.close)
    for iteration in (2, 3):
        loggers.log({"a": 1.0}, iteration)
    (found,) = read_metrics(tmp_path / "metrics-rank0.jsonl")
    assert found["iteration"] == 1 and found["a"] == 1 and found["b"] is None
    assert (tmp_path / "metrics-rank0.jsonl").read_text().endswith("}\n")
    assert [r.getMessage() for r in caplog.records] == [
        "metrics of this rank cannot be written from here on: No space left on device"
    ]


def test_a_tracker_that_fails_is_left_out_with_one_warning(caplog):
    class Broken(Logger):
        name, errors = "it", (ConnectionError,)

        def log(self, *_):
            raise ConnectionResetError("reset\nby peer")

    told, loggers = [], Loggers()
    loggers.add(Broken)
    loggers.open.append(SimpleNamespace(errors=(), name="", log=lambda *args: told.append(args)))
    loggers.log({}, 1)
    loggers.log({}, 2)
    assert [args[1] for args in told] == [1, 2]
    assert [r.getMessage() for r in caplog.records] == ["it cannot be written from here on: reset"]


@pytest.mark.slow("MLflow, an extra")
def test_mlflow_has_the_curves_of_a_stopped_and_resumed_run(run, monkeypatch, tmp_path):
    pytest.importorskip("mlflow")
    from mlflow.tracking import MlflowClient

    with monkeypatch.context() as patch:
        stop_after(patch, 6)
        run(tracker="mlflow")
    done = run(tracker="mlflow")
    client = MlflowClient(f"sqlite:///{tmp_path}/logs/mlflow.db")
    (experiment,) = [found for found in client.search_experiments() if found.name != "Default"]
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.status == "FINISHED" and found.data.params["embed_dim"] == "32"
    history = {m.step: m.value for m in client.get_metric_history(found.info.run_id, "Loss/train")}
    assert history == pytest.approx(scalars(done.folder, "Loss/train"), rel=1e-6) and len(history) == 12
    assert found.data.metrics["gradient/norm"] == done.readings[-1]["gradient/norm"]


@pytest.mark.slow("Weights & Biases, an extra")
def test_weights_and_biases_has_the_curves_without_a_network(run, monkeypatch):
    pytest.importorskip("wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.delenv("WANDB_MODE", raising=False)
    done, history = run(tracker="wandb"), {}
    (file,) = done.folder.glob("wandb/offline-run-*/*.wandb")
    for data in leveldb_records(file.read_bytes()):
        items = {
            "/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in Record.FromString(data).history.item
        }
        if "Loss/train" in items:
            history[items["_step"]] = items["Loss/train"]
    assert history == pytest.approx(scalars(done.folder, "Loss/train"), rel=1e-6) and len(history) == 12


def leveldb_records(log):
    """The records of a log as LevelDB has it, after 7 bytes of the file's own: pieces in blocks of 32 KiB."""
    at, pieces, block = 7, b"", 2**15
    while at < len(log):
        if block - at % block < 7:  # a header does not fit
            at += block - at % block
        size, kind = int.from_bytes(log[at + 4 : at + 6], "little"), log[at + 6]
        pieces += log[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, last
            yield pieces
            pieces = b""


@pytest.mark.parametrize("name", ["mlflow", "wandb"])
def test_a_missing_package_is_one_line(run, monkeypatch, name):
    monkeypatch.setattr("importlib.util.find_spec", lambda found: None)
    line = f"--tracker {name}: this package is not installed: pip install -r requirements/trackers.txt"
    with refusal(line):
        run(tracker=name)


@pytest.mark.parametrize(
    ("name", "amp_mode", "peak"),
    [
        ("NVIDIA A100-SXM4-40GB", "bf16", 312e12), ("NVIDIA H100 80GB HBM3", "none", 67e12),
        ("NVIDIA H100 PCIe", "bf16", None), ("NVIDIA H200 NVL", "bf16", None), ("AMD Instinct MI250X", "fp8", None),
        ("NVIDIA A100-SXM-64GB", "bf16", 358e12), ("NVIDIA GH200 480GB", "bf16", 989.5e12),
        ("NVIDIA GB200", "bf16", 2.5e15), ("AMD Instinct MI300X", "bf16", 1.3074e15),
        ("AMD Instinct MI300A", "fp8", 1.9612e15), ("NVIDIA A100-PCIE-40GB", "bf16", 312e12),
        ("NVIDIA A100 80GB PCIe", "bf16", 312e12), ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16", None),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", "bf16", None),
    ],
)  # fmt: skip
def test_a_peak_is_that_of_the_device_or_not_known(monkeypatch, tiny_config, name, amp_mode, peak):
    monkeypatch.setattr(info, "device_name", lambda _: name)
    assert info.peak_flops_per_sec(CPU, tiny_config(amp_mode=amp_mode)) == peak
