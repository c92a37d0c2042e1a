"""A training step as the training scripts build it, and a batch for it."""

import torch
from torch import Tensor

from distributed.data_parallel import data_parallel
from distributed.domain_parallel import split_images
from distributed.model_parallel import split_model
from training.model import build_model, initial_weights
from training.optimizer import build_optimizer
from training.speed_options import apply_compute_options
from training.step import TrainingStep
from utils import comm
from utils.errors import reported_as_usage_error
from utils.schema import Config
from utils.tiles import own_window


def build_step(config: Config, device: torch.device, where: str) -> TrainingStep:
    """The TrainingStep of this rank, whose mesh is built. Raises UsageError, naming `where`, for a split that fails."""
    model = build_model(config)
    with reported_as_usage_error(ValueError, where):
        split = (split_images if comm.get_size("domain") > 1 else split_model)(model, config)
    apply_compute_options(config, device, model)
    parallel = data_parallel(model, config, device, initial_weights(config), split)
    step = TrainingStep(config, device, parallel, build_optimizer(config, model, device))
    torch.manual_seed(config.seed + comm.dropout_stream(config.sequence_parallel))
    return step


def random_batch(config: Config, device: torch.device) -> tuple[Tensor, Tensor]:
    """This rank's part of a batch: random images, and random images or classes to learn."""
    random = torch.Generator().manual_seed(config.seed)
    own = slice(comm.get_rank("dp"), None, comm.get_size("dp"))
    part = (own, slice(None), *own_window(config.img_size, config.patch_size))

    def images(channels: int) -> Tensor:
        whole = torch.randn(config.global_batch_size, channels, *config.img_size, generator=random)
        return whole[part].to(device).clone()

    x = images(config.n_in_channels)
    if config.model == "classifier":
        assert config.num_classes
        return x, torch.randint(config.num_classes, (config.global_batch_size,), generator=random)[own].to(device)
    return x, images(config.n_out_channels)
