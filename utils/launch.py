"""Which rank this process is, as plain python, torchrun, srun, mpiexec or export_DDP_vars.sh started it.

Ranks may come and go: torchrun --nnodes 2:4 starts all again when a node is lost or has come, and a Slurm job may come
back on fewer nodes. Data parallelism shrinks and grows, every other dimension keeps its size. The batch stays: where
fewer ranks share it, each accumulates more micro-batches that are no larger than at first. Ranks that cannot share it
wait.
"""

import contextlib
import fcntl
import logging
import os
import re
import socket
import struct
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from utils.errors import NotEnoughRanksError, UsageError
from utils.mpi_launch import MpiRank, find_mpi, mpi_address, mpi_port, read_mpi
from utils.yaml_files import read_mappings

if TYPE_CHECKING:
    from utils.schema import Config

log = logging.getLogger(__name__)
SIOCGIFADDR = 0x8915  # of Linux: the IPv4 address of an interface
ELSEWHERE = "203.0.113.1"  # in a network for documentation (RFC 5737): where packets to nowhere in particular go
BOUNDS = {
    "MASTER_PORT": (1, 2**16 - 1),
    "WORLD_SIZE": (1, 2**20),
    "SLURM_STEP_NUM_NODES": (1, 2**20),
}
VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Launch:
    """The rank of this process, and where rank 0 is, from the launcher's variables."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    nodes: int = 1
    master_addr: str = ""
    master_port: int = 0

    @property
    def ranks_per_node(self) -> int:
        """Ranks on each node; the last node may have fewer."""
        return -(-self.world_size // self.nodes)


def read_launch(env: Mapping[str, str] = os.environ) -> Launch:
    """The Launch in the environment: of torchrun or export_DDP_vars.sh, else of mpiexec or srun, else a single process.

    Raises UsageError where variables are missing, are no numbers, or contradict each other.
    """
    # A step of srun tells how many tasks it has, whoever starts the ranks inside.
    tasks = _number(env, "SLURM_STEP_NUM_TASKS", 1)
    if "RANK" in env or "WORLD_SIZE" in env:
        # torchrun sets all of these variables, and so does our script.
        missing = [name for name in VARIABLES if name not in env]
        if missing:
            raise UsageError(
                f"RANK or WORLD_SIZE is set, but not {', '.join(missing)}: start with torchrun, srun or plain python, "
                "or unset it"
            )
        rank = _number(env, "RANK")
        local_rank = _number(env, "LOCAL_RANK")
        size = _number(env, "WORLD_SIZE")
        port = _number(env, "MASTER_PORT")
        if "LOCAL_WORLD_SIZE" in env:  # torchrun
            nodes = -(-size // max(1, _number(env, "LOCAL_WORLD_SIZE")))
        else:
            nodes = _number(env, "SLURM_STEP_NUM_NODES", 1)
        launch = Launch(rank, local_rank, size, nodes, env["MASTER_ADDR"], port)
        # The script sets the variables once; each task of srun must have its own.
        by_srun = tasks > 1 and "TORCHELASTIC_RUN_ID" not in env
        if by_srun and (rank, size) != (_number(env, "SLURM_PROCID"), tasks):
            raise UsageError(
                f"RANK {rank} of {size} contradicts srun's task {env['SLURM_PROCID']} of {tasks}: source "
                "export_DDP_vars.sh inside each task, not in the batch script"
            )
    else:
        mpi = _read_mpi(env, tasks)
        if mpi is not None:
            port = _number(env, "MASTER_PORT") if "MASTER_PORT" in env else mpi_port(env)
            address = mpi_address(env, mpi)
            launch = Launch(mpi.rank, mpi.local_rank, mpi.size, mpi.nodes, address, port)
        elif tasks > 1:
            launch = _read_srun(env, tasks)
        else:
            return Launch()
    # From here on the numbers come from any launcher.
    if launch.world_size > 1 and not launch.master_addr.strip():
        raise UsageError("MASTER_ADDR is empty: it is the address of rank 0's node")
    if not 0 <= launch.rank < launch.world_size:
        raise UsageError(f"RANK {launch.rank} is not one of the {launch.world_size} ranks of WORLD_SIZE")
    return launch


def _read_srun(env: Mapping[str, str], tasks: int) -> Launch:
    """The Launch of a task of srun. tasks: of its step."""
    rank = _number(env, "SLURM_PROCID")
    local_rank = _number(env, "SLURM_LOCALID")
    nodes = _number(env, "SLURM_STEP_NUM_NODES")
    address = env.get("MASTER_ADDR") or _slurm_master(env)
    return Launch(rank, local_rank, tasks, nodes, address, _srun_port(env))


def _srun_port(env: Mapping[str, str]) -> int:
    """The port of rank 0: jobs that share a node have different numbers, and so different ports."""
    if "MASTER_PORT" in env:
        return _number(env, "MASTER_PORT")
    return 12000 + _number(env, "SLURM_JOB_ID") % 20000


def _read_mpi(env: Mapping[str, str], tasks: int) -> MpiRank | None:
    """The rank that mpiexec gave this process; None without it, or where srun gave it. tasks: of the step of srun."""
    # srun sets some of MPI's variables as well.
    family = find_mpi(env)
    if family is None:
        return None
    # srun speaks PMI too, and then both tell the same. An mpiexec inside a step counts otherwise.
    theirs = (env[family.rank], env[family.size])
    is_of_srun = tasks > 1 and theirs == (env.get("SLURM_PROCID"), env.get("SLURM_STEP_NUM_TASKS"))
    return None if is_of_srun else read_mpi(env, family)


def warn_of_unused_tasks(env: Mapping[str, str] = os.environ) -> None:
    """Say, in a process that runs alone, that the Slurm job asked for several tasks and srun did not start them."""
    asked = env.get("SLURM_NTASKS", "1")
    is_in_step = "SLURM_STEP_NUM_TASKS" in env
    if is_in_step or not asked.isdecimal() or int(asked) <= 1:
        return
    log.warning(
        "the Slurm job has %s tasks, and this is one process alone: start the command with srun to use them all", asked
    )


def name_gloo_interface(launch: Launch) -> None:
    """Let gloo take the interface towards rank 0, unless GLOO_SOCKET_IFNAME names one.

    By itself it takes what the host name resolves to: that may be nothing, or an address that no other node reaches.
    On the node of rank 0, whose own name may mean the loopback, it is the only other one, or that of the default route.
    Raises UsageError where only the user can tell which one that is.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    # On a single node the loopback is enough.
    interface = "lo" if launch.nodes == 1 else interface_towards(launch.master_addr)
    if interface == "lo" and launch.nodes > 1:
        addresses = interface_addresses()
        others = [name for name, address in addresses.items() if not address.startswith("127.")]
        if others:  # else the nodes are simulated on one machine
            interface = others[0] if len(others) == 1 else interface_towards(ELSEWHERE)
        if not interface:
            raise UsageError(
                f"{launch.master_addr} is a loopback address on this node, which no other node reaches: set "
                f"GLOO_SOCKET_IFNAME to the interface towards the other nodes, one of {' '.join(others)}"
            )
    if interface:
        os.environ["GLOO_SOCKET_IFNAME"] = interface


def interface_towards(address: str) -> str:
    """Name of the network interface by which this machine reaches an address; '' where that cannot be told."""
    try:
        found = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)
        family, _, _, _, target = found[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # chooses a route; nothing is sent
            local_address = probe.getsockname()[0]
    except OSError:
        return ""
    for name, own_address in interface_addresses().items():
        if own_address == local_address:
            return name
    return ""


def interface_addresses() -> dict[str, str]:
    """{network interface of this machine: its IPv4 address}, of those that have one."""
    addresses = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                # The kernel takes the name in a record of C, and writes the address behind it.
                request = struct.pack("256s", name[:15].encode())
                record = fcntl.ioctl(probe, SIOCGIFADDR, request)
                addresses[name] = socket.inet_ntoa(record[20:24])
    return addresses


def _number(
    env: Mapping[str, str],
    name: str,
    otherwise: int | None = None,
) -> int:
    try:
        text = env[name] if otherwise is None else env.get(name, otherwise)
        value = int(text)
    except KeyError:
        raise UsageError(f"{name} is not set, although srun started several tasks") from None
    except ValueError:
        raise UsageError(f"{name}='{env[name]}' is not a whole number") from None
    # Numbers beyond their bounds would fail much later, and less clearly.
    least, most = BOUNDS.get(name, (0, 2**31 - 1))
    if not least <= value <= most:
        raise UsageError(f"{name}={value} is not within {least} to {most}")
    return value


def _slurm_master(env: Mapping[str, str]) -> str:
    """The address of rank 0: the first node of the step, or the node of srun where that name does not resolve."""
    # All ranks are on this machine.
    if env.get("SLURM_STEP_NUM_NODES") == "1":
        return "127.0.0.1"
    nodes = env.get("SLURM_STEP_NODELIST", "")
    try:
        command = ["scontrol", "show", "hostnames", nodes]
        listed = subprocess.run(command, capture_output=True, text=True, check=True)
        # Slurm lists the nodes in the order of the tasks.
        first = listed.stdout.split()[0]
        socket.getaddrinfo(first, None)
        return first
    except (OSError, subprocess.CalledProcessError, IndexError):
        if "SLURM_LAUNCH_NODE_IPADDR" not in env:
            raise UsageError(f"no address for rank 0 of the nodes '{nodes}': set MASTER_ADDR") from None
        return env["SLURM_LAUNCH_NODE_IPADDR"]


RANGE = re.compile(r"--nnodes[= ](\d+):(\d+)")


def is_range_of_nodes() -> bool:
    """Tell whether torchrun, which started this process, was given a smallest and a largest number of nodes."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return False
    try:
        command = Path(f"/proc/{os.getppid()}/cmdline").read_text(errors="replace")
    except OSError:  # no Linux
        command = ""
    # torchrun takes its options from variables too.
    by_variable = os.environ.get("PET_NNODES", "")
    words = command.split("\0")
    found = RANGE.search(f"{' '.join(words)} --nnodes={by_variable}")
    return found is not None and found[1] != found[2]


def fitting_ranks(config: "Config", world_size: int) -> int:
    """The most of the ranks that share the batch equally. Raises NotEnoughRanksError where they are too few."""
    smallest = config.smallest_layout.world_size
    replicas = world_size // smallest
    if replicas == 0:
        raise NotEnoughRanksError(
            f"{world_size} ranks are there, and the model is split over {smallest}: repeat the command when more are"
        )
    # One replica always fits.
    pieces = config.global_batch_size // config.gradient_accumulation
    while pieces % replicas and replicas > 1:
        replicas -= 1
    return replicas * smallest


def fit(config: "Config", world_size: int) -> dict[str, int]:
    """Keys of the config that follow from the ranks that are there: micro_batch_size, gradient_accumulation.

    A micro-batch is at most as large as that of the first start, which the folder of the run remembers. Raises
    UsageError for a batch that is given for each device, and NotEnoughRanksError.
    """
    if config.local_batch_size is not None:
        raise UsageError("where ranks come and go the whole batch stays: give global_batch_size, not local_batch_size")
    replicas = fitting_ranks(config, world_size) // config.smallest_layout.world_size
    own_samples = config.global_batch_size // replicas
    most = config.micro_batch_size or _micro_batch_of_before(config) or own_samples // config.gradient_accumulation
    count = config.gradient_accumulation
    while count < own_samples and (own_samples % count or own_samples // count > most):
        count += 1
    return {"micro_batch_size": max(1, most), "gradient_accumulation": count}


def _micro_batch_of_before(config: "Config") -> int | None:
    """The micro_batch_size in the folder of this run; None where there is none yet."""
    path = Path(config.expdir) / config.config / config.run_num / "config.yaml"
    if not path.exists():
        return None
    return read_mappings(path, "configs").get(config.config, {}).get("micro_batch_size")
