"""Floating-point operations of training, and how many of them a device can do."""

import re

import torch

from training.models.info import inspect_model
from utils.device import device_name
from utils.schema import Config
from utils.yaml_files import read_mappings

PASSES = 3  # forward, and twice as much backward
# Forms of a GPU with other peaks than the one in config/hardware.yaml: cards of Hopper, and a slice of any GPU. A card
# of the A100 has the same peaks.
CARDS = {"pcie", "nvl"}
SLICE = "mig"
SAME_AS_CARD = "a100"


def training_flops(config: Config) -> float:
    """Floating-point operations of one training step on one sample: three forward passes, of matrix products alone.

    The backward pass has two products for each one. Activation checkpointing computes more, which does not count:
    utilisation is of the work the model needs (Chowdhery et al. 2022, PaLM, arXiv:2204.02311, appendix B). Of a rollout
    it is one step of the forecast. An ensemble makes a pass for each member of a sample.
    """
    return PASSES * inspect_model(config).flops * config.ensemble_size


def precision(config: Config) -> str:
    """The precision of matrix products: bf16, fp16, fp8, tf32 or fp32."""
    if config.amp_mode != "none":
        return config.amp_mode
    return "tf32" if config.enable_tf32 else "fp32"


def is_gpu(name: str, device_name: str) -> bool:
    """Tell whether a device that reports this name is the GPU called `name` in config/hardware.yaml, and all of it."""
    # Names of devices differ by maker and version, so words are compared.
    words = set(re.split(r"\W+", device_name.lower()))
    is_slower_card = SAME_AS_CARD not in words and bool(words & CARDS)
    is_slice = SLICE in words
    has_its_name = words >= set(name.split("-"))
    return has_its_name and not is_slower_card and not is_slice


def peak_flops_per_sec(device: torch.device, config: Config) -> float | None:
    """Dense peak of a device in the precision of this config; None for one that config/hardware.yaml does not have."""
    for name, gpu in read_mappings("config/hardware.yaml", "GPUs").items():
        if is_gpu(name, device_name(device)):
            return gpu.get(precision(config))
    return None
