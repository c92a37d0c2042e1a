"""What one forward pass shows of a model: the shape of its output, its cost, how it uses its weights."""

from typing import NamedTuple

from distributed.checks.usage import Usage, watch
from distributed.parallel_model import check_output
from distributed.protocol import points_kept_together
from networks.vit import PerAxis
from training.models.build import blank_inputs, build_model
from training.models.checks import check_made
from training.models.model_class import describe_error
from utils.errors import UsageError
from utils.schema import Config

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
