"""A composition of options: what is trained, in which layout, and in which other one it goes on."""

import math
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from torch.nn.modules.batchnorm import _BatchNorm

from tools.compositions.choices import DP, OWN_NUMBERS, Choice, keys_of_layouts, words_of
from tools.instruments.rank_case import build_case
from tools.instruments.ranks import Case
from tools.planner.layouts import script_of
from training.models.build import build_model
from training.tasks import build_task
from utils.errors import UsageError
from utils.layout import tile_counts

MOST_RANKS = 4  # of a composition: more would only wait for one another on few cores
# Values that name a format of half precision or less, whatever the key.
COARSE = ("bf16", "fp16", "fp8")
# A step of it takes milliseconds; heads, blocks, patches and samples can be shared by two and by four.
TINY = (
    "--yaml_config=config/ViT.yaml",
    "--config=quick",
    "--device=cpu",
    "--img_size",  # rows and columns: 4 x 8 patches
    "16",
    "32",
    "--patch_size=4",
    "--embed_dim=16",
    "--depth=2",
    "--num_heads=4",  # of 4 features each
    "--mlp_ratio=2",
    "--n_in_channels=3",
    "--n_out_channels=3",
    "--global_batch_size=8",
    "--num_iters=12",
    "--warmup=2",
    "--sync_batchnorm",  # else each layout has statistics of its own, see OWN_NUMBERS
)
STRATEGY = "data_parallel"
MICRO_BATCHES = "gradient_accumulation"
COMPILED = "enable_jit"
SPLITS = ("tensor_parallel", "context_parallel", "pipeline_parallel", "ensemble_parallel")


class TooManyRanks(UsageError):
    """A composition that needs more ranks than are tried."""


@dataclass(frozen=True)
class Composition:
    """Choices beside a base of options. then: those of the layout that goes on from a checkpoint, or None."""

    choices: tuple[Choice, ...]
    then: tuple[Choice, ...] | None = None

    @property
    def name(self) -> str:
        """The choices, in words."""
        text = " ".join(choice.name for choice in self.choices) or "nothing"
        if self.then is None:
            return text
        resumed = " ".join(choice.name for choice in self.then) or "one device"
        return f"{text}, resumed with {resumed}"

    @property
    def size(self) -> int:
        """Number of choices."""
        return len(self.choices) + len(self.then or ())

    def smaller(self) -> Iterator["Composition"]:
        """The compositions that lack one choice, or the stop and resume."""
        # A finding in a run without a stop is the easiest to look into, so this is tried first.
        if self.then is not None:
            yield replace(self, then=None)
        for choice in self.choices:
            others = [other for other in self.choices if other != choice]
            yield replace(self, choices=tuple(others))
        then = self.then or ()
        for choice in then:
            others = [other for other in then if other != choice]
            yield replace(self, then=tuple(others))

    def pairs(self) -> set[frozenset[str]]:
        """The pairs of choices that stand in it together."""
        names = [choice.name for choice in self.choices]
        return {frozenset(pair) for pair in combinations(names, 2)}

    def holds(self, other: "Composition") -> bool:
        """Tell whether all choices of another one are in this one."""
        if not set(other.choices) <= set(self.choices):
            return False
        if other.then is None:
            return True
        return self.then is not None and set(other.then) <= set(self.then)


def settings_of(choices: Iterable[Choice]) -> dict[str, Any]:
    """{key: value} of some choices together; what one brings along gives way to another's own."""
    settings: dict[str, Any] = {}
    for choice in choices:
        settings |= choice.settings
    # The key that a choice is about has the last word.
    for choice in choices:
        settings[choice.key] = choice.settings[choice.key]
    return settings


def ranks_of(settings: dict[str, Any]) -> int:
    """The ranks that some settings need. Raises UsageError for sizes that are none."""
    rows, columns = tile_counts(settings.get("domain_parallel", 1))
    others = [int(settings.get(key, 1)) for key in SPLITS]
    return math.prod([settings.get(DP, 1), rows, columns, *others])


class Base:
    """The options that all compositions share. given: words of a command line, beside those of a tiny run.

    Raises UsageError for options that are refused, and for a model that does not fit the task.
    """

    def __init__(self, given: Sequence[str]):
        self.given = list(given)
        self.words = [*TINY, *given]
        self.config = build_case("base", "train.py", self.words, 1).config
        # A model that does not fit would fail in every composition, so it is refused here.
        build_task(self.config).check_model()

    def case(self, choices: Sequence[Choice], name: str = "composition") -> Case:
        """The case of some choices, as the command of its script has it. Raises UsageError where it is refused."""
        settings = settings_of(choices)
        ranks = ranks_of(settings)
        # Too many ranks are no refusal: the options may be right, and only the trial is too large.
        if ranks > MOST_RANKS:
            raise TooManyRanks(f"{ranks} ranks: at most {MOST_RANKS} are tried")
        return build_case(name, script_of(settings), [*self.words, *words_of(settings)], ranks)

    def reference(self, choices: Iterable[Choice]) -> Case:
        """The case of one device with the same options, but those that say how work is shared."""
        all_settings = settings_of(list(choices))
        # What shares work is left out, and what changes numbers stays. To compile changes none, and takes long.
        left_out = [*self.keys_without_effect(all_settings), COMPILED]
        settings = {key: value for key, value in all_settings.items() if key not in left_out}
        try:
            return build_case("one device", "train.py", [*self.words, *words_of(settings)], 1)
        except UsageError:
            if STRATEGY not in all_settings:
                raise
        # A key that belongs to a strategy is refused without it. On one device a strategy changes nothing.
        settings[STRATEGY] = all_settings[STRATEGY]
        return build_case("one device", "train.py", [*self.words, *words_of(settings)], 1)

    def resumed(self, composition: Composition) -> list[Choice]:
        """The choices of the layout that goes on: its own, and those of the first that change the numbers."""
        of_layouts = self.keys_without_effect(settings_of(composition.choices))
        # A checkpoint goes on with the same numbers, in whatever layout.
        kept = [choice for choice in composition.choices if choice.key not in of_layouts]
        others = [choice for choice in composition.then or () if choice.key in of_layouts]
        return [*kept, *others]

    def keys_without_effect(self, settings: dict[str, Any]) -> list[str]:
        """The keys, and DP, that change no numbers under some settings.

        Micro-batches do, where a model takes the statistics of one: there one device has as many.
        """
        keys = keys_of_layouts()
        # These keys alone decide which modules the model has.
        names = [key for key in ("model", "model_args", "task", "num_classes") if key in settings]
        config = self.config.model_copy(update={key: settings[key] for key in names})
        if any(isinstance(module, _BatchNorm) for module in build_model(config).modules()):
            keys.remove(MICRO_BATCHES)
        return keys

    def command(self, composition: Composition) -> str:
        """The command line that runs one composition again."""
        settings = settings_of(composition.choices)
        words = ["python", "plan.py", "check", "--all", f"--ranks={ranks_of(settings)}"]
        if composition.then is not None:
            others = settings_of(composition.then)
            # A value may hold brackets and stars, which a shell would expand. --then is quoted a second time below.
            then = shlex.join([f"--ranks={ranks_of(others)}", *words_of(others)])
            words.append(f"--then={then}")
        return shlex.join([*words, *self.given, *words_of(settings)])


def is_coarse(choices: Iterable[Choice]) -> bool:
    """Tell whether some choices compute or send in half precision."""
    values = settings_of(list(choices)).values()
    # Formats are named by words, whatever the key.
    words = [value for value in values if isinstance(value, str)]
    return any(word in COARSE for word in words)


def has_own_numbers(choices: Iterable[Choice]) -> bool:
    """Tell whether each layout trains with numbers of its own."""
    settings = settings_of(list(choices))
    return any(settings.get(key, value) != value for key, value in OWN_NUMBERS.items())
