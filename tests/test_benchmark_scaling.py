"""`benchmark.py scaling` makes the runs that are missing; its report has what they come to, and what is not there."""

import json
import math
import os
import re
import signal
import sys
import time
from unittest import mock

import pytest
from torch.utils.tensorboard import SummaryWriter

import benchmark
from tests.conftest import TINY
from tests.support import programs
from tests.test_slurm import cluster  # noqa: F401
from tools.benchmarks import scaling
from tools.benchmarks.scaling.report import collect, write_report
from tools.benchmarks.scaling.runs import place, start, state
from tools.benchmarks.scaling.study import Target, build_runs, job_lines, read_study
from tools.slurm import submit
from utils.config import write_config, yaml
from utils.errors import STOPPED_STATUS, UsageError, run_main

ONE_AND_TWO = {"one": {"ranks": 1}, "ddp": {"ranks": 2}}
TENSOR = {"ranks": 2, "options": {"tensor_parallel": 2}}


@pytest.fixture
def study_file(data_keys, tmp_path):
    """Call with families, and keys of the study, to write a study named `tiny` over the sample data."""

    def write(families, **keys):
        options = {k: v for k, v in (TINY | data_keys).items() if k != "global_batch_size"}
        options |= {"expdir": str(tmp_path / "logs"), "device": "cpu", "num_iters": 40, "num_data_workers": 0}
        options |= {"warmup": 0} | keys.pop("options", {})
        families = {
            name: {"batch": 10, "scaling": "strong", "config": "quick", "layouts": ONE_AND_TWO} | family
            for name, family in families.items()
        }
        study = {"about": "a test", "options": options, "families": families} | keys
        path = tmp_path / "scaling.yaml"
        yaml().dump({"tiny": study}, path)
        return str(path)

    return write


def call(path, *words):
    """Exit status of the program; its output goes beside the study."""
    return benchmark.main(["scaling", "--study=tiny", f"--study_file={path}", f"--out={path}-report", *words])


def runs_of(path):
    return build_runs(path, read_study(path, "tiny"), [])


def pretend(run, speeds, epochs, errors, persistence=250.0):
    """A finished run: {iteration: samples/s of the steps since the one before}, and {iteration: RMSE of z500}."""
    run.folder.mkdir(parents=True)
    write_config(run.config, run.folder / "config.yaml")
    events(run.folder, 1, speeds, epochs, errors)
    summary = {
        "world_size": run.ranks, "parameters": 7, "peak_memory_bytes": 2**29, "device": "cpu", "units": {"z500": "m"},
        "rmse": {"z500": list(errors.values())[-1]}, "persistence_rmse": {"z500": persistence},
    }  # fmt: skip
    (run.folder / "summary.json").write_text(json.dumps(summary))


def events(folder, first, speeds, epochs, errors):
    """What the trainer tells TensorBoard from an iteration on."""
    with SummaryWriter(folder, purge_step=first) as writer:
        for iteration, speed in speeds.items():
            writer.add_scalar("speed/samples_per_sec", speed, iteration)
            if iteration in epochs:
                writer.add_scalar("loss/train_epoch", 1.0, iteration)
            if iteration in errors:
                writer.add_scalar("rmse/14_z500", errors[iteration], iteration)


@pytest.fixture
def pretended(study_file, tmp_path):
    """Strong: 20 samples/s on one rank, 30 on two, and a third run that is missing. Weak: 20 and 36."""
    layouts = ONE_AND_TWO | {"tensor": TENSOR}
    path = study_file({"strong": {"layouts": layouts}, "weak": {"scaling": "weak"}})
    runs, epochs = runs_of(path), [20, 40]
    # 10 + 5 + 5 + 5 seconds; the first reading is of the first 10 steps, which do not count
    pretend(runs[0], {10: 10.0, 20: 20.0, 30: 20.0, 40: 20.0}, epochs, {20: 400.0, 40: 200.0})
    pretend(runs[1], {10: 20.0, 20: 30.0, 30: 30.0, 40: 30.0}, epochs, {20: 400.0, 40: 200.0})
    pretend(runs[3], {10: 10.0, 20: 20.0, 30: 20.0, 40: 20.0}, epochs, {20: 400.0, 40: 201.2})
    pretend(runs[4], {10: 20.0, 20: 30.0, 30: 36.0, 40: 60.0}, [20, 30, 40], {20: 290.0, 40: 150.0})
    return path, runs, tmp_path / "out"


def test_figures_are_those_of_hand_made_runs(pretended):
    _, runs, out = pretended
    one, two, missing, weak_one, weak_two = collect(runs, out, Target("z500", 300.0, "given")).rows.itertuples()
    assert (one.samples_per_sec, one.speedup, one.efficiency) == pytest.approx((20, 1, 1))
    assert (two.samples_per_sec, two.speedup, two.efficiency) == pytest.approx((30, 1.5, 0.75))
    assert one.relative_to == two.relative_to == "strong-one-1"
    assert one.training_seconds == pytest.approx(25)
    # 400 after 15 s and 200 after 25 s; on two ranks after 5 + 10/3 s and 5 + 10 s
    assert one.seconds_to_target == pytest.approx(20)
    assert two.seconds_to_target == pytest.approx((5 + 10 / 3 + 15) / 2)
    assert two.device_hours_to_target == pytest.approx(2 * two.seconds_to_target / 3600)
    assert two.device_hours_per_1000_samples == pytest.approx(2 * 1000 / 30 / 3600)
    assert two.device_hours == pytest.approx(2 * 15 / 3600)
    # the batch of a weak run grows: 20 samples a step on two ranks; the median epoch counts
    assert [run.config.global_batch_size for run in runs] == [10, 10, 10, 10, 20]
    assert (weak_two.samples_per_sec, weak_two.slowest_epoch, weak_two.fastest_epoch) == pytest.approx((36, 30, 60))
    assert (weak_two.speedup, weak_two.efficiency) == pytest.approx((1.8, 0.9))
    assert weak_two.relative_to == "weak-one-1"
    assert weak_two.reached.startswith("≤") and weak_two.seconds_to_target == pytest.approx(200 / 20 + 200 / 30)
    assert not weak_one.reached.startswith("≤")
    assert missing.state == "missing" and math.isnan(missing.samples_per_sec)


def test_a_target_that_is_not_reached_is_said_so(pretended):
    path, runs, out = pretended
    figures = collect(runs, out, Target("z500", 160.0, "given"))
    assert list(figures.rows["seconds_to_target"].isna()) == [True, True, True, True, False]
    out.mkdir()
    write_report(figures, read_study(path, "tiny"), out)
    assert (out / "report.html").read_text().count("<td>not reached</td>") == 3


def test_a_target_is_chosen_that_every_run_reaches(pretended):
    _, runs, out = pretended
    target = collect(runs, out, None).target
    assert (target.field, target.rmse) == ("z500", 202)  # of 200, 200, 201.2 and 150
    assert "chosen afterwards" in str(target)


def test_steps_computed_twice_count_once(study_file, tmp_path):
    run = runs_of(study_file({"strong": {}}))[0]
    pretend(run, {10: 10.0, 20: 20.0, 30: 1.0}, [20], {20: 400.0})  # killed; continued from iteration 20
    events(run.folder, 21, {30: 20.0, 40: 20.0}, [40], {40: 200.0})
    row = collect([run], tmp_path, None).rows.iloc[0]
    assert row.training_seconds == pytest.approx(25) and row.samples_per_sec == pytest.approx(20)


def test_more_ranks_than_cores_are_flagged(pretended):
    path, runs, out = pretended
    out.mkdir()
    for run, cores in zip(runs, (1, 1, 1, 4, 4), strict=True):
        (out / f"run-{run.number}.json").write_text(
            json.dumps({"run": run.name, "nodes": 1, "cores": cores, "threads": 1, "devices": 0})
        )
    figures = collect(runs, out, None)
    assert [bool(crowd) for crowd in figures.rows["crowd"].fillna("")] == [False, True, False, False, False]
    write_report(figures, read_study(path, "tiny"), out)
    assert "strong-ddp-2: oversubscribed: 2 ranks with 1 thread(s) each" in (out / "report.html").read_text()


def test_the_report_needs_nothing_else_and_leaves_nothing_out(pretended, capsys):
    path, runs, _ = pretended
    assert call(path, "--report_only", "--target=z500=300") == 1  # a run is missing
    out = f"{path}-report"
    page = re.sub(r"\s*(</?t[drh]>)\s*", r"\1", open(f"{out}/report.html").read())
    assert page.count("<svg") == 4 and "src=" not in page and 'href="http' not in page
    assert "<tr><td>strong-tensor-2</td><td>missing</td><td>never started</td></tr>" in page
    assert "<td>1.50</td><td>75%</td>" in page
    assert "<td>persistence: nothing changes</td><td>250.000</td>" in page
    assert all(run.command in page for run in runs)
    report = json.loads(open(f"{out}/report.json").read())
    rows = report["rows"]
    assert report["target"] == {"field": "z500", "rmse": 300, "reason": "given with --target"}
    assert [row["run"] for row in rows] == [run.name for run in runs]
    assert rows[1]["efficiency"] == pytest.approx(0.75) and rows[2]["efficiency"] is None
    assert "strong-tensor-2: missing: never started" in capsys.readouterr().out


@pytest.mark.parametrize(
    "said, expected",
    [
        ("starting\nerror: rank 1: no room\nerror: rank 0: no bread", "error: rank 1: no room"),
        ("[rank0]: torch.OutOfMemoryError: CUDA out of memory", "[rank0]: torch.OutOfMemoryError: CUDA out of memory"),
        ("launch: job 1\nerror: old\nlaunch: job 1, restart 1\nsrun: error: Killed", "srun: error: Killed"),
        ("saved\ntorch.distributed.SignalException: Process 1 got signal: 15", None),
        ("launch: job 1\nerror: old\nlaunch: job 1, restart 1", None),
    ],
)  # fmt: skip
def test_a_run_that_failed_says_why(study_file, tmp_path, said, expected):
    run = runs_of(study_file({"strong": {}}))[0]
    (tmp_path / "run-0.out").write_text(said + "\n")
    now = state(run, tmp_path)
    assert (now.kind, now.why) == (("failed", expected) if expected else ("missing", "never started"))


def test_a_process_that_ends_without_a_word_has_failed(study_file, tmp_path):
    run = runs_of(study_file({"strong": {}}))[0]
    with mock.patch.object(sys, "executable", "/bin/false"):
        assert start(run, tmp_path) == 1
    assert state(run, tmp_path).why == "error: it ended with status 1"


def test_a_folder_of_other_settings_is_not_taken_for_the_run(pretended, capsys):
    path, runs, _ = pretended
    with mock.patch.object(scaling, "start") as started:
        assert call(path, "--num_iters=50") == 1
        assert [each.args[0].name for each in started.call_args_list] == ["strong-tensor-2"]
    assert f"{runs[0].folder} has num_iters 40, not 50" in capsys.readouterr().out
    summary = json.loads((runs[0].folder / "summary.json").read_text())
    (runs[0].folder / "summary.json").write_text(json.dumps(summary | {"world_size": 8}))
    assert state(runs[0], runs[0].folder).why.startswith(f"{runs[0].folder} has 8 ranks, not 1")


def strong(**keys):
    return {"strong": keys}


def layout(**keys):
    return {"strong": {"layouts": {"a": keys}, "batch": 12}}


SPLIT = {"context_parallel": 2, "domain_parallel": 2}


@pytest.mark.parametrize(
    "families, keys, words, message",
    [
        (strong(batchs=1), {}, [], "tiny: strong: unknown key 'batchs' (did you mean 'batch'?)"),
        (layout(rank=1), {}, [], "tiny: strong: a: unknown key 'rank' (did you mean 'ranks'?)"),
        (layout(ranks=[1, "2"]), {}, [], "tiny: strong: a: ranks: '2' should be a valid integer"),
        (layout(), {}, [], "tiny: strong: a: key 'ranks' is missing (ranks of the run; a list: of each run)"),
        (
            layout(ranks=4, options=SPLIT),
            {},
            [],
            "tiny: strong-a-4: no script has context_parallel and domain_parallel",
        ),
        (layout(ranks=[1, 1]), {}, [], "tiny: a number of ranks is listed twice"),
        (layout(ranks=6), {}, ["--sbatch"], "strong-a-6: 6 ranks do not fill nodes of 4 GPUs"),
        (strong(scaling="wrong"), {}, [], "tiny: strong: scaling: 'wrong' should be 'strong' or 'weak'"),
        (
            strong(batch=3),
            {},
            [],
            "tiny: strong-ddp-2: config/ViT.yaml: quick: global_batch_size 3 cannot be shared by",
        ),
        (strong(config="quik"), {}, [], "no config 'quik' (did you mean 'quick'?)"),
        (strong(), {"targets": "z500=1"}, [], "tiny: unknown key 'targets' (did you mean 'target'?)"),
        (strong(), {"target": "z500"}, [], "tiny: target 'z500': expected a field and its RMSE, as z500=300"),
        (strong(), {"options": {"depht": 1}}, [], "strong-one-1: unknown option 'depht' (did you mean 'depth'?)"),
        (strong(), {"options": {"run_num": "1"}}, [], "tiny: strong-one-1: option 'run_num' is set by the study"),
        (strong(), {"options": {"depth": -1}}, [], "tiny: strong-one-1: command line: depth: -1 should be greater"),
        (strong(), {}, ["--study=tini"], "no config 'tini' (did you mean 'tiny'?)"),
        (strong(), {}, ["--study_file=no.yaml"], "no.yaml: No such file"),
        (strong(), {}, ["--only=2"], "--only 2: the study has runs 0 to 1"),
        (strong(), {}, ["--target=z500=-1"], "command line: target 'z500=-1': expected"),
        (strong(), {}, ["--num_iter=3"], "unknown option '--num_iter' (did you mean '--num_iters'?)"),
        (strong(), {}, ["--out=/dev/null/x"], "/dev/null/x: Not a directory"),
    ],
)
def test_bad_studies_and_options_are_one_line_and_status_2(study_file, capsys, families, keys, words, message):
    path = study_file(families, **keys)
    with mock.patch.object(scaling, "start", side_effect=AssertionError), pytest.raises(SystemExit) as end:
        run_main(lambda: call(path, *words))
    error = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and len(error) == 1 and message in error[0]


def test_an_unknown_field_of_the_target_is_refused(pretended):
    with pytest.raises(UsageError, match=r"no run forecasts 'z50' .did you mean 'z500'"):
        call(pretended[0], "--report_only", "--target=z50=300")


@pytest.mark.parametrize("name", ["quick", "cluster"])
def test_the_studies_that_come_along_are_ones_that_the_scripts_take(name):
    study = read_study("config/scaling.yaml", name)
    runs = build_runs("config/scaling.yaml", study, [])
    assert {run.scaling for run in runs} == {"strong", "weak"}
    assert {run.script for run in runs} == {"train.py", "train_mp.py", "train_shard.py"}
    assert len({run.folder for run in runs}) == len(runs)


def test_each_size_of_run_has_its_own_array(pretended, capsys):
    path, runs, _ = pretended
    study = read_study(path, "tiny")
    lines = job_lines([run for run in runs if run.number != 1], study.gpus_per_node, ["--study=tiny"], runs[0].folder)
    assert "-N 1 --ntasks-per-node=1 --gpus-per-node=1 --array=0,3 " in lines[0]
    assert "-N 1 --ntasks-per-node=2 --gpus-per-node=2 --array=2,4 " in lines[1]
    assert "--dependency=afterany:$job0:$job1 " in lines[2] and lines[2].endswith("--study=tiny --report_only")
    assert call(path, "--sbatch") == 0
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 2 and "--array=2 " in printed[0]  # the others are finished


def test_without_slurm_nothing_is_submitted(pretended, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UsageError, match="there is no sbatch here"):
        call(pretended[0], "--submit")


@pytest.mark.parametrize("refused", ["-N 2 --test-only", "-N 2 --array", None])
def test_all_jobs_of_a_study_are_submitted_or_what_was_is_said(tmp_path, monkeypatch, refused):
    """A stand-in for sbatch writes down what it was asked, and refuses one thing."""
    fake = tmp_path / "sbatch"
    fake.write_text(f"""#!/bin/bash
words=" $* "; echo "$words" >> {tmp_path}/asked
[[ $words == *--test-only* ]] && kind=--test-only || kind=--array
[[ $words == *" -N 2 "* && "-N 2 $kind" == "{refused}" ]] && {{ echo "sbatch: error: no such nodes" >&2; exit 1; }}
[[ $kind == --test-only ]] || wc -l < {tmp_path}/asked
""")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    lines = [
        "job0=$(sbatch --parsable -N 1 --array=0 a.sh)",
        "job1=$(sbatch --parsable -N 2 --array=1 a.sh)",
        "sbatch --parsable -N 1 --dependency=afterany:$job0:$job1 a.sh --report_only",
    ]
    if refused:
        with pytest.raises(UsageError, match="^sbatch: sbatch: error: no such nodes; ") as caught:
            submit(lines)
        left = "nothing was submitted" if "test" in refused else "in the queue: 4 (scancel takes them back)"
        assert str(caught.value).endswith(left)
    else:
        assert submit(lines) == "6"
        assert "--dependency=afterany:4:5 " in (tmp_path / "asked").read_text().splitlines()[-1]
    asked = (tmp_path / "asked").read_text().splitlines()
    assert all("--test-only" in line and "--dependency" not in line for line in asked[:3])
    assert len(asked) == {"-N 2 --test-only": 2, "-N 2 --array": 5, None: 6}[refused]


@pytest.mark.slow("a study whose runs the training scripts make, started by torchrun")
@pytest.mark.timeout(200)
def test_a_study_is_made_by_the_training_scripts_stopped_continued_and_not_repeated(
    study_file, capsys, tmp_path, monkeypatch
):
    programs.use_forks(tmp_path / "bin", monkeypatch)
    layouts = {"one": {"ranks": 1}, "tensor": TENSOR}
    path = study_file({"strong": {"layouts": layouts, "batch": 4}}, options={"num_iters": 300, "validate_every": 20})
    words = ["scaling", "--study=tiny", f"--study_file={path}", f"--out={path}-report"]
    first, second = runs_of(path)
    study = programs.start(["benchmark.py", *words])
    end = time.monotonic() + 60
    while not (first.folder / "out.log").exists() or "epoch 1 " not in (first.folder / "out.log").read_text():
        assert time.monotonic() < end
        time.sleep(0.05)
    study.send_signal(signal.SIGTERM)
    output, _ = study.communicate(timeout=60)
    assert study.returncode == STOPPED_STATUS and "stopped; repeat the command to resume" in output

    assert benchmark.main(words) == 0
    log = (first.folder / "out.log").read_text()
    assert "Resuming at iteration" in log and log.count("Starting training") == 1
    report = open(f"{path}-report/report.json").read()
    one, two = json.loads(report)["rows"]
    assert one["state"] == two["state"] == "finished" and (one["ranks"], two["ranks"]) == (1, 2)
    assert min(one["samples_per_sec"], two["speedup"], two["seconds_to_target"], two["device_hours"]) > 0
    assert two["rmse"]["z500"] == pytest.approx(one["rmse"]["z500"], rel=1e-3)  # one problem, two layouts
    assert place(second, second.folder.parents[2] / "scaling.yaml-report")["threads"] == 1

    with mock.patch.object(scaling, "start", side_effect=AssertionError("a run was repeated")):
        assert benchmark.main(words) == 0
    assert open(f"{path}-report/report.json").read() == report


@pytest.mark.slow("Slurm makes the runs of a study in arrays")
@pytest.mark.timeout(300)
def test_slurm_makes_the_runs_in_arrays_and_then_the_report(cluster, study_file, tmp_path):  # noqa: F811
    layouts = {"one": {"ranks": 1}, "more": {"ranks": 1}, "ddp": {"ranks": 2}}
    options = {"num_iters": 400, "validate_every": 40}
    path = study_file({"strong": {"layouts": layouts, "batch": 4}}, gpus_per_node=1, options=options)
    words = ["scaling", "--study=tiny", f"--study_file={path}", f"--out={tmp_path / 'out'}"]
    said = cluster.run(sys.executable, "benchmark.py", *words, "--submit")
    job = said.split("the report comes with job ")[1].split(",")[0]
    output = tmp_path / "out/run-1.out"
    cluster._poll(job, lambda: output.exists() and "Starting training" in output.read_text(), "start of training")
    tasks = cluster.run("squeue", "--noheader", "--array", "--format=%F_%K").split()
    warned = next(task for task in tasks if task.endswith("_1"))
    cluster.run("scancel", "--batch", "--signal=USR1", warned)
    state, status = cluster.end(job)
    assert cluster.field(warned, "Restarts") == "1"
    assert cluster.field(warned.replace("_1", "_0"), "Restarts") == "0"  # of the same array
    outputs = {file.name: file.read_text() for file in (tmp_path / "out").glob("*.out")}
    assert (state, status) == ("COMPLETED", 0), outputs
    assert set(outputs) == {"run-0.out", "run-1.out", "run-2.out", "report.out"}
    one, more, two = json.loads((tmp_path / "out/report.json").read_text())["rows"]
    assert one["state"] == more["state"] == two["state"] == "finished"
    assert (one["place"]["nodes"], two["place"]["nodes"]) == (1, 2)
    assert two["rmse"]["z500"] == pytest.approx(one["rmse"]["z500"], rel=1e-3)
