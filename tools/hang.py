"""Say why the ranks of a run waited for one another, from what each of them left in the run's folder.

python -m tools.hang logs/quick/00
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, Field, NonNegativeInt, ValidationError

from tools.preflight.rendezvous import shortened
from utils.errors import ArgumentParser, UsageError, first_line, run_main
from utils.rank_failure import FILE_NAME
from utils.schema import Ranks

SAME_SHAPE = ("all_reduce", "broadcast", "allreduce_coalesced")  # on all ranks of the group; others may be uneven


class Group(NamedTuple):
    """A process group: its name in torch, what it is for, and its ranks."""

    name: str
    purpose: str
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        purpose = "" if self.purpose in ("default_pg", "undefined") else f" ({self.purpose.removeprefix('mesh_')})"
        return f"{_ranks(self.ranks)}{purpose}"


class Call(NamedTuple):
    """A collective that a rank called, the number-th one of its group."""

    group: Group
    number: int
    operation: str  # and the type and shape of its tensors
    done: bool

    def __str__(self) -> str:
        return f"{self.operation}, number {self.number} of {self.group}"

    def fits(self, other: "Call") -> bool:
        """Whether two ranks may call these two as the same collective."""
        kind, other_kind = self.operation.split()[0], other.operation.split()[0]
        return self.operation == other.operation or kind == other_kind not in SAME_SHAPE


class CallSchema(BaseModel):
    """A collective in a record."""

    group: str
    number: NonNegativeInt
    operation: str = Field(pattern=r"\S")
    tensors: list[str]
    done: bool


class Record(BaseModel):
    """What a rank writes: utils.rank_failure."""

    rank: NonNegativeInt
    world_size: Ranks
    start: str
    reason: str
    at: list[str]
    groups: dict[str, tuple[str, tuple[NonNegativeInt, ...]]]
    calls: list[CallSchema]


class Rank:
    """What one rank left: its calls in order, the one it is in, and where it was."""

    def __init__(self, record: Record):
        self.number, self.world_size, self.start = record.rank, record.world_size, record.start
        self.where = " < ".join(record.at) + (f", and ended: {record.reason}" if record.reason else "")
        groups = {name: Group(name, *of) for name, of in record.groups.items()}
        self.calls = [
            Call(groups[c.group], c.number, " ".join([c.operation, *c.tensors]), c.done)
            for c in record.calls
            if c.group in groups
        ]
        self.last = {call.group: call.number for call in self.calls}
        # A collective that ended in an error counts as done, too.
        self.in_call = next((call for call in self.calls if not call.done), self.calls[-1] if self.calls else None)


def read_ranks(folder: Path) -> dict[int, Rank]:
    """{number: Rank} of the last start that left records in a run's folder. Raises UsageError where there are none."""
    pattern = FILE_NAME.format("*")
    files = sorted(folder.glob(pattern), key=lambda path: path.stat().st_mtime)
    if not files:
        raise UsageError(f"{folder}: no {pattern} in it: no rank noticed that the run hung, or there was only one")
    ranks = []
    for path in files:
        try:
            ranks.append(Rank(Record.model_validate_json(path.read_bytes())))
        except (OSError, ValueError) as error:
            problem = error.errors()[0]["msg"] if isinstance(error, ValidationError) else first_line(error)
            raise UsageError(f"{path} is damaged ({problem}): remove it to read the others") from None
    return {rank.number: rank for rank in ranks if rank.start == ranks[-1].start}


def explain(ranks: dict[int, Rank]) -> Iterator[str]:
    """Lines that say which ranks wait, in which collective, and for whom."""
    size = next(iter(ranks.values())).world_size
    silent = sorted(set(range(size)) - set(ranks))
    if silent:
        yield f"no record of {_ranks(silent)}: ended by something else, or on a node whose files are not here"
    mismatches = list(_mismatches(ranks))
    for calls in mismatches:
        first = next(iter(calls.values()))
        yield f"the order of collectives differs: number {first.number} of {first.group} is"
        yield from _grouped((rank, call.operation) for rank, call in calls.items())
    waiting = defaultdict(list)  # ranks, by what they are in and others have not called
    for number, rank in sorted(ranks.items()):
        if rank.in_call and _missing(rank.in_call, ranks):
            waiting[rank.in_call._replace(done=False)].append(number)
    for call, numbers in waiting.items():
        yield f"waiting for {_ranks(_missing(call, ranks))}: {_ranks(numbers)}, in {call}"
    late = {number for call in waiting for number in _missing(call, ranks)} - set(chain(*waiting.values()))
    if late:
        yield f"late: {_ranks(sorted(late))}"
    elif waiting and not mismatches:
        yield "the order of collectives differs: no rank is late, they wait for one another in different groups"
    elif not mismatches:
        yield "no rank waits for another that has not come; the last collective of"
        yield from _grouped((number, str(rank.in_call)) for number, rank in ranks.items())
    yield "where the ranks were (all threads: stacks-rank<N>.txt):"
    yield from _grouped((number, rank.where) for number, rank in sorted(ranks.items()))


def _ranks(numbers: Sequence[int]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {shortened(numbers)}"


def _missing(call, ranks):
    """The ranks that have not called what another one is in."""
    return [n for n in call.group.ranks if n not in ranks or ranks[n].last.get(call.group, 0) < call.number]


def _mismatches(ranks):
    """{rank: call} of the first number in each group that is not the same collective on all ranks."""
    calls = defaultdict(dict)
    for number, rank in sorted(ranks.items()):
        for call in rank.calls:
            calls[call.group, call.number][number] = call
    found = set()
    for (group, _), same in sorted(calls.items()):
        first = next(iter(same.values()))
        if group not in found and not all(first.fits(call) for call in same.values()):
            found.add(group)
            yield same


def _grouped(texts):
    """A line for the ranks of which the same is to be said. texts: (rank, text)."""
    lines = defaultdict(list)
    for number, text in texts:
        lines[text].append(number)
    for text, numbers in lines.items():
        yield f"    {_ranks(numbers)}: {text}"


def main(argv: Sequence[str] | None = None) -> None:
    """Command line; raises UsageError where the folder holds nothing that can be read."""
    parser = ArgumentParser(description="Say which rank of a run that hung was late, and in what the others waited.")
    parser.add_argument("folder", type=Path, help="the folder of the run")
    print("\n".join(explain(read_ranks(parser.parse_args(argv).folder))))


if __name__ == "__main__":
    run_main(main)
