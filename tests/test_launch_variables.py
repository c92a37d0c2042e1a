"""Who a process is, from the environment of each launcher; contradictions are named before any connection."""

import os
from dataclasses import replace

import pytest

from tests.support import programs
from tests.support.refusals import refusal
from utils.launch import VARIABLES, Launch, read_launch, warn_of_unused_tasks

TORCHRUN = {
    "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a",
    "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none",
}  # fmt: skip
SRUN = {
    "SLURM_JOB_ID": "123456", "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "node1",
}  # fmt: skip
EXPORTED = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}


def test_plain_python_is_one_process():
    assert read_launch({}) == Launch()
    assert read_launch({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}) == Launch()  # in a batch script
    assert read_launch(SRUN | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}) == Launch()


def test_torchrun():
    assert read_launch(TORCHRUN) == Launch(3, 1, 4, 2, "a", 29500)
    assert read_launch(TORCHRUN | SRUN).rank == 3  # torchrun started by srun, one task a node


def test_srun_alone():
    assert read_launch(SRUN) == Launch(1, 1, 2, 1, "127.0.0.1", 12000 + 123456 % 20000)
    assert read_launch(SRUN | {"MASTER_ADDR": "b", "MASTER_PORT": "7"}) == Launch(1, 1, 2, 1, "b", 7)


def test_srun_on_nodes_whose_names_do_not_resolve_uses_the_address_of_srun():
    env = SRUN | {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "no-such-node-[1-2]"}
    assert read_launch(env | {"SLURM_LAUNCH_NODE_IPADDR": "10.0.0.7"}).master_addr == "10.0.0.7"
    with refusal("no address for rank 0 of the nodes 'no-such-node"):
        read_launch(env)


def test_exported_variables_inside_srun():
    assert read_launch(SRUN | EXPORTED) == Launch(1, 1, 2, 1, "a", 29500)


@pytest.mark.parametrize(
    ("env", "line"),
    [
        ({"WORLD_SIZE": "2"}, "is set, but not RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT: start with"),
        ({k: v for k, v in EXPORTED.items() if k != "MASTER_PORT"}, "is set, but not MASTER_PORT: start with"),
        (EXPORTED | {"RANK": "x"}, "RANK='x' is not a whole number"),
        (EXPORTED | {"RANK": "2"}, "RANK 2 is not one of the 2 ranks"),
        (
            SRUN | EXPORTED | {"RANK": "0"},
            "RANK 0 of 2 contradicts srun's task 1 of 2: source export_DDP_vars.sh inside",
        ),
        ({k: v for k, v in SRUN.items() if k != "SLURM_PROCID"}, "SLURM_PROCID is not set"),
        (EXPORTED | {"MASTER_PORT": "99999"}, "MASTER_PORT=99999 is not within 1 to 65535"),
        (EXPORTED | {"WORLD_SIZE": "-2"}, "WORLD_SIZE=-2 is not within 1 to"),
        (EXPORTED | {"MASTER_ADDR": " "}, "MASTER_ADDR is empty"),
    ],
)
def test_missing_and_contradictory_variables_are_named(env, line):
    with refusal(line):
        read_launch(env)


OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
TWO_NODES = OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}


def started(**expected):
    """The fields of a Launch by name, but for its port."""
    return Launch(**expected, master_port=0)


def read_without_port(env):
    launch = read_launch(env)
    assert 12000 <= launch.master_port < 32000
    return replace(launch, master_port=0)


def test_mpiexec_on_one_node():
    alone = started(rank=1, local_rank=1, world_size=2, nodes=1, master_addr="127.0.0.1")
    assert read_without_port(MPICH) == alone
    pals = {"PMI_RANK": "1", "PMI_SIZE": "2", "PALS_LOCAL_RANKID": "1", "PALS_APID": "a"}
    assert read_without_port(pals) == alone
    few = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
    assert read_without_port(few) == alone
    assert read_launch({"PMI_RANK": "0", "PMI_SIZE": "1"}) == Launch()
    named = MPICH | {"MASTER_ADDR": "b", "MASTER_PORT": "7"}
    assert read_launch(named) == Launch(1, 1, 2, 1, "b", 7)


def test_mpiexec_on_nodes_of_pbs(tmp_path):
    nodes = tmp_path / "nodes"
    nodes.write_text("first\nfirst\nsecond\nsecond\n")
    env = TWO_NODES | {"PBS_NODEFILE": str(nodes), "PBS_JOBID": "17.server"}
    assert read_without_port(env) == started(rank=3, local_rank=1, world_size=4, nodes=2, master_addr="first")


def test_all_ranks_of_a_start_have_one_port_and_two_starts_in_a_job_have_two():
    job = {"PBS_JOBID": "17.server"}
    ports = set()
    for rank in ("0", "1"):
        env = MPICH | job | {"PMI_RANK": rank, "MPI_LOCALRANKID": rank}
        ports.add(read_launch(env).master_port)
    assert len(ports) == 1
    for start in ("a", "b"):
        ports.add(read_launch(MPICH | job | {"PMIX_NAMESPACE": start}).master_port)
    assert len(ports) == 3


def test_srun_that_speaks_pmi_is_srun_and_mpiexec_inside_a_job_is_mpiexec():
    as_srun = {"PMI_RANK": "1", "PMI_SIZE": "2"}
    assert read_launch(SRUN | as_srun) == read_launch(SRUN)
    assert read_launch(SRUN | {"PMIX_RANK": "1"}) == read_launch(SRUN)
    # mpirun starts its own daemons by srun, a task on each node, whose variables the ranks inherit.
    inside = SRUN | TWO_NODES | {"MASTER_ADDR": "a", "MASTER_PORT": "7"}
    assert read_launch(inside) == Launch(3, 1, 4, 2, "a", 7)
    assert read_launch(TWO_NODES | EXPORTED) == Launch(1, 1, 2, 1, "a", 29500)


@pytest.mark.parametrize(
    ("env", "line"),
    [
        (
            {"OMPI_COMM_WORLD_RANK": "1"},
            "OMPI_COMM_WORLD_RANK is set, but not OMPI_COMM_WORLD_SIZE: start with Open MPI",
        ),
        ({"PMI_SIZE": "2"}, "PMI_SIZE is set, but not PMI_RANK"),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, "not the rank on this node .PMI_LOCAL_RANK or .*: set RANK, LOCAL_RANK"),
        (MPICH | {"PMI_SIZE": "two"}, "PMI_SIZE='two' is not a whole number"),
        (MPICH | {"PMI_RANK": "2"}, "RANK 2 is not one of the 2 ranks"),
        (OPEN_MPI, "there are several nodes; set OMPI_COMM_WORLD_LOCAL_SIZE"),
        (TWO_NODES, "4 ranks on 2 nodes, and nothing says where rank 0 is: set MASTER_ADDR"),
        (TWO_NODES | {"PBS_NODEFILE": "/nowhere"}, "nothing says where rank 0 is"),
        ({"PMIX_RANK": "0", "PMIX_NAMESPACE": "a"}, "PMIX_RANK is set, but nothing says how many ranks"),
    ],
)
def test_what_mpiexec_leaves_unsaid_is_asked_for(env, line):
    with refusal(line):
        read_launch(env)


def test_tasks_that_srun_did_not_start_are_noticed(caplog):
    batch = {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}
    warn_of_unused_tasks(batch)
    assert caplog.messages == [
        "the Slurm job has 4 tasks, and this is one process alone: start the command with srun to use them all"
    ]
    for env in (batch | {"SLURM_NTASKS": "1"}, batch | {"SLURM_STEP_NUM_TASKS": "1"}, {}):
        warn_of_unused_tasks(env)
    assert len(caplog.messages) == 1


def test_two_ranks_of_mpiexec_train_together(tiny_options, tmp_path):
    words = ["train.py", *tiny_options(expdir=tmp_path / "logs", run_num="mpi", num_iters=2)]
    programs_started = []
    for rank in range(2):
        told = {"PMI_RANK": rank, "PMI_SIZE": 2, "MPI_LOCALRANKID": rank, "MPI_LOCALNRANKS": 2}
        outside = {name: value for name, value in os.environ.items() if name not in VARIABLES}
        env = outside | {name: str(value) for name, value in told.items()} | {"PMIX_NAMESPACE": str(tmp_path)}
        programs_started.append(programs.start(words, env, merged=True))
    outcomes = [programs.finish(program) for program in programs_started]
    assert [status for status, _ in outcomes] == [0, 0], outcomes
    assert "2 x cpu: dp 2" in outcomes[0][1]
