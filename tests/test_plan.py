"""plan.py as it is used: one layout, the best ones, the curve, and the planner held against real runs."""

import json
import re

import pytest

import plan
from tests.support.refusals import refusal
from tools.planner import validate as verify
from tools.planner.fake import Replica

MP = ["--yaml_config", "config/mp.yaml", "--config", "mp"]


def planned(capsys, *words):
    """The plans that plan.py prints as JSON."""
    assert plan.main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


PARTS = 8  # of the layouts of `plan.py --verify`; each takes up to a minute
QUICK = ["mp_quick tensor_parallel=2", "shard_quick domain_parallel=2"]


def test_small_layouts_run_for_real_are_those_of_the_plan(capsys):
    cases = [case for case in verify.build_cases() if case.name in QUICK]
    assert len(cases) == len(QUICK)
    assert verify.verify(cases) == 0, capsys.readouterr().out


@pytest.mark.nightly
@pytest.mark.slow("all layouts of `plan.py --verify`, run for real")
@pytest.mark.parametrize("part", range(PARTS))
def test_all_small_layouts_run_for_real_are_those_of_the_plan(capsys, part):
    cases = verify.build_cases()[part::PARTS]
    assert len(cases) >= 1
    assert verify.verify(cases) == 0, capsys.readouterr().out


def test_a_message_that_is_not_planned_is_noticed(capsys, monkeypatch):
    monkeypatch.setattr(Replica, "_reduce", lambda self, bucket: None)
    (ddp,) = [case for case in verify.build_cases() if "data_parallel=ddp" in case.name]
    assert verify.verify([ddp]) == 1
    assert re.search(r"1 x all_reduce of \d+ bytes \(backward, dp\) planned as 0", capsys.readouterr().out)


def test_json_of_one_layout(capsys):
    (one,) = planned(
        capsys, "--yaml_config", "config/shard.yaml", "--config", "classify_1024", "--domain_parallel", "4",
        "--gpus", "4", "--gpu", "a100-80gb",
    )  # fmt: skip
    assert {"dp": 1, "tp": 1, "cp": 1, "pp": 1, "domain": 4}.items() <= one["layout"].items()
    memory = one["memory_bytes"]
    assert memory["activations"] < one["peak_allocated_bytes"] < sum(memory.values())
    assert one["fits"] == "fits" and one["flops_per_step"] > 1e12 and one["step_time_error"] < 1
    assert {"phase", "kind", "group", "count", "bytes"} <= one["collectives"][0].keys()
    assert one["samples_per_sec"] == pytest.approx(1 / one["step_time_s"])


def test_text_of_one_layout(capsys, tmp_path):
    plan.main([*MP, "--depth", "4", "--gpus", "16", "--tensor_parallel", "4", "--png", str(tmp_path / "memory.png")])
    text = capsys.readouterr().out
    said = "tp 4 x dp 4", "forward all_reduce", "inside a node", "This fits", "node-hours", "Reading the data is not in"
    assert not [words for words in said if words not in text]
    assert (tmp_path / "memory.png").stat().st_size > 1000


@pytest.mark.nightly
@pytest.mark.slow("the order of many layouts")
def test_the_best_layouts_of_16_gpus(capsys, tmp_path):
    plans = planned(
        capsys, *MP, "--gpus", "16", "--amp_mode", "fp16", "--top", "12", "--png", str(tmp_path / "all.png")
    )
    assert len(plans) == 12 and all(one["fits"] != "no" for one in plans)
    seconds = [one["step_time_s"] for one in plans]
    assert seconds == sorted(seconds)


def test_the_winner_comes_with_its_command_and_the_others_with_a_reason(capsys):
    plan.main([*MP, "--gpus", "8", "--top", "1"])
    text, told = capsys.readouterr()
    assert re.fullmatch(r"tracing layout 1 of 1 \(of \d+ that can run\), after 0 s\n", told)
    assert "sbatch -N 2 submit_" in text and "12 blocks cannot be shared by" in text


@pytest.mark.slow("a search in which no layout fits")
def test_where_nothing_fits_no_command_is_given(capsys):
    plan.main(["--yaml_config", "config/shard.yaml", "--config", "shard_025deg_patch2", "--gpus", "2", "--top", "1"])
    text = capsys.readouterr().out
    assert "fits; those that need least" in text and "Nothing to run" in text
    assert "sbatch" not in text and "torchrun" not in text


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
        (["--gpus", "99999999"], "expected a number from 1 to"),
        (["--gpu", "a100"], "no GPU 'a100' (did you mean 'a100-40gb'?)"),
        ([*MP, "--gpus", "16", "--tensor_parallel", "16"], "8 heads cannot be split over 16 ranks"),
        ([*MP, "--gpus", "64", "--context_parallel", "64"], "45 rows of patches"),
        ([*MP, "--gpus", "8", "--local_batch_size", "4"], "compared at the same --global_batch_size"),
        (
            [*MP, "--gpus", "4", "--context_parallel", "2", "--domain_parallel", "2"],
            "domain_parallel goes without context_parallel",
        ),
        ([*MP, "--top", "0"], "argument --top: 0 is not within"),
    ],
)
def test_bad_input_is_refused_in_one_line(words, message):
    with refusal(re.escape(message)):
        plan.main(words)
