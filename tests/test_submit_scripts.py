"""The submit scripts without Slurm: one body, site files, containers, and sourcing outside a job."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
SUBMIT = sorted(path.name for path in REPOSITORY.glob("submit_*.sh"))
DDP_NAMES = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]


def run(command, **environment):
    """Run with hardly any environment; returns the completed process."""
    environment = {"PATH": os.environ["PATH"], "HOME": "/tmp", "USER": "me"} | environment
    return subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=60)


def test_shellcheck_finds_nothing():
    if shutil.which("shellcheck") is None and not os.environ.get("CI"):
        pytest.skip("shellcheck is not installed: apt-get install shellcheck")
    files = [*SUBMIT, "export_DDP_vars.sh", "tests/slurm/cluster.sh", *sorted(map(str, Path("sites").glob("*.sh")))]
    result = run(["shellcheck", "-x", *files])
    assert result.returncode == 0, result.stdout


def test_the_scripts_differ_only_in_what_they_ask_for_and_run():
    def body(name):
        lines = (REPOSITORY / name).read_text().splitlines()
        return [line.split(".py")[0].rsplit(" ", 1)[0] for line in lines if line and not line.startswith("#")]

    assert all(body(name) == body("submit_pm.sh") for name in SUBMIT)


@pytest.mark.parametrize("shell", ["bash", "sh"])
def test_outside_slurm_the_variables_are_left_alone(shell):
    script = f"set -eu; . ./export_DDP_vars.sh; for n in {' '.join(DDP_NAMES)}; do eval echo \\${{$n-unset}}; done"
    result = run([shell, "-c", script])
    assert (result.returncode, result.stdout.split(), result.stderr) == (0, ["unset"] * 5, "")


def test_outside_slurm_a_submit_script_says_what_to_do():
    result = run(["bash", "submit_pm.sh"])
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "error: no Slurm job here: submit with sbatch, or run python train.py\n"


@pytest.fixture
def launch(tmp_path):
    """Run the shared body as in a job of one task, with an srun that prints the command of a task, word by word."""
    stub = tmp_path / "srun"
    stub.write_text('#!/bin/bash\nwhile [[ $1 != task ]]; do shift; done; shift\nprintf "%s\\n" "$@"\n')
    stub.chmod(0o755)

    def start(*words, program="train.py", **environment):
        job = {
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NUM_NODES": "1",
            "SLURM_NTASKS": "1",
            "SLURM_CPUS_ON_NODE": "1",
            "SLURM_JOB_NODELIST": "node1",
            "BASH_FUNC_module%%": '() { echo "module $*"; }',
        }
        return run(["bash", "sites/launch.sh", program, *words], **job | environment)

    return start


def test_without_a_container_a_task_is_python_and_the_words_given(launch):
    result = launch("--config=short", "two words", PYTHON=sys.executable)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[1:] == [sys.executable, "train.py", "--config=short", "two words"]


def test_a_part_of_a_package_is_started_as_a_module(launch):
    result = launch("--timeout", "5", program="tools/preflight/__main__.py", PYTHON="python")
    assert result.stdout.splitlines()[1:] == ["python", "-m", "tools.preflight", "--timeout", "5"]


def test_folders_of_the_site_come_before_the_words_given(launch, tmp_path):
    result = launch("--expdir=mine", DATA_DIR="/data/era5", LOG_DIR=str(tmp_path / "logs"), PYTHON="python")
    words = result.stdout.splitlines()[3:]
    assert words[0] == "--train_data_path=/data/era5/train" and words[-2:] == [
        f"--expdir={tmp_path}/logs",
        "--expdir=mine",
    ]
    assert "--time_means_path=/data/era5/stats/time_means.npy" in words
    assert (tmp_path / "logs").is_dir()


@pytest.mark.parametrize(
    "container, start, contains",
    [
        ("shifter", ["shifter", "--image=it:1", "--extra"], []),
        (
            "podman-hpc",
            ["podman-hpc", "run", "--rm", "--gpu"],
            [
                "--extra",
                f"--volume={REPOSITORY}:{REPOSITORY}",
                "--volume=/data/a b:/data/a b",
                "--env=RANK",
                "--env=NCCL_*",
            ],
        ),
        ("apptainer", ["apptainer", "exec"], ["--extra", f"--bind={REPOSITORY}", "--bind=/data/a b", "it:1"]),
    ],
)
def test_a_container_wraps_python(launch, container, start, contains):
    result = launch("--config=x", CONTAINER=container, IMAGE="it:1", CONTAINER_FLAGS="--extra", DATA_DIR="/data/a b")
    words = result.stdout.splitlines()[1:]
    assert words[: len(start)] == start
    python = words.index("python")
    assert set(contains) <= set(words[:python]) and words[python + 1] == "train.py" and words[-1] == "--config=x"


@pytest.mark.parametrize("name", ["GLOO_", "PYTORCH_", "TORCH", "NCCL_"])
def test_podman_hands_on_the_variables_of_torch(launch, name):
    assert f"--env={name}*" in launch(CONTAINER="podman-hpc", IMAGE="it:1").stdout.splitlines()


@pytest.mark.parametrize(
    "signal, requeue, shown, said",
    [
        ("USR1", 0, "", "launch: saved and requeued"),
        ("USR1", 1, " Requeue=0 ", "launch: saved, but the job may not be requeued: submit it again"),
        ("USR1", 1, " Requeue=1 ", "launch: saved; if squeue -j 7 lists no such job once this one has ended, submit"),
        ("TERM", 0, "", "launch: saved and stopped; preempted or requeued, it goes on by itself"),
    ],
)
def test_what_is_said_of_a_run_that_saved_is_true(launch, tmp_path, signal, requeue, shown, said):
    stubs = {
        "srun": f"trap : USR1; kill -{signal} $PPID; sleep 0.5; exit 75",
        "scontrol": f'[[ $1 == show ]] && echo "JobId=7{shown}Restarts=0" || exit {requeue}',
    }
    for name, script in stubs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{script}\n")
        (tmp_path / name).chmod(0o755)
    result = launch(PYTHON="python")
    assert result.returncode == 75 and result.stdout.splitlines()[-1].startswith(said), result.stdout
    assert ("to be preempted, requeued or cancelled" in result.stdout) == (signal == "TERM")


@pytest.mark.parametrize("resolves, address", [(True, "node1"), (False, "10.0.0.7"), (False, "")])
def test_a_node_whose_name_does_not_resolve_is_reached_by_the_address_of_srun(tmp_path, resolves, address):
    for name, script in {"scontrol": "echo node1; echo node2", "getent": f"exit {0 if resolves else 2}"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    job = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1",
        "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NODELIST": "node[1-2]", "SLURM_LAUNCH_NODE_IPADDR": address,
    }  # fmt: skip
    result = run(["sh", "-euc", ". ./export_DDP_vars.sh; echo $RANK/$WORLD_SIZE ${MASTER_ADDR-unset}"], **job)
    assert (result.stdout, result.stderr) == (f"1/2 {address or 'unset'}\n", "")


@pytest.mark.parametrize(
    "environment, site, modules",
    [
        ({}, "generic", []),
        (
            {"NERSC_HOST": "perlmutter", "PYTHON": "python", "MODULES": "pytorch/1"},
            "perlmutter",
            ["module load pytorch/1"],
        ),
        ({"LMOD_SYSTEM_NAME": "frontier"}, "frontier", ["module load rocm"]),
        ({"SLURM_CLUSTER_NAME": "frontier", "SITE": "generic", "MODULES": "a b"}, "generic", ["module load a b"]),
    ],
)
def test_the_site_is_found_or_chosen(launch, environment, site, modules):
    result = launch(**environment)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert [line for line in lines if line.startswith("module")] == modules
    assert next(line for line in lines if line.startswith("launch:")).endswith(f", site {site}")


def test_a_site_file_may_be_anywhere(launch, tmp_path):
    (tmp_path / "mine.sh").write_text("PYTHON=my-python\n")
    assert "my-python" in launch(SITE=str(tmp_path / "mine.sh")).stdout


@pytest.mark.parametrize(
    "environment, line",
    [
        ({"SITE": "moon"}, "error: SITE=moon: no file sites/moon.sh; there are frontier.sh generic.sh perlmutter.sh"),
        ({"CONTAINER": "box"}, "error: CONTAINER=box: use shifter, podman-hpc, apptainer or none"),
        ({"CONTAINER": "shifter"}, "error: CONTAINER=shifter needs IMAGE, the image's name"),
        ({"MODULES": "a", "BASH_FUNC_module%%": "() { false; }"}, "error: sites/generic.sh: module load a failed"),
    ],
)
def test_a_wrong_setting_is_one_line_and_status_2(launch, environment, line):
    result = launch(**environment)
    assert (result.returncode, result.stderr) == (2, line + "\n")
