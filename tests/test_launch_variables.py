"""Who a process is, from the environment of each launcher; contradictions are named before any connection."""

import pytest

from tests.support.refusals import refusal
from utils.launch import Launch, read_launch

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
