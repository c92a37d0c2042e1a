"""What one forward pass shows of a model: the shape of its output, its cost, how it uses its weights.

The cost is in floating-point operations, beside how many of them a device can do.
"""

import re
from typing import NamedTuple

import torch

from distributed.checks.usage import Usage, watch
from distributed.parallel_model import check_output
from distributed.protocol import points_kept_together
from networks.vit import PerAxis
from training.models.build import blank_inputs, build_model, describe_error
from training.models.checks import check_made
from utils.device import device_name
from utils.errors import UsageError
from utils.schema import Config
from utils.yaml_files import read_mappings

PASSES = 3  # forward, and twice as much backward
# Forms of a GPU with other peaks than the one in config/hardware.yaml: cards of Hopper, and a slice of any GPU. A card
# of the A100 has the same peaks.
CARDS = {"pcie", "nvl"}
SLICE = "mig"
SAME_AS_CARD = "a100"
# (device, samples) with which a look at a model is tried.
ATTEMPTS = (
    ("meta", 1),
    ("meta", 2),
    ("cpu", 1),
    ("cpu", 2),
)


class ModelInfo(NamedTuple):
    """Facts about a whole model.

    output_shape: for one sample. parameters: how many. flops: floating-point operations of a forward pass of one
    sample, in matrix products and convolutions. kept_together: points between which images are not cut, see
    distributed.protocol.points_kept_together. usage: how it uses its modules and parameters.
    """

    output_shape: tuple[int, ...]
    parameters: int
    flops: int
    kept_together: PerAxis
    usage: Usage


def inspect_model(config: Config) -> ModelInfo:
    """Run one sample through the model of a config, in training mode. Raises UsageError where that cannot be trained.

    On the meta device if it can be done there; a model that reads numbers runs on the CPU. BatchNorm over a single
    point takes two samples.
    """
    image = (config.model_in_channels, *config.img_size)
    problems: dict[str, Exception] = {}
    # The cheapest attempt comes first.
    for device, samples in ATTEMPTS:
        model = build_model(config, device)
        weights = dict(model.named_parameters())
        try:
            output, usage = watch(model, *blank_inputs(config, samples, device))
            break
        except Exception as error:
            problems[device] = problems.get(device, error)
    else:
        problem = problems["cpu"]
        raise UsageError(
            f"{config.config}: model {config.model} fails on an input of {[1, *image]}: {describe_error(problem)}"
        ) from problem
    # A weight that appears in the forward pass would never be trained.
    check_made(model, weights, config)
    check_output(output, f"{config.config}: model {config.model}")
    if not output.requires_grad:
        frozen = f" with freeze {config.freeze}" if config.freeze else ""
        raise UsageError(
            f"{config.config}: the output of model {config.model} depends on no weight that is trained: nothing can be "
            f"learned{frozen}"
        )
    shape: tuple[int, ...] = ()  # of a scalar
    if output.dim():
        shape = (output.shape[0] // samples, *output.shape[1:])
    return ModelInfo(
        output_shape=shape,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        flops=usage.flops // samples,
        kept_together=points_kept_together(model),
        usage=usage,
    )


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
