"""plan.py as it is used: one layout, the best ones, the curve, and the planner held against real runs."""

import json
import subprocess
import sys
import time

import pytest

import plan
from tests.support.marks import slow_but
from tools.planner import validate as verify
from tools.planner.fake import Replica
from utils.errors import UsageError

MP = ["--yaml_config", "config/mp.yaml", "--config", "mp"]
KEYS = {
    "layout", "memory_bytes", "peak_allocated_bytes", "fits", "collectives", "flops_per_step", "step_time_s",
    "step_time_error", "samples_per_sec",
}  # fmt: skip
LIMITED = """
import re, runpy, sys
sys.argv = ["plan.py", *sys.argv[1:]]
try:
    runpy.run_path("plan.py", run_name="__main__")
finally:
    print(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1], file=sys.stderr)  # without its parent's
"""


def planned(capsys, *words):
    """The plans that plan.py prints as JSON."""
    assert plan.main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("some", slow_but([True], [True, False], "all layouts of `plan.py --verify`, run for real"))
def test_small_layouts_run_for_real_are_those_of_the_plan(capsys, some):
    cases = verify.build_cases()
    assert len(cases) > 8
    cases = [case for number, case in enumerate(cases) if (number % 8 == 0) == some]
    assert verify.verify(cases) == 0, capsys.readouterr().out


def test_a_message_that_is_not_planned_is_noticed(capsys, monkeypatch):
    monkeypatch.setattr(Replica, "_reduce", lambda self, bucket: None)
    (ddp,) = [case for case in verify.build_cases() if "data_parallel=ddp" in case.name]
    assert verify.verify([ddp]) == 1
    assert "Message(phase='backward', kind='all_reduce'" in capsys.readouterr().out


def test_json_of_one_layout(capsys):
    (one,) = planned(
        capsys, "--yaml_config", "config/shard.yaml", "--config", "classify_1024", "--domain_parallel", "4",
        "--gpus", "4", "--gpu", "a100-80gb",
    )  # fmt: skip
    assert one.keys() >= KEYS
    assert {"dp": 1, "tp": 1, "cp": 1, "pp": 1, "domain": 4}.items() <= one["layout"].items()
    names = {"parameters", "gradients", "optimizer", "activations", "temporaries", "buffers", "overhead"}
    assert one["memory_bytes"].keys() == names
    memory = one["memory_bytes"]
    assert memory["activations"] < one["peak_allocated_bytes"] < sum(memory.values())
    assert {"phase", "kind", "group", "count", "bytes"} <= one["collectives"][0].keys()
    assert one["samples_per_sec"] == pytest.approx(1 / one["step_time_s"])


def test_text_of_one_layout(capsys, tmp_path):
    plan.main([*MP, "--gpus", "16", "--tensor_parallel", "4", "--png", str(tmp_path / "memory.png")])
    text = capsys.readouterr().out
    for words in (
        "tp 4 x dp 4",
        "forward all_reduce",
        "inside a node",
        "fits",
        "node-hours",
        "Reading the data is not in",
    ):
        assert words in text
    assert (tmp_path / "memory.png").stat().st_size > 1000


@pytest.mark.slow("the order of many layouts, and that it is the published one")
def test_the_best_layouts_of_16_gpus(capsys, tmp_path):
    plans = planned(
        capsys, *MP, "--gpus", "16", "--amp_mode", "fp16", "--top", "12", "--png", str(tmp_path / "all.png")
    )
    assert len(plans) == 12 and all(one["fits"] != "no" for one in plans)
    seconds = [one["step_time_s"] for one in plans]
    assert seconds == sorted(seconds)
    place = {tuple(one["layout"][name] for name in ("tp", "cp", "dp")): i for i, one in enumerate(plans)}
    assert place[1, 4, 4] < place.get((4, 1, 4), len(plans))  # 166 samples/s were published of it, and 126


def test_the_winner_comes_with_its_command_and_the_others_with_a_reason(capsys):
    plan.main([*MP, "--gpus", "16", "--top", "1"])
    text = capsys.readouterr().out
    assert "sbatch -N 4 submit_" in text and "12 blocks cannot be shared by" in text


@pytest.mark.slow("a search in which no layout fits")
def test_where_nothing_fits_no_command_is_given(capsys):
    plan.main(["--yaml_config", "config/shard.yaml", "--config", "shard_025deg_patch2", "--gpus", "2", "--top", "1"])
    text = capsys.readouterr().out
    assert "fits; those that need least" in text and "Nothing to run" in text
    assert "sbatch" not in text and "torchrun" not in text


@pytest.mark.slow("1,024 GPUs planned by the command in a bounded memory")
def test_1024_gpus_are_planned_in_seconds_and_little_memory():
    command = [sys.executable, "-c", LIMITED, *MP, "--gpus", "1024", "--global_batch_size", "2048", "--top", "3"]
    started = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stderr.splitlines()[-1]) * 1024 < 1e9
    print(f"{time.monotonic() - started:.1f} s")  # a time is noise here; the limit above is four times the promise


@pytest.mark.slow("the best layout for each number of GPUs")
def test_the_curve(capsys, tmp_path):
    points = planned(capsys, *MP, "--gpus", "8..32", "--png", str(tmp_path / "curve.png"))
    assert [(p["scaling"], p["layout"]["gpus"]) for p in points] == [
        (kind, gpus) for kind in ("strong", "weak") for gpus in (8, 16, 32)
    ]
    weak = [p for p in points if p["scaling"] == "weak"]
    assert [p["layout"]["global_batch_size"] for p in weak] == [64, 128, 256]
    assert points[0]["efficiency"] == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpus", "0"], "--gpus '0': expected a number from 1 to"),
        (["--gpus", "16..8"], "--gpus '16..8': expected a number"),
        (["--gpus", "99999999"], "expected a number from 1 to"),
        (["--gpu", "a100"], "no GPU 'a100' (did you mean 'a100-40gb'?)"),
        ([*MP, "--gpus", "16", "--tensor_parallel", "3"], "16 ranks cannot be split as tp 3"),
        ([*MP, "--gpus", "16", "--tensor_parallel", "16"], "8 heads cannot be split over 16 ranks"),
        ([*MP, "--gpus", "64", "--context_parallel", "64"], "45 rows of patches"),
        ([*MP, "--gpus", "5", "--pipeline_parallel", "5", "--gradient_accumulation", "5"], "mp"),
        ([*MP, "--gpus", "8", "--data_parallel", "ddp", "--global_batch_size", "63"], "63 cannot be shared by 8 ranks"),
        ([*MP, "--gpus", "8", "--local_batch_size", "4"], "compared at the same --global_batch_size"),
        ([*MP, "--gpus", "4", "--context_parallel", "2", "--domain_parallel", "2"], "train_mp.py"),
        ([*MP, "--top", "0"], "argument --top: 0 is not within"),
        ([*MP, "--tensor_paralel", "2"], "unknown option"),
    ],
)
def test_bad_input_is_refused_in_one_line(words, message):
    with pytest.raises(UsageError) as refused:
        plan.main(words)
    assert message in str(refused.value) and "\n" not in str(refused.value)
