"""Which rank this process is, where mpiexec or mpirun started it: PBS, LSF, Cray PALS, or a workstation with MPI.

Only the environment is read; MPI itself is not used. srun sets some of these variables too: utils/launch.py decides.
"""

import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from utils.errors import UsageError

# Ports 12000 to 31999 are below those that systems hand out.
FIRST_PORT = 12000
PORTS = 20000
# A name that all ranks of one start share, and no other start on their nodes.
NAMES_OF_START = ("PMIX_NAMESPACE", "PALS_APID", "OMPI_MCA_ess_base_jobid")
NAMES_OF_JOB = ("PBS_JOBID", "LSB_JOBID", "COBALT_JOBID", "SLURM_JOB_ID", "JOB_ID")
BY_HAND = "RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"


@dataclass(frozen=True)
class MpiVariables:
    """The variables of one family of launchers; of those that tell the same, the first one that is set counts."""

    launcher: str
    rank: str
    size: str
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...]


FAMILIES = (
    MpiVariables(
        launcher="Open MPI",
        rank="OMPI_COMM_WORLD_RANK",
        size="OMPI_COMM_WORLD_SIZE",
        local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
        local_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    MpiVariables(
        launcher="MVAPICH",
        rank="MV2_COMM_WORLD_RANK",
        size="MV2_COMM_WORLD_SIZE",
        local_rank=("MV2_COMM_WORLD_LOCAL_RANK",),
        local_size=("MV2_COMM_WORLD_LOCAL_SIZE",),
    ),
    MpiVariables(  # MPICH, Intel MPI, Cray PALS
        launcher="mpiexec",
        rank="PMI_RANK",
        size="PMI_SIZE",
        local_rank=("PMI_LOCAL_RANK", "MPI_LOCALRANKID", "PALS_LOCAL_RANKID"),
        local_size=("PMI_LOCAL_SIZE", "MPI_LOCALNRANKS", "PALS_LOCAL_SIZE"),
    ),
)


@dataclass(frozen=True)
class MpiRank:
    """One of several ranks that MPI's launcher started. local_size: ranks on this node."""

    rank: int
    size: int
    local_rank: int
    local_size: int

    @property
    def nodes(self) -> int:
        """Nodes of the run; the last one may have fewer ranks."""
        return -(-self.size // self.local_size)


def find_mpi(env: Mapping[str, str]) -> MpiVariables | None:
    """The family of launchers that started several ranks; None where none did.

    Raises UsageError where variables of a launcher are there in part, or are no numbers.
    """
    for family in FAMILIES:
        names = [family.rank, family.size]
        there = [name for name in names if name in env]
        if not there:
            continue
        if len(there) < len(names):
            missing = family.size if family.rank in env else family.rank
            raise UsageError(
                f"{there[0]} is set, but not {missing}: start with {family.launcher}'s mpiexec, or unset it"
            )
        # A launcher with one rank started an ordinary process.
        if _number(env, family.size, least=1) > 1:
            return family
        return None
    # Others tell the rank alone. A step of srun has its own variables beside it.
    if "PMIX_RANK" in env and "SLURM_STEP_NUM_TASKS" not in env:
        raise UsageError(f"PMIX_RANK is set, but nothing says how many ranks there are: set {BY_HAND} in each")
    return None


def read_mpi(env: Mapping[str, str], family: MpiVariables) -> MpiRank:
    """The rank that the variables of a family tell. Raises UsageError where some are missing, or contradict others."""
    rank = _number(env, family.rank)
    size = _number(env, family.size, least=1)
    # Versions of a launcher name the variable differently.
    local_rank_name = _first_set(env, family.local_rank)
    if local_rank_name is None:
        wanted = " or ".join(family.local_rank)
        raise UsageError(
            f"{family.rank} is set, but not the rank on this node ({wanted}), by which a rank takes its device: "
            f"set {BY_HAND} in each rank"
        )
    local_rank = _number(env, local_rank_name)
    local_size_name = _first_set(env, family.local_size)
    local_size = size if local_size_name is None else _number(env, local_size_name, least=1)
    # Without the number of ranks on a node all are taken to be on this one.
    is_elsewhere_too = rank != local_rank
    if local_size_name is None and is_elsewhere_too:
        raise UsageError(
            f"{family.rank} is {rank} and {local_rank_name} {local_rank}, so there are several nodes; set "
            f"{family.local_size[0]} to the ranks on each, or {BY_HAND}"
        )
    return MpiRank(rank, size, local_rank, min(local_size, size))


def mpi_address(env: Mapping[str, str], mpi: MpiRank) -> str:
    """The address of rank 0's node: MASTER_ADDR, else this machine or the first node of PBS. Raises UsageError."""
    if env.get("MASTER_ADDR"):
        return env["MASTER_ADDR"]
    if mpi.nodes == 1:
        return "127.0.0.1"
    node_file = env.get("PBS_NODEFILE", "")
    try:
        # PBS lists the nodes in the order of the ranks.
        hosts = Path(node_file).read_text().split() if node_file else []
    except (OSError, ValueError):
        hosts = []
    if not hosts:
        raise UsageError(
            f"mpiexec started {mpi.size} ranks on {mpi.nodes} nodes, and nothing says where rank 0 is: set MASTER_ADDR "
            "to its node (mpirun -x MASTER_ADDR=..., mpiexec -genv MASTER_ADDR ...)"
        )
    return hosts[0]


def mpi_port(env: Mapping[str, str]) -> int:
    """A port for rank 0 that all ranks derive alike: of this start, or this job, or this login session."""
    names = [env[name] for name in (*NAMES_OF_START, *NAMES_OF_JOB) if env.get(name)]
    # A rank may be the child of a script of its own, so the parent tells nothing; the session is that of mpiexec.
    shared = names[0] if names else f"session {os.getsid(0)}"
    return FIRST_PORT + zlib.crc32(shared.encode()) % PORTS


def _first_set(
    env: Mapping[str, str],
    names: tuple[str, ...],
) -> str | None:
    for name in names:
        if name in env:
            return name
    return None


def _number(
    env: Mapping[str, str],
    name: str,
    least: int = 0,
) -> int:
    try:
        value = int(env[name])
    except ValueError:
        raise UsageError(f"{name}='{env[name]}' is not a whole number") from None
    if not least <= value < 2**20:
        raise UsageError(f"{name}={value} is not within {least} to {2**20 - 1}")
    return value
