"""The report of a machine's GPUs: whatever breaks in a command is told, and the other commands follow."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from distributed import attention
from distributed.collectives import as_group
from tests.support import programs
from tests.support.launch import popen
from tools import gpu_report
from tools.instruments.collective_speed import are_right
from utils.config import SCRIPTS, load_config
from utils.errors import UsageError
from utils.files import write_json

# A grandchild in a session of its own that no signal but SIGKILL ends, and its parent, which leaves or waits.
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('here', flush=True); time.sleep(99)"
)
PARENT = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {STUBBORN!r}], stdout=subprocess.PIPE, start_new_session=True)
child.stdout.readline()
print("child", child.pid, flush=True)
"""


@pytest.fixture
def command(tmp_path):
    """Call with a name and a program: {name: a command that runs it}."""

    def make(name, program, seconds=15, lacks=""):
        file = tmp_path / f"{name.replace(' ', '_')}.py"
        file.write_text(program)
        return {name: (seconds, f"python {file}", lacks)}

    return make


@pytest.fixture
def report(tmp_path, monkeypatch):
    """Call with commands: exit status, the report, and where the work was."""

    def run(*commands):
        todo = {name: command for one in commands for name, command in one.items()}
        monkeypatch.setattr(gpu_report, "commands", lambda *_: todo)
        monkeypatch.setattr(gpu_report.signal, "signal", lambda *_: None)
        monkeypatch.chdir(tmp_path)
        status = gpu_report.main(["--device=cpu", f"--out={tmp_path}/out"])
        (written,) = (tmp_path / "out").glob("*.json")
        (work,) = (tmp_path / "logs/gpu_report").iterdir()
        return status, json.loads(written.read_text()), written.with_suffix(".md").read_text(), work

    return run


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")")[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_command_that_fails_hangs_or_leaves_processes_is_told_and_the_others_follow(report, command, monkeypatch):
    reads = "import json, pathlib; (file,) = pathlib.Path('../../../out').glob('*.json'); "
    reads += "print(json.loads(file.read_text())['commands'][0]['command'])"  # the report is on disk after each
    status, found, text, work = report(
        command("device", "print(3e12)"),
        command("bad", "print('ValueError: so it is\\nsome more'); raise SystemExit(3)"),
        command("ladder", ""),
        command("absent", "", lacks="needs what is not here"),
        command("leaves a process", PARENT),
        command("hangs", PARENT + "time.sleep(99)", seconds=-14),
        command("follows", reads),
    )
    assert status == 1
    outcome = {row["command"]: (row["status"], row["said"], row["figures"]) for row in found["commands"]}
    assert outcome.pop("ladder")[0] == "failed"  # it has left no figures
    assert re.fullmatch(r"not done after \d s", outcome["hangs"][1])
    assert re.fullmatch(r"child \d+", outcome["leaves a process"][1])
    assert outcome == {
        "device": ("passed", "3000000000000.0", {"bf16 TFLOP/s": 3.0}),
        "bad": ("failed", "exit status 3, not 0: ValueError: so it is", {}),
        "absent": ("skipped", "needs what is not here", {}),
        "leaves a process": ("passed", outcome["leaves a process"][1], {}),
        "hangs": ("out of time", outcome["hangs"][1], {}),
        "follows": ("passed", "device", {}),
    }
    for name in ("leaves a process", "hangs"):
        assert not alive(re.search(r"child (\d+)", (work / f"{name}.log").read_text())[1])
    assert re.search(r"\| device +\| +passed \| +[\d.]+ \| +15 \| +3000000000000.0 \| +bf16 TFLOP/s 3 \|", text), text


def test_all_commands_together_have_a_time_limit_too(report, command, monkeypatch):
    monkeypatch.setattr(gpu_report, "SECONDS", 2)
    status, found, *_ = report(command("hangs", "import time; time.sleep(99)", 6000), command("late", ""))
    assert status == 1 and [row["status"] for row in found["commands"]] == ["out of time", "not run"]


def test_a_training_is_stopped_when_it_has_saved_and_must_end_as_expected(command, tmp_path):
    program = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit({})); print('Saved checkpoint'); "
    end = time.monotonic() + 60
    for status in (75, 0):
        _, words, _ = command("saves", program.format(status) + "time.sleep(99)")["saves"]
        if status == 75:
            assert gpu_report.run_command(gpu_report.STOPPED, words, tmp_path, end) == "Saved checkpoint"
        else:
            with pytest.raises(RuntimeError, match="exit status 0, not 75"):
                gpu_report.run_command(gpu_report.STOPPED, words, tmp_path, end)


def test_goals_stand_beside_the_best_that_was_measured(tmp_path):
    speeds = {"0 workers": 4, "8 workers": 5, "bf16": 36}
    steps = [{"step": name, "samples_per_sec": n, "mfu": n / 100, "data_wait": 0.0} for name, n in speeds.items()]
    write_json(tmp_path / "ladder.json", {"steps": steps, "failed": {"fp8": "no such kernel"}})
    figures = {"short/compiled": {"MFU": 0.34}, "ladder": gpu_report.read_figures("ladder", tmp_path, "", None)}
    assert figures["ladder"]["failed"] == "fp8"
    goals = gpu_report.goals([{"command": name, "figures": found} for name, found in figures.items()])
    assert [(goal["measured"], goal["met"]) for goal in goals] == [(0.36, "yes"), (None, "not measured"), (7.2, "yes")]


def test_plans_stand_beside_what_was_measured_hits_and_misses():
    plan = {
        "layout": {"gpus": 2}, "gpu": "h100", "settings": {"enable_jit": False}, "step_time_error": 0.35,
        "peak_allocated_bytes": 100 * 2**30, "step_time_s": 0.1, "calls": 4,
    }  # fmt: skip
    hits = {"peak_allocated_bytes": 96 * 2**30, "step_time_s": 0.134, "calls": 4}
    misses = {"peak_allocated_bytes": 94 * 2**30, "step_time_s": 0.136, "calls": 5}

    def verdicts(plan, found):
        row = gpu_report.beside_plan("quick/ddp", plan, found)
        return [row[f"{title}, measured"].split(" ")[-1] for title in gpu_report.PLANNED]

    assert verdicts(plan, hits) == ["hit"] * 3 and verdicts(plan, misses) == ["MISS"] * 3
    assert verdicts(plan, {}) == ["-"] * 3
    compiled = plan | {"settings": {"enable_jit": True}}
    assert verdicts(compiled, misses) == ["hit", "MISS", "MISS"]  # its memory is an upper bound
    row = gpu_report.beside_plan("quick/ddp", plan, misses)
    assert row["GiB, planned"] == "100 (95 to 105)" and row["GiB, measured"] == "94 MISS"


def test_the_plans_of_the_training_runs_are_printed(capsys, monkeypatch):
    todo = gpu_report.commands("cpu", 2)
    some = {name: todo[name] for name in ("mp_quick/tp", "forecast")}
    monkeypatch.setattr(
        gpu_report, "commands", lambda *_: {"broken": (1, "python -m train --config=quick --num_heads=3", "")} | some
    )
    gpu_report.main(["--plan", "h100", "--device=cpu"])
    said = capsys.readouterr().out
    assert "broken: not planned: UsageError: " in said and re.search(r"\| mp_quick/tp +\| 2 x h100 \|", said)


@pytest.mark.parametrize("count", [1, 2, 8])
def test_what_runs_fits_ten_minutes_and_the_goals_come_first(count):
    todo = {name: seconds for name, (seconds, _, lacks) in gpu_report.commands("cuda", count).items() if not lacks}
    names = list(todo)
    before = names[: names.index("short/embed_1024") + 1]
    assert sum(todo[name] for name in before) <= 200 and not {"tests", "ladder"} & {*before}
    if count == 1:
        assert sum(todo.values()) + gpu_report.PLAN_SECONDS <= gpu_report.SECONDS == 600
    assert ("quick/ddp_graphs" in names) == (count > 1)


@pytest.mark.parametrize("count", [1, 2, 8])
def test_the_commands_train_what_the_scripts_take(count):
    layouts = set()
    for name, (_, command, lacks) in gpu_report.commands("cuda", count).items():
        if (trained := gpu_report.training(command)) and not lacks:
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
        (["--device=cpu", "--out=/proc/nowhere"], "--out: "),
    ],
)
def test_what_cannot_be_used_is_one_line(words, line, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gpu_report.torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(gpu_report, "make_plans", lambda *_: {})
    with pytest.raises(UsageError) as caught:
        gpu_report.main([f"--out={tmp_path}", *words])
    assert line in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.skipif(gpu_report.torch.accelerator.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    "words",
    [
        ["make", "gpu", f"PY={sys.executable}"],
        pytest.param([sys.executable, "-m", "pytest", "-m", "gpu"], marks=pytest.mark.slow("all tests are collected")),
    ],
)
def test_without_a_gpu_one_line_says_so(words):
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
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
    while not list(tmp_path.glob("logs/gpu_report/*/data-era5.log")):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 130
    assert not [file for file in Path("/proc").glob("[0-9]*/cwd") if str(tmp_path / "logs") in _target(file)]


def _target(link):
    try:
        return str(link.readlink())
    except OSError:
        return ""


TAUGHT = {  # trainings whose words the tests above check, and which other tests run
    "quick/fsdp", "mp_quick/tp", "mp_quick/cp", "mp_quick/pp", "shard_quick/domain", "quick/profiled", "preflight",
    "loaders",
}  # fmt: skip


@pytest.mark.slow("the real commands of the report, at tiny sizes on the CPU, of two ranks")
@pytest.mark.timeout(1800)
def test_the_commands_run_without_a_gpu_at_tiny_sizes(tmp_path, monkeypatch):
    programs.use_forks(tmp_path / "bin", monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # preflight would take the GPUs of this machine
    todo = {name: (300, *rest) for name, (_, *rest) in gpu_report.commands("cpu", 2).items() if name not in TAUGHT}
    *_, rows = gpu_report.run_all(todo, tmp_path, time.monotonic() + 1700)
    results = {row["command"]: row for row in rows}
    skipped = {name for name, row in results.items() if row["said"] == "needs a GPU"}
    assert skipped == set(gpu_report.GPU_ONLY)
    wrong = {name: row["said"] for name, row in results.items() if name not in skipped and row["status"] != "passed"}
    assert wrong == {} and len(results) > 10
    assert results["quick/resumed"]["figures"]["resumed at"] >= 20
    plans = gpu_report.make_plans({"quick/ddp": todo["quick/ddp"]}, gpu_report.load_gpu("h100"))
    gpu_report.write_report(tmp_path / "report", {"name": "a CPU"}, plans, rows, tmp_path)
    report = json.loads((tmp_path / "report.json").read_text())
    assert {goal["met"] for goal in report["goals"]} <= {"yes", "no"}  # every one is measured
    (ddp,) = report["plans"]
    assert ddp["collectives, measured"].endswith(" hit") and ddp["ms a step, measured"] != "-"
