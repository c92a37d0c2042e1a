"""The likely cause of a difference between a layout and one device, by the pattern of the difference.

All ranks call `cause` together, because some patterns show in sums over groups of ranks.
"""

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from tools.layout_check.recording import BATCH, FORWARD, GRADIENT, INITIAL, UNREDUCED, Key, Record
from utils import comm
from utils.config import read_mappings

GROUPS = ("tp", "cp", "domain", "dp", "image", "dp_image")  # in which ranks may hold parts of one sum
SIZES = ("dp", "tp", "cp", "domain", "pp", "dp_image")  # by which a number may be wrong
CAUSES = "config/causes.yaml"
LATER = "weights after a later step"
RANDOM = "random numbers: each layout has other streams of them; without them (dropout 0) the rest can be compared"


def cause(
    key: Key, kind: str, wrong: Sequence[int], found: Record, wanted: Tensor | None, scale: float, tolerance: float
) -> str:
    """The likely cause of a difference in words.

    kind: class of the module. wrong: ranks that differ. found: of this rank. wanted: what one device has in this rank's
    place, None where it has no part of this tensor. scale: size of the tensor's numbers.
    """
    (stage, name), some = key, len(wrong) < comm.world_size()
    together, beside, factor = all(comm.gather(wanted is not None)), False, None
    if wanted is not None:
        got = found[key].value
        beside = stage == FORWARD and _beside_cuts((got - wanted).abs() > tolerance * scale)
        factor = _factor(got, wanted, tolerance)

    def is_wanted(x):
        """On each rank: tell whether a tensor is what is wanted there."""
        right = x is not None and x.shape == wanted.shape and ((x - wanted).abs() <= tolerance * scale).all()
        return comm.gather(bool(right))

    if any(comm.gather(beside)):
        return "only rows beside a cut differ: the halo that a rank borrows from its neighbours"
    before, mean_is_right = found.get((UNREDUCED, name)) if stage == GRADIENT else None, False
    if together and all(comm.gather(before is not None)):
        assert before is not None
        mean_is_right = is_wanted(_summed(before.value / comm.get_size("dp_image"), "dp_image"))[wrong[0]]
    factors = comm.gather(factor)
    if factor := factors[wrong[0]]:
        alike = all(abs((factors[rank] or 0) - factor) < 1e-6 for rank in wrong)
        if alike and not some and (explained := _by_factor(factor)):
            return explained + (": what a rank computes is right, its reduction is not" if mean_is_right else "")
    if mean_is_right:
        return f"the gradients of the ranks are right, but not averaged over {_group('dp_image')}"
    if together and stage not in (BATCH, INITIAL) and len(set(comm.gather(got.shape))) == 1:
        for group in GROUPS:
            if all(is_wanted(_summed(got, group))):
                return f"each rank has its part of a sum, which is not added up over {_group(group)}"
    causes = read_mappings(CAUSES, "stages")
    of_stage = causes.get(stage, causes[LATER])
    if some:
        who = f"rank {wrong[0]} alone" if len(wrong) == 1 else f"ranks {', '.join(map(str, wrong))} alone"
        return f"{who}: {of_stage['some'].format(kind)}"
    return (_of_forward(name, kind) if stage == FORWARD else "") or of_stage["all"].format(kind)


def _summed(x: Tensor, group: str) -> Tensor | None:
    """The sum over a group; None where it has one rank."""
    if comm.get_size(group) == 1:
        return None
    total = x.clone()
    dist.all_reduce(total, group=comm.get_group(group))
    return total


def _factor(got: Tensor, wanted: Tensor, tolerance: float) -> float | None:
    """The number got / wanted where it is one for the whole tensor, and not 1."""
    square = (wanted * wanted).sum()
    if not square or got.is_complex():
        return None
    factor = ((got * wanted).sum() / square).item()
    rest = (got - factor * wanted).abs().max() / wanted.abs().max()
    return factor if rest <= max(tolerance, 1e-6) * max(1, abs(factor)) and abs(factor - 1) > tolerance else None


def _beside_cuts(apart: Tensor) -> bool:
    """Tell whether what differs lies within the first or the last rows or columns of an image, and nowhere else."""
    if apart.dim() < 4 or not apart.any():
        return False
    for dim in range(2, apart.dim()):
        rows = apart.amax([d for d in range(apart.dim()) if d != dim])
        edge = max(1, len(rows) // 4)
        if len(rows) > 2 and not rows[edge:-edge].any():
            return True
    return False


def _by_factor(factor: float) -> str:
    """Explain a constant factor by the size of a group of ranks."""
    for size, what in (
        (factor, "{} times what it should be: reduced twice, or a sum where a mean belongs, over {}"),
        (1 / factor, "1/{} of what it should be: a mean where a sum belongs, or divided twice, over {}"),
    ):
        names = [name for name in SIZES if comm.get_size(name) > 1 and abs(size - comm.get_size(name)) < 1e-3]
        if names:
            return what.format(round(size), " or ".join(map(_group, names)))
    return ""


def _group(name: str) -> str:
    names = {"dp_image": "the data-parallel ranks and those of an image", "image": "the ranks of an image"}
    return f"{names.get(name, name)} ({comm.get_size(name)} ranks)"


def _of_forward(name: str, kind: str) -> str:
    """Explain a difference of all ranks that begins in a module of a well-known kind."""
    if "BatchNorm" in kind and comm.get_size("dp") > 1:
        return "each rank normalizes by the statistics of its own samples, as PyTorch does: give --sync_batchnorm"
    if "Norm" in kind:
        return "a norm: statistics of a rank's part instead of the whole, or another eps"
    if "attn" in name.lower() and comm.get_size("image") > 1:
        return "attention does not see the keys and values of all ranks, or in another order"
    return "the position embedding is not split as the tokens are" if "pos" in name.lower() else ""
