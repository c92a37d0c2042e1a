"""`benchmark.py scaling` makes the runs that are missing, and puts what they come to into one table."""

import json
import os
import re
import signal
import sys
from unittest import mock

import pytest

import benchmark
from tests.conftest import TINY
from tests.support import programs
from tests.support.launch import wait_for
from tests.support.refusals import refusal
from tests.test_slurm import cluster  # noqa: F401
from tools.benchmarks import scaling
from tools.benchmarks.scaling import array_jobs, build_runs, collect, summary_file
from utils.errors import STOPPED_STATUS
from utils.files import write_json
from utils.yaml_files import yaml

ONE_AND_TWO = {"one": {"ranks": 1}, "ddp": {"ranks": 2}}
TENSOR = {"ranks": 2, "tensor_parallel": 2}
SPLIT = {"context_parallel": 2, "domain_parallel": 2}


@pytest.fixture
def study_file(data_keys, tmp_path):
    """Call with keys of a study to write one named `tiny` over the sample data."""

    def write(options=(), **keys):
        own = TINY | data_keys | {"config": "quick", "expdir": str(tmp_path / "logs"), "device": "cpu", "warmup": 0}
        own |= {"global_batch_size": 10, "num_iters": 40, "num_data_workers": 0} | dict(options)
        path = tmp_path / "scaling.yaml"
        yaml().dump({"tiny": {"layouts": ONE_AND_TWO, "options": own} | keys}, path)
        return str(path)

    return write


def call(path, *words):
    """Exit status of the program."""
    return benchmark.main(["scaling", "--study=tiny", f"--study_file={path}", *words])


def pretend(run, samples_per_sec):
    """A finished run of this speed."""
    summary = {"peak_memory_bytes": 2**29, "iterations": 40, "samples_per_sec": samples_per_sec, "val_loss": 0.25}
    write_json(summary_file(run), summary)


@pytest.fixture
def pretended(study_file):
    """20 samples/s on one rank, 30 on two, and a third run that is missing."""
    path = study_file(layouts=ONE_AND_TWO | {"tensor": TENSOR})
    runs = build_runs(path, "tiny", [])
    pretend(runs[0], 20.0)
    pretend(runs[1], 30.0)
    return path, runs


def test_figures_are_those_of_hand_made_runs(pretended):
    one, two = collect(pretended[1])
    assert (one["samples_per_sec"], one["speedup"], one["efficiency"]) == (20, 1, 1)
    assert (two["samples_per_sec"], two["speedup"], two["efficiency"]) == (30, 1.5, 0.75)
    assert two["device_hours"] == pytest.approx(2 * 40 * 10 / 30 / 3600)  # 40 steps of 10 samples
    assert two["val_loss"] == 0.25 and two["gib"] == 0.5


def test_in_weak_scaling_the_batch_grows_with_the_ranks(study_file):
    runs = build_runs(study_file(batch_per_rank=5), "tiny", [])
    assert [run.config.global_batch_size for run in runs] == [5, 10]


def test_the_report_needs_no_run_and_names_what_is_missing(pretended, tmp_path, capsys):
    path, _ = pretended
    with mock.patch.object(scaling, "start", side_effect=AssertionError):
        assert call(path, "--report_only", f"--json={tmp_path}/out.json", f"--png={tmp_path}/out.png") == 1
    printed = capsys.readouterr().out
    assert [cell.strip() for cell in printed.splitlines()[3].split("|")[4:7]] == ["30.0", "1.50", "75%"]
    assert "not finished: tensor-2" in printed
    figures = json.loads((tmp_path / "out.json").read_text())
    assert [row["run"] for row in figures["rows"]] == ["one-1", "ddp-2"] and figures["failed"] == ["tensor-2"]
    assert (tmp_path / "out.png").read_bytes()[1:4] == b"PNG"


def test_a_run_that_fails_lets_the_others_be_made_and_is_named(pretended, capsys):
    path, _ = pretended
    with mock.patch.object(sys, "executable", "/bin/false"):
        assert call(path) == 1
    printed = capsys.readouterr().out.splitlines()
    assert printed[:3] == [f"{name}: failed with status 1" for name in ("one-1", "ddp-2", "tensor-2")]
    assert printed[-1] == "not finished: tensor-2"


@pytest.mark.parametrize(
    "keys, words, message",
    [
        ({"layout": {}}, [], "tiny: unknown key 'layout' (did you mean 'layouts'?)"),
        ({"layouts": {"a": {"ranks": [1, "2"]}}}, [], "tiny: a-2: ranks: expected a number, or a list of numbers"),
        ({"layouts": {"a": {}}}, [], "tiny: a-None: ranks: expected a number, or a list of numbers"),
        (
            {"layouts": {"a": {"ranks": 4} | SPLIT}},
            [],
            "tiny: a-4: no script has context_parallel and domain_parallel",
        ),
        (
            {"layouts": {"a": {"ranks": 7, "global_batch_size": 14}}},
            ["--list"],
            "7 ranks do not fill 2 nodes",
        ),
        ({"options": {"global_batch_size": 3}}, [], "ddp-2: config/ViT.yaml: quick: global_batch_size 3 cannot be"),
        ({"options": {"config": "quik"}}, [], "no config 'quik' (did you mean 'quick'?)"),
        (
            {"options": {"depht": 1}},
            [],
            "one-1: command line: unknown option '--depht' (did you mean '--depth'?)",
        ),
        ({"options": {"depth": -1}}, [], "tiny: one-1: command line: depth: -1 should be greater"),
        ({}, ["--study=tini"], "no config 'tini' (did you mean 'tiny'?)"),
        ({}, ["--study_file=no.yaml"], "no.yaml: No such file"),
        ({}, ["--only=2"], "--only 2: the study has 1 runs of 1 ranks"),
        ({}, ["--num_iter=3"], "unknown option '--num_iter' (did you mean '--num_iters'?)"),
    ],
)
def test_bad_studies_and_options_are_one_line(study_file, keys, words, message):
    path = study_file(**keys)
    with mock.patch.object(scaling, "start", side_effect=AssertionError), refusal(re.escape(message)):
        call(path, *words)


@pytest.mark.parametrize("name", ["quick", "quick_weak", "cluster", "cluster_weak", "large", "large_weak"])
def test_the_studies_that_come_along_are_ones_that_the_scripts_take(name):
    runs = build_runs("config/scaling.yaml", name, [])
    assert len({summary_file(run) for run in runs}) == len(runs) > 5
    assert array_jobs(runs, [])


def test_each_number_of_ranks_has_its_own_array(study_file, capsys):
    path = study_file(layouts=ONE_AND_TWO | {"tensor": TENSOR})
    assert call(path, "--list", "--seed=3") is None
    jobs = [line for line in capsys.readouterr().out.splitlines() if line.startswith("sbatch")]
    assert "--nodes=1 --ntasks-per-node=1 --gpus-per-node=1 --array=0-0 submit_scaling.sh --study=tiny" in jobs[0]
    assert "--nodes=1 --ntasks-per-node=2 --gpus-per-node=2 --array=0-1 " in jobs[1] and jobs[1].endswith("--seed=3")


def test_a_task_of_an_array_becomes_its_run(study_file):
    path = study_file(layouts=ONE_AND_TWO | {"tensor": TENSOR})
    with (
        mock.patch.dict(os.environ, programs.launch_variables(1, 2)),
        mock.patch.object(os, "execv", side_effect=InterruptedError) as become,
        pytest.raises(InterruptedError),
    ):
        call(path, "--only=1")
    words = become.call_args.args[1]
    assert words[1] == "train_mp.py" and "--run_num=tiny-tensor-2" in words


@pytest.mark.slow("a study whose runs the training scripts make, started by torchrun")
@pytest.mark.timeout(200)
def test_a_study_is_made_by_the_training_scripts_stopped_continued_and_not_repeated(study_file, tmp_path, monkeypatch):
    programs.use_forks(tmp_path / "bin", monkeypatch)
    options = {"num_iters": 300, "validate_every": 20, "global_batch_size": 4}
    path = study_file(options, layouts={"one": {"ranks": 1}, "tensor": TENSOR})
    words = ["scaling", "--study=tiny", f"--study_file={path}", f"--json={tmp_path}/out.json"]
    first, _ = build_runs(path, "tiny", [])
    log = summary_file(first).with_name("out.log")
    study = programs.start(["benchmark.py", *words])
    wait_for(log, "epoch 1 ", study)
    study.send_signal(signal.SIGTERM)
    output, _ = study.communicate(timeout=60)
    assert study.returncode == STOPPED_STATUS and "repeat the command to resume" in output

    assert benchmark.main(words) is None
    assert "Resuming at iteration" in log.read_text() and log.read_text().count("Starting training") == 1
    one, two = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert (one["ranks"], two["ranks"]) == (1, 2)
    assert min(one["samples_per_sec"], two["speedup"], two["device_hours"]) > 0
    assert two["val_loss"] == pytest.approx(one["val_loss"], rel=1e-3)  # one problem, two layouts
    assert benchmark.main(words) is None and log.read_text().count("Starting training") == 1  # none is repeated
    assert benchmark.main([*words, "--num_iters=310"]) == 1  # nor is a run of other settings taken for one of these


@pytest.mark.slow("Slurm makes the runs of a study in an array")
@pytest.mark.timeout(300)
def test_slurm_makes_the_runs_in_an_array(cluster, study_file, tmp_path):  # noqa: F811
    layouts = {"one": {"ranks": 1}, "more": {"ranks": 1}}
    path = study_file({"num_iters": 400, "validate_every": 40, "global_batch_size": 4}, layouts=layouts)
    words = ["--study=tiny", f"--study_file={path}"]
    options = [f"--output={tmp_path}/run-%a.out", "--array=0-1", "--nodes=1", "--ntasks-per-node=1"]
    job = cluster.submit("submit_scaling.sh", *words, options=[*options, "--gpus-per-node=1"])
    output = tmp_path / "run-1.out"
    cluster._poll(job, lambda: output.exists() and "Starting training" in output.read_text(), "start of training")
    tasks = cluster.run("squeue", "--noheader", "--array", "--format=%F_%K").split()
    warned = next(task for task in tasks if task.endswith("_1"))
    cluster.run("scancel", "--batch", "--signal=USR1", warned)
    runs = build_runs(path, "tiny", [])
    cluster._poll(job, lambda: all(summary_file(run).exists() for run in runs), "the end of both runs")
    assert cluster.field(warned, "Restarts") == "1"
    assert cluster.field(warned.replace("_1", "_0"), "Restarts") == "0"  # of the same array
    assert call(path, "--report_only") is None
