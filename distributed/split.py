"""The result of model parallelism: which parameters, blocks and images of a model are split, and how.

A rank holds a band of latitude of each image (context parallel) or a tile (domain parallel).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from distributed.shard.core.spec import Spec
from networks.vit import PerAxis, per_axis
from utils import comm
from utils.errors import LayoutError
from utils.layout import Sizes, shard_sizes

if TYPE_CHECKING:  # slow to import, and only rung 3 has stages
    from distributed.pipeline import Stage

AXES = {"cp": 0, "domain_lat": 0, "domain_lon": 1}  # mesh dimension -> axis of the image that its ranks split


class Cut(NamedTuple):
    """One axis of the image (0: latitude), and how many points of it each rank along a mesh dimension holds."""

    axis: int
    sizes: Sizes
    mesh_dim: str

    @property
    def own(self) -> slice:
        """This rank's points."""
        rank = comm.get_rank(self.mesh_dim)
        start = sum(self.sizes[:rank])
        return slice(start, start + self.sizes[rank])


def image_cuts(img_size: Sequence[int], patch_size: PerAxis) -> list[Cut]:
    """The cuts through every image of this run, between patches; [] where each rank holds whole images.

    img_size: points along each axis. patch_size: points that stay on one rank, along each axis or along all.
    Raises LayoutError for more ranks along an axis than patches.
    """
    cuts = []
    for name, axis in AXES.items():
        ranks = comm.get_size(name)
        if ranks > 1:
            # Cuts lie between patches, so that no patch is on two ranks.
            patch = per_axis(patch_size, len(img_size))[axis]
            patches = img_size[axis] // patch
            if ranks > patches:
                kind = "context parallel" if name == "cp" else "domain parallel"
                what = "rows" if axis == 0 else "columns"
                raise LayoutError(f"{kind}: {patches} {what} of patches cannot be split over {ranks} ranks")
            sizes = tuple(count * patch for count in shard_sizes(patches, ranks))
            cuts.append(Cut(axis, sizes, name))
    return cuts


def own_window(img_size: Sequence[int], patch_size: PerAxis) -> tuple[slice, ...]:
    """This rank's part of an image, one slice for each axis."""
    # An axis that no mesh dimension cuts is whole.
    window = [slice(0, n) for n in img_size]
    for cut in image_cuts(img_size, patch_size):
        window[cut.axis] = cut.own
    return tuple(window)


@dataclass
class Split:
    """How model parallelism has split a model; empty where every rank holds all of it.

    dims: {parameter: dimension} of the parameters that tensor-parallel ranks hold in pieces. stages: this rank's stages
    of the pipeline, and the schedule that runs them. specs: {parameter: Spec} of the parameters split over the domain
    ranks. cuts: how images are split (image_cuts).
    """

    dims: dict[str, int] = field(default_factory=dict)
    stages: list["Stage"] = field(default_factory=list)
    schedule: str = "1f1b"
    specs: dict[str, Spec] = field(default_factory=dict)
    cuts: list[Cut] = field(default_factory=list)
