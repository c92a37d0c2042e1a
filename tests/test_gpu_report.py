"""The report of a machine's GPUs: whatever breaks in a command is told, and the other commands follow."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from distributed import attention
from distributed.collectives import as_group
from tests.support import programs
from tests.support.launch import alive, popen, wait_until, without_make
from tests.support.refusals import refusal
from tools import gpu_report
from tools.instruments.collective_speed import are_right
from utils.config import SCRIPTS, load_config
from utils.errors import os_errors_as_usage_errors

LEAVES = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(99)"])
print("child", child.pid, flush=True)
"""
SAVES = """
import signal, sys, time
signal.signal(15, lambda *_: sys.exit({}))
print("Saved checkpoint", flush=True)
time.sleep(99)
"""


@pytest.fixture
def report(tmp_path, monkeypatch):
    """Call with programs by name: exit status, the report, and the outcome of each."""

    def run(*words, **programs):
        todo = {}
        for name, program in programs.items():
            (tmp_path / f"{name}.py").write_text(program)
            todo[name] = f"python {tmp_path}/{name}.py"
        monkeypatch.setattr(gpu_report, "commands", lambda *_: todo)
        monkeypatch.setattr(gpu_report.signal, "signal", lambda *_: None)
        monkeypatch.chdir(tmp_path)
        status = gpu_report.main(["--device=cpu", f"--out={tmp_path}/out", *words])
        (written,) = (tmp_path / "out").glob("*.md")
        text = written.read_text()
        return status, text, {name: "".join(re.findall(rf"\| {name} +\|(.*)", text)) for name in programs}

    return run


def test_a_command_that_fails_hangs_or_leaves_processes_is_told_and_the_others_follow(report, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_report, "LONGEST", 3)
    reads = "import pathlib; (file,) = pathlib.Path('../../../out').glob('*.md'); "
    status, text, found = report(
        bad="print('so it is'); raise SystemExit(3)",
        leaves=LEAVES,
        hangs=LEAVES + "time.sleep(99)",
        follows=reads + "raise SystemExit('so it is' not in file.read_text())",  # the report is on disk after each
        ladder="print('a table')",
    )
    assert status == 1 and "## ladder\n\n```text\na table\n```" in text
    assert "failed, status 3" in found["bad"] and "so it is" in found["bad"] and "out of time" in found["hangs"]
    assert "passed" in found["leaves"] and "passed" in found["follows"]
    logs = [next(tmp_path.glob(f"logs/gpu_report/*/{name}.log")).read_text() for name in ("leaves", "hangs")]
    assert not any(alive(re.search(r"child (\d+)", log)[1]) for log in logs)


@pytest.mark.parametrize(
    ("hangs", "outcomes", "status"),
    [
        (2000, ("passed", "not finished", "not reached"), 0),  # the others took its time
        (gpu_report.LONGEST, ("passed", "out of time", "not finished"), 1),
    ],
)
def test_what_is_not_reached_has_not_failed(report, monkeypatch, capsys, hangs, outcomes, status):
    """All commands together have a time limit too: of 500 seconds here, of which the first command takes 50 or 200."""
    seconds = {"passes": 200 if hangs > gpu_report.LONGEST else 50, "hangs": hangs, "late": 2000}
    now = [0.0]

    def run_command(name, command, work, limit):
        now[0] += min(limit, seconds[name])
        return ("passed", "") if seconds[name] < limit else ("out of time", "")

    clock = SimpleNamespace(monotonic=lambda: now[0], strftime=time.strftime)
    monkeypatch.setattr(gpu_report, "time", clock)
    monkeypatch.setattr(gpu_report, "run_command", run_command)
    found_status, _, found = report("--seconds=500", passes="", hangs="", late="")
    assert tuple(line.split("|")[1].strip() for line in found.values()) == outcomes
    assert found_status == status and "; --seconds gives more" in capsys.readouterr().out


def test_a_machine_is_looked_at_before_anything_is_measured():
    assert next(iter(gpu_report.commands("cuda", 8))) == "preflight"


@pytest.mark.parametrize(("status", "outcome"), [(75, ("passed", "")), (0, ("failed, status 0", "Saved checkpoint"))])
def test_a_training_is_stopped_when_it_has_saved_and_must_end_as_expected(status, outcome, tmp_path):
    (tmp_path / "saves.py").write_text(SAVES.format(status))
    found = gpu_report.run_command(gpu_report.STOPPED, f"{sys.executable} {tmp_path}/saves.py", tmp_path, 60)
    assert found == outcome


def test_the_plans_of_the_training_runs_are_printed(capsys, monkeypatch):
    todo = gpu_report.commands("cpu", 2)
    some = {name: todo[name] for name in ("mp_quick/tp", "forecast")}
    monkeypatch.setattr(
        gpu_report, "commands", lambda *_: {"broken": "python -m train --config=quick --num_heads=3"} | some
    )
    gpu_report.main(["--plan", "h100", "--device=cpu"])
    said = capsys.readouterr().out
    assert re.search(r"\| broken .* not planned: UsageError: ", said)
    assert re.search(r"\| mp_quick/tp +\| 2 x h100 \|", said) and "forecast" not in said


@pytest.mark.parametrize("count", [1, 2, 8])
def test_the_commands_train_what_the_scripts_take(count):
    layouts = set()
    for name, command in gpu_report.commands("cuda", count).items():
        if trained := gpu_report.training(command):
            words, ranks = trained
            script = re.search(r"-m (train\w*)", command)[1]
            config = load_config(words, None, ranks, *SCRIPTS[f"{script}.py"][:2])
            assert name in (f"{config.config}/{config.run_num}", gpu_report.STOPPED)
            layouts.add((ranks, *config.layout(ranks).mesh_dims.values()))
    assert len(layouts) == (1 if count == 1 else 6)  # one device, and dp, tp, cp, pp, domain


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], "device 'cuda': not on this machine"),
        (["--device=cpu", "--gpu=h1000"], "no GPU 'h1000' (did you mean 'h100'?)"),
        (["--device=cpu", "--out=/proc/nowhere"], "/proc/nowhere: "),
    ],
)
def test_what_cannot_be_used_is_one_line(words, line, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gpu_report.torch.accelerator, "is_available", lambda: False)
    with refusal(re.escape(line)), os_errors_as_usage_errors():
        gpu_report.main([f"--out={tmp_path}", *words])


@pytest.mark.slow("make gpu as it is called")
@pytest.mark.skipif(gpu_report.torch.accelerator.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    "words",
    [
        ["make", "gpu", f"PY={sys.executable}"],
        pytest.param([sys.executable, "-m", "pytest", "-m", "gpu"], marks=pytest.mark.slow("all tests are collected")),
    ],
)
def test_without_a_gpu_one_line_says_so(words):
    env = without_make()
    done = subprocess.run(words, capture_output=True, text=True, env=env)
    lines = [line for line in (done.stdout + done.stderr).splitlines() if not line.startswith("make: ")]
    assert done.returncode == 2 and len(lines) == 1 and re.search("not on this machine|no GPU is there", lines[0])


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def lone_rank(request):
    """The device of a process group of one rank, of gloo or NCCL."""
    device = torch.device(request.param, 0) if request.param == "cuda" else torch.device("cpu")
    backend = "gloo" if request.param == "cpu" else "nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield device
    dist.destroy_process_group()


def test_collectives_of_one_rank_give_the_right_numbers(lone_rank):
    assert set(are_right(lone_rank, torch.float32).values()) == {True}


@pytest.mark.parametrize("method", attention.METHODS)
def test_attention_of_one_rank_is_that_of_the_whole(lone_rank, method):
    tokens, features, dtype = (16200, 64, torch.bfloat16) if lone_rank.type == "cuda" else (50, 8, torch.float32)
    group = as_group(dist.group.WORLD)
    *qkv, grad = torch.randn(4, 1, 4, tokens, features, device=lone_rank).to(dtype).unbind()
    q, k, v = (x.clone().requires_grad_() for x in qkv)
    out = attention.METHODS[method](q, k, v, sizes=[tokens], group=group)
    found = [out, *torch.autograd.grad(out, (q, k, v), grad)]
    q, k, v = (x.float().clone().requires_grad_() for x in qkv)
    whole = F.scaled_dot_product_attention(q, k, v)
    expected = [whole, *torch.autograd.grad(whole, (q, k, v), grad.float())]
    assert max(((a.float() - b).norm() / b.norm()).item() for a, b in zip(found, expected, strict=True)) < 0.02


@pytest.mark.slow("the data that the report makes for itself")
def test_who_stops_the_report_ends_its_command(tmp_path, monkeypatch):
    """The first command is real; SIGTERM, as of `timeout`."""
    env = os.environ | {"PYTHONPATH": str(Path.cwd())}
    monkeypatch.chdir(tmp_path)
    process = popen([sys.executable, "-m", "tools.gpu_report", "--device=cpu", f"--out={tmp_path}/out"], env)
    wait_until(lambda: list(tmp_path.glob("logs/gpu_report/*/preflight.log")))
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 130
    logs = str(tmp_path / "logs")
    wait_until(lambda: not [file for file in Path("/proc").glob("[0-9]*/cwd") if logs in _target(file)])


def _target(link):
    try:
        return str(link.readlink())
    except OSError:
        return ""


TAUGHT = {  # trainings whose words the tests above check, and which other tests run
    "quick/fsdp", "mp_quick/tp", "mp_quick/cp", "mp_quick/pp", "shard_quick/domain", "quick/profiled", "preflight",
    "loaders",
}  # fmt: skip


@pytest.mark.nightly
@pytest.mark.slow("the real commands of the report, at tiny sizes on the CPU, of two ranks")
@pytest.mark.timeout(1800)
def test_the_commands_run_without_a_gpu_at_tiny_sizes(tmp_path, monkeypatch):
    programs.use_forks(tmp_path / "bin", monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # preflight would take the GPUs of this machine
    monkeypatch.setattr(gpu_report.signal, "signal", lambda *_: None)
    todo = {name: command for name, command in gpu_report.commands("cpu", 2).items() if name not in TAUGHT}
    monkeypatch.setattr(gpu_report, "commands", lambda *_: todo)
    monkeypatch.chdir(tmp_path)
    assert gpu_report.main(["--device=cpu", "--gpu=h100", f"--out={tmp_path}", "--seconds=1700"]) == 0
    (written,) = tmp_path.glob("*.md")
    *_, step, planned, calls, _, _ = re.search(r"\| quick/ddp +\| 2 x h100 \|(.*)", written.read_text())[1].split("|")
    assert planned.strip() == calls.strip() == "1" and float(step) > 0
