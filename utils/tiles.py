"""Which part of an image a rank holds: a band of latitude (context parallel) or a tile (domain parallel)."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import Tensor

from distributed.collectives import Sizes, as_group, gather_from_region, shard_sizes
from networks.vit import PerAxis
from utils import comm

AXES = {"cp": 0, "domain_lat": 0, "domain_lon": 1}  # of the image, which the ranks along a mesh dimension split


class Cut(NamedTuple):
    """An axis of the image (0: latitude) and how many points of it each rank along a mesh dimension has."""

    axis: int
    sizes: Sizes
    mesh_dim: str

    @property
    def own(self) -> slice:
        """This rank's points."""
        start = sum(self.sizes[: comm.get_rank(self.mesh_dim)])
        return slice(start, start + self.sizes[comm.get_rank(self.mesh_dim)])


def per_axis(value: PerAxis, axes: int) -> tuple[int, ...]:
    """A number for each axis: (4, 2) -> (4, 4); several stay as they are."""
    return (value,) * axes if isinstance(value, int) else tuple(value)


def image_cuts(img_size: Sequence[int], patch_size: PerAxis) -> list[Cut]:
    """The cuts that this run makes through every image, between patches; [] where ranks have whole images.

    img_size: points along each axis. patch_size: points that stay together, along each axis or along all. Raises
    ValueError for more ranks along an axis than patches.
    """
    cuts = []
    for name, axis in AXES.items():
        ranks = comm.get_size(name)
        if ranks > 1:
            patch = per_axis(patch_size, len(img_size))[axis]
            patches = img_size[axis] // patch
            if ranks > patches:
                kind = "context parallel" if name == "cp" else "domain parallel"
                what = "rows" if axis == 0 else "columns"
                raise ValueError(f"{kind}: {patches} {what} of patches cannot be split over {ranks} ranks")
            cuts.append(Cut(axis, tuple(n * patch for n in shard_sizes(patches, ranks)), name))
    return cuts


def own_window(img_size: Sequence[int], patch_size: PerAxis) -> tuple[slice, ...]:
    """This rank's part of an image, a slice for each axis."""
    window = [slice(0, n) for n in img_size]
    for cut in image_cuts(img_size, patch_size):
        window[cut.axis] = cut.own
    return tuple(window)


def joined(part: Tensor, cuts: Iterable[Cut]) -> Tensor:
    """Whole images, on every rank, from the ranks' parts: (B, C, h, w) -> (B, C, H, W)."""
    for cut in cuts:
        part = gather_from_region(part, 2 + cut.axis, cut.sizes, as_group(comm.get_group(cut.mesh_dim)))
    return part
