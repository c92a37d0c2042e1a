"""The likely cause of a difference between a layout and one device, by the pattern of the difference.

All ranks call these functions together, because some patterns show in sums over groups of ranks.
"""

from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor

from tools.layout_check.recording import BATCH, FORWARD, GRADIENT, INITIAL, UNREDUCED, Key, Record
from utils import comm
from utils.config import read_mappings

GROUPS = ("tp", "cp", "domain", "dp", "image", "dp_image")  # in which ranks may hold parts of one sum
SIZES = ("dp", "tp", "cp", "domain", "pp", "dp_image")  # by which a number may be wrong
CAUSES = "config/causes.yaml"
LATER = "weights after a later step"


@dataclass
class Facts:
    """What a rank sees of a difference. factor: got / wanted, where that is one number.

    beside_cuts: only rows next to another rank's differ. sums: groups over which the ranks' tensors add up to what is
    wanted. mean_is_right: the mean of the ranks' gradients before their reduction is what is wanted.
    """

    differs: bool
    factor: float | None = None
    beside_cuts: bool = False
    sums: list[str] = field(default_factory=list)
    mean_is_right: bool = False


def facts(key: Key, record: Record, wanted: Tensor, scale: float, tolerance: float, together: bool) -> Facts:
    """Facts about a difference. wanted: what one device has in this rank's place. scale: size of its numbers.

    together: whether all ranks have a part of this tensor, and call this.
    """
    got = record[key].value
    apart = (got - wanted).abs() > tolerance * scale
    found = Facts(bool(apart.any() or got.isnan().any()), _factor(got, wanted, tolerance))
    found.beside_cuts = _beside_cuts(apart) if key[0] == FORWARD else False
    if not together:
        return found
    if len(set(comm.gather(got.shape))) == 1:
        found.sums = [name for name in GROUPS if _alike(_summed(got, name), wanted, scale, tolerance)]
    before = record.get((UNREDUCED, key[1])) if key[0] == GRADIENT else None
    if all(comm.gather(before is not None)):
        assert before is not None
        mean = _summed(before.value / comm.get_size("dp_image"), "dp_image")
        found.mean_is_right = _alike(mean, wanted, scale, tolerance)
    return found


def _summed(x: Tensor, group: str) -> Tensor | None:
    """The sum over a group; None where it has one rank."""
    if comm.get_size(group) == 1:
        return None
    total = x.clone()
    dist.all_reduce(total, group=comm.get_group(group))
    return total


def _alike(x: Tensor | None, y: Tensor, scale: float, tolerance: float) -> bool:
    return x is not None and x.shape == y.shape and bool(((x - y).abs() <= tolerance * scale).all())


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


def cause(key: Key, kind: str, of_ranks: list[Facts]) -> str:
    """The likely cause in words. kind: class of the module. of_ranks: facts of all ranks."""
    stage, name = key
    wrong = [rank for rank, seen in enumerate(of_ranks) if seen.differs]
    first = of_ranks[wrong[0]] if wrong else of_ranks[0]
    some = 0 < len(wrong) < len(of_ranks)
    if any(seen.beside_cuts for seen in of_ranks):
        return "only rows beside a cut differ: the halo that a rank borrows from its neighbours"
    factors = {round(of_ranks[rank].factor or 0, 6) for rank in wrong}
    if len(factors) == 1 and first.factor and not some and (explained := _by_factor(first.factor)):
        return explained + (": what a rank computes is right, its reduction is not" if first.mean_is_right else "")
    if first.mean_is_right:
        return f"the gradients of the ranks are right, but not averaged over {_group('dp_image')}"
    shared_sums = [name for name in GROUPS if all(name in seen.sums for seen in of_ranks)]
    if shared_sums and stage not in (BATCH, INITIAL):
        return f"each rank has its part of a sum, which is not added up over {_group(shared_sums[0])}"
    causes = read_mappings(CAUSES, "stages")
    of_stage = causes.get(stage, causes[LATER])
    if some:
        who = f"rank {wrong[0]} alone" if len(wrong) == 1 else f"ranks {', '.join(map(str, wrong))} alone"
        return f"{who}: {of_stage['some'].format(kind)}"
    return (_of_forward(name, kind) if stage == FORWARD else "") or of_stage["all"].format(kind)


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
