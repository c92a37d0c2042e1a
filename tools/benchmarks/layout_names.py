"""The names of layouts in commands: 'tp2xdp2', 'domain2x2xdp2,amp_mode=bf16'."""

import math
import re
from collections.abc import Sequence

from utils.config import STRATEGIES
from utils.errors import UsageError

# The key of the config that has the size of each dimension of a layout.
OPTIONS = {
    "tp": "tensor_parallel",
    "cp": "context_parallel",
    "pp": "pipeline_parallel",
    "domain": "domain_parallel",
    "ens": "ensemble_parallel",
}


def split_words(sizes: dict[str, str]) -> list[str]:
    """The options that split a model as parse_layout says, in micro-batches for a pipeline; other words may follow."""
    words = [f"--{option}={sizes[dim]}" for dim, option in OPTIONS.items()]
    stages = int(sizes["pp"])
    # Fewer micro-batches would let the stages idle for longer.
    if stages > 1:
        words.append(f"--gradient_accumulation={2 * stages}")
    return words


def _named_strategy(name: str) -> str:
    """How to name a layout where a strategy of data parallelism stands in place of a dimension; "" where none does."""
    for part in name.split("x"):
        for strategy in STRATEGIES:
            size = part.removeprefix(strategy)
            if size == part:
                continue
            sized = name.replace(part, f"dp{size if size.isdecimal() else 2}")
            return f"{strategy} is what the ranks of dp share, not a dimension: {sized},data_parallel={strategy}"
    return ""


def parse_layout(
    text: str,
    dims: Sequence[str],
) -> tuple[dict[str, str], int]:
    """Sizes and ranks of a layout: 'domain2x2xdp2,amp_mode=bf16' -> {'domain': '2x2', 'dp': '2', others: '1'}, 8.

    dims: those that it may have. Raises UsageError, with an example, for anything else, and for a layout of one rank.
    """
    name = text.partition(",")[0]
    sizes: dict[str, str] = {}
    ranks = 1
    is_understood = True
    # An x joins two dimensions where a letter follows. Before a digit it stands between rows and columns of tiles.
    for part in re.split("x(?=[a-z])", name):
        match = re.fullmatch(r"([a-z]+)([1-9]\d*(?:x[1-9]\d*)?)", part)
        if match is None or match[1] not in dims or match[1] in sizes:
            is_understood = False
            break
        dim, size = match.groups()
        # Only an image is split along two sides.
        if "x" in size and dim != "domain":
            is_understood = False
            break
        sizes[dim] = size
        ranks *= math.prod(map(int, size.split("x")))
    if not is_understood:
        meant = _named_strategy(name)
        if meant:
            raise UsageError(f"layout '{name}': {meant}")
        raise UsageError(f"layout '{name}': expected sizes of {', '.join(dims)} joined by x, as {dims[0]}2xdp2")
    if ranks == 1:
        raise UsageError(f"layout '{name}': it has one rank, which is measured anyway")
    # Dimensions that the name leaves out have size 1.
    return dict.fromkeys([*OPTIONS, "dp"], "1") | sizes, ranks
