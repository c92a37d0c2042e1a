"""Rung 4 of the ladder: one image over several devices, by domain parallelism, beside data and tensor parallelism.

    torchrun --nproc_per_node 2 train_shard.py --config=shard_quick --domain_parallel 2
    torchrun --nproc_per_node 4 train_shard.py --config=shard_quick --domain_parallel 2x2 --data_parallel fsdp

Every rank reads, embeds and predicts its band of latitude or its tile alone. The ranks that are left are data parallel,
with any strategy of rung 2. Exit status: as train.py.
"""

from distributed.data_parallel import DataParallelOptions, data_parallel
from distributed.domain_parallel import DomainOptions, split_images
from training.models.build import build_model, initial_weights
from training.run.run import Run
from training.start import start
from training.step.optimizer import build_optimizer
from training.step.speed_options import apply_speed_options
from training.step.step import TrainingStep
from utils import connection


def main(argv: list[str] | None = None) -> int | None:
    """Train as the words of a command line say (sys.argv's, if none are given); returns the exit status."""
    config, device, task = start("train_shard.py", argv, __doc__)

    model = build_model(config)  # names and shapes; parameters are allocated once each rank knows its share
    split = split_images(model, config.options(DomainOptions))
    apply_speed_options(config, device, model)
    loaders = task.loaders(device)  # of this rank's part of the samples
    options = config.options(DataParallelOptions)
    parallel = data_parallel(model, options, device, initial_weights(config), task.usage, split)
    optimizer = build_optimizer(config, parallel, device)
    step = TrainingStep(config, device, parallel, optimizer, task)

    with Run(config, step, task, loaders) as run:  # continues from the newest checkpoint in its folder
        for iteration in run.iterations():
            with iteration:
                x, y = iteration.batch()
                output = step(iteration.number, x, y, log_norm=iteration.is_read)  # forward, backward, update
                iteration.finish(output)  # log, validate, save, each where it is due
    return run.status()


if __name__ == "__main__":
    connection.run_ranks(main, resumes=True)
