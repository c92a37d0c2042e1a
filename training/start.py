"""How a training script starts: its settings are read and checked, its ranks are connected and arranged."""

import os

import torch

from training.run.profiling import restart_under_nsys
from training.step.determinism import prepare_environment
from training.tasks import Task, build_task
from utils import comm, connection
from utils.config import SCRIPTS, load_config
from utils.launch import fitting_ranks, is_range_of_nodes, read_launch
from utils.schema import Config


def start(
    script: str,
    argv: list[str] | None,
    description: str | None,
) -> tuple[Config, torch.device, Task]:
    """The settings of this run, this rank's device, and the task.

    script: its name in utils.config.SCRIPTS, which has its file of configs and the keys by which it splits a model.
    argv: words of a command line, sys.argv's if None. description: the text of --help.
    With ENABLE_PROFILING=1 the command starts again inside Nsight Systems. Raises UsageError, before anything is
    connected, for settings that do not fit one another, the launch or the task.
    """
    launch = read_launch()
    own = SCRIPTS[script]
    elastic = is_range_of_nodes()
    config = load_config(argv, description, launch.world_size, own.yaml_config, own.splits, elastic=elastic)
    ranks = fitting_ranks(config, launch.world_size) if config.elastic else launch.world_size
    layout = config.layout(ranks, launch.ranks_per_node)
    task = build_task(config)
    # This does not come back where the command starts again under nsys.
    restart_under_nsys()
    prepare_environment(config)
    if config.enable_cuda_graphs:  # NCCL's thread for errors would disturb a capture; Run has the watchdog end hangs
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    # From here on the ranks wait for one another.
    device = connection.connect(config.device, config.comm_timeout, config.cpu_offload, ranks)
    comm.build_mesh(device, layout)
    return config, device, task
