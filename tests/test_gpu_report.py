"""The report of a machine's GPUs: whatever breaks in a part is told, and the other parts follow."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support import programs
from tests.support.launch import popen
from tools.gpu_report import __main__ as gpu_report
from tools.gpu_report import running
from tools.gpu_report.parts import Machine
from tools.gpu_report.running import Part
from tools.tables import installed
from utils.config import SCRIPTS, load_config
from utils.errors import UsageError

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


def part(name, program, seconds=60, **others):
    return Part(name, seconds, ["-c", program], **others)


PARTS = [
    part("good", "print(1)", figures=lambda: {"answer": 42}),
    part("bad", "print('ValueError: so it is\\nsome more'); raise SystemExit(3)"),
    part("unreadable", "", figures=lambda: json.loads("{")),
    part("absent", "", lacks="needs what is not here"),
    part("leaves a process", PARENT),
    part("hangs", PARENT + "time.sleep(99)", seconds=2),
    part("follows", ""),
]


@pytest.fixture
def report(tmp_path, monkeypatch, capsys):
    """Call with parts and options: exit status, the report, and where the work was."""

    def run(parts, *words):
        monkeypatch.setattr(Machine, "parts", lambda machine: parts)
        monkeypatch.setattr(gpu_report.signal, "signal", lambda *_: None)
        work = tmp_path / "work"
        status = gpu_report.main(["--device=cpu", f"--out={tmp_path}/out", f"--work={work}", *words])
        (written,) = (tmp_path / "out").glob("*.json")
        return status, json.loads(written.read_text()), written.with_suffix(".md").read_text(), work

    return run


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")")[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_part_that_fails_hangs_or_leaves_processes_is_told_and_the_others_follow(report):
    status, found, text, work = report(PARTS)
    assert status == 1
    outcome = {part["part"]: (part["status"], part["why"]) for part in found["parts"]}
    assert outcome.pop("unreadable")[1].startswith("JSONDecodeError: ")
    assert re.fullmatch(r"not done after \d s", outcome["hangs"][1])
    assert outcome == {
        "good": ("passed", ""),
        "bad": ("failed", "Failure: exit status 3, not 0: ValueError: so it is"),
        "absent": ("skipped", "needs what is not here"),
        "leaves a process": ("passed", ""),
        "hangs": ("out of time", outcome["hangs"][1]),
        "follows": ("passed", ""),
    }
    for name in ("leaves a process", "hangs"):
        assert not alive(re.search(r"child (\d+)", (work / f"{name}.log").read_text())[1])
    assert re.search(r"\| good +\| +passed \| +\d+\.\d \| +answer 42 \|", text), text


def test_all_parts_together_have_a_time_limit_too(report, monkeypatch):
    monkeypatch.setattr(gpu_report, "MINUTES", 0.03)
    status, found, *_ = report([part("hangs", "import time; time.sleep(99)", 6000), part("late", "")])
    assert status == 1 and [part["status"] for part in found["parts"]] == ["out of time", "not run"]


def test_it_is_a_success_if_no_part_failed(report):
    assert report([PARTS[0], PARTS[3]])[0] == 0


def test_a_command_is_stopped_when_it_says_so_and_must_end_as_expected(tmp_path):
    saves = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(75)); print('saved'); time.sleep(99)"
    running.run(["-c", saves], tmp_path / "log", time.monotonic() + 60, status=75, stop_at="saved")
    with pytest.raises(running.Failure, match="exit status 75, not 0"):
        running.run(["-c", saves], tmp_path / "log", time.monotonic() + 60, stop_at="saved")


def test_goals_stand_beside_what_was_measured(tmp_path):
    figures = {
        "ladder of short": {"MFU": 0.34, "x fp32": 8.0},
        "short, fused: planned": {"memory off": -0.04, "time off": 0.3},
    }
    parts = [{"part": name, "status": "passed", "seconds": 1.0, "why": "", "figures": f} for name, f in figures.items()]
    gpu_report.write_report(tmp_path / "a.b", {"name": "a GPU"}, parts)
    goals = json.loads((tmp_path / "a.b.json").read_text())["goals"]
    assert [(goal["measured"], goal["met"]) for goal in goals] == [
        (0.34, "no"), (8.0, "yes"), (None, "not measured"), (-0.04, "yes"), (0.3, "no"),
    ]  # fmt: skip
    assert "# a GPU" in (tmp_path / "a.b.md").read_text()


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA A100-SXM4-80GB", "a100-80gb"), ("NVIDIA H200", "h200"),
        ("AMD Instinct MI250X", "mi250x"), ("NVIDIA GeForce RTX 3060", ""),
    ],
)  # fmt: skip
def test_the_planner_knows_a_gpu_by_the_name_of_the_device(name, entry):
    assert gpu_report.planner_entry(name) == entry


def test_a_package_is_missing_also_where_the_one_around_it_is():
    assert installed("torch.nn") and not installed("no_such_package.dali") and not installed("torch.no_such_module")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], "device 'cuda': not on this machine"),
        (["--device=cpu", "--gpu=h1000"], "no GPU 'h1000' (did you mean 'h100'?)"),
        (["--device=cpu", "--out=/proc/nowhere"], "--out, --work: "),
        (["--device=cpu", "--work=."], "--out, --work: "),
    ],
)
def test_what_cannot_be_used_is_one_line(words, line, monkeypatch, tmp_path):
    monkeypatch.setattr(gpu_report.torch.accelerator, "is_available", lambda: False)
    with pytest.raises(UsageError) as caught:
        gpu_report.main([f"--out={tmp_path}", f"--work={tmp_path / 'work'}", *words])
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


@pytest.mark.slow("the data that the report makes for itself")
def test_who_stops_the_report_ends_its_part(tmp_path):
    """The first part is real: `data of quick`; SIGTERM, as of `timeout`."""
    words = ["-m", "tools.gpu_report", "--device=cpu", f"--out={tmp_path}/out", f"--work={tmp_path}/work"]
    process = popen([sys.executable, *words])
    process.stdout.readline()
    while not (tmp_path / "work/quick, plain.log").exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 130
    assert not [file for file in Path("/proc").glob("[0-9]*/cmdline") if str(tmp_path) in _read(file)]


def _read(file):
    try:
        return file.read_text()
    except OSError:
        return ""


@pytest.mark.parametrize("count", [1, 2, 3, 4, 8])
def test_the_parts_train_what_the_scripts_take_on_any_number_of_gpus(count, tmp_path):
    layouts = set()
    for part in Machine("cuda", count, "h100", tmp_path).parts():
        words = [] if part.lacks else part.words
        if script := next((word for word in words if word in SCRIPTS), None):
            start = words.index(script)
            ranks = int(words[start - 1]) if start else 1
            layout = load_config(words[start + 1 :], None, ranks, *SCRIPTS[script][:2]).layout(ranks)
            layouts.add((ranks, *layout.mesh_dims.values()))
    assert {ranks for ranks, *_ in layouts} == {1, count}
    assert count in (1, 3) or len(layouts) == 6  # one device, and dp, tp, cp, pp, domain


TAUGHT = {  # trainings whose words the test above checks, and which other tests run
    "quick, compiled", "quick, fsdp", "mp_quick, tp", "mp_quick, cp", "mp_quick, pp", "shard_quick, domain",
    "quick, graphs_and_checkpointing", "quick, profiled", "preflight", "loaders",
}  # fmt: skip


@pytest.mark.slow("the real parts of the report, at tiny sizes on the CPU, of two ranks")
@pytest.mark.timeout(1800)
def test_the_parts_run_without_a_gpu_at_tiny_sizes(tmp_path, monkeypatch):
    programs.use_forks(tmp_path / "bin", monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # preflight would take the GPUs of this machine
    parts = [
        replace(part, seconds=300) for part in Machine("cpu", 2, "h100", tmp_path).parts() if part.name not in TAUGHT
    ]
    results = {result["part"]: result for result in running.run_parts(parts, tmp_path, 1700)}
    skipped = {name for name, result in results.items() if result["why"] == "needs a GPU"}
    assert {name: (r["status"], r["why"]) for name, r in results.items() if name not in skipped} == {
        name: ("passed", "") for name in results if name not in skipped
    }
    assert skipped == {"tests", "quick, graphs", "ladder of quick"} and len(results) > 10
    assert results["quick, stopped and resumed"]["figures"]["resumed at"] >= 40
    assert results["collectives, attention"]["figures"]["gloo collectives"] == 6
    gpu_report.write_report(tmp_path / "report", {"name": "a CPU"}, list(results.values()))
    goals = json.loads((tmp_path / "report.json").read_text())["goals"]
    assert {goal["met"] for goal in goals} <= {"yes", "no"}  # every one is measured
