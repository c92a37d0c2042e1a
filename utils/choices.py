"""Optimizers and losses that a config can name. An entry is all that a new one needs, beside its own code.

The schema takes the names from here, training what it builds, and the planner what a step holds and moves. Nothing is
imported before it is used: an entry names its class or function as "module:name".
"""

import pkgutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from utils.errors import UsageError, nearest


@dataclass(frozen=True)
class OptimizerKind:
    """What the program must know of an optimizer.

    build: the class, called with groups of parameters (`params`, `weight_decay`), `lr` and the arguments below.
    arguments: further ones, always the same. takes: which of betas, fused and capturable (for CUDA graphs) it takes.
    decay: the weight decay where the config gives none. decouples: its decay takes lr * weight_decay of a weight away,
    as the schema says; with an optimizer that adds it to the gradient instead, weight_decay is refused.
    moments: numbers that it keeps for each parameter. initial: {name of a moment: value before the first step}, zero
    unless given. moved: numbers that its kernels read and write for each parameter, one operation after another, and
    in a fused kernel. kernels: how many there are.
    trains_matrices: it is Muon, which gets the matrices of hidden layers, and `build` is for all other weights.
    """

    build: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    takes: tuple[str, ...] = ("betas", "fused", "capturable")
    decay: float = 0.0
    decouples: bool = True
    moments: int = 2
    initial: Mapping[str, float] = field(default_factory=dict)
    moved: int = 12
    moved_if_fused: int = 4
    kernels: int = 7
    trains_matrices: bool = False


# Without a decay AdamW is Adam; with one Adam would add it to the gradient, and divide it by the second moment.
ADAMW = "torch.optim:AdamW"
OPTIMIZERS = {
    "Adam": OptimizerKind(ADAMW),
    "AdamW": OptimizerKind(ADAMW, decay=0.01),
    "Muon": OptimizerKind(ADAMW, takes=("betas", "fused"), trains_matrices=True),
}


@dataclass(frozen=True)
class LossKind:
    """What the program must know of a loss of forecasts.

    function: of (prediction, target, image_group), images (B, C, h, w) -> (B,). image_group: the ranks that hold parts
    of the same images, None for one. is_weighted: it takes weights of channels and rows, (C, h, 1), before the group.
    scores_members: it is of all members of an ensemble, of (members, target, weights, alpha): (B, M, P), (B, P), (P,).
    """

    function: str
    is_weighted: bool = False
    scores_members: bool = False


LOSSES = {
    "relative_l2": LossKind("training.forecasting.losses:relative_l2"),
    "squared_error": LossKind("training.forecasting.losses:weighted_squared_error", is_weighted=True),
    "crps": LossKind("training.forecasting.crps:weighted_crps", is_weighted=True, scores_members=True),
}


def load(path: str) -> Any:
    """The class or function of an entry, "module:name"."""
    return pkgutil.resolve_name(path)


def choose(key: str, name: str, table: Mapping[str, Any]) -> Any:
    """The entry of a table that a config names. Raises UsageError for a name without one: there is no default."""
    check_known(key, name, table)
    return table[name]


def check_known(key: str, name: str, names: Collection[str]) -> None:
    """Raise UsageError for a name that the schema allows, but nothing stands for where it is used."""
    if name not in names:
        raise UsageError(f"{key} {name}: nothing stands for it{nearest(name, names)}: there are {', '.join(names)}")
