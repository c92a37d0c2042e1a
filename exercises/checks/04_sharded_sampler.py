"""Every sample once, whatever state the ranks' generators are in; all ranks are asked one after another."""

from collections import Counter
from itertools import chain
from types import ModuleType

import torch

from exercises.checks.common import Draw, Wrong, expect

WORLD_SIZES = (1,)


def on_rank(exercise: ModuleType, rank: int, size: int, draw: Draw) -> None:
    """Check `samples_of`, for all ranks of several sizes. Raises Wrong."""
    for size in (2, 3, draw.integer(4, 7)):
        disturbed: list[bool] = []
        length = size * draw.integer(8, 20) + draw.integer(1, size - 1)
        seed = draw.integer(0, 10**6)
        epoch = draw.integer(1, 50)

        def samples(rank, *args, size=size, length=length, disturbed=disturbed):
            torch.manual_seed(rank)  # as that of dropout, another on every rank
            before = torch.get_rng_state()
            found = exercise.samples_of(rank, size, length, *args)
            expect(found is not None, "samples_of returned None: is something returned?")
            disturbed.append(not torch.equal(before, torch.get_rng_state()))
            return [int(sample) for sample in found]

        parts = [samples(r, seed, epoch) for r in range(size)]
        compare_ranks(parts, size, length)
        expect(
            not any(disturbed), "torch's default generator is not as it was: draw from a torch.Generator() of your own"
        )
        again = [samples(r, seed, epoch) for r in range(size)]
        expect(parts == again, "asked again for the same epoch, the order is another: a resumed run goes astray")
        others = {"the next epoch": (seed, epoch + 1), "another seed": (seed + 1, epoch)}
        for why, drawn_from in others.items():
            other_parts = [samples(r, *drawn_from) for r in range(size)]
            expect(parts != other_parts, f"{why} has the same order: draw it from seed and epoch")
        expect(any(part != sorted(part) for part in parts), "the order is not shuffled")
        for r, part in enumerate(parts):
            done = draw.integer(1, len(part) - 1)
            left = samples(r, seed, epoch, done)
            expect(
                left == part[done:],
                f"resumed after {done} samples, rank {r} of {size} goes on with {left[:3]}..., an uninterrupted run "
                f"with {part[done : done + 3]}...: leave out the first samples of the rank, not of all",
            )


def compare_ranks(parts: list[list[int]], size: int, length: int) -> None:
    """parts: samples of each rank; all of them once, shared out evenly."""
    counts = Counter(chain(*parts))
    there = set(range(length))
    outside = set(counts) - there
    if outside:
        raise Wrong(f"sample {min(outside)} is asked for, there are 0 to {length - 1}")
    missing = there - set(counts)
    twice = [sample for sample, number in counts.items() if number > 1]
    what = f"of {length} samples on {size} ranks, {len(twice)} come twice and {len(missing)} never"
    if twice and missing:
        is_same_part = all(set(part) == set(parts[0]) for part in parts)
        hint = "does every rank take the same part?" if is_same_part else "do the ranks shuffle alike?"
        raise Wrong(f"{what}: {hint}")
    expect(not twice, f"{what}: was the epoch filled up to a multiple of the ranks, or is each sample on every rank?")
    expect(not missing, f"{what}: {length} is not a multiple of {size}, was the rest forgotten?")
    sizes = sorted(map(len, parts))
    expect(sizes[-1] - sizes[0] <= 1, f"ranks have {sizes} samples: the last one would wait for the longest")
