"""The model that a config describes."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from networks.classifier import Classifier
from networks.vit import Transformer, ViT
from utils.errors import reported_as_usage_error
from utils.schema import Config


def build_model(config: Config, device: torch.device | str = "meta") -> Transformer:
    """The ViT of a config. On the meta device it has shapes and names, but no memory yet."""
    forecasts = config.model == "forecast"
    Model: Callable[..., Transformer] = ViT if forecasts else Classifier
    with reported_as_usage_error(ValueError, config.config), torch.device(device):
        return Model(
            config.img_size,
            config.patch_size,
            config.n_in_channels,
            config.n_out_channels if forecasts else config.num_classes,
            config.embed_dim,
            config.depth,
            config.num_heads,
            config.mlp_ratio,
            config.dropout,
        )


def initial_weights(config: Config) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of every parameter of the whole model, drawn on the CPU: they depend on config.seed alone."""
    return build_model(config).initial_weights(torch.Generator().manual_seed(config.seed))
