"""A plan is submitted, and a finished run is compared with the plan of its config; what cannot be done is one line."""

import json
import os
import stat

import pytest

import plan as program
from tests.support import programs
from tests.support.refusals import refusal
from tools.planner import compare as comparison
from tools.planner.compare import compare
from tools.planner.plan import OF_THE_LAYOUT
from utils.config import SCRIPTS, load_config, write_config

PLANNED = {"forward_s": 0.010, "backward_s": 0.020, "pipeline_s": 0.030, "update_s": 0.005}
A100 = "NVIDIA A100-SXM4-40GB"


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """A stand-in for sbatch that notes its words, each in a line; call for those of the job."""
    script, words = tmp_path / "bin/sbatch", tmp_path / "words"
    script.parent.mkdir()
    script.write_text(f'#!/bin/bash\necho "PREFLIGHT=$PREFLIGHT" > {words}\nprintf "%s\\n" "$@" >> {words}\necho 17\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{script.parent}:{os.environ['PATH']}")
    return lambda: words.read_text().splitlines()


@pytest.mark.slow("the search, the choice and the submission in one")
def test_the_chosen_layout_is_submitted(slurm, tiny_options, capsys):
    words = [*tiny_options(), "--gpus=8", "--top=3", "--choose=2", "--submit=-t 00:10:00 --comment 'two words'"]
    program.main(words)
    said, sent = capsys.readouterr().out, slurm()
    assert sent[0] == "PREFLIGHT=1" and "job 17: " in said
    assert {"--nodes=2", "--ntasks-per-node=4", "--gpus-per-node=4", "two words"} <= {*sent}
    (script,) = (name for name, script in SCRIPTS.items() if script.submit in sent)
    own = SCRIPTS[script]
    config = load_config(sent[sent.index(own.submit) + 1 :], None, 8, own.yaml_config, own.splits)
    program.main([*tiny_options(), "--gpus=8", "--top=3", "--json"])
    first, second, _ = (one["layout"] for one in json.loads(capsys.readouterr().out))
    of_job = {key: getattr(config, key) for key in OF_THE_LAYOUT}
    assert of_job == {key: second[key] for key in OF_THE_LAYOUT} and config.layout(8).tp == second["tp"]
    assert first != second


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--gpus=2", "--top=3", "--choose=9"], "--choose 9: the search lists . layouts; --top 9 lists more"),
        (["--gpus=2..4", "--submit"], "--choose and --submit take a layout of one number of --gpus"),
        (["--gpus=5", "--global_batch_size=5", "--data_parallel=ddp", "--submit"], "5 ranks do not fill 2 nodes of 4"),
        (["--gpus=1", "--submit=-t 'x"], "sbatch: .*; nothing was submitted"),
        (["--gpus=1", "--embed_dim=32768", "--depth=24", "--submit"], "this layout does not fit into memory"),
    ],
)
def test_what_cannot_be_submitted_is_one_line_and_leaves_nothing(slurm, tiny_options, tmp_path, words, line):
    with refusal(line):
        program.main([*tiny_options(), *words])
    assert not (tmp_path / "words").exists()


def test_without_slurm_nothing_is_submitted(tiny_options, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with refusal("--submit: there is no sbatch here"):
        program.main([*tiny_options(), "--gpus=1", "--submit"])


@pytest.fixture
def folder(tiny_options, tmp_path, monkeypatch):
    """Call with how many readings, and what differs from the plan in them; returns the folder of such a run."""
    plan = {"step_time_s": 0.035, "peak_allocated_bytes": 2**30, "calls": 4} | PLANNED

    def as_planned(*_):
        return plan

    monkeypatch.setattr(comparison, "planned_figures", as_planned)
    monkeypatch.setattr(comparison, "plan_layout", as_planned)  # it would trace the model for nothing

    def make(readings=3, **measured):
        run = tmp_path / "logs/quick/00"
        run.mkdir(parents=True)
        write_config(load_config(tiny_options(), None, 2), run / "config.yaml")
        (run / "summary.json").write_text(json.dumps({"config": "quick", "world_size": 2}))
        usual = {
            "device": A100, "iterations": 10, "ranks": 2, "memory/most_bytes": 2**30, "messages": 4, "time/step": 0.036,
            "time/data": 0.001, "time/forward": 0.010, "time/backward": 0.019, "time/reduce": 0.001,
            "time/optimizer": 0.005, "time/slowest_rank": 1, "time/slowest_over_mean": 1.0,
        }  # fmt: skip
        first = {"iteration": 10, "since_start": 10} | usual | {"time/step": 9}  # of the warmup
        lines = [usual | {"iteration": 10 * n, "since_start": 10 * n} | measured for n in range(2, readings + 1)]
        (run / "metrics-rank0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [first, *lines]))
        return run

    return make


def cells_of(text):
    """The rows of a comparison, as words."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


def test_a_run_as_planned_has_ratios_of_one_and_no_reason(folder):
    text = compare(folder())
    assert "plan for 2 x a100-40gb; run on 2 x NVIDIA A100-SXM4-40GB, iterations 11 to 30" in text
    rows = cells_of(text)
    assert [row[-1] for row in rows] == ["1.00"] * 6 and rows[0][1:3] == ["35", "35"] and "\n- " not in text


@pytest.mark.parametrize(
    ("measured", "reason"),
    [
        ({"time/data": 0.020, "time/step": 0.055}, "data: a step waits 36% of its time for its batch"),
        ({"time/slowest_over_mean": 1.4}, "straggler: rank 1 takes 1.40 times the mean"),
        ({"time/backward": 0.060, "time/step": 0.077}, "messages: the backward pass"),
        (
            {"time/forward": 0.020, "time/backward": 0.039, "time/optimizer": 0.010, "time/step": 0.071},
            "computation: all phases are off alike",
        ),
        ({"memory/most_bytes": 2**31}, "memory: "),
        ({"messages": 6}, "collectives: the run sends others than planned"),
        ({"device": "cpu", "time/step": 5}, "the plan is for a100-40gb, and cpu is another device"),
    ],
)
def test_what_is_off_has_its_reason_and_no_other(folder, measured, reason):
    text = compare(folder(**measured), "a100-40gb")
    (found,) = [line for line in text.splitlines() if line.startswith("- ")]
    assert found.startswith(f"- {reason}")
    assert ("memory at most" in text) == ("device" not in measured)  # of a CPU the run knows its resident set alone


def test_the_stages_of_a_pipeline_are_compared_as_one(folder):
    text = compare(folder(**{"time/pipeline": 0.029, "time/forward": None, "time/backward": None}))
    assert "forward and backward, ms" in text and "| forward," not in text and "\n- " not in text


def test_only_the_last_start_counts(folder):
    run = folder(readings=2)
    lines = (run / "metrics-rank0.jsonl").read_text().splitlines()
    again = [json.loads(line) | {"iteration": 30 + n, "time/step": 0.071} for n, line in enumerate(lines)]
    (run / "metrics-rank0.jsonl").write_text("".join(f"{line}\n" for line in [*lines, *map(json.dumps, again)]))
    assert cells_of(compare(run))[0][-1] == "2.00"


def test_a_run_that_is_not_finished_or_has_no_readings_is_one_line(folder, tmp_path):
    with refusal("nowhere: has no summary.json: no run has finished here"):
        program.main(["compare", str(tmp_path / "nowhere")])
    run = folder(device="cpu")
    with refusal("cpu: config/hardware.yaml has no such device: give --gpu NAME"):
        compare(run)
    for readings in ("half a li", None):
        (run / "metrics-rank0.jsonl").write_text(readings) if readings else (run / "metrics-rank0.jsonl").unlink()
        with refusal("has no readings"):
            program.main(["compare", str(run)])
    (run / "summary.json").write_text("[1]")
    with refusal("summary.json: is not the summary of a run"):
        compare(run)


@pytest.mark.parametrize("options", ["--data_parallel=fsdp", "--pipeline_parallel=2 --gradient_accumulation=2"])
def test_any_finished_run_is_compared_with_its_collectives(tiny_options, tmp_path, capsys, options):
    words = [*tiny_options(yaml_config="config/ViT.yaml"), *options.split()]
    script = "train_mp.py" if "pipeline" in options else "train.py"
    (status, output), _ = programs.run_ranks([script, *words], ranks=2)
    assert status == 0, output
    assert program.main(["compare", str(tmp_path / "logs/quick/00"), "--gpu=a100-40gb"]) == 0
    text = capsys.readouterr().out
    assert "plan for 2 x a100-40gb; run on 2 x cpu" in text and "- the plan is for a100-40gb, and cpu is" in text
    if "fsdp" in options:  # sends of a pipeline are no collectives
        assert cells_of(text)[-1][::3] == ["collectives of a step", "1.00"]
