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

from tests.support import programs
from tests.support.launch import popen
from tools import gpu_report
from tools.gpu_report import Part
from tools.tables import installed
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
def part(tmp_path):
    """Call with a name and a program: a part that runs it."""

    def make(name, program, estimate=15, **others):
        file = tmp_path / f"{name.replace(' ', '_')}.py"
        file.write_text(program)
        return Part(name, estimate, str(file), **others)

    return make


@pytest.fixture
def report(tmp_path, monkeypatch):
    """Call with parts and options: exit status, the report, and where the work was."""

    def run(parts, *words):
        monkeypatch.setattr(gpu_report, "parts", lambda *_: parts)
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


def test_a_part_that_fails_hangs_or_leaves_processes_is_told_and_the_others_follow(report, part, monkeypatch):
    monkeypatch.setattr(Part, "limit", property(lambda part: 2 * part.estimate))
    status, found, text, work = report([
        part("good", "print(1)", figures=lambda work: {"answer": 42}),
        part("bad", "print('ValueError: so it is\\nsome more'); raise SystemExit(3)", figures=lambda work: {"kept": 1}),
        part("unreadable", "", figures=lambda work: json.loads("{")),
        part("absent", "", lacks="needs what is not here"),
        part("leaves a process", PARENT),
        part("hangs", PARENT + "time.sleep(99)", estimate=1),
        part("follows", "print('the end')"),
    ])  # fmt: skip
    assert status == 1
    outcome = {part["part"]: (part["status"], part["said"], part["figures"]) for part in found["parts"]}
    assert outcome.pop("unreadable")[0] == "failed"
    assert re.fullmatch(r"not done after \d s", outcome["hangs"][1])
    assert re.fullmatch(r"child \d+", outcome["leaves a process"][1])
    assert outcome == {
        "good": ("passed", "1", {"answer": 42}),
        "bad": ("failed", "exit status 3, not 0: ValueError: so it is", {"kept": 1}),
        "absent": ("skipped", "needs what is not here", {}),
        "leaves a process": ("passed", outcome["leaves a process"][1], {}),
        "hangs": ("out of time", outcome["hangs"][1], {}),
        "follows": ("passed", "the end", {}),
    }
    for name in ("leaves a process", "hangs"):
        assert not alive(re.search(r"child (\d+)", (work / f"{name}.log").read_text())[1])
    assert re.search(r"\| good +\| +passed \| +\d+\.\d \| +15 \| +answer 42 \|", text), text


def test_the_report_is_on_disk_after_each_part(report, part, tmp_path):
    """The second part reads what there is of the first."""
    reads = f"import json, pathlib; (file,) = pathlib.Path({str(tmp_path)!r}, 'out').glob('*.json'); "
    reads += "print(json.loads(file.read_text())['parts'][0]['part'])"
    status, found, *_ = report([part("first", ""), part("second", reads), part("absent", "", lacks="a GPU")])
    assert status == 0 and found["parts"][1]["said"] == "first"


def test_all_parts_together_have_a_time_limit_too(report, part, monkeypatch):
    monkeypatch.setattr(gpu_report, "SECONDS", 2)
    status, found, *_ = report([part("hangs", "import time; time.sleep(99)", 6000), part("late", "")])
    assert status == 1 and [part["status"] for part in found["parts"]] == ["out of time", "not run"]


def test_a_command_is_stopped_when_it_says_so_and_must_end_as_expected(part, tmp_path):
    saves = part(
        "saves", "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(75)); print('saved'); time.sleep(99)"
    )
    end = time.monotonic() + 60
    assert gpu_report.run(saves, tmp_path, tmp_path / "log", end, status=75, stop_at="saved") == "saved"
    with pytest.raises(RuntimeError, match="exit status 75, not 0"):
        gpu_report.run(saves, tmp_path, tmp_path / "log", end, stop_at="saved")


def ladder_of(**speeds):
    steps = [{"step": name, "samples_per_sec": n, "mfu": n / 100, "data_wait": 0.0} for name, n in speeds.items()]
    return {"steps": steps, "failed": {"fp8": "no such kernel"}}


def test_goals_stand_beside_the_best_that_was_measured(tmp_path):
    write_json(tmp_path / "ladder.json", ladder_of(**{"0 workers": 4, "8 workers": 5, "bf16": 36}))
    figures = {"short/compiled": {"MFU": 0.34}, "ladder": gpu_report.ladder(tmp_path)}
    assert figures["ladder"]["failed"] == "fp8"
    results = [
        {"part": name, "status": "passed", "seconds": 1.0, "estimate": 1, "said": "", "figures": found}
        for name, found in figures.items()
    ]
    gpu_report.write_report(tmp_path / "a.b", {"name": "a GPU"}, results, tmp_path)
    goals = json.loads((tmp_path / "a.b.json").read_text())["goals"]
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
        return [row[title]["hit"] for title in gpu_report.PLANNED]

    assert verdicts(plan, hits) == [True] * 3 and verdicts(plan, misses) == [False] * 3
    assert verdicts(plan, {}) == [None] * 3
    compiled = plan | {"settings": {"enable_jit": True}}
    assert verdicts(compiled, misses) == [True, False, False]  # its memory is an upper bound
    text = gpu_report.plan_table([gpu_report.beside_plan("quick/ddp", plan, misses)])
    assert re.search(r"\| 100 \(95 to 105\) \| +94 MISS \|", text) and "136 MISS" in text and " 5 MISS" in text


def test_plans_are_made_and_kept_before_the_runs(tmp_path, capsys, monkeypatch):
    runs = [part for part in gpu_report.parts("cpu", 2, "h100") if part.name in ("quick/resumed", "mp_quick/tp")]
    broken = Part("quick/broken", 1, "train.py --config=quick --num_heads=3")
    monkeypatch.setattr(gpu_report, "parts", lambda *_: [broken, *runs])
    assert gpu_report.main(["--plan", "h100", "--device=cpu", f"--work={tmp_path}"]) == 1
    said = capsys.readouterr().out
    assert "quick/broken: not planned: UsageError: " in said and re.search(r"\| mp_quick/tp +\| 2 x h100 \|", said)
    assert json.loads((tmp_path / f"plans/{runs[1].name}.json").read_text())["layout"]["tp"] == 2


@pytest.mark.parametrize("count", [1, 2, 8])
def test_what_runs_fits_ten_minutes_and_the_goals_come_first(count):
    parts = [part for part in gpu_report.parts("cuda", count, "h100") if not part.lacks]
    names = [part.name for part in parts]
    before = [part.estimate for part in parts[: names.index("short/embed_1024") + 1]]
    assert sum(before) <= 200 and not {"tests", "ladder"} & {*names[: len(before)]}
    if count == 1:
        assert sum(part.estimate for part in parts) <= gpu_report.SECONDS == 600
    assert ("quick/ddp_graphs" in names) == (count > 1)


@pytest.mark.parametrize("count", [1, 2, 8])
def test_the_parts_train_what_the_scripts_take(count):
    layouts = set()
    for part in gpu_report.parts("cuda", count, "h100"):
        script, *words = part.command.split()
        if script in SCRIPTS and not part.lacks:
            ranks = part.ranks or 1
            layout = load_config(words, None, ranks, *SCRIPTS[script][:2]).layout(ranks)
            layouts.add((ranks, *layout.mesh_dims.values()))
    assert len(layouts) == (1 if count == 1 else 6)  # one device, and dp, tp, cp, pp, domain


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
    """The first parts are real; SIGTERM, as of `timeout`."""
    words = ["-m", "tools.gpu_report", "--device=cpu", f"--out={tmp_path}/out", f"--work={tmp_path}/work"]
    process = popen([sys.executable, *words])
    process.stdout.readline()
    while not (tmp_path / "work/data-era5.log").exists():
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


TAUGHT = {  # trainings whose words the tests above check, and which other tests run
    "quick/fsdp", "mp_quick/tp", "mp_quick/cp", "mp_quick/pp", "shard_quick/domain", "quick/profiled", "preflight",
    "loaders",
}  # fmt: skip


@pytest.mark.slow("the real parts of the report, at tiny sizes on the CPU, of two ranks")
@pytest.mark.timeout(1800)
def test_the_parts_run_without_a_gpu_at_tiny_sizes(tmp_path, monkeypatch):
    programs.use_forks(tmp_path / "bin", monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # preflight would take the GPUs of this machine
    monkeypatch.setattr(Part, "limit", 300)
    parts = [part for part in gpu_report.parts("cpu", 2, "h100") if part.name not in TAUGHT]
    results = {result["part"]: result for result in gpu_report.run_parts(parts, tmp_path, 1700)}
    skipped = {name for name, result in results.items() if result["said"] == "needs a GPU"}
    assert skipped == {"tests", "quick/graphs", "quick/ddp_graphs"}
    wrong = {name: r["said"] for name, r in results.items() if name not in skipped and r["status"] != "passed"}
    assert wrong == {} and len(results) > 10
    assert results["quick/resumed"]["figures"]["resumed at"] >= 20
    assert results["device"]["figures"]["gloo collectives"] == 6
    gpu_report.write_report(tmp_path / "report", {"name": "a CPU"}, list(results.values()), tmp_path)
    report = json.loads((tmp_path / "report.json").read_text())
    assert {goal["met"] for goal in report["goals"]} <= {"yes", "no"}  # every one is measured
    (ddp,) = [row for row in report["plans"] if row["run"] == "quick/ddp"]
    assert ddp["collectives"]["hit"] and ddp["ms a step"]["measured"]
