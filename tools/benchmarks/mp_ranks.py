"""The ranks of `benchmark.py mp`: what a step of each layout takes, holds and sends."""

from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from tools.benchmarks import team
from tools.instruments.assembly import build_step, random_batch
from tools.instruments.memory import memory_of_a_pipeline_step, memory_of_a_step
from tools.instruments.messages import messages_of_a_step
from utils import comm
from utils.layout import Layout

if TYPE_CHECKING:  # it imports this module
    from tools.benchmarks.model_parallel import Case


class Ranks(team.Team):
    """The ranks of a Team, which hold Cases of tools.benchmarks.model_parallel.

    turn: seconds of some steps, of the slowest rank.
    """

    combine: ClassVar[Callable[[list[float]], float]] = max  # a step takes as long as on its slowest rank

    def __init__(self, size: int, cases: "Sequence[Case]"):
        super().__init__(size, cases, _serve)


def _serve(pipe: Connection, cases: "Sequence[Case]") -> None:
    config = cases[0].config
    device = comm.init(config.device, config.comm_timeout)
    if device.type == "cpu":
        torch.set_num_threads(1)
    meshes: dict[Layout, Any] = {}
    built = []
    for each in cases:
        built.append(RankCase(each, device, meshes))
    pipe.send([each.figures for each in built])
    while (turn := pipe.recv()) is not None:
        case, steps = turn
        built[case].use_mesh()
        pipe.send(built[case].seconds(steps))
    comm.shutdown()


class RankCase(team.Case):
    """One layout on one rank. meshes: {layout: groups}, of all cases of this process."""

    def __init__(self, case: "Case", device: torch.device, meshes: dict[Layout, Any]):
        config, self.device = case.config, device
        self.before = torch.cuda.memory_allocated() if device.type == "cuda" else None
        if case.layout not in meshes:
            comm.build_mesh(device, case.layout)
            meshes[case.layout] = comm.swap_meshes({})
        self.meshes = meshes[case.layout]
        self.use_mesh()
        self.x, self.y = random_batch(config, device)
        self.step = build_step(config, device, f"layout '{case.name}'")
        self.figures = self.measure()
        if config.tp_backend == "dtensor":  # a saved DTensor has the size of the whole, not of its part
            self.figures["memory"]["activations"] = None

    def use_mesh(self) -> None:
        """The groups of this case are those of the process."""
        comm.swap_meshes(self.meshes)

    def measure(self) -> dict[str, Any]:
        """Memory and messages of a step on this rank."""
        cuda = self.device.type == "cuda"
        self.train(team.WARMUP_STEPS - 1)
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        self.train(1)
        allocated = None if self.before is None else torch.cuda.max_memory_allocated() - self.before
        measure = memory_of_a_pipeline_step if self.step.parallel.pipeline else memory_of_a_step
        memory = measure(self.step, self.x, self.y) | {"allocated at most": allocated}
        return {"memory": memory, "messages": messages_of_a_step(self.step, self.x, self.y)}
