"""The methods by which a model's heads (tp), tokens (cp) or blocks (pp) are split. networks/vit.py has them all.

A class need not derive from anything: the names are enough. Rungs 1, 2 and 4 ask for none of them.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from networks.vit import PerAxis
from utils.errors import LayoutError


@runtime_checkable
class SplittableAttention(Protocol):
    """Self-attention over the tokens (B, N, D) of an image, whose heads and tokens can be split.

    qkv: one projection, its rows ordered (head, q|k|v, head_dim). proj: the projection of all heads' results.
    attend: called as attend(q, k, v, dropout_p=p) with (B, heads, N, head_dim) each. dropout: p in training.
    """

    qkv: nn.Linear
    proj: nn.Linear
    head_dim: int
    dropout: float
    attend: Callable[..., Tensor]


@runtime_checkable
class SplittableMLP(Protocol):
    """Two linear layers, with a function of each feature alone between them, whose hidden features can be split.

    drop: nn.Dropout of the hidden features.
    """

    fc1: nn.Linear
    fc2: nn.Linear
    drop: nn.Module


@runtime_checkable
class SplittableTransformer(Protocol):
    """forward(x) = head(norm(blocks(pos_drop(pos_embed(patch_embed(x)))))), for an image x.

    pos_embed.tokens: the slice of the image's tokens that it is given. blocks: a list of modules from tokens to tokens,
    (B, N, D), each with `attn` and `mlp` as above. head.grid: patches along each axis.
    """

    patch_embed: nn.Module
    pos_embed: Any
    pos_drop: nn.Module
    blocks: Any
    norm: nn.Module
    head: Any


def check_transformer(model: nn.Module, kind: str) -> Any:
    """The same model; raises LayoutError, naming what is missing, unless it is splittable. kind: of parallelism."""
    missing = next(_missing(model), None)
    if missing:
        raise LayoutError(
            f"{kind}: {type(model).__name__} has no {missing}, which it takes to split it (docs/porting.md says what a "
            "model offers for that); train this model with train.py, or with train_shard.py --domain_parallel"
        )
    return model


def _missing(model: nn.Module) -> Iterator[str]:
    """The names of the protocols that a model lacks."""
    parts: list[tuple[str, Any, Any]] = [("", model, SplittableTransformer)]
    for i, block in enumerate(getattr(model, "blocks", ())):
        parts.append((f"blocks[{i}].attn.", getattr(block, "attn", None), SplittableAttention))
        parts.append((f"blocks[{i}].mlp.", getattr(block, "mlp", None), SplittableMLP))
    for where, part, protocol in parts:
        for name in protocol.__annotations__:
            if not hasattr(part, name):
                yield f"{where}{name}"


def points_kept_together(model: nn.Module) -> PerAxis:
    """Points along each axis between which images are not cut: the model's patch_size or stride; 1 if it has neither.

    Where a cut does not fit an operation, the operation moves points between ranks: the sizes say what is cheap.
    """
    for name in ("patch_size", "stride"):
        value = getattr(model, name, None)
        if isinstance(value, int):
            return value
        # Other libraries use these names for other things.
        if isinstance(value, Sequence) and all(isinstance(n, int) for n in value):
            return value
    return 1
