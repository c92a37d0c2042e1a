"""Each phase must do its part by itself; the sum must be right, x unharmed, and the bytes those of a ring."""

from types import ModuleType

import torch
from torch import Tensor

from exercises.checks.common import Draw, Recorder, Wrong, expect, expect_tensor, ratio, same

WORLD_SIZES = (2, 3)


def on_rank(exercise: ModuleType, rank: int, size: int, draw: Draw) -> None:
    """Check both phases apart, then `ring_all_reduce`: result, input, messages, bytes. Raises Wrong."""
    for _ in range(3):
        n = size * draw.integer(1, 50)
        parts = [draw.tensor(n) for _ in range(size)]
        check_reduce_scatter(exercise, rank, parts)
        check_all_gather(exercise, rank, parts)
        check_together(exercise, rank, parts)


def check_reduce_scatter(exercise: ModuleType, rank: int, parts: list[Tensor]) -> None:
    """parts: the tensor of each rank, (N,). Raises Wrong."""
    size = len(parts)
    sums = torch.stack(parts).sum(0).chunk(size)
    before = parts[rank].chunk(size)
    chunks = [chunk.clone() for chunk in before]
    with Recorder() as record:
        exercise.reduce_scatter(chunks)
    expect_sends_alone(record, "reduce_scatter")
    mine = (rank + 1) % size
    got = expect_tensor(chunks[mine], tuple(sums[mine].shape), f"chunk {mine}")
    if not same(got, sums[mine]):
        hint = "is what arrives added to the chunk that is sent next?"
        whole = [number for number, chunk in enumerate(chunks) if same(chunk, sums[number])]
        scale = ratio(got, sums[mine])
        if whole:
            hint = f"chunk {whole[0]} is: which chunk does a rank send first?"
        elif scale and abs(scale * size - 1) < 1e-3:
            hint = "it is the mean: all-reduce makes the sum"
        elif same(got, before[mine]):
            hint = "it is this rank's own: nothing was added"
        raise Wrong(f"after reduce_scatter chunk {mine} of rank {rank} is not the sum of all ranks': {hint}")
    expect_bytes(record, "reduce_scatter", (size - 1) * got.nbytes)


def check_all_gather(exercise: ModuleType, rank: int, parts: list[Tensor]) -> None:
    """Rank r begins with one whole sum, in chunk r + 1, and its own numbers in the others. Raises Wrong."""
    size = len(parts)
    sums = torch.stack(parts).sum(0).chunk(size)
    mine = (rank + 1) % size
    chunks = [chunk.clone() for chunk in parts[rank].chunk(size)]
    chunks[mine] = sums[mine].clone()
    with Recorder() as record:
        exercise.all_gather(chunks)
    expect_sends_alone(record, "all_gather")
    wrong = [number for number in range(size) if not same(chunks[number], sums[number])]
    if wrong:
        hint = f"rank {rank} begins with chunk {mine}, which is whole, and then passes on what has arrived"
        if wrong == [mine]:
            hint = f"chunk {mine} was whole on rank {rank} before: what arrives belongs elsewhere"
        elif mine not in wrong and any(is_more(chunks[number], parts[rank], sums, number) for number in wrong):
            hint = "what arrives is whole: it replaces what is there, and nothing is added"
        raise Wrong(f"after all_gather chunks {wrong} of {size} are not the whole sums: {hint}")
    expect_bytes(record, "all_gather", (size - 1) * sums[mine].nbytes)


def is_more(chunk: Tensor, mine: Tensor, sums: tuple[Tensor, ...], number: int) -> bool:
    """Tell whether a chunk is the whole sum and this rank's own numbers, from `mine` (N,), on top."""
    return same(chunk, sums[number] + mine.chunk(len(sums))[number])


def check_together(exercise: ModuleType, rank: int, parts: list[Tensor]) -> None:
    """Both phases one after the other, on a tensor that stays as it is. Raises Wrong."""
    x = parts[rank].clone()
    out = expect_tensor(exercise.ring_all_reduce(x), tuple(x.shape), "the result")
    expect(same(out, torch.stack(parts).sum(0)), "the result of both phases is not the sum")
    expect(torch.equal(x, parts[rank]), "the input was changed: replace chunks, do not add in place")


def expect_sends_alone(record: Recorder, phase: str) -> None:
    """Raises Wrong where anything but a send or a receive was called."""
    others = sorted(set(record.kinds()) - {"send", "recv"})
    expect(not others, f"{' and '.join(others)} called in {phase}: here it is to be made of sends and receives")


def expect_bytes(record: Recorder, phase: str, ideal: int) -> None:
    """Raises Wrong where this rank sent other than `ideal` bytes in a phase, whose result was right."""
    sent = sum(call.sent for call in record.calls)
    hint = "is one chunk passed on in a step, or all of them?" if sent > ideal else "how was the rest learnt?"
    expect(sent == ideal, f"{phase} sent {sent} bytes, a ring sends (n-1)/n of the tensor, which is {ideal}: {hint}")
