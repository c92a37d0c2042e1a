"""Functions that treat all rows of a dimension alike, in whatever Order they lie, or raise OutOfOrder: see edges.py.

For any function that is not named here, the rows are brought into their global order first.
"""

from distributed.shard.core.tensor import RULES, named
from distributed.shard.extra import composed, derivatives, losses
from distributed.shard.ops import (
    attributes,
    elementwise,
    extrema,
    indexing,
    joining,
    linear,
    lookup,
    moments,
    normalization,
    reductions,
    views,
)
from distributed.shard.ops.edges import IN_ANY_ORDER

# All rules of some modules, and some rules of others.
MODULES = (
    attributes,
    derivatives,
    elementwise,
    indexing,
    linear,
    losses,
    moments,
    normalization,
    reductions,
    views,
)
SINGLE = composed.new, extrema.extremum, joining.cat, joining.stack, lookup.scatter
NAMES = {module.__name__ for module in MODULES}

for function, rule in RULES.items():
    if rule.__module__ in NAMES or rule in SINGLE:
        IN_ANY_ORDER.add(function)
IN_ANY_ORDER.update(named("prelu", "cosine_similarity", "pairwise_distance", "vecdot", "softmin"))
