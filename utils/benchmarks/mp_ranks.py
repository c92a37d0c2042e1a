"""The ranks of `benchmark.py mp`: what a step of each layout takes, holds and sends."""

import torch

from utils import comm
from utils.benchmarks import team
from utils.benchmarks.build import build_step, random_batch
from utils.benchmarks.memory import memory_of_a_pipeline_step, memory_of_a_step
from utils.benchmarks.messages import messages_of_a_step


class Ranks(team.Team):
    """The ranks of a Team, which hold Cases of utils.benchmarks.model_parallel.

    turn: seconds of some steps, of the slowest rank.
    """

    combine = max  # a step takes as long as on its slowest rank

    def __init__(self, size, cases):
        super().__init__(size, cases, _serve)


def _serve(pipe, cases):
    config = cases[0].config
    device = comm.init(config.device, config.comm_timeout)
    if device.type == "cpu":
        torch.set_num_threads(1)
    meshes, built = {}, []
    for case in cases:
        built.append(RankCase(case, device, meshes))
    pipe.send([case.figures for case in built])
    while (turn := pipe.recv()) is not None:
        case, steps = turn
        built[case].use_mesh()
        pipe.send(built[case].seconds(steps))
    comm.shutdown()


class RankCase(team.Case):
    """One layout on one rank. meshes: {layout: groups}, of all cases of this process."""

    def __init__(self, case, device, meshes):
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

    def use_mesh(self):
        """The groups of this case are those of the process."""
        comm.swap_meshes(self.meshes)

    def measure(self):
        """Memory and messages of a step on this rank."""
        cuda = self.device.type == "cuda"
        self.train(team.WARMUP_STEPS - 1)
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        self.train(1)
        allocated = torch.cuda.max_memory_allocated() - self.before if cuda else None
        measure = memory_of_a_pipeline_step if self.step.parallel.pipeline else memory_of_a_step
        memory = measure(self.step, self.x, self.y) | {"allocated at most": allocated}
        return {"memory": memory, "messages": messages_of_a_step(self.step, self.x, self.y)}
