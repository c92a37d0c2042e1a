"""How the ranks of a run are split over the dimensions of the mesh: arithmetic alone, no process group."""

import math
from dataclasses import dataclass

import numpy as np

from utils.errors import UsageError

DIMENSIONS = {
    "dp": "data parallel",
    "cp": "context parallel",
    "tp": "tensor parallel",
    "pp": "pipeline parallel",
}
ORDER = "tp-cp-dp-pp"  # neighbours along the first dimension are adjacent ranks


@dataclass(frozen=True)
class Layout:
    """So many ranks as tp x cp x pp x dp, dp being what is left.

    shard: ranks of dp that share one copy of sharded parameters (dp_shard); None: all of dp. order: which dimension's
    neighbours are adjacent ranks, the first one's most. Raises UsageError where the numbers do not fit.
    """

    world_size: int
    tp: int = 1
    cp: int = 1
    pp: int = 1
    shard: int | None = None
    order: str = ORDER

    def __post_init__(self):
        named = self.order.split("-")
        if len(set(named)) < len(named) or not set(named) <= set(DIMENSIONS):
            raise UsageError(
                f"parallel_order '{self.order}': name each of {', '.join(DIMENSIONS)} at most once, as in {ORDER}"
            )
        others = self.tp * self.cp * self.pp
        if self.world_size % others:
            split = " x ".join(
                f"{name} {getattr(self, name)}" for name in ("tp", "cp", "pp") if getattr(self, name) > 1
            )
            size = self.world_size
            raise UsageError(f"{size} ranks cannot be split as {split} x dp: {size} is not a multiple of {others}")
        if self.shard is not None and self.dp % self.shard:
            raise UsageError(
                f"{self.dp} data-parallel ranks cannot be split into groups of {self.shard} (dp_shard): "
                f"{self.dp} is not a multiple of {self.shard}"
            )

    @property
    def dp(self):
        return self.world_size // (self.tp * self.cp * self.pp)

    @property
    def mesh_dims(self):
        """{name: size} of the mesh, the slowest dimension first: ranks are numbered in row-major order."""
        shard = self.shard or self.dp
        sizes = {"dp_shard": shard, "dp_replicate": self.dp // shard, "tp": self.tp, "cp": self.cp, "pp": self.pp}
        order = self.order.split("-") + [name for name in ORDER.split("-") if name not in self.order.split("-")]
        fastest_first = [part for name in order for part in (("dp_shard", "dp_replicate") if name == "dp" else (name,))]
        return {name: sizes[name] for name in reversed(fastest_first)}

    def groups(self, name):
        """The groups of ranks along a dimension, or along dp, (groups, ranks of a group)."""
        dims = self.mesh_dims
        along = [d for d in dims if d == name or d.removesuffix("_shard").removesuffix("_replicate") == name]
        ranks = np.arange(self.world_size).reshape(*dims.values())
        axes = [list(dims).index(d) for d in along]
        return np.moveaxis(ranks, axes, range(-len(axes), 0)).reshape(-1, math.prod(dims[d] for d in along))

    def table(self, ranks_per_node):
        """The groups of every dimension as text, and which of them lie inside a node."""
        lines = [f"{self.world_size} ranks, {ranks_per_node} a node, order {self.order}"]
        names = [name for name in DIMENSIONS if len(self.groups(name)[0]) > 1]
        if 1 < (self.shard or self.dp) < self.dp:
            names += ["dp_shard", "dp_replicate"]
        for name in names:
            groups = self.groups(name)
            crossing = sum(len(set(group // ranks_per_node)) > 1 for group in groups)
            where = "inside a node" if not crossing else f"{crossing} of {len(groups)} cross nodes"
            text = " ".join("[" + " ".join(map(str, group)) + "]" for group in groups)
            lines.append(f"{name:12} {len(groups)} x {len(groups[0])}  {where:20} {text}")
        return "\n".join(lines)
