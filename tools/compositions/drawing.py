"""Draw compositions from a seed: every legal pair of choices, in compositions of two to six.

A composition begins with a pair that none had before, and takes further choices as long as the command of its script
accepts them. What is drawn depends on the seed and the schema alone, not on what came out of the compositions before.
"""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations

from tools.compositions.choices import COMPANIONS, MESH, Choice, keys_of_layouts
from tools.compositions.composition import Base, Composition, TooManyRanks
from utils.errors import UsageError
from utils.schema import keys_that_affect

SIZES = (2, 3, 4, 5, 6, 6, 6)  # choices of a composition: the large ones have the most pairs
MOST = max(SIZES)
TRIES = 12  # to make a refused pair legal by further choices, such as a strategy that a key belongs to
SHARE_RESUMED = 0.35  # of the compositions
SHARE_OF_SEVERAL_RANKS = 0.9  # at least


class Draws:
    """Compositions without end. refusals: {line: how often}, of what `check_config` refused while drawing.

    uncovered: pairs of choices that were in no composition yet. illegal: those that are refused, whatever is beside.
    """

    def __init__(self, base: Base, choices: Sequence[Choice], seed: int):
        self.base = base
        self.choices = list(choices)
        self.chance = random.Random(seed)
        layout_keys = keys_of_layouts()
        self.of_layouts = [choice for choice in self.choices if choice.key in layout_keys]
        self.of_mesh = [choice for choice in self.choices if choice.key in MESH]
        self.pairs: list[tuple[Choice, Choice]] = []
        for first, second in combinations(self.choices, 2):
            if first.key != second.key:
                self.pairs.append((first, second))
        self._shuffle()
        self.uncovered = self._names_of_pairs()
        self.illegal: set[frozenset[str]] = set()
        self.refusals = Counter[str]()

    def __iter__(self) -> Iterator[Composition]:
        while True:
            for pair in self.pairs:
                first, second = pair
                if frozenset((first.name, second.name)) not in self.uncovered:
                    continue
                composition = self._around(pair)
                if composition is not None:
                    yield composition
            # All pairs are covered: they are drawn once more, among others.
            self._shuffle()
            self.uncovered = self._names_of_pairs() - self.illegal

    def _names_of_pairs(self) -> set[frozenset[str]]:
        return {frozenset((first.name, second.name)) for first, second in self.pairs}

    def _shuffle(self) -> None:
        """Put the pairs in a new order, those in front that say how work is shared: most mistakes are there."""
        self.chance.shuffle(self.pairs)
        shares_work = {*MESH, *keys_that_affect("layout")}

        def is_of_other_keys(pair: tuple[Choice, Choice]) -> bool:
            return not any(choice.key in shares_work for choice in pair)

        self.pairs.sort(key=is_of_other_keys)  # False comes before True; within both the new order stays

    def _around(self, pair: tuple[Choice, Choice]) -> Composition | None:
        """A legal composition with a pair in it; None where none was found."""
        chosen = self._made_legal(list(pair))
        first, second = pair
        name = frozenset((first.name, second.name))
        self.uncovered.discard(name)
        if chosen is None:
            self.illegal.add(name)
            return None

        # Choices that make the most new pairs are tried first.
        size = self.chance.choice(SIZES)
        others = self.chance.sample(self.choices, 3 * MOST)
        others.sort(key=lambda other: -self._count_new_pairs(other, chosen))
        has_several_ranks = any(choice.key in MESH for choice in chosen)
        if not has_several_ranks and self.chance.random() < SHARE_OF_SEVERAL_RANKS:
            # Most compositions have several ranks: on one rank there is little to go wrong.
            sizes = self.chance.sample(self.of_mesh, len(self.of_mesh))
            others = [*sizes, *others]
        for other in others:
            is_new = all(other.key not in choice.settings for choice in chosen)
            # A refused choice is passed over, so that most of what is drawn can run.
            if len(chosen) < size and is_new and self._is_legal([*chosen, other]):
                chosen.append(other)
        then = self._other_layout(chosen) if self.chance.random() < SHARE_RESUMED else None
        composition = Composition(tuple(chosen), then)
        self.uncovered -= composition.pairs()
        return composition

    def _count_new_pairs(self, other: Choice, chosen: Sequence[Choice]) -> int:
        """The pairs of one choice with some others that were in no composition yet."""
        return sum(frozenset((other.name, choice.name)) in self.uncovered for choice in chosen)

    def _made_legal(self, pair: list[Choice]) -> list[Choice] | None:
        """The pair, or with one or two further choices that it needs; None where none of some tries helped."""
        if self._is_legal(pair):
            return pair
        keys_of_pair = {choice.key for choice in pair}
        names = [name for key, name in COMPANIONS.items() if key in keys_of_pair]
        beside = [choice for choice in self.choices if choice.name in names and choice.key not in keys_of_pair]
        if beside and self._is_legal([*pair, *beside]):
            return [*pair, *beside]
        for count in range(TRIES):
            others = self.chance.sample(self.choices, 1 + count % 2)
            keys = {choice.key for choice in [*pair, *others]}
            if len(keys) == len(pair) + len(others) and self._is_legal([*pair, *others]):
                return [*pair, *others]
        return None

    def _is_legal(self, chosen: Sequence[Choice]) -> bool:
        """Tell whether the command of its script accepts some choices."""
        try:
            self.base.case(chosen)
        except TooManyRanks:
            return False
        except UsageError as refusal:
            self.refusals[str(refusal)] += 1
            return False
        return True

    def _other_layout(self, chosen: Sequence[Choice]) -> tuple[Choice, ...] | None:
        """The choices of another layout that can go on with the numbers of some choices; None where none was found."""
        # A checkpoint goes on with its numbers: they stay, and the layout is another.
        numbers = [choice for choice in chosen if choice not in self.of_layouts]
        for _ in range(TRIES):
            others = self.chance.sample(self.of_layouts, self.chance.randint(0, 2))
            keys = {choice.key for choice in others}
            if len(keys) == len(others) and self._is_legal([*numbers, *others]):
                return tuple(others)
        return None
