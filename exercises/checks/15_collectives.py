"""Compare the learner's answer for each collective with the real one, on as many ranks."""

from types import ModuleType

import torch
import torch.distributed as dist

from exercises.checks.common import Draw, expect

WORLD_SIZES = (2, 3)
KINDS = ("broadcast", "all_reduce", "all_gather", "reduce_scatter", "all_to_all")
HINTS = {
    "broadcast": "every rank has what rank 0 had",
    "all_reduce": "every rank has the sum, element by element",
    "all_gather": "every rank has all lists, in the order of the ranks",
    "reduce_scatter": "rank r has piece r of the sum, and nothing else",
    "all_to_all": "rank r has piece r of every rank's list, in the order of the ranks",
}


def on_rank(exercise: ModuleType, rank: int, size: int, draw: Draw) -> None:
    """Check every function against torch.distributed. Raises Wrong."""
    # A piece has two numbers at least, so that pieces in a row are not every n-th number; and no number comes twice.
    n = size * draw.integer(2, 3)
    numbers_of_all = draw.random.sample(range(100), n * size)
    before = [numbers_of_all[r * n : (r + 1) * n] for r in range(size)]
    for kind in KINDS:
        said = getattr(exercise, kind)([list(numbers) for numbers in before])
        expect(
            isinstance(said, list) and len(said) == size,
            f"`{kind}` returns {said!r}, expected a list with one list for each of {size} ranks",
        )
        got = real(kind, torch.tensor(before[rank]), size).tolist()
        strided = real(kind, torch.tensor(strides(before[rank], size)), size).tolist()
        expect(
            list(said[rank]) == got or list(said[rank]) != strided,
            f"{kind}: a piece is {n // size} numbers in a row, not every {size}th number",
        )
        expect(
            list(said[rank]) == got,
            f"{kind} of {before} leaves {got} on rank {rank}, not {said[rank]}: {HINTS[kind]}",
        )
    numbers = n * size
    one_way = (size - 1) / size * numbers
    for kind, wanted in (("all_gather", one_way), ("reduce_scatter", one_way), ("all_reduce", 2 * one_way)):
        said = exercise.sent(kind, numbers, size)
        expect(
            abs(said - wanted) < 1e-6,
            f"in {kind} of {numbers} numbers each of {size} ranks sends {wanted:g}, not {said:g}",
        )


def strides(numbers: list[int], size: int) -> list[int]:
    """The numbers in the order in which their pieces would be every size-th number."""
    pieces = [numbers[r::size] for r in range(size)]
    return [number for piece in pieces for number in piece]


def real(kind: str, mine: torch.Tensor, size: int) -> torch.Tensor:
    """The result of torch's collective on this rank."""
    pieces = list(mine.chunk(size))
    if kind == "broadcast":
        dist.broadcast(mine, 0)
    elif kind == "all_reduce":
        dist.all_reduce(mine)
    elif kind == "all_gather":
        parts = [torch.empty_like(mine) for _ in range(size)]
        dist.all_gather(parts, mine)
        mine = torch.cat(parts)
    elif kind == "reduce_scatter":
        mine = torch.empty_like(pieces[0])
        dist.reduce_scatter(mine, pieces)
    else:
        sent = mine
        mine = torch.empty_like(sent)
        dist.all_to_all_single(mine, sent)
    return mine
