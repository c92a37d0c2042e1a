"""The likely cause of a difference between a layout and one device, by the pattern of the difference.

All ranks call `cause` together, because some patterns show in sums over groups of ranks.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from tools.layout_check.differences import coordinates, difference, is_of_numbers
from tools.layout_check.record import (
    BATCH,
    BUFFERS,
    FORWARD,
    GRADIENT,
    INITIAL,
    MOMENTS,
    RELOADED,
    UNREDUCED,
    Key,
    Record,
)
from utils import comm
from utils.schema import Config
from utils.yaml_files import read_mappings

GROUPS = ("tp", "cp", "domain", "ens", "dp", "image", "grad_reduce")  # in which ranks may hold parts of one sum
SIZES = ("dp", "tp", "cp", "domain", "ens", "pp", "grad_reduce")  # by which a number may be wrong
CAUSES = "tools/layout_check/causes.yaml"  # {stage: {some, all, ...: text}}
LATER = "weights after a later step"
RANDOM = "random numbers: each layout has other streams of them; without them (dropout 0) the rest can be compared"
NARROW = 1e-5  # a relative error that rounding to float32 may lead to, in a comparison in float64
COARSE = 2**-4  # the largest relative error that rounding to bfloat16 leads to, in a few steps
SHOWN = 4  # names of buffers


@dataclass
class Apart:
    """A tensor that differs from that of one device, as a rank sees it.

    kind: class of the module. ranks: those that differ. error: the largest relative one. found: all that this rank
    recorded. wanted: what one device has in this rank's place, None where it has no part of this tensor. limit: the
    largest difference that counts as equal. config: of the layout. input_is_right: of a module whose output differs;
    None where its input could not be compared.
    """

    key: Key
    kind: str
    ranks: Sequence[int]
    error: float
    found: Record
    wanted: Tensor | None
    limit: float
    config: Config
    input_is_right: bool | None = None

    @property
    def stage(self) -> str:
        """The stage in which it differs."""
        return self.key[0]

    @property
    def value(self) -> Tensor:
        """The tensor of this rank; it must have a part of it."""
        return self.found[self.key].value

    @property
    def is_of_some(self) -> bool:
        """Tell whether it is right on other ranks."""
        return len(self.ranks) < comm.world_size()

    def is_wanted(self, x: Tensor | None) -> list[bool]:
        """On each rank: tell whether a tensor is what is wanted there."""
        is_right = False
        if x is not None and self.wanted is not None and x.shape == self.wanted.shape:
            is_right = bool((difference(x, self.wanted) <= self.limit).all())
        # A rank without a part takes part in the gather too, or the others would wait for it.
        return comm.gather(is_right)


def cause(apart: Apart) -> str:
    """The likely cause of a difference in words."""
    of_stages = read_mappings(CAUSES, "stages")
    of_stage = of_stages.get(apart.stage, of_stages[LATER])
    # What was asked for comes first: patterns of rounding would be chance.
    found = _of_options(apart, of_stages["options"])
    # The sums below are of numbers: a mask or a counter is right or not.
    holds_numbers = apart.wanted is None or is_of_numbers(apart.wanted)
    if not found and all(comm.gather(holds_numbers)):
        found = _of_pattern(apart)
    if found:
        return found
    # BatchNorm does not read its buffers in training: there the samples themselves are the cause.
    is_of_samples = not apart.is_of_some and apart.stage not in (BATCH, INITIAL) and "BatchNorm" not in apart.kind
    if is_of_samples and (names := _buffers_of_own_samples(apart.found)):
        return of_stages["options"]["buffers of own samples"].format(", ".join(names[:SHOWN]))
    # All ranks run the same code, so where some alone differ their data or their state does.
    if apart.is_of_some:
        who = f"rank {apart.ranks[0]} alone"
        if len(apart.ranks) > 1:
            who = f"ranks {', '.join(map(str, apart.ranks))} alone"
        what = "input" if apart.stage == FORWARD and apart.input_is_right is False else "some"
        return f"{who}: {of_stage[what].format(apart.kind)}"
    # A comparison in float64 shows the rounding of a module that computes in float32.
    is_wide = torch.get_default_dtype() == torch.float64
    if apart.stage == FORWARD and is_wide and apart.error < NARROW:
        return of_stages["options"]["narrow"].format(apart.kind)
    if apart.stage == FORWARD and (found := _of_forward(apart)):
        return found
    if apart.stage == FORWARD and apart.input_is_right is False:
        return of_stage["input"].format(apart.kind)
    if apart.stage == FORWARD and apart.input_is_right is None:
        return of_stage["unknown input"].format(apart.kind)
    return of_stage["all"].format(apart.kind)


def _of_options(apart: Apart, texts: dict[str, str]) -> str:
    """Explain a difference as small as rounding by an option of the layout that rounds what is sent."""
    if apart.error > COARSE:
        return ""
    # Gradients are reduced after the forward pass, so nothing up to it has the rounding of what was sent.
    config, is_reduced = apart.config, apart.stage not in (BATCH, INITIAL, FORWARD)
    if config.gather_dtype != "none" and apart.stage not in (BATCH, INITIAL):
        return texts["gather_dtype"].format(config.gather_dtype)
    if config.gradient_compression != "none" and is_reduced and comm.get_size("grad_reduce") > 1:
        return texts["gradient_compression"].format(config.gradient_compression)
    return ""


def _of_pattern(apart: Apart) -> str:
    """Explain a difference by sums over groups of ranks, by a factor, or by its place; "" where none of them fits."""
    wanted, stage, first = apart.wanted, apart.stage, apart.ranks[0]
    # Every condition is gathered or the same on all ranks, so that they take the same branch and no gather hangs.
    is_together = all(comm.gather(wanted is not None))
    is_beside, factor = False, None
    if wanted is not None:
        is_beside = stage == FORWARD and _is_beside_cuts(difference(apart.value, wanted) > apart.limit)
        factor = _factor(apart.value, wanted, apart.limit)
    is_wrong_before = apart.input_is_right is False  # then its own halo is not the cause
    if any(comm.gather(is_beside)) and not is_wrong_before:
        return "only rows beside a cut differ: the halo that a rank borrows from its neighbours"
    has_other_samples = stage == FORWARD and apart.config.gradient_accumulation > 1 and _has_other_samples(apart)
    if all(comm.gather(has_other_samples)):
        return "micro-batches hold other samples than on one device, or in another order"

    # One factor for the whole tensor shows a mean or a sum that was taken wrongly, or twice.
    mean_is_right = stage == GRADIENT and is_together and not apart.is_of_some and _mean_is_right(apart)
    factors = comm.gather(factor)
    if (size := factors[first]) and not apart.is_of_some:
        of_ranks = [factors[rank] or 0 for rank in apart.ranks]
        is_alike = all(abs(other - size) < 1e-6 for other in of_ranks)
        if is_alike and (explained := _by_factor(size, apart.config.gradient_accumulation)):
            right = ": what a rank computes is right, its reduction is not" if mean_is_right else ""
            return explained + right
    if mean_is_right:
        samples = ", or micro-batches are left out" if apart.config.gradient_accumulation > 1 else ""
        return f"the gradients of the ranks are right, but not averaged over {_group('grad_reduce')}{samples}"

    # A rank that holds a part of a sum has the right tensor once the parts of a group are added up.
    is_computed = stage not in (BATCH, INITIAL, RELOADED, MOMENTS)
    if is_together and is_computed and not apart.is_of_some and len(set(comm.gather(apart.value.shape))) == 1:
        for group in GROUPS:
            if all(apart.is_wanted(_summed(apart.value, group))):
                return f"each rank has its part of a sum, which is not added up over {_group(group)}"
    return ""


def _has_other_samples(apart: Apart) -> bool:
    """Tell whether the samples of this rank's output are right ones in another order."""
    value, wanted = apart.value, apart.wanted
    if wanted is None or value.shape != wanted.shape or value.dim() == 0:
        return False
    for sample in value:
        largest = difference(sample.expand_as(wanted), wanted).flatten(1).amax(1)  # (B,), by right sample
        if not (largest <= apart.limit).any():
            return False
    return True


def _mean_is_right(apart: Apart) -> bool:
    """Tell whether the mean of the gradients before their reduction is what is wanted, on the first wrong rank."""
    before = apart.found.get((UNREDUCED, apart.key[1]))
    if not all(comm.gather(before is not None)):
        return False
    assert before is not None
    # Training should have made this reduction: a mean over all ranks that share the gradient.
    mean = _summed(before.value / comm.get_size("grad_reduce"), "grad_reduce")
    return apart.is_wanted(mean)[apart.ranks[0]]


def _buffers_of_own_samples(found: Record) -> list[str]:
    """Names of the buffers that differ between ranks which differ in their samples alone."""
    digests = {}
    for (stage, name), part in found.items():
        if stage == BUFFERS:
            raw = part.value.detach().cpu().contiguous().flatten().view(torch.uint8)
            digests[name] = hashlib.sha256(raw.numpy().tobytes()).digest()
    # Ranks with another part of the image or of the weights may well have other buffers.
    place = {name: rank for name, rank in coordinates().items() if name != "dp"}
    of_ranks = comm.gather((place, digests))
    names = []
    for name in digests:
        of_place = {seen[name] for there, seen in of_ranks if there == place and name in seen}
        if len(of_place) > 1:
            names.append(name)
    first, *_ = comm.gather(names)  # one answer on all ranks
    return first


def _summed(x: Tensor, group: str) -> Tensor | None:
    """The sum over a group; None where it has one rank."""
    if comm.get_size(group) == 1:
        return None
    total = x.clone()
    dist.all_reduce(total, group=comm.get_group(group))
    return total


def _factor(got: Tensor, wanted: Tensor, limit: float) -> float | None:
    """The number got / wanted where it is one for the whole tensor, and not 1. limit: of what counts as equal."""
    square = (wanted * wanted).sum()
    if got.is_complex() or not square or not square.isfinite():
        return None
    largest = wanted.abs().max()
    tolerance = limit / largest.item()
    # Least squares: <got, wanted> / <wanted, wanted> is the factor with the smallest rest.
    factor: float = ((got * wanted).sum() / square).item()
    difference = got - factor * wanted
    rest = (difference.abs().max() / largest).item()
    is_one_factor = rest <= max(tolerance, 1e-6) * max(1, abs(factor))
    return factor if is_one_factor and abs(factor - 1) > tolerance else None


def _is_beside_cuts(apart: Tensor) -> bool:
    """Tell whether what differs lies within the first or the last rows or columns of an image, and nowhere else."""
    if apart.dim() < 4 or not apart.any():
        return False
    for dim in range(2, apart.dim()):
        rows = apart.amax([d for d in range(apart.dim()) if d != dim])  # (H,) or (W,): whether anything in it differs
        # Deep in a model a halo has reached several rows, so up to a quarter on each side counts as its place.
        edge = max(1, len(rows) // 4)
        if len(rows) > 2 and not rows[edge:-edge].any():
            return True
    return False


def _by_factor(factor: float, micro_batches: int) -> str:
    """Explain a constant factor by the size of a group of ranks, or by the number of micro-batches."""
    # A factor may be the size of a group, or one divided by it.
    for size, what in (
        (factor, "{} times what it should be: reduced twice, or a sum where a mean belongs, over {}"),
        (1 / factor, "1/{} of what it should be: a mean where a sum belongs, or divided twice, over {}"),
    ):
        names = []
        for name in SIZES:
            ranks = comm.get_size(name)
            if ranks > 1 and abs(size - ranks) < 1e-3:
                names.append(_group(name))
        if micro_batches > 1 and abs(size - micro_batches) < 1e-3:
            names.append(f"the micro-batches ({micro_batches})")
        if names:
            return what.format(round(size), " or ".join(names))
    return ""


def _group(name: str) -> str:
    names = {"grad_reduce": "the data-parallel ranks and those of an image", "image": "the ranks of an image"}
    return f"{names.get(name, name)} ({comm.get_size(name)} ranks)"


def _of_forward(apart: Apart) -> str:
    """Explain a difference of all ranks that begins in a module of a well-known kind."""
    name, kind = apart.key[1].lower(), apart.kind
    if "attn" in name and comm.get_size("image") > 1:
        return "attention does not see the keys and values of all ranks, or in another order"
    if apart.input_is_right is False:
        return ""
    if "BatchNorm" in kind and comm.get_size("dp") > 1:
        return "each rank normalizes by the statistics of its own samples, as PyTorch does: give --sync_batchnorm"
    if "Norm" in kind:
        return "a norm: statistics of a rank's part instead of the whole, or another eps"
    return "the position embedding is not split as the tokens are" if "pos" in name else ""
