"""The report of a machine's GPUs: whatever breaks in a part is told, and the other parts follow."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.launch import popen
from tools.gpu_report import __main__ as gpu_report
from tools.gpu_report import page, running
from tools.gpu_report.running import Command, Part
from tools.tables import installed
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
    return Part(name, seconds, [Command(["-c", program])], **others)


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
        monkeypatch.setattr(gpu_report, "parts_of", lambda machine: parts)
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


def test_all_parts_together_have_a_time_limit_too(report):
    status, found, *_ = report([part("hangs", "import time; time.sleep(99)", 6000), part("late", "")], "--minutes=0.03")
    assert status == 1 and [part["status"] for part in found["parts"]] == ["out of time", "not run"]


def test_it_is_a_success_if_no_part_failed(report):
    assert report([PARTS[0], PARTS[3]])[0] == 0


def test_a_command_is_stopped_when_it_says_so_and_must_end_as_expected(tmp_path):
    saves = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(75)); print('saved'); time.sleep(99)"
    stopped = Command(["-c", saves], status=75, stop_at="saved")
    running.run(stopped, tmp_path / "log", time.monotonic() + 60)
    with pytest.raises(running.Failure, match="exit status 75, not 0"):
        running.run(Command(stopped.words, stop_at="saved"), tmp_path / "log", time.monotonic() + 60)


def test_goals_stand_beside_what_was_measured(tmp_path):
    figures = {page.LADDER: {"MFU": 0.34, "x fp32": 8.0}, page.PLANNED: {"memory off": -0.04, "time off": 0.3}}
    parts = [{"part": name, "status": "passed", "seconds": 1.0, "why": "", "figures": f} for name, f in figures.items()]
    page.write_report(tmp_path / "a.b", {"name": "a GPU"}, parts)
    goals = json.loads((tmp_path / "a.b.json").read_text())["goals"]
    assert [(goal["measured"], goal["met"]) for goal in goals] == [
        (0.34, "no"), (None, "not measured"), (8.0, "yes"), (-0.04, "yes"), (0.3, "no"),
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
        (["--device=cpu", "--minutes=0"], "--minutes: more than 0"),
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
    "words", [["make", "gpu", f"PY={sys.executable}"], [sys.executable, "-m", "pytest", "-m", "gpu"]]
)
def test_without_a_gpu_one_line_says_so(words):
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run(words, capture_output=True, text=True, env=env)
    lines = [line for line in (done.stdout + done.stderr).splitlines() if not line.startswith("make: ")]
    assert done.returncode == 2 and len(lines) == 1 and re.search("not on this machine|no GPU is there", lines[0])


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


@pytest.mark.slow("the real parts of the report, at tiny sizes on the CPU")
@pytest.mark.timeout(2400)
def test_the_parts_run_without_a_gpu_at_tiny_sizes(tmp_path):
    words = ["--device=cpu", "--gpu=h100", f"--out={tmp_path}/out", f"--work={tmp_path}/work", "--minutes=40"]
    done = subprocess.run([sys.executable, "-m", "tools.gpu_report", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (written,) = (tmp_path / "out").glob("*.json")
    report = json.loads(written.read_text())
    parts = {part["part"]: part for part in report["parts"]}
    skipped = {name for name, part in parts.items() if part["status"] == "skipped"}
    assert {parts[name]["why"] for name in skipped} == {"needs a GPU", "needs two GPUs"}
    assert skipped >= {"tests", "quick, graphs"} and len(parts) - len(skipped) >= 15
    assert parts["quick, stopped and resumed"]["figures"]["resumed at"] >= 200
    assert parts["collectives, attention"]["figures"]["gloo collectives"] == 5
    assert {goal["met"] for goal in report["goals"]} <= {"yes", "no"}  # each is measured
    assert not (tmp_path / "work/data").exists()
