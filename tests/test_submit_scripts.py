"""The submit scripts without Slurm: one body, site files, containers, and sourcing outside a job."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
SUBMIT = sorted(path.name for path in REPOSITORY.glob("submit_*.sh") if not path.is_symlink())
# An srun that prints the command of a task, word by word; to stderr go its own options.
SRUN = """#!/bin/bash
while [[ $1 != task ]]; do echo "srun $1" >&2; shift; done
echo "bind ${SLURM_CPU_BIND:-}" >&2
shift
printf "%s\\n" "$@"
"""
SITES = "alps.sh frontier.sh generic.sh juwels.sh perlmutter.sh leonardo.sh lumi.sh"
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


@pytest.mark.parametrize(("theirs", "ours"), [("submit_pm_dp.sh", "submit_dp.sh"), ("submit_pm_mp.sh", "submit_mp.sh")])
def test_names_that_users_of_nersc_type_are_links_to_ours(theirs, ours):
    assert (REPOSITORY / theirs).readlink() == Path(ours)
    assert run(["bash", theirs]).stderr == run(["bash", ours]).stderr


def test_their_program_with_graphs_says_which_option_it_is():
    result = run([sys.executable, "train_mp_graphs.py", "--config=mp", "--run_num=a b"])
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == (
        "error: train_mp_graphs.py is an option of train_mp.py here: "
        "give train_mp.py --enable_cuda_graphs --config=mp '--run_num=a b'\n"
    )


def write_program(path, text):
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def launch(tmp_path):
    """Run the shared body as in a job of one task, with the SRUN above. body: another file for it."""
    write_program(tmp_path / "srun", SRUN)

    def start(*words, program="train.py", body="sites/launch.sh", **environment):
        job = {
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NUM_NODES": "1",
            "SLURM_NTASKS": "1",
            "SLURM_CPUS_ON_NODE": "1",
            "SLURM_JOB_NODELIST": "node1",
            "BASH_FUNC_module%%": '() { echo "module $*"; }',
        }
        return run(["bash", body, program, *words], **job | environment)

    return start


def test_without_a_container_a_task_is_python_and_the_words_given(launch):
    result = launch("--config=short", "two words", PYTHON=sys.executable)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[1:] == [sys.executable, "train.py", "--config=short", "two words"]


def test_a_part_of_a_package_is_started_as_a_module(launch):
    result = launch("--device", "cpu", program="tools/preflight/__main__.py", PYTHON="python")
    assert result.stdout.splitlines()[1:] == ["python", "-m", "tools.preflight", "--device", "cpu"]


def test_folders_of_the_site_come_before_the_words_given(launch, tmp_path):
    result = launch("--expdir=mine", DATA_DIR="/data/era5", LOG_DIR=str(tmp_path / "logs"), PYTHON="python")
    words = result.stdout.splitlines()[3:]
    assert words[0] == "--train_data_path=/data/era5/train" and words[-2:] == [
        f"--expdir={tmp_path}/logs",
        "--expdir=mine",
    ]
    assert "--time_means_path=/data/era5/stats/time_means.npy" in words
    assert (tmp_path / "logs").is_dir()


@pytest.fixture
def staged(launch, tmp_path):
    """Run with the data copied to a disk; two nodes are one after the other here. Python lists what it is given."""
    for name in ("train", "valid"):
        (tmp_path / "data" / name).mkdir(parents=True)
        (tmp_path / "data" / name / "1979.h5").write_text(name)
    (tmp_path / "disk").mkdir()
    write_program(tmp_path / "python", PYTHON_THAT_LISTS)

    def start(**environment):
        (tmp_path / "srun").write_text(SRUN_THAT_RUNS)
        folders = {"DATA_DIR": str(tmp_path / "data"), "STAGE_TO": str(tmp_path / "disk")}
        return launch("--config=x", PYTHON=str(tmp_path / "python"), **folders | environment)

    return start


# Like srun, it runs a command; "tasks" counts those of each step.
SRUN_THAT_RUNS = """#!/bin/bash
while [[ $1 != bash ]]; do [[ $1 == --ntasks=* ]] && echo "tasks ${1#*=}"; shift; done
exec "$@"
"""
PYTHON_THAT_LISTS = """#!/bin/bash
for word in "$@"; do
    case $word in --train_data_path=* | --valid_data_path=*) echo "${word#*=}: $(cat "${word#*=}"/*)" ;; esac
done
exit "${STATUS:-0}"
"""


@pytest.mark.parametrize("status", [0, 3])
def test_the_data_are_copied_to_the_disk_of_each_node_and_removed_at_the_end(staged, tmp_path, status):
    copies = tmp_path / "disk/staged-7"
    copies.mkdir()
    (copies / "part").touch()  # of a start of this job that was killed
    result = staged(STATUS=str(status), SLURM_NTASKS="4")
    shown = [f"{copies}/train: train", f"{copies}/valid: valid"]
    assert result.stdout.splitlines()[1:] == ["tasks 1", "tasks 4", *shown, "tasks 1"]
    assert (result.returncode, result.stderr) == (status, "") and not list((tmp_path / "disk").iterdir())
    assert len(list((tmp_path / "data").rglob("*.h5"))) == 2


def test_data_that_cannot_be_copied_start_nothing(staged, tmp_path):
    (tmp_path / "data/valid/1979.h5").unlink()
    (tmp_path / "data/valid").rmdir()
    result = staged()
    assert (result.returncode, result.stdout.splitlines()[1:]) == (2, ["tasks 1", "tasks 1"])
    assert result.stderr.endswith(f"launch: STAGE_TO={tmp_path}/disk: the data were not copied: nothing was started\n")
    assert "valid" in result.stderr.splitlines()[0] and not list((tmp_path / "disk").iterdir())


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
        ("USR1", 0, "", "launch: stopped after saving and requeued"),
        ("USR1", 1, " Requeue=0 ", "launch: stopped after saving, but the job may not be requeued: submit it again"),
        ("USR1", 1, " Requeue=1 ", "launch: stopped after saving; if squeue -j 7 lists no such job once this one has"),
        ("TERM", 0, "", "launch: stopped after saving; preempted or requeued, it resumes by itself"),
    ],
)
def test_what_is_said_of_a_run_that_saved_is_true(launch, tmp_path, signal, requeue, shown, said):
    stubs = {
        "srun": f"trap : USR1; kill -{signal} $PPID; sleep 0.5; exit 75",
        "scontrol": f'[[ $1 == show ]] && echo "JobId=7{shown}Restarts=0" || exit {requeue}',
    }
    for name, script in stubs.items():
        write_program(tmp_path / name, f"#!/bin/bash\n{script}\n")
    result = launch(PYTHON="python")
    assert result.returncode == 75 and result.stdout.splitlines()[-1].startswith(said), result.stdout
    assert ("to be preempted, requeued or cancelled" in result.stdout) == (signal == "TERM")


@pytest.mark.parametrize("resolves, address", [(True, "node1"), (False, "10.0.0.7"), (False, "")])
def test_a_node_whose_name_does_not_resolve_is_reached_by_the_address_of_srun(tmp_path, resolves, address):
    for name, script in {"scontrol": "echo node1; echo node2", "getent": f"exit {0 if resolves else 2}"}.items():
        write_program(tmp_path / name, f"#!/bin/sh\n{script}\n")
    job = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1",
        "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NODELIST": "node[1-2]", "SLURM_LAUNCH_NODE_IPADDR": address,
    }  # fmt: skip
    result = run(["sh", "-euc", ". ./export_DDP_vars.sh; echo $RANK/$WORLD_SIZE ${MASTER_ADDR-unset}"], **job)
    assert (result.stdout, result.stderr) == (f"1/2 {address or 'unset'}\n", "")


@pytest.mark.parametrize(
    ("device", "flags"), [("/dev/nvidiactl", ["--nv"]), ("/dev/kfd", ["--rocm"]), ("/dev/no-gpu", [])]
)
def test_apptainer_is_told_of_the_gpus_that_are_there(launch, tmp_path, device, flags):
    """The body with paths of devices under the test's folder, in which one of them is."""
    (tmp_path / "dev").mkdir()
    (tmp_path / device[1:]).touch()
    body = tmp_path / "launch.sh"
    body.write_text((REPOSITORY / "sites/launch.sh").read_text().replace("-e /dev/", f"-e {tmp_path}/dev/"))
    words = launch("--config=x", body=str(body), CONTAINER="apptainer", IMAGE="it.sif", CONTAINER_FLAGS="--extra")
    words = words.stdout.splitlines()[1:]
    assert words[words.index("--extra") :] == ["--extra", *flags, "it.sif", "python", "train.py", "--config=x"]


def test_apptainer_may_still_be_called_singularity(launch, tmp_path):
    (tmp_path / "singularity").touch(0o755)
    assert launch(CONTAINER="apptainer", IMAGE="it.sif").stdout.splitlines()[1] == "singularity"
    (tmp_path / "apptainer").touch(0o755)
    assert launch(CONTAINER="apptainer", IMAGE="it.sif").stdout.splitlines()[1] == "apptainer"


@pytest.mark.parametrize(
    ("container", "options"),
    [
        (
            "pyxis",
            [
                "--container-image=it:1", f"--container-mounts={REPOSITORY}:{REPOSITORY},/data/a b:/data/a b",
                f"--container-workdir={REPOSITORY}", "--extra",
            ],
        ),
        ("environment", ["--environment=it:1", "--extra"]),
    ],
)  # fmt: skip
def test_a_container_may_be_started_by_srun(launch, container, options):
    result = launch("--config=x", CONTAINER=container, IMAGE="it:1", CONTAINER_FLAGS="--extra", DATA_DIR="/data/a b")
    words, own = result.stdout.splitlines()[1:], result.stderr.splitlines()
    assert words[:2] == ["python", "train.py"] and words[-1] == "--config=x"
    first = own.index(f"srun {options[0]}")
    assert own[first : first + len(options)] == [f"srun {option}" for option in options]


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
        ({"SLURM_CLUSTER_NAME": "lumi"}, "lumi", []),
        (
            {"SLURM_CLUSTER_NAME": "lumi", "CONTAINER": "apptainer", "IMAGE": "it.sif"},
            "lumi",
            ["module use /appl/local/laifs/modules", "module load lumi-aif-singularity-bindings"],
        ),
        ({"SYSTEMNAME": "juwelsbooster"}, "juwels", []),
        ({"SLURM_CLUSTER_NAME": "leonardo"}, "leonardo", []),
        ({"SLURM_CLUSTER_NAME": "clariden", "CONTAINER": "environment", "IMAGE": "torch"}, "alps", []),
    ],
)
def test_the_site_is_found_or_chosen(launch, environment, site, modules):
    result = launch(**environment)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert [line for line in lines if line.startswith("module")] == modules
    assert next(line for line in lines if line.startswith("launch:")).endswith(f", site {site}")


def test_on_a_whole_node_of_lumi_each_task_gets_the_cpus_next_to_its_device(launch):
    result = launch(SLURM_CLUSTER_NAME="lumi", SLURM_GPUS_ON_NODE="8")
    bind = next(line for line in result.stderr.splitlines() if line.startswith("bind "))
    masks = [int(mask, 16) for mask in bind.removeprefix("bind mask_cpu:").split(",")]
    first = [(mask & -mask).bit_length() - 1 for mask in masks]
    assert first == [49, 57, 17, 25, 1, 9, 33, 41] and all(mask.bit_count() == 7 for mask in masks)
    assert launch(SLURM_CLUSTER_NAME="lumi", SLURM_GPUS_ON_NODE="2").stderr.splitlines()[-1] == "bind "


def test_ranks_on_juwels_meet_over_infiniband():
    name = subprocess.run(["hostname", "-s"], capture_output=True, text=True, check=True).stdout.strip()
    site = "set -u; source sites/juwels.sh; echo $MASTER_ADDR $CUDA_VISIBLE_DEVICES"
    assert run(["bash", "-c", site]).stdout == f"{name}i 0,1,2,3\n"


def test_tasks_are_dealt_out_in_blocks_so_that_each_is_near_its_gpu(launch, tmp_path):
    """In Slurm's default order neighbours sit on different sockets."""
    write_program(tmp_path / "srun", '#!/bin/bash\nprintf "%s\\n" "$@"')
    assert "--distribution=block:block" in launch().stdout.splitlines()
    assert "--distribution=cyclic:cyclic" in launch(SLURM_DISTRIBUTION="cyclic:cyclic").stdout.splitlines()


def test_a_site_file_may_be_anywhere(launch, tmp_path):
    (tmp_path / "mine.sh").write_text("PYTHON=my-python\n")
    assert "my-python" in launch(SITE=str(tmp_path / "mine.sh")).stdout


@pytest.mark.parametrize(
    "environment, line",
    [
        ({"SITE": "moon"}, f"error: SITE=moon: no file sites/moon.sh; there are {SITES}"),
        ({"CONTAINER": "box"}, "error: CONTAINER=box: use shifter, podman-hpc, apptainer, pyxis, environment or none"),
        ({"STAGE_TO": "/tmp"}, "error: STAGE_TO=/tmp needs DATA_DIR, the folder whose train/ and valid/ are copied"),
        ({"CONTAINER": "shifter"}, "error: CONTAINER=shifter needs IMAGE, the image's name"),
        ({"MODULES": "a", "BASH_FUNC_module%%": "() { false; }"}, "error: sites/generic.sh: module load a failed"),
    ],
)
def test_a_wrong_setting_is_one_line_and_status_2(launch, environment, line):
    result = launch(**environment)
    assert (result.returncode, result.stderr) == (2, line + "\n")
