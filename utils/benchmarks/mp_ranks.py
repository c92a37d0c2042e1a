"""The ranks of `benchmark.py mp`: what a step of each layout takes, holds and sends."""

import torch

from distributed.data_parallel import data_parallel
from distributed.model_parallel import split_model
from distributed.tiles import own_window
from utils import comm
from utils.benchmarks import team
from utils.benchmarks.memory import memory_of_a_pipeline_step, memory_of_a_step
from utils.benchmarks.messages import messages_of_a_step
from utils.compute import apply_compute_options
from utils.errors import reported_as_usage_error
from utils.model import build_model, initial_weights
from utils.optim import build_optimizer
from utils.training_step import TrainingStep


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
    random = torch.Generator().manual_seed(config.seed)
    shapes = [(config.global_batch_size, n, *config.img_size) for n in (config.n_in_channels, config.n_out_channels)]
    batch = [torch.randn(shape, generator=random) for shape in shapes]
    meshes, built = {}, []
    for case in cases:
        built.append(RankCase(case, device, batch, meshes))
    pipe.send([case.figures for case in built])
    while (turn := pipe.recv()) is not None:
        case, steps = turn
        built[case].use_mesh()
        pipe.send(built[case].seconds(steps))
    comm.shutdown()


class RankCase(team.Case):
    """One layout on one rank. meshes: {layout: groups}, of all cases of this process."""

    def __init__(self, case, device, batch, meshes):
        config, self.device = case.config, device
        self.before = torch.cuda.memory_allocated() if device.type == "cuda" else None
        if case.layout not in meshes:
            comm.build_mesh(device, case.layout)
            meshes[case.layout] = comm.swap_meshes({})
        self.meshes = meshes[case.layout]
        self.use_mesh()
        rows, columns = own_window(config.img_size, config.patch_size)
        own = slice(comm.get_rank("dp"), None, comm.get_size("dp"))
        self.x, self.y = (t[own, :, rows, columns].to(device).clone() for t in batch)
        model = build_model(config)
        with reported_as_usage_error(ValueError, f"layout '{case.name}'"):
            split = split_model(model, config)
        apply_compute_options(config, device, model)
        parallel = data_parallel(model, config, device, initial_weights(config), split)
        self.step = TrainingStep(config, device, parallel, build_optimizer(config, model, device))
        torch.manual_seed(config.seed + comm.dropout_stream(config.sequence_parallel))
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
