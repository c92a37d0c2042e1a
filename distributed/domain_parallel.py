"""Rung 4: one sample split over ranks along latitude, or along latitude and longitude, for any model in networks/.

The model does not change. Its input is a ShardTensor, and every operation in it works on this rank's part
(distributed/shard_tensor.py). What enters and leaves the model is this rank's part as a plain tensor.

Weights are plain tensors, whole on every rank. Each rank computes a part of their gradient, and the parts must be
summed. Data parallelism averages gradients over dp and domain ranks together, as if tiles were samples. The loss is
therefore multiplied by the number of domain ranks: the mean over dp x domain ranks is then the mean over dp of the sum
over domain.

A parameter with one row for each token, the position embedding, can be split as the tokens are (shard_parameters). A
rank holds, updates and saves the rows of its own tokens; no other domain rank has a gradient for them.
"""

import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from distributed.checks.ties import tie_pieces, tied_names
from distributed.context_parallel import check_attention
from distributed.protocol import SplittableAttention, points_kept_together
from distributed.shard.core.axes import Axes, Axis, merged, unsplit_axes
from distributed.shard.core.calls import INSIDE
from distributed.shard.core.hacks import with_plain_base
from distributed.shard.core.operands import to_spec
from distributed.shard.core.order import in_global_order
from distributed.shard.core.spec import Mesh, Spec, as_mesh
from distributed.shard.core.tensor import find_libraries
from distributed.shard_tensor import (
    ShardTensor,
    local,
    part_of,
    replicate,
    set_attention_method,
    set_fallback,
    sum_partial,
    wrap,
)
from distributed.sharded_units import GATHER_DTYPES
from distributed.split import Split, image_cuts, per_axis
from distributed.tensor_parallel import tensor_parallel
from networks.vit import PerAxis, Transformer
from utils import comm
from utils.errors import LayoutError, UsageError, reported_as_usage_error

POSITIONS = "pos_embed.weight"  # of a Transformer: one row for each token


@dataclass(frozen=True)
class DomainOptions:
    """Settings of domain parallelism, rung 4. The fields are keys of the config (utils/schema.py)."""

    img_size: Sequence[int]
    config: str = "model"  # how messages call it
    domain_method: str = "gather"
    domain_fallback: str = "error"
    data_parallel: str = "ddp"
    amp_mode: str = "none"
    gather_dtype: str = "none"


def domain_mesh() -> DeviceMesh | None:
    """The DeviceMesh of the domain ranks, of the dimensions along which there are several; None where there is one."""
    names = [name for name in ("domain_lat", "domain_lon") if comm.get_size(name) > 1]
    return comm.get_mesh(*names) if names else None


class Domain:
    """How images of one size are split over the domain ranks. mesh: the result of domain_mesh."""

    def __init__(self, mesh: DeviceMesh, img_size: Sequence[int], patch_size: PerAxis):
        self.mesh = as_mesh(mesh)
        patch = per_axis(patch_size, len(img_size))
        patches = [n // p for n, p in zip(img_size, patch, strict=True)]  # along each axis

        # The axes of the image in points, and of the grid in patches: both are split in the same places.
        axes = [unsplit_axes(n) for n in img_size]
        self.grid = [unsplit_axes(n) for n in patches]
        cuts = [cut for cut in image_cuts(img_size, patch) if cut.mesh_dim != "cp"]
        for mesh_dim, (axis, sizes, _) in enumerate(cuts):
            patch_sizes = tuple([n // patch[axis] for n in sizes])
            axes[axis] = (Axis(img_size[axis], mesh_dim, sizes),)
            self.grid[axis] = (Axis(patches[axis], mesh_dim, patch_sizes),)
        self.image = Spec(self.mesh, tuple(axes))

    def spec(self, samples: int, channels: int) -> Spec:
        """Of images (samples, channels, *img_size)."""
        dims = unsplit_axes(samples), unsplit_axes(channels), *self.image.dims
        return self.image.kept((samples, channels), lambda: Spec(self.mesh, dims))

    def token_axes(self) -> Axes:
        """The axes of the dimension of tokens: the patches of an image, row by row."""
        return merged(chain.from_iterable(self.grid))


def domain_parallel(
    model: nn.Module,
    img_size: Sequence[int],
    patch_size: PerAxis,
    method: str = "gather",
) -> Domain | None:
    """Let a model, in place, work on this rank's part of an image: (B, C, h, w) -> its part of the output.

    An output that is no image, classes for example, is whole on every rank. Parallel over the domain ranks of the
    mesh; with one of them the model stays as it is. patch_size: points along each axis that stay on one rank.
    method: of attention, see distributed/attention.py.
    Returns the Domain, or None with one rank. Raises ValueError for an unknown method, more ranks than patches, heads
    that all_to_all cannot split, dropout of attention with ring, and modules that are compiled already. Tensor
    parallelism comes before.
    """
    set_attention_method(method)
    mesh = domain_mesh()
    ranks = comm.get_size("domain")
    if mesh is None:
        return None
    find_libraries()
    for name, module in model.named_modules():
        is_compiled = type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None
        if is_compiled:
            raise LayoutError(
                f"module '{name}' is compiled by the model itself, and domain parallel splits what it is given: take "
                "torch.compile out of the model; --enable_jit compiles its blocks"
            )
        if isinstance(module, SplittableAttention):
            check_attention(module, method, ranks, "domain parallel")
    domain = Domain(mesh, img_size, patch_size)
    forward = refusing_compiled_functions(model.forward)

    def forward_part(x, *others):  # the noise of a member: alike on all ranks of the image
        images = wrap(x, domain.spec(x.shape[0], x.shape[1]))
        y = in_global_order(sum_partial(forward(images, *others)))
        if y.spec.shape[2:] == domain.image.shape:  # as the target is cut, whatever the model has made of the cuts
            y = to_spec(y, domain.spec(y.shape[0], y.shape[1]))
        elif not y.spec.split_dims:
            y = replicate(y)
        return local(y).clone()  # fully_shard warns of views

    model.forward = forward_part
    return domain


def refusing_compiled_functions(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward function that raises UsageError where the model compiles a function inside it by itself."""

    def call(*args: Any) -> Any:
        try:
            return forward(*args)
        except RuntimeError as error:
            # The compiler is slow to import. A program that has not imported it has compiled nothing.
            compiler = sys.modules.get("torch._dynamo.exc")
            if compiler is not None and isinstance(error, compiler.TorchDynamoException):
                raise compiled_by_the_model(error) from error
            raise

    return call


def compiled_by_the_model(error: RuntimeError) -> UsageError:
    """The refusal of a compiled function, with the model's line that called it. error: of torch's compiler."""
    place = ""
    # The last frame outside of torch and of ShardTensor is the innermost line of the model.
    for frame in traceback.extract_tb(error.__traceback__):
        if not frame.filename.startswith(INSIDE):
            file = Path(frame.filename)
            place = f" ({file.name}, line {frame.lineno})"
    return UsageError(
        f"a function is compiled by the model itself{place}, and domain parallel splits what it is given: take "
        "torch.compile out of the model; --enable_jit compiles its blocks"
    )


class OnParts:
    """The forward function of a block that is checkpointed or compiled, between blocks that are not.

    A ShardTensor cannot enter a compiled or checkpointed region, but its local part can. `transforms` are applied to a
    function of the part, one after the other. Raises ValueError where the output is not split as the input is.
    """

    def __init__(self, forward: Callable):
        self.forward = forward
        self.transforms: list[Callable[[Callable], Callable]] = []
        self.regions: list[tuple[Spec, Callable]] = []  # (spec of the input, function)

    def __call__(self, x: ShardTensor, *others: Any, **named: Any) -> ShardTensor:
        """x: the block's input; the output is split as it is. Other arguments are passed on."""
        x = in_global_order(x)
        region = next((region for spec, region in self.regions if spec == x.spec), None)
        if region is None:
            region = partial(self._on_part, x.spec)
            for transform in self.transforms:
                region = transform(region)
            self.regions.append((x.spec, region))
        spec = x.spec
        part = local(x)
        with with_plain_base(part):
            result = region(part, *others, **named)
        return wrap(result, spec)

    def _on_part(self, spec, part, *others, **named):
        """The forward function between plain tensors: the local part of the input -> that of the output."""
        y = in_global_order(self.forward(wrap(part, spec), *others, **named))
        if y.spec != spec:
            raise ValueError(
                f"the output of a checkpointed or compiled block must be split as its input is, {spec}, not {y.spec}"
            )
        return local(y)


def shard_parameters(
    model: nn.Module,
    mesh: DeviceMesh | Mesh,
    partition: Mapping[str, Sequence[Axes]],
    dtype: torch.dtype | None = None,
) -> dict[str, Spec]:
    """Split parameters over the domain ranks, in place, also on the meta device.

    partition: {name: the axes of each dimension}, for example (domain.token_axes(), whole(embed_dim)). Inside the model
    such a parameter is a ShardTensor; its name stays, and its shape becomes that of this rank's part. dtype: in which
    the model sees it, as it sees the parameters that fully_shard gathers.
    Returns {name: Spec}.
    """
    specs = {}
    for name, dims in partition.items():
        owner, _, attribute = name.rpartition(".")
        module = model.get_submodule(owner)
        spec = Spec(as_mesh(mesh), tuple(dims))
        parameter = module.get_parameter(attribute)
        part = part_of(parameter.detach(), spec).clone()  # a view would keep the whole
        setattr(module, attribute, nn.Parameter(part, parameter.requires_grad))
        _show_as_sharded(module, attribute, spec, dtype)
        specs[name] = spec
    return specs


def _show_as_sharded(module, attribute, spec, dtype):
    """Let the module see its parameter as a ShardTensor; for everybody else it stays the plain local part."""

    def get(self):
        part = self._parameters[attribute].to(dtype=dtype)
        return wrap(part, spec)

    # A property of the class hides what the module itself holds. So the module gets a class of its own.
    cls = type(module)
    module.__class__ = type(f"Sharded{cls.__name__}", (cls,), {attribute: property(get)})


def split_images(model: nn.Module, options: DomainOptions) -> Split:
    """Split a model over the tensor-parallel ranks, and its images over the domain-parallel ones. It may be on meta.

    Images are cut between patches, see points_kept_together.
    The position embedding is split with the tokens, except under zero1, whose ranks send each other whole parameters,
    and with fp16 under fully_shard: torch's gradient scaler takes no mixture of DTensors and plain tensors.
    Raises UsageError where heads, hidden features or patches cannot be split, and for ring attention with dropout.
    """
    with reported_as_usage_error(ValueError, options.config):
        split = Split()
        patch_size = points_kept_together(model)
        set_fallback(options.domain_fallback)
        ties = tied_names(model)
        # Tensor parallelism comes first: it looks for plain layers.
        if comm.get_size("tp") > 1:
            split.dims = tensor_parallel(model, comm.get_group("tp"))
            tie_pieces(model, ties, "tensor parallel")
        domain = domain_parallel(model, options.img_size, patch_size, options.domain_method)
        if domain is None:
            return split
        split.cuts = image_cuts(options.img_size, patch_size)

        # The position embedding has a row for each token: each rank keeps the rows of its own tokens.
        strategy = options.data_parallel
        takes_mixture = strategy == "ddp" or (strategy != "zero1" and options.amp_mode != "fp16")
        is_shared = any(POSITIONS in names for names in ties)
        if takes_mixture and isinstance(model, Transformer) and not is_shared:
            features = model.pos_embed.weight.shape[1]
            axes = (domain.token_axes(), unsplit_axes(features))
            dtype = GATHER_DTYPES[options.gather_dtype]
            split.specs = shard_parameters(model, domain.mesh, {POSITIONS: axes}, dtype)
        return split
