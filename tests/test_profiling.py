"""Profiles of a window of steps."""

import gzip
import json
import os
import sys

import pytest

import train
from docs.examples import read_trace
from tests.support import programs
from tests.support.refusals import refusal
from tests.test_timeline import event
from utils.launch import VARIABLES

WINDOW = {"profile": "torch", "profile_start": 3, "profile_steps": 4}


def test_the_torch_profile_holds_exactly_the_window(tiny_options, tmp_path, capsys):
    train.main(tiny_options(**WINDOW))
    folder = tmp_path / "logs/quick/00/profile"
    with gzip.open(folder / "trace.json.gz") as file:
        events = json.load(file)["traceEvents"]
    spans = {
        name: [
            (e["ts"], e["ts"] + e["dur"]) for e in events if e.get("name") == name and e.get("cat") == "user_annotation"
        ]
        for name in ("step", "data", "forward", "backward", "optimizer")
    }
    assert {name: len(found) for name, found in spans.items()} == dict.fromkeys(spans, 4)
    for name in ("data", "forward", "backward", "optimizer"):
        for (begin, end), (outer_begin, outer_end) in zip(sorted(spans[name]), sorted(spans["step"]), strict=True):
            assert outer_begin <= begin and end <= outer_end
    assert "aten::" in (folder / "operations.txt").read_text()
    read_trace.main([str(folder / "trace.json.gz"), "--png", str(tmp_path / "step.png")])
    *_, total = (line.strip("|").split("|") for line in capsys.readouterr().out.splitlines() if line.startswith("|"))
    for shown, name in zip(total[1:5], ("data", "forward", "backward", "optimizer"), strict=True):
        assert float(shown) == pytest.approx(sum(end - begin for begin, end in spans[name]) / 4 / 1000, abs=0.02)
    assert (tmp_path / "step.png").stat().st_size > 10_000


def rows_of(events, folder, capsys):
    """The tables that are printed of a trace, as words."""
    with gzip.open(folder / "trace.json.gz", "wt") as file:
        json.dump({"traceEvents": events}, file)
    read_trace.main([str(folder / "trace.json.gz")])
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines() if line]


def test_the_trace_of_a_cpu_is_read_by_operations_without_those_that_they_call(tmp_path, capsys):
    """An all-reduce from 4 to 14 ms, in which the rank computes for 6 ms, idles and waits."""
    ranges = ("step", 0, 20), ("forward", 0, 20), ("gloo:all_reduce", 4, 14)
    operations = ("outer", 0, 10), ("aten::mm", 2, 5), ("leaf", 5, 6), ("wait_tensor", 12, 20)
    events = [*(event("user_annotation", *r) for r in ranges), *(event("cpu_op", *op) for op in operations)]
    rows = rows_of(events, tmp_path, capsys)
    for kind, time, share in (
        ("matrix products", "3.00", "15.0%"),
        ("other", "7.00", "35.0%"),
        ("waiting for messages", "8.00", "40.0%"),
        ("no operation", "2.00", "10.0%"),
    ):
        assert [kind, "0.00", time, "0.00", "0.00", share] in rows
    assert ["gloo:all_reduce", "1", "10.00", "60%"] in rows


def test_the_trace_of_a_gpu_is_read_by_its_kernels(tmp_path, capsys):
    """Kernels of two streams, an all-reduce half under a matrix product, in each of two steps of 100 ms."""
    events = []
    for begin in (0, 1000):
        for category, name, start, stop in (
            ("gpu_user_annotation", "step", 0, 100),
            ("gpu_user_annotation", "nccl:all_reduce", 50, 70),
            ("gpu_user_annotation", "forward", 0, 40),
            ("gpu_user_annotation", "backward", 40, 90),
            ("cpu_op", "aten::mm", 0, 9),
            ("kernel", "sm90_xmma_gemm", 5, 25),
            ("kernel", "sm90_xmma_gemm", 40, 60),
            ("kernel", "elementwise", 50, 60),  # on another stream: covers nothing more
            ("kernel", "ncclDevKernel_AllReduce_Sum_f32", 50, 70),
        ):
            events.append(event(category, name, begin + start, begin + stop))
    rows = rows_of(events, tmp_path, capsys)
    assert ["matrix products", "0.00", "20.00", "20.00", "0.00", "40.0%"] in rows
    assert ["no operation", "0.00", "20.00", "30.00", "0.00", "50.0%"] in rows
    assert ["ncclDevKernel_AllReduce_Sum_f32", "1", "20.00", "50%"] in rows


def test_a_trace_that_is_not_there_or_not_of_training_is_one_line(tmp_path):
    with gzip.open(tmp_path / "other.json.gz", "wt") as file:
        json.dump({"traceEvents": []}, file)
    with refusal("no range 'step' in it"):
        read_trace.main([str(tmp_path / "other.json.gz")])
    with refusal(r"trace.json.gz: no such file"):
        read_trace.main(["trace.json.gz"])


def test_a_window_beyond_the_last_iteration_is_refused(tiny_options):
    line = r"profile window: steps 5 to 12 of this process, but only 12 are left to num_iters"
    with refusal(line):
        train.main(tiny_options(profile="torch", profile_start=5, profile_steps=8))


def run(words, **variables):
    return programs.run(["train.py", *words], os.environ | variables)


@pytest.mark.parametrize(
    "step, report",
    [
        ({}, "mine"),
        pytest.param(
            {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, "mine", marks=pytest.mark.slow("a step of one")
        ),
        pytest.param(
            dict(zip(VARIABLES, ["2", "2", "4", "127.0.0.1", "1"], strict=True)),
            "mine-rank2",
            marks=pytest.mark.slow("a step of several ranks"),
        ),
    ],
)
def test_nsight_systems_wraps_the_command(tiny_options, tmp_path, step, report):
    """A stand-in for nsys that writes down what it was asked and starts the program."""
    fake = tmp_path / "bin/nsys"
    fake.parent.mkdir()
    fake.write_text(
        f'#!/bin/sh\necho "$@" > {tmp_path}/asked\nwhile [ "$1" != "{sys.executable}" ]; do shift; done\nexec "$@"\n'
    )
    fake.chmod(0o755)
    words = tiny_options(device="cpu", comm_timeout=1)
    path = f"{fake.parent}:{os.environ['PATH']}"
    result = run(words, ENABLE_PROFILING="1", PROFILE_OUTPUT="mine", PATH=path, **step)
    asked = (tmp_path / "asked").read_text()
    assert asked.startswith(f"profile --output {report} ") and "--capture-range cudaProfilerApi" in asked
    assert asked.strip().endswith(" ".join(["train.py", *words]))
    assert result.returncode == 2  # the program started once, inside nsys: no GPU to record, or no other ranks
    if report == "mine":
        assert "ENABLE_PROFILING=1 records a GPU, this run is on cpu: use --profile torch" in result.stderr


def test_no_nsight_systems_is_said_at_once(tiny_options, tmp_path):
    result = run(tiny_options(), ENABLE_PROFILING="1", PATH=str(tmp_path))
    assert result.returncode == 2
    assert result.stderr.startswith("error: ENABLE_PROFILING=1 needs Nsight Systems") and result.stderr.count("\n") == 1
