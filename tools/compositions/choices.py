"""What a composition of options is made of: choices, drawn from the schema of the config.

A key takes part if it says that it may change how a run computes; the values to try follow from its type and bounds.
Keys of other types, such as names, need examples here.
"""

import types
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from networks import MODELS
from utils.command_line import option_words
from utils.schema import Config, keys_that_affect

DP = "dp"  # a choice that is no key: how many ranks the other dimensions of the mesh leave
DP_SIZES = (2, 4)
MESH = (
    DP,
    "tensor_parallel",
    "context_parallel",
    "pipeline_parallel",
    "domain_parallel",
    "ensemble_parallel",
)
JOINED = "tools.compositions.joined:Joined"
SMALL_NUMBER = 16  # up to here a whole number is doubled; a larger one becomes 2
# What a type does not say: text, lists and mappings. A choice may bring along what it needs.
EXAMPLES: dict[str, list[Any]] = {
    "task": ["classify", "transport"],
    "model": [*MODELS, JOINED],
    "freeze": [["blocks.0.*"], ["*bias"]],
    "forcings": [["hour"], ["latitude", "day"]],
    "channel_weights": [{"u10": 0.1}],
    "rollout_schedule": [[[1, 2]]],
    "betas": [[0.8, 0.9]],
    "muon_weights": [["*mlp*"]],
    "clip_grad_norm": [0.01],  # below the norms of a tiny run, or nothing is clipped
    "domain_parallel": [2, 3, "2x2", "1x2"],
    "ensemble_size": [2, 4],
    "ensemble_parallel": [2, 3],
    "parallel_order": ["dp-pp-domain-cp-tp", "ens-dp-tp"],
}
# What some choices need beside them, by key and value.
BROUGHT: dict[tuple[str, str], dict[str, Any]] = {
    ("model", "unet"): {"model_args": {"width": 4, "levels": 1}},
    ("model", "afno"): {"model_args": {"num_blocks": 2}},
    ("model", "neighborhood"): {"model_args": {"kernel_size": 3}},
    ("model", JOINED): {"model_args": {}},
    ("model", "classifier"): {"task": "classify", "num_classes": 5},
    ("task", "classify"): {"model": "classifier", "num_classes": 5},
    ("muon_weights", "['*mlp*']"): {"optimizer": "Muon"},
    ("loss", "crps"): {"ensemble_size": 2},
    ("ensemble_size", "2"): {"loss": "crps"},
    ("ensemble_size", "4"): {"loss": "crps"},
}
# Choices about layouts bring nothing along that changes numbers: they need another choice beside them, by its name.
COMPANIONS = {"ensemble_parallel": "ensemble_size=4"}
# Values with which each layout has numbers of its own, as the schema says of them. They run, and are held against the
# plan; their losses are not compared.
OWN_NUMBERS: dict[str, Any] = {"dropout": 0.0, "noddp": False, "sync_batchnorm": True}


@dataclass(frozen=True)
class Choice:
    """A key with a value, by its name: "data_parallel=fsdp". settings: {key: value}, with what the value needs."""

    name: str
    settings: dict[str, Any] = field(compare=False, hash=False)

    @property
    def key(self) -> str:
        """The key of the schema, or DP."""
        return self.name.partition("=")[0]


def all_choices(base: Config, fixed: Iterable[str] = ()) -> list[Choice]:
    """Every choice beside a config: in schema order, DP first. fixed: keys that keep their value."""
    fixed = set(fixed)
    found = [Choice(f"{DP}={size}", {DP: size}) for size in DP_SIZES]
    for key in keys_that_take_part():
        if key in fixed:
            continue
        for value in values_of(key, getattr(base, key)):
            brought = BROUGHT.get((key, str(value)), {})
            found.append(Choice(f"{key}={value}", {key: value, **brought}))
    return found


def keys_that_take_part() -> list[str]:
    """The keys that may change how a run computes, in schema order.

    Those of speed do not: they concern reading, recording, and the device.
    """
    return keys_that_affect("model", "result", "training", "layout")


def keys_of_layouts() -> list[str]:
    """The keys, and DP, that say how work is shared, not which numbers come out: one device goes without them."""
    return [DP, *keys_that_affect("layout")]


def keys_without_values(base: Config) -> list[str]:
    """The keys that would take part if their type said what to try."""
    return [key for key in keys_that_take_part() if not values_of(key, getattr(base, key))]


def values_of(key: str, now: Any) -> list[Any]:
    """The values to try of a key, other than the present one; [] where its type does not say any."""
    if key in EXAMPLES:
        return [value for value in EXAMPLES[key] if value != now]
    field = Config.model_fields[key]
    values: list[Any] = []
    for kind in kinds_of(field.annotation):
        values += values_of_kind(kind, bounds_of(field), now)
    return [value for value in values if value != now]


def kinds_of(annotation: Any) -> Iterator[Any]:
    """The types of which a value may be."""
    if get_origin(annotation) in (Union, types.UnionType):
        for kind in get_args(annotation):
            yield from kinds_of(kind)
    elif hasattr(annotation, "__metadata__"):
        yield get_args(annotation)[0]
    else:
        yield annotation


def bounds_of(field: FieldInfo) -> list[Any]:
    """The bounds of a key's numbers, those within an optional type included."""
    bounds = list(field.metadata)
    for kind in get_args(field.annotation):
        for inner in getattr(kind, "__metadata__", ()):
            bounds += getattr(inner, "metadata", [inner])
    return bounds


def values_of_kind(kind: Any, bounds: list[Any], now: Any) -> list[Any]:
    """Values of one type to try: both of a switch, each word of a list, another number."""
    if kind is bool:
        return [False, True]
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    candidates: Sequence[float]
    if kind is int:
        candidates = whole_numbers(now)
    elif kind is float:
        candidates = real_numbers(now)
    else:
        return []
    # One other number is enough, since each further choice makes a pair with every other one.
    return [value for value in candidates if is_within(value, bounds)][:1]


def whole_numbers(now: Any) -> list[int]:
    """Other whole numbers than the present one, the best to try first."""
    if not isinstance(now, int) or now == 0:
        return [2, 1]
    if now > SMALL_NUMBER:
        return [2, now - 1]
    return [2 * now, now + 1, now - 1]


def real_numbers(now: Any) -> list[float]:
    """Other real numbers than the present one, the best to try first."""
    if not isinstance(now, int | float) or now == 0:
        return [0.5, 2.0]
    if now > SMALL_NUMBER:  # so large that it is without effect in a tiny run
        return [0.01, now / 2]
    return [now / 2, 2 * now]


def is_within(value: float, bounds: list[Any]) -> bool:
    """Tell whether a number lies within the bounds of the schema."""
    for bound in bounds:
        if isinstance(bound, Ge) and value < bound.ge:  # type: ignore[operator]  # its type allows for more than numbers
            return False
        if isinstance(bound, Gt) and value <= bound.gt:  # type: ignore[operator]
            return False
        if isinstance(bound, Le) and value > bound.le:  # type: ignore[operator]
            return False
        if isinstance(bound, Lt) and value >= bound.lt:  # type: ignore[operator]
            return False
    return True


def words_of(settings: dict[str, Any]) -> list[str]:
    """The options of a command line that give these settings; DP is none."""
    words = []
    for key, value in settings.items():
        if key != DP:
            words += option_words(key, value)
    return words
