"""The rules of ShardTensor: one for each torch function. Importing a module registers its rules."""

from distributed.shard.rules import (  # noqa: F401
    along,
    attention,
    attributes,
    composed,
    elementwise,
    extrema,
    indexing,
    joining,
    linear,
    lookup,
    losses,
    neighborhood,
    normalization,
    randomness,
    recurrent,
    reductions,
    softmax,
    spatial,
    views,
)
