"""What each torch function does with a ShardTensor. A module here registers its rules when it is imported."""

from distributed.shard.rules import (  # noqa: F401
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
