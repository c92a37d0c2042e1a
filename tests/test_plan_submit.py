"""A plan is submitted, kept with its run, and the run is compared with it; what cannot be done is one line."""

import json
import os
import stat

import pytest

import plan as program
from tests.support import programs
from tools.planner.hardware import load_gpu
from tools.planner.plan import plan_layout
from tools.planner.search import Request
from tools.planner.submit import stored
from training.planned import compare
from utils.config import SCRIPTS, load_config, write_config
from utils.errors import UsageError

PLANNED = {"forward": 0.010, "backward": 0.020, "update": 0.005}
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
def test_the_chosen_layout_is_submitted_and_stored(slurm, tiny_options, tmp_path, capsys):
    words = [*tiny_options(), "--gpus=8", "--top=3", "--choose=2", "--submit=-t 00:10:00 --comment 'two words'"]
    program.main(words)
    said, sent = capsys.readouterr().out, slurm()
    (file,) = (tmp_path / "logs/plans").iterdir()
    kept = json.loads(file.read_text())
    assert sent[0] == "PREFLIGHT=1" and f"--plan={file}" in sent and "job 17: " in said and str(file) in said
    assert {"--nodes=2", "--ntasks-per-node=4", "--gpus-per-node=4", "two words"} <= {*sent}
    (script,) = (name for name, script in SCRIPTS.items() if script.submit in sent)
    own = SCRIPTS[script]
    config = load_config(sent[sent.index(own.submit) + 1 :], None, 8, own.yaml_config, own.splits)
    assert config.model_dump() == kept["settings"] | {"plan": str(file)}
    program.main([*tiny_options(), "--gpus=8", "--top=3", "--json"])
    listed = json.loads(capsys.readouterr().out)
    assert listed[1]["layout"] == kept["layout"] != listed[0]["layout"]


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
    with pytest.raises(UsageError, match=line):
        program.main([*tiny_options(), *words])
    assert not [*tmp_path.glob("logs/plans/*")] and not (tmp_path / "words").exists()


def test_without_slurm_nothing_is_stored(tiny_options, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="--submit: there is no sbatch here"):
        program.main([*tiny_options(), "--gpus=1", "--submit"])
    assert not [*(tmp_path / "logs/plans").iterdir()]


@pytest.fixture(scope="module")
def kept(tiny_settings):
    """A stored plan of two ranks, with round numbers."""
    words = [f"--{key}={value}" for key, value in tiny_settings.items() if not isinstance(value, list)]
    request = Request(["--config=quick", *words, "--img_size", "16", "32"], load_gpu("a100-40gb"))
    config = request.config(2)
    found = stored(plan_layout(config, config.layout(2), request.gpu), request)
    assert found["step_time_s"] == pytest.approx(sum(found[f"{phase}_s"] for phase in PLANNED), rel=0.05)
    times = {f"{phase}_s": seconds for phase, seconds in PLANNED.items()}
    return found | times | {"step_time_s": 0.035, "peak_allocated_bytes": 2**30, "calls": 4}


@pytest.fixture
def folder(kept, tmp_path):
    """Call with what differs from the plan, in the plan and in the readings; returns the folder of such a run."""

    def make(plan=None, readings=3, **measured):
        run = tmp_path / "logs/quick/00"
        run.mkdir(parents=True)
        (run / "plan.json").write_text(json.dumps(kept | (plan or {})))
        write_config(load_config(["--config=quick", *options(kept)], None, 2), run / "config.yaml")
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


def options(kept):
    """Words that give the config of a stored plan."""
    keys = [key for key in kept["settings"] if key.endswith("_path") or key in ("embed_dim", "depth", "num_heads")]
    keys += ["num_iters", "warmup", "global_batch_size", "patch_size", "device"]
    return [*(f"--{key}={kept['settings'][key]}" for key in keys), "--img_size", "16", "32"]


def test_a_run_as_planned_has_ratios_of_one_and_no_reason(folder):
    text = compare(folder())
    assert "plan for 2 x a100-40gb; run on 2 x NVIDIA A100-SXM4-40GB, iterations 11 to 30" in text
    rows = [line.rsplit(maxsplit=3)[1:] for line in text.splitlines()[2:]]
    assert [row[-1] for row in rows] == ["1.00"] * 6 and rows[0][:2] == ["35", "35"] and "- " not in text


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
    (found,) = [line for line in compare(folder(**measured)).splitlines() if line.startswith("- ")]
    assert found.startswith(f"- {reason}")


def test_a_plan_for_a_cpu_is_held_against_a_run_on_one(folder):
    run = folder({"gpu": "laptop", "device_type": "cpu"}, **{"device": "cpu", "memory/most_bytes": 2**31})
    (found,) = [line for line in compare(run).splitlines() if line.startswith("- ")]
    assert found.startswith("- memory: the resident set has Python and its libraries in it")


def test_the_stages_of_a_pipeline_are_compared_as_one(folder):
    text = compare(folder(**{"time/pipeline": 0.029, "time/forward": None, "time/backward": None}))
    assert "forward and backward, ms" in text and "\nforward," not in text and "- " not in text


def test_only_the_last_start_counts(folder):
    run = folder(readings=2)
    lines = (run / "metrics-rank0.jsonl").read_text().splitlines()
    again = [json.loads(line) | {"iteration": 30 + n, "time/step": 0.071} for n, line in enumerate(lines)]
    (run / "metrics-rank0.jsonl").write_text("".join(f"{line}\n" for line in [*lines, *map(json.dumps, again)]))
    assert "2.00" in compare(run).splitlines()[2]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"settings": {}}', "{}", "\x00"])
def test_an_unreadable_plan_is_one_line(folder, text):
    run = folder()
    (run / "plan.json").write_text(text)
    with pytest.raises(UsageError, match="plan.json: is not"):
        compare(run)


@pytest.mark.parametrize(
    ("plan", "line"),
    [
        ({"settings": {"config": "other"}}, "no config 'other'"),
        ({"settings": {"embed_dim": 64}}, r"another run: embed_dim \(64 there, 32 in the run\)"),
        ({"settings": {"data_parallel": "fsdp"}}, r"another run: data_parallel \(fsdp there, ddp in the run\)"),
        ({"settings": {"nonsense": 1}}, "unknown key 'nonsense'"),
        ({"layout": {"gpus": 4}}, r"another run: ranks \(4 there, 2 in the run\)"),
        ({"step_time_s": 0}, "is not a plan"),
        ({"forward_s": None}, "is not a plan"),
    ],
)
def test_the_plan_of_another_run_is_one_line(folder, kept, plan, line):
    run = folder({name: kept[name] | value if isinstance(value, dict) else value for name, value in plan.items()})
    with pytest.raises(UsageError, match=line):
        compare(run)


def test_a_run_without_plan_or_readings_is_one_line(folder, tmp_path):
    with pytest.raises(UsageError, match="nowhere: has no plan.json"):
        program.main(["compare", str(tmp_path / "nowhere")])
    run = folder()
    (run / "metrics-rank0.jsonl").write_text('{"iteration": 1}\nhalf a li')
    with pytest.raises(UsageError, match="has no readings"):
        program.main(["compare", str(run)])
    (run / "metrics-rank0.jsonl").unlink()
    with pytest.raises(UsageError, match="has no readings"):
        program.main(["compare", str(run)])


@pytest.mark.parametrize("options", ["--data_parallel=fsdp", "--pipeline_parallel=2 --gradient_accumulation=2"])
def test_a_run_with_a_plan_ends_with_the_comparison_and_its_collectives(tiny_options, tmp_path, options):
    words = [*tiny_options(yaml_config="config/ViT.yaml"), *options.split()]
    request, path = Request(words, load_gpu("a100-40gb")), tmp_path / "a plan.json"
    path.write_text(json.dumps(stored(request.plan(2), request)))
    script = "train_mp.py" if "pipeline" in options else "train.py"
    (status, output), _ = programs.run_ranks([script, *words, f"--plan={path}"], ranks=2)
    assert status == 0, output
    run = tmp_path / "logs/quick/00"
    assert json.loads((run / "plan.json").read_text()) == json.loads(path.read_text())
    assert compare(run) in (run / "out.log").read_text()
    if "fsdp" in options:  # sends of a pipeline are no collectives
        assert [line.split()[-1] for line in compare(run).splitlines() if line.startswith("collectives")] == ["1.00"]


def test_a_plan_that_is_none_stops_a_run_at_its_start(tiny_options, tmp_path):
    (tmp_path / "x.json").write_text("[1]")
    done = programs.run(["train.py", *tiny_options(plan=tmp_path / "x.json")])
    assert done.returncode == 2 and "x.json: is not a plan as plan.py --submit stores it" in done.stderr
