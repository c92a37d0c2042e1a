"""How the ranks of a run are split over the dimensions of the mesh: arithmetic alone, no process group.

python -m utils.layout --world_size 8 --tensor_parallel 4 --parallel_order tp-dp     shows the groups as a table
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from utils.errors import ArgumentParser, UsageError, int_in_range, run_main

DIMENSIONS = {
    "dp": "data parallel",
    "cp": "context parallel",
    "domain": "domain parallel",
    "ens": "ensemble parallel",
    "tp": "tensor parallel",
    "pp": "pipeline parallel",
}
# Two dimensions have two dimensions of the mesh each. The first one has adjacent ranks as neighbours.
PARTS = {
    "dp": ("dp_shard", "dp_replicate"),
    "domain": ("domain_lon", "domain_lat"),
}
Sizes = tuple[int, ...]  # of the pieces of a dimension, by rank
ORDER = "tp-cp-domain-ens-dp-pp"  # neighbours along the first dimension are adjacent ranks


def tile_counts(domain_parallel: int | str) -> tuple[int, int]:
    """Ranks along latitude and longitude: 4 or "4" -> (4, 1), "2x2" -> (2, 2). Raises UsageError for anything else."""
    # A number of bands is a column of tiles.
    counts = str(domain_parallel).split("x")
    if len(counts) > 2 or not all(n.isdecimal() and int(n) for n in counts):
        raise UsageError(f"domain_parallel '{domain_parallel}': expected ranks along latitude, or 2x2 for tiles")
    rows = int(counts[0])
    columns = int(counts[1]) if len(counts) == 2 else 1
    return rows, columns


def shard_sizes(length: int, size: int) -> Sizes:
    """Cut `length` into `size` contiguous pieces as even as possible, the longer first: (45, 4) -> (12, 11, 11, 11)."""
    shortest, longer = divmod(length, size)  # so many pieces have one more
    return tuple(shortest + (rank < longer) for rank in range(size))


@dataclass(frozen=True)
class Layout:
    """The ranks of a run as tp x cp x domain x ens x pp x dp. dp is the number that the others leave.

    domain: ranks along latitude and along longitude that share an image. ens: ranks that share the members of a sample.
    shard: dp ranks that share one copy of sharded parameters (dp_shard); None: all of them. order: the dimension named
    first has adjacent ranks as neighbours, then the second, and so on. Raises UsageError where the numbers do not fit.
    """

    world_size: int
    tp: int = 1
    cp: int = 1
    pp: int = 1
    shard: int | None = None
    order: str = ORDER
    domain: tuple[int, int] = (1, 1)
    ens: int = 1

    def __post_init__(self):
        named = self.order.split("-")
        is_repeated = len(set(named)) < len(named)
        is_known = set(named) <= set(DIMENSIONS)
        if is_repeated or not is_known:
            raise UsageError(
                f"parallel_order '{self.order}': name each of {', '.join(DIMENSIONS)} at most once, as in {ORDER}"
            )
        others = self._ranks_of_a_replica()
        if self.world_size % others:
            split = self.describe("tp", "cp", "domain", "ens", "pp")
            size = self.world_size
            raise UsageError(f"{size} ranks cannot be split as {split} x dp: {size} is not a multiple of {others}")
        if self.shard is not None and self.dp % self.shard:
            raise UsageError(
                f"{self.dp} data-parallel ranks cannot be split into groups of {self.shard} (dp_shard): "
                f"{self.dp} is not a multiple of {self.shard}"
            )

    @property
    def dp(self) -> int:
        """Number of data-parallel ranks."""
        return self.world_size // self._ranks_of_a_replica()

    def _ranks_of_a_replica(self) -> int:
        """Ranks of all dimensions but dp."""
        return self.tp * self.cp * self.pp * self.ens * math.prod(self.domain)

    def describe(self, *names: str) -> str:
        """The named dimensions that have more than one rank, as text: tp 2 x domain 2x2."""
        sizes = {name: getattr(self, name) for name in names if name != "domain"}
        rows, columns = self.domain
        parts = [f"{name} {size}" for name, size in sizes.items() if size > 1]
        if "domain" in names and rows * columns > 1:
            tiles = f"{rows}x{columns}" if columns > 1 else f"{rows}"
            parts.append(f"domain {tiles}")
        return " x ".join(parts)

    @property
    def mesh_dims(self) -> dict[str, int]:
        """{name: size} of the mesh. Ranks are numbered in row-major order, so the slowest dimension comes first."""
        shard = self.shard or self.dp
        rows, columns = self.domain
        sizes = {
            "dp_shard": shard,
            "dp_replicate": self.dp // shard,
            "tp": self.tp,
            "cp": self.cp,
            "pp": self.pp,
            "ens": self.ens,
            "domain_lat": rows,
            "domain_lon": columns,
        }
        # Dimensions that the order leaves out follow in the usual order.
        named = self.order.split("-")
        left_out = [name for name in ORDER.split("-") if name not in named]
        fastest_first: list[str] = []
        for name in named + left_out:
            fastest_first += PARTS.get(name, (name,))
        return {name: sizes[name] for name in reversed(fastest_first)}

    def groups(self, name: str) -> np.ndarray:
        """The groups of ranks along a dimension, (groups, ranks of a group)."""
        # Ranks are numbered in row-major order of these dimensions.
        dims = self.mesh_dims
        along = [d for d in dims if d in PARTS.get(name, (name,))]
        ranks = np.arange(self.world_size).reshape(*dims.values())
        size = math.prod(dims[d] for d in along)
        axes = [list(dims).index(d) for d in along]
        # With its own axes last, every row is one group.
        own_axes_last = np.moveaxis(ranks, axes, range(-len(axes), 0))
        return own_axes_last.reshape(-1, size)

    def table(self, ranks_per_node: int) -> str:
        """The groups of every dimension as text, and which of them lie inside a node."""
        lines = [f"{self.world_size} ranks, {ranks_per_node} a node, order {self.order}"]
        # Only dimensions that are really split have a line.
        names = [name for name in DIMENSIONS if len(self.groups(name)[0]) > 1]
        is_sharded_in_part = self.shard is not None and 1 < self.shard < self.dp
        if is_sharded_in_part:
            names += ["dp_shard", "dp_replicate"]
        for name in names:
            groups = self.groups(name)
            # A group that crosses nodes communicates over the network.
            crossing = 0
            for group in groups:
                nodes = set(group // ranks_per_node)
                crossing += len(nodes) > 1
            where = "inside a node" if not crossing else f"{crossing} of {len(groups)} cross nodes"
            bracketed = []
            for group in groups:
                ranks = " ".join(map(str, group))
                bracketed.append(f"[{ranks}]")
            text = " ".join(bracketed)
            lines.append(f"{name:12} {len(groups)} x {len(groups[0])}  {where:20} {text}")
        return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Command line; raises UsageError for a layout that is impossible."""
    ranks = int_in_range(1, 2**16)
    parser = ArgumentParser(description="Show the groups of a parallel layout.")
    parser.add_argument("--world_size", type=ranks, required=True)
    for name in ("tensor", "context", "pipeline", "ensemble"):
        parser.add_argument(f"--{name}_parallel", type=ranks, default=1)
    parser.add_argument("--domain_parallel", default="1", metavar="N|NxM", help="ranks along latitude x longitude")
    parser.add_argument("--dp_shard", type=ranks, help="data-parallel ranks that share one copy of sharded parameters")
    parser.add_argument("--parallel_order", default=ORDER, help="default: %(default)s")
    parser.add_argument("--ranks_per_node", type=ranks, default=4, help="default: %(default)s")
    o = parser.parse_args(argv)
    layout = Layout(
        o.world_size,
        o.tensor_parallel,
        o.context_parallel,
        o.pipeline_parallel,
        o.dp_shard,
        o.parallel_order,
        tile_counts(o.domain_parallel),
        o.ensemble_parallel,
    )
    print(layout.table(o.ranks_per_node))


if __name__ == "__main__":
    run_main(main)
