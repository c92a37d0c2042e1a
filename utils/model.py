"""The model that a config describes."""

import torch

from networks.classifier import Classifier
from networks.vit import ViT
from utils.errors import reported_as_usage_error


def build_model(config, device="meta"):
    """The ViT of a config. On the meta device it has shapes and names, but no memory yet."""
    forecasts = config.model == "forecast"
    with reported_as_usage_error(ValueError, config.config), torch.device(device):
        return (ViT if forecasts else Classifier)(
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


def initial_weights(config):
    """(name, tensor) of every parameter of the whole model, drawn on the CPU: they depend on config.seed alone."""
    return build_model(config).initial_weights(torch.Generator().manual_seed(config.seed))
