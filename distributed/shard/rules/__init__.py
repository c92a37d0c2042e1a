"""The rules of ShardTensor: one for each torch function. Importing a module registers its rules."""

from distributed.shard.rules import (  # noqa: F401
    along,
    attention,
    attributes,
    elementwise,
    extrema,
    indexing,
    joining,
    linear,
    losses,
    neighborhood,
    normalization,
    reductions,
    softmax,
    spatial,
    views,
)
