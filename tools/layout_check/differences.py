"""How far a rank's tensors are from those of one device: the place of a part in the whole, and its relative error."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from distributed.shard.core.spec import part_of
from tools.layout_check.record import BATCH, CLIPPED, EVALUATION, FORWARD, GRADIENT, INPUT, UPDATES, Key, Part, Record
from tools.layout_check.recording import rounding_of
from utils import comm
from utils.layout import shard_sizes
from utils.sample_order import own_positions
from utils.schema import Config

TOLERANCES = {"float64": 1e-8, "float32": 1e-3}  # relative to the largest number of a tensor
Wholes = Mapping[Key, Tensor]


def errors_of(
    found: Record,
    wholes: Wholes,
    config: Config,
) -> tuple[dict[Key, float], dict[Key, Tensor]]:
    """Of all that can be compared on this rank: its relative error, and what one device has in its place.

    All ranks call it together. wholes: the tensors of one device. config: it says how the samples of a batch, and their
    members, are dealt.
    """
    dealt = Dealt(config.gradient_accumulation, config.ensemble_size)
    # Where a part begins follows from the sizes of all others: [(coordinates, {key: shape}) of each rank].
    shapes = comm.gather((coordinates(), {key: part.shape for key, part in found.items()}))
    # Of gradients the model's largest counts as well, see scale_of.
    scales = {stage: largest_of_stage(wholes, stage) for stage in (GRADIENT, CLIPPED)}
    errors: dict[Key, float] = {}
    wanted: dict[Key, Tensor] = {}
    for key, part in found.items():
        expected = None
        if key in wholes:
            expected = expected_part(key, part, wholes[key], shapes, dealt)
        if expected is None:
            continue
        wanted[key] = expected.to(part.value.device)
        apart = difference(part.value, wanted[key])
        # A weight may go anywhere where its gradient is rounding: Adam divides the gradient by its size.
        if key[0] in UPDATES and (GRADIENT, key[1]) in wholes:
            gradient = wholes[GRADIENT, key[1]].abs()
            size = expected_part(key, part, gradient, shapes, dealt)
            assert size is not None
            apart = apart[is_trained(size, gradient, scales[GRADIENT]).to(apart.device)]
        errors[key] = relative(apart, scale_of(key, wholes[key], scales))
    return errors, wanted


def difference(value: Tensor, wanted: Tensor) -> Tensor:
    """The size of the difference of each element: 0 where both are the same infinity, or no number.

    Of truth values and whole numbers it is 0 or 1: they are the same, or not.
    """
    same = value == wanted  # infinities too, whose difference would be no number
    if not is_of_numbers(value):
        return (~same).double()
    both_no_numbers = value.isnan() & wanted.isnan()
    return (value - wanted).abs().masked_fill(same | both_no_numbers, 0)


def is_of_numbers(tensor: Tensor) -> bool:
    """Tell whether a tensor holds real or complex numbers, which rounding may change."""
    return tensor.is_floating_point() or tensor.is_complex()


def size_of(tensor: Tensor) -> float:
    """The largest finite number of a tensor, by its size; 1 of truth values, whole numbers and zeros."""
    if not is_of_numbers(tensor):
        return 1.0
    sizes = tensor.abs()
    finite = sizes[sizes.isfinite()]  # a mask of minus infinities has other numbers beside them
    largest = finite.max().item() if finite.numel() else 0.0
    return largest or 1.0


def largest_of_stage(wholes: Wholes, stage: str) -> float:
    """The largest number of all tensors of a stage."""
    sizes = [size_of(tensor) for key, tensor in wholes.items() if key[0] == stage and tensor.any()]
    return max(sizes, default=0.0)


def scale_of(key: Key, whole: Tensor, scales: Mapping[str, float]) -> float:
    """The size that differences of a tensor are measured by: its own largest number.

    A gradient that is zero but for rounding, as that of a bias in front of a BatchNorm, is measured by the model's.
    scales: {stage: largest number of its tensors}, of the stages with gradients.
    """
    own = size_of(whole)
    if key[0] not in scales:
        return own
    if not whole.any():
        own = 0.0
    # With the scale below, a difference is equal up to `rounding_of` times the model's largest gradient.
    tolerance = TOLERANCES[str(torch.get_default_dtype()).removeprefix("torch.")]
    of_the_model = scales[key[0]] * rounding_of(torch.get_default_dtype()) / tolerance
    return max(own, of_the_model) or 1.0


def is_trained(size: Tensor, gradient: Tensor, of_the_model: float) -> Tensor:
    """Tell of each element of a weight whether its gradient is more than rounding: Adam divides it by its size.

    size: of the gradient in the place of this rank's part. gradient: size of the whole tensor's.
    """
    eps = torch.finfo(size.dtype).eps
    largest = size_of(gradient) if gradient.any() else 0.0
    # The factor keeps away from elements that were set to zero in one run alone (see recording.drop_rounding).
    least = max(eps**0.5 * largest, 4 * rounding_of(size.dtype) * of_the_model)
    return size > least


def relative(apart: Tensor, scale: float) -> float:
    """The largest difference, by a scale; infinite where one of both is no number."""
    if not apart.numel():
        return 0.0
    largest = apart.max().item() / scale
    return math.inf if math.isnan(largest) else largest


def coordinates() -> dict[str, int]:
    """This rank's place in the dimensions that split tensors."""
    return {name: comm.get_rank(name) for name in ("dp", "ens", "pp", "cp", "tp", "domain_lat", "domain_lon")}


class Dealt(NamedTuple):
    """How the samples of a batch are dealt to ranks: in micro-batches, and with so many members each."""

    micro_batches: int
    members: int

    def own_rows(self, whole: Tensor, names: tuple[str, ...]) -> Tensor:
        """This rank's samples of all, or its members of its samples. names: of the dimensions that share them."""
        are_members = "ens" in names
        each = self.members if are_members else 1
        samples = whole.unflatten(0, (-1, each))  # (B, M, ...)
        places = own_positions(len(samples), comm.get_rank("dp"), comm.get_size("dp"), self.micro_batches)
        own = samples[places]
        if are_members:
            counts = shard_sizes(each, comm.get_size("ens"))
            rank = comm.get_rank("ens")
            own = own.narrow(1, sum(counts[:rank]), counts[rank])
        return own.flatten(0, 1)


def expected_part(
    key: Key,
    part: Part,
    whole: Tensor,
    shapes: list[Any],
    dealt: Dealt,
) -> Tensor | None:
    """The tensor that one device has in the place of a rank's part; None where that place is not known.

    A part of a dimension is found by the ranks whose parts make up its length. shapes: of the parts of all ranks.
    """
    if whole.dim() != len(part.shape):
        return None
    for dim, size in enumerate(part.shape):
        if whole.shape[dim] == size:
            continue
        for names in splits_of(key[0], dim, whole.dim()):
            start = start_along(key, dim, names, whole.shape[dim], shapes)
            if start is None:
                continue
            # Samples are dealt out by micro-batch, so a rank's samples are no range. All other parts are ranges.
            are_samples = names[0] == "dp"
            whole = dealt.own_rows(whole, names) if are_samples else whole.narrow(dim, start, size)
            break
    if whole.shape != part.shape:
        return None
    # So far the part is that of all domain ranks together; its Spec says where this rank's lies in it.
    return part_of(whole, part.spec) if part.spec else whole


def start_along(
    key: Key,
    dim: int,
    names: tuple[str, ...],
    length: int,
    shapes: list[Any],
) -> int | None:
    """Where this rank's part begins, if the ranks along these dimensions of the mesh hold such a length together."""
    here = coordinates()
    own = [here[name] for name in names]
    # Ranks that differ in these coordinates alone hold the length together, in the order of their coordinates.
    total, start = 0, 0
    for there, sizes in shapes:
        is_beside = all(there[name] == here[name] for name in here if name not in names)
        if key not in sizes or not is_beside:
            continue
        total += sizes[key][dim]
        if [there[name] for name in names] < own:
            start += sizes[key][dim]
    return start if total == length else None


def splits_of(
    stage: str,
    dim: int,
    dims: int,
) -> list[tuple[str, ...]]:
    """The dimensions of the mesh, alone or together, that may split a dimension of a tensor with so many."""
    if stage not in (BATCH, INPUT, FORWARD, EVALUATION):  # a weight
        return [("tp",)]
    if dim == 0:
        return [("dp",), ("dp", "ens")]
    if dims > 3:  # images, (B, C, H, W)
        return [("cp",), ("domain_lat",)] if dim == 2 else [("domain_lon",)]
    # Features lie on tp; tokens on cp, on tp (sequence parallelism), or on both.
    return [("tp",)] if dim == dims - 1 else [("cp",), ("tp",), ("cp", "tp")]  # tokens, (B, N, D), or (B, D)
