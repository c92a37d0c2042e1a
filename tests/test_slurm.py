"""The submit scripts on a real Slurm, a cluster of 4 nodes on this machine (tests/slurm/cluster.sh)."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

import train
from tests.support.launch import losses, summary
from tests.support.programs import write_python

REPOSITORY = Path(__file__).parents[1]
CLUSTER = REPOSITORY / "tests/slurm/cluster.sh"
SUBMIT = sorted(file.name for file in REPOSITORY.glob("submit_*.sh") if not file.is_symlink())
PATIENCE_SECONDS = 120  # for a job to do what is waited for
ENDED = {"COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL", "OUT_OF_MEMORY"}
PROBE = """
import json, os, pathlib, sys
names = "RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT CUDA_VISIBLE_DEVICES NVIDIA_TF32_OVERRIDE ENABLE_PROFILING"
seen = {name: os.environ.get(name) for name in [*names.split(), "SLURMD_NODENAME", "SLURM_CPUS_PER_TASK"]}
seen["words"] = sys.argv[1:]
folder = pathlib.Path(os.environ["SLURM_SUBMIT_DIR"], "probe-" + os.environ["SLURM_JOB_ID"])
folder.mkdir(exist_ok=True)
(folder / os.environ["RANK"]).write_text(json.dumps(seen))
"""
# As train.py answers a signal, without the time it takes to import torch. Rank 1 saves longer, or fails.
STOPPABLE = """
import os, signal, sys, time
rank, stop = int(os.environ["RANK"]), []
for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, lambda *_: stop.append(1))
print("ready", rank, flush=True)
if "fails" in sys.argv and rank == 1:
    sys.exit(3)
while not stop:
    time.sleep(0.05)
time.sleep(2 * rank)
print("saved", rank, flush=True)
sys.exit(75)
"""


class Cluster:
    """Submits jobs from a folder of links to this repository, where their output lands."""

    def __init__(self, state, folder):
        self.state, self.folder = Path(state), folder
        for path in REPOSITORY.iterdir():
            if not path.name.startswith(".") and path.name not in ("data", "logs"):
                (folder / path.name).symlink_to(path)
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SBATCH_", "MASTER_"))}
        self.environment = kept | {
            "SLURM_CONF": f"{state}/slurm.conf",
            "PYTHON": write_python(folder / "bin"),
            "SITE": "generic",
        }

    def run(self, *command, **environment):
        environment = self.environment | environment
        done = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout + done.stderr

    def submit(self, script, *words, options=(), **environment):
        return self.run("sbatch", "--parsable", *options, script, *words, **environment).split()[0]

    def script(self, like, text):
        """A submit script with the requests of another one, for a Python program."""
        count = len(list(self.folder.glob("program*.py")))
        program = self.folder / f"program{count}.py"
        program.write_text(text)
        head, _, _ = (REPOSITORY / like).read_text().rpartition("source ")
        script = self.folder / f"{program.stem}.sh"
        script.write_text(f'{head}source sites/launch.sh {program.name} "$@"\n')
        return script.name

    def output(self, job):
        path = self.folder / f"vit-era5-{job}.out"
        return path.read_text() if path.exists() else ""

    def field(self, job, name):
        words = self.run("scontrol", "--oneliner", "show", "job", job).split()
        return next(word.partition("=")[2] for word in words if word.startswith(f"{name}="))

    def until(self, job, text):
        """Wait for a text in the job's output."""
        self._poll(job, lambda: text in self.output(job), f"{text!r} in its output")

    def end(self, job):
        """Wait for the job's end, however often it is requeued; returns its state and exit status."""
        self._poll(job, lambda: self.field(job, "JobState") in ENDED, "its end")
        return self.field(job, "JobState"), int(self.field(job, "ExitCode").split(":")[0])

    def lose_node(self, node, job):
        """End a node as a power cut would: its daemon, the daemons of its job steps, then their tasks."""
        tasks = [process for process in psutil.process_iter() if _runs_on(process, node, job)]
        steps = {process.parent() for process in tasks}
        daemon = psutil.Process(int((self.state / f"slurmd-{node}.pid").read_text()))
        for process in [daemon, *(p for p in steps if p and p.name().startswith("slurmstepd")), *tasks]:
            process.kill()

    def _poll(self, job, done, what):
        end = time.monotonic() + PATIENCE_SECONDS
        while not done():
            assert time.monotonic() < end, (
                f"job {job}: no {what} within {PATIENCE_SECONDS} s; output: {self.output(job)}"
            )
            time.sleep(0.3)  # each question starts a program of Slurm


def _runs_on(process, node, job):
    try:
        environment = process.environ()
    except (psutil.AccessDenied, psutil.NoSuchProcess):
        return False
    return environment.get("SLURMD_NODENAME") == node and environment.get("SLURM_JOB_ID") == job


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    if shutil.which("sbatch") is None and not os.environ.get("CI"):
        pytest.skip("Slurm is not installed: 'make slurm' says how")
    state = tempfile.mkdtemp(prefix="slurm-")  # the length of a socket's path is limited
    try:
        subprocess.run([CLUSTER, "start", state], check=True, timeout=60)
        yield Cluster(state, tmp_path_factory.mktemp("submit"))
    finally:
        subprocess.run([CLUSTER, "stop", state], timeout=60)
        shutil.rmtree(state)


@pytest.fixture(scope="module")
def probe(cluster):
    """Call with sbatch options to run a job that writes what its tasks see; returns that, by rank."""

    def start(like, *words, options=(), **environment):
        job = cluster.submit(cluster.script(like, PROBE), *words, options=options, **environment)
        assert cluster.end(job) == ("COMPLETED", 0), cluster.output(job)
        seen = [json.loads(path.read_text()) for path in (cluster.folder / f"probe-{job}").iterdir()]
        return job, sorted(seen, key=lambda task: int(task["RANK"]))

    return start


def test_a_stock_slurm_accepts_the_files_as_they_are(cluster):
    for name in SUBMIT:
        assert "to start at" in cluster.run("sbatch", "--test-only", name)


def test_words_and_environment_arrive_as_they_were(probe):
    words = ["--config=short", "two words", 'it\'s "quoted"', "$HOME *", ""]
    variables = {"ENABLE_PROFILING": "1", "NVIDIA_TF32_OVERRIDE": "0", "MASTER_ADDR": "stale", "MASTER_PORT": "1"}
    job, (task,) = probe("submit_pm.sh", *words, options=["-n", "1", "-t", "20"], **variables)
    assert task["words"] == words
    assert (task["ENABLE_PROFILING"], task["NVIDIA_TF32_OVERRIDE"]) == ("1", "0")
    assert (task["MASTER_ADDR"], int(task["MASTER_PORT"])) == ("127.0.0.1", 12000 + int(job))


# Two nodes of two tasks, each task with both devices of its node, or with its own one.
NODE, TASK = ["--ntasks-per-node=2", "--gpus-per-node=2"], ["-n", "4", "--gpus-per-task=1"]


@pytest.mark.parametrize(
    "like, options, local, nodes, devices, cpus",
    [
        ("submit_pm.sh", [], "0", "1", ["0"], 8),
        ("submit_pm.sh", ["-n", "2"], "01", "11", ["0,1"] * 2, 8),
        ("submit_pm.sh", ["-n", "2", "--gpus-per-task=0"], "01", "11", [None] * 2, 1),
        ("submit_dp.sh", ["-N", "2", *NODE], "0101", "1122", ["0,1"] * 4, 64),
        ("submit_dp.sh", ["-N", "2", *TASK], "0101", "1122", ["0", "1"] * 2, 64),
        ("submit_dp.sh", [], "0123", "1111", ["0,1,2,3"] * 4, 32),
        ("submit_dp.sh", ["-N", "2"], "01230123", "11112222", ["0,1,2,3"] * 8, 32),
    ],
)
def test_each_task_knows_its_place(probe, like, options, local, nodes, devices, cpus):
    _, tasks = probe(like, options=options)
    assert [task["RANK"] for task in tasks] == [str(rank) for rank in range(len(local))]
    assert {task["WORLD_SIZE"] for task in tasks} == {str(len(local))}
    assert [task["LOCAL_RANK"] for task in tasks] == list(local)
    assert [task["SLURMD_NODENAME"] for task in tasks] == [f"node{n}" for n in nodes]
    assert [task["CUDA_VISIBLE_DEVICES"] for task in tasks] == devices
    assert {int(task["SLURM_CPUS_PER_TASK"]) for task in tasks} == {cpus}
    assert len({(task["MASTER_ADDR"], task["MASTER_PORT"]) for task in tasks}) == 1


def test_a_port_in_use_is_passed_over(cluster):
    script = cluster.script("submit_pm.sh", PROBE)
    job = cluster.submit(script, options=["--hold"])
    with socket.create_server(("127.0.0.1", 12000 + int(job))):
        cluster.run("scontrol", "release", job)
        assert cluster.end(job) == ("COMPLETED", 0)
    assert json.loads((cluster.folder / f"probe-{job}/0").read_text())["MASTER_PORT"] == str(12037 + int(job))


def test_srun_alone_may_source_the_variables(cluster):
    command = "source ./export_DDP_vars.sh; echo $RANK/$WORLD_SIZE $LOCAL_RANK $MASTER_ADDR $MASTER_PORT"
    lines = cluster.run("srun", "-N", "2", "--ntasks-per-node=2", "bash", "-c", command).splitlines()
    assert len({line.split()[3] for line in lines}) == 1
    assert sorted(line.rsplit(" ", 2)[0] for line in lines) == [f"{r}/4 {r % 2}" for r in range(4)]
    (address,) = {line.split()[2] for line in lines}  # node1 is a name that Slurm alone knows
    socket.getaddrinfo(address, None)


def test_a_job_that_cannot_run_says_so_and_has_status_2(cluster, tmp_path):
    job = cluster.submit("submit_pm.sh", options=["-D", tmp_path])
    assert cluster.end(job) == ("FAILED", 2)
    assert "is not the repository" in (tmp_path / f"vit-era5-{job}.out").read_text()


def warn(cluster, job):
    """Do as Slurm does `--signal` seconds before the time limit."""
    cluster.run("scancel", "--batch", "--signal=USR1", job)


def test_the_status_is_that_of_the_script(cluster):
    job = cluster.submit(cluster.script("submit_pm.sh", "import sys; sys.exit(1)"))
    assert cluster.end(job) == ("FAILED", 1)


def test_a_task_that_fails_ends_the_others(cluster):
    job = cluster.submit(cluster.script("submit_pm.sh", STOPPABLE), "fails", options=["-n", "2"], SLURM_WAIT="1")
    state, status = cluster.end(job)
    assert (state, status > 0) == ("FAILED", True)


@pytest.mark.parametrize("options, variables", [([], {"REQUEUE": "0"}), (["--no-requeue"], {})])
def test_without_requeue_the_job_ends_after_all_tasks_saved(cluster, options, variables):
    script = cluster.script("submit_pm.sh", STOPPABLE)
    job = cluster.submit(script, options=["-n", "2", *options], **variables)
    cluster.until(job, "ready 0")
    cluster.until(job, "ready 1")
    warn(cluster, job)
    assert cluster.end(job) == ("FAILED", 75)
    assert "saved 0" in cluster.output(job) and "saved 1" in cluster.output(job)
    assert "submit it again to resume" in cluster.output(job)
    assert cluster.field(job, "Restarts") == "0"


def test_a_warning_before_training_began_is_not_answered_with_a_requeue(cluster):
    job = cluster.submit(cluster.script("submit_pm.sh", "import time; print('ready', flush=True); time.sleep(60)"))
    cluster.until(job, "ready")
    warn(cluster, job)
    assert cluster.end(job) == ("FAILED", 138)
    assert "ask for more time" in cluster.output(job)


@pytest.mark.slow("Slurm itself warns and preempts real training, and starts it again where it stopped")
@pytest.mark.parametrize(
    "script, requests, taken, tasks, num_iters, layout",
    [
        ("submit_pm.sh", ["-n", "1", "-t", "20"], "node4", 1, 1500, {}),
        ("submit_mp.sh", ["-N", "2", "--ntasks-per-node=1"], "node[3-4]", 2, 500, {"tensor_parallel": 2}),
    ],
    ids=["one-task", "tensor-parallel-nodes"],
)
def test_a_warned_and_a_preempted_run_end_as_an_undisturbed_one(
    cluster, tiny_options, tmp_path, script, requests, taken, tasks, num_iters, layout
):
    def submit(run_num, *more):
        words = tiny_options(
            run_num=run_num, num_iters=num_iters, num_data_workers=0, validate_every=1000, checkpoint_every=10_000,
            **{"yaml_config": "config/ViT.yaml"} | layout
        )  # fmt: skip
        return cluster.submit(script, *words, options=[*requests, *more])

    warned, preempted = submit("warned"), submit("preempted", "-w", taken)
    cluster.until(warned, "Time taken for epoch 1 ")
    warn(cluster, warned)
    cluster.until(preempted, "Time taken for epoch 1 ")
    cluster.run("sbatch", "-p", "urgent", "-w", taken, "--exclusive", "--output=/dev/null", "--wrap=true")
    cluster.until(warned, "requeued")
    cluster.until(preempted, "DUE TO PREEMPTION")
    whole = submit("whole")
    assert cluster.end(whole) == ("COMPLETED", 0), cluster.output(whole)
    for run_num, job in (("warned", warned), ("preempted", preempted)):
        assert cluster.end(job) == ("COMPLETED", 0), cluster.output(job)
        assert losses(tmp_path, run_num) == losses(tmp_path, "whole")
        assert summary(tmp_path, run_num)["world_size"] == tasks
        assert cluster.field(job, "Restarts") == "1" and "Resuming at iteration" in cluster.output(job)


@pytest.mark.slow("a plan that Slurm queues, checks, runs, and that the run is compared with")
def test_a_plan_is_submitted_run_and_compared(cluster, tiny_options, tmp_path):
    words = [
        "plan.py",
        *tiny_options(num_iters=30),
        "--gpus=2",
        "--data_parallel=fsdp",
        "--submit=--gpus-per-node=0 -t 9",
    ]
    said = cluster.run(sys.executable, *words)
    job = said.partition("\njob ")[2].partition(":")[0]
    assert cluster.end(job) == ("COMPLETED", 0), cluster.output(job)
    output, run = cluster.output(job), tmp_path / "logs/quick/00"
    assert output.index("ok    collectives") < output.index("Starting training")  # the preflight came first
    assert json.loads((run / "summary.json").read_text())["world_size"] == 2
    compared = cluster.run(sys.executable, "plan.py", "compare", str(run), "--gpu=a100-40gb")
    row = next(line for line in compared.splitlines() if "collectives of a step" in line)
    _, _, planned, measured, ratio, _ = map(str.strip, row.split("|"))
    assert planned == measured != "0" and ratio == "1.00"


@pytest.mark.slow("Slurm starts nothing where the preflight fails")
def test_a_job_whose_preflight_fails_trains_nothing(cluster, tiny_options, tmp_path):
    words = tiny_options(train_data_path=tmp_path / "nowhere")
    job = cluster.submit("submit_dp.sh", *words, options=["--ntasks-per-node=1"], PREFLIGHT="1")
    assert cluster.end(job) == ("FAILED", 1)
    assert "nothing was started" in cluster.output(job) and "Starting training" not in cluster.output(job)


@pytest.mark.slow("a forecast whose ranks Slurm has started on two nodes")
def test_two_nodes_share_the_images_of_a_forecast(cluster, tiny_options, tmp_path):
    train.main(["--yaml_config=config/ViT.yaml", *tiny_options(num_iters=2, warmup=0)])
    words = ["--run_folder", tmp_path / "logs/quick/00", "--lead_hours=12", "--starts=2", "--domain_parallel=2"]
    job = cluster.submit("submit_forecast.sh", *words, options=["-N", "2", "--ntasks-per-node=1"])
    assert cluster.end(job) == ("COMPLETED", 0), cluster.output(job)
    assert "2 forecasts of 12 hours" in cluster.output(job)
    assert (tmp_path / "logs/quick/00/forecast/z500.webp").is_file()


@pytest.mark.slow("Slurm loses a node of a job that outlives it")
@pytest.mark.nightly
def test_a_run_goes_on_on_fewer_nodes_in_its_job_and_in_another_one(cluster, tiny_options, tmp_path):
    """The node stays lost, so this and what follows are the last tests."""
    often = {"num_iters": 2500, "validate_every": 10_000, "checkpoint_every": 100, "elastic": True}
    words = tiny_options(run_num="fewer", **often)

    def submit(*options):
        job = cluster.submit("submit_dp.sh", *words, options=[*options, "--ntasks-per-node=1"])
        cluster.until(job, "Saved checkpoint")
        return job

    job = submit("--no-kill", "-N", "3")
    assert "2 of 3 ranks share the batch, 1 wait" in cluster.output(job)
    *_, lost = cluster.run("scontrol", "show", "hostnames", cluster.field(job, "NodeList")).split()
    cluster.lose_node(lost, job)
    cluster.until(job, "a node was lost: going on with 2 node(s) x 1 task(s)")
    cluster.until(job, "Resuming at iteration")
    assert "Restarts=0" in cluster.run("scontrol", "show", "job", job)
    cluster.run("scancel", job)
    cluster.until(job, "Stopped after saving")
    job = submit("-N", "1")
    assert cluster.end(job) == ("COMPLETED", 0), cluster.output(job)
    assert "Resuming at iteration" in cluster.output(job) and summary(tmp_path, "fewer")["world_size"] == 1
    train.main(["--yaml_config=config/ViT.yaml", *tiny_options(run_num="whole", **often)])
    assert losses(tmp_path, "fewer") == pytest.approx(losses(tmp_path, "whole"), rel=1e-3)


@pytest.mark.slow("Slurm notices a lost node and gives the run another one")
def test_a_run_that_loses_a_node_goes_on_on_others(cluster, tiny_options, tmp_path):
    """One of the last tests: the node stays lost."""

    def submit(run_num):
        words = tiny_options(run_num=run_num, num_iters=1000, validate_every=1000, checkpoint_every=100)
        return cluster.submit("submit_dp.sh", *words, options=["-N", "2", "--ntasks-per-node=1"])

    whole, broken = submit("whole"), submit("broken")
    cluster.until(broken, "Saved checkpoint")
    _, lost = cluster.run("scontrol", "show", "hostnames", cluster.field(broken, "NodeList")).split()
    cluster.lose_node(lost, broken)
    for job in (whole, broken):
        assert cluster.end(job) == ("COMPLETED", 0), cluster.output(job)
    assert cluster.field(broken, "Restarts") == "1", cluster.output(broken)
    assert "Resuming at iteration" in cluster.output(broken)
    assert lost not in cluster.run("scontrol", "show", "hostnames", cluster.field(broken, "NodeList")).split()
    assert losses(tmp_path, "broken") == losses(tmp_path, "whole")
