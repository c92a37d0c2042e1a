"""The result of model parallelism: which parameters, blocks and images of a model are split, and how."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from distributed.shard.spec import Spec
from utils.tiles import Cut

if TYPE_CHECKING:  # slow to import, and only rung 3 has stages
    from distributed.pipeline import Stage


@dataclass
class Split:
    """How model parallelism has split a model; empty where every rank holds all of it.

    dims: {parameter: dimension} of the parameters that tensor-parallel ranks hold in pieces. stages: this rank's stages
    of the pipeline, and the schedule that runs them. specs: {parameter: Spec} of the parameters split over the domain
    ranks. cuts: how images are split (utils/tiles.py).
    """

    dims: dict[str, int] = field(default_factory=dict)
    stages: list["Stage"] = field(default_factory=list)
    schedule: str = "1f1b"
    specs: dict[str, Spec] = field(default_factory=dict)
    cuts: list[Cut] = field(default_factory=list)
