"""Say why the ranks of a run waited for one another, from what each of them left in the run's folder.

python -m tools.hang logs/quick/00
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from tools.preflight.rendezvous import shortened
from utils.errors import ArgumentParser, UsageError, run_main
from utils.files import read_json
from utils.rank_failure import FILE_NAME

SAME_SHAPE = ("all_reduce", "broadcast", "allreduce_coalesced")  # on all ranks of the group; others may be uneven


class Call(NamedTuple):
    """A collective that a rank called, the number-th one of its group."""

    group: str
    number: int  # in its group, as torch counts the collectives that a rank calls
    operation: str
    tensors: list[str]  # dtype and shape of each input
    done: bool

    def __str__(self) -> str:
        return " ".join([self.operation, *self.tensors])

    def kind(self) -> str:
        """The part that all ranks of the group must call alike."""
        return str(self) if self.operation in SAME_SHAPE else self.operation


Record = dict[str, Any]  # what a rank leaves behind (utils.rank_failure): groups: {name: (purpose, ranks)}, at, calls


def read_ranks(folder: Path) -> dict[int, Record]:
    """{rank: Record} of the last start that left records in a run's folder. Raises UsageError where there are none."""
    # The file written last names the last start.
    files = sorted(folder.glob(FILE_NAME.format("*")), key=lambda path: path.stat().st_mtime)
    if not files:
        raise UsageError(
            f"{folder}: no {FILE_NAME.format('*')} in it: no rank noticed that the run hung, or there was only one"
        )
    records = [read_json(path) for path in files]
    for record in records:
        # A group of one rank waits for nobody, so its calls are left out.
        known = [call for call in record["calls"] if call["group"] in record["groups"]]
        record["calls"] = [Call(**call) for call in known]
    # An earlier start of the same run may have left records of ranks that noticed nothing this time.
    last_start = records[-1]["start"]
    last = [record for record in records if record["start"] == last_start]
    last.sort(key=itemgetter("rank"))
    return {record["rank"]: record for record in last}


def explain(records: dict[int, Record]) -> Iterator[str]:
    """Lines that say which ranks wait, in which collective, and for whom."""
    size = next(iter(records.values()))["world_size"]
    # A rank that was killed, or whose node is gone, leaves no record.
    silent = sorted(set(range(size)) - set(records))
    if silent:
        yield f"no record of {_ranks(silent)}: ended by something else, or on a node whose files are not here"

    # Ranks that call different collectives in one group can never meet, whoever is late.
    mismatches = list(_mismatches(records))
    for calls in mismatches:
        rank = min(calls)
        yield f"the order of collectives differs: {_place(records[rank], calls[rank])} is"
        yield from _grouped(calls.items())

    # A rank waits for the members of its group that have not reached the collective it is in.
    within: dict[int, str] = {}
    missing: dict[int, list[int]] = {}
    reached = _last_numbers(records)
    for rank, record in records.items():
        call = _current_call(record)
        if call is None:
            continue
        within[rank] = f"{call}, {_place(record, call)}"
        _, members = record["groups"][call.group]
        missing[rank] = [other for other in members if reached.get((other, call.group), -1) < call.number]

    # Ranks that wait for the same others in the same collective share a line.
    waiting = defaultdict(list)
    for rank, absent in missing.items():
        if absent:
            waiting[_ranks(absent), within[rank]].append(rank)
    for (absent_ranks, collective), ranks in waiting.items():
        yield f"waiting for {absent_ranks}: {_ranks(ranks)}, in {collective}"

    # Late is whoever is waited for and waits for nobody.
    waited_for = set(chain(*missing.values()))
    late = waited_for - set(chain(*waiting.values()))
    if late:
        yield f"late: {_ranks(sorted(late))}"
    elif waiting and not mismatches:
        yield "the order of collectives differs: no rank is late, they wait for one another in different groups"
    elif not mismatches:
        yield "no rank waits for another that has not come; the last collective of"
        yield from _grouped((rank, within.get(rank)) for rank in records)

    yield "where the ranks were (all threads: stacks-rank<N>.txt):"
    places = []
    for rank, record in records.items():
        end = f", and ended: {record['reason']}" if record["reason"] else ""
        places.append((rank, " < ".join(record["at"]) + end))
    yield from _grouped(places)


def _last_numbers(records: dict[int, Record]) -> dict[tuple[int, str], int]:
    """{(rank, group): number of the last call of this rank in this group}."""
    reached = {}
    for rank, record in records.items():
        for call in record["calls"]:
            reached[rank, call.group] = call.number
    return reached


def _current_call(record: Record) -> Call | None:
    """The collective that a rank is in, or else the last one; None where it called none.

    A collective that ended in an error counts as done, too.
    """
    calls: list[Call] = record["calls"]
    for call in calls:
        if not call.done:
            return call
    return calls[-1] if calls else None


def _ranks(numbers: Sequence[int]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {shortened(numbers)}"


def _place(record: Record, call: Call) -> str:
    """The number of a call and its group, in words."""
    purpose, ranks = record["groups"][call.group]
    place = f"number {call.number} of {_ranks(ranks)}"
    if purpose in ("default_pg", "undefined"):
        return place
    return f"{place} ({purpose.removeprefix('mesh_')})"


def _mismatches(records: dict[int, Record]) -> Iterator[dict[int, Call]]:
    """{rank: call} of the first number in each group that is not the same collective on all ranks."""
    calls = defaultdict[tuple[str, int], dict[int, Call]](dict)
    for rank, record in records.items():
        for call in record["calls"]:
            calls[call.group, call.number][rank] = call
    # After the first mismatch of a group nothing in it can match.
    mismatched = set()
    for (group, _), of_number in sorted(calls.items()):
        kinds = {call.kind() for call in of_number.values()}
        if group not in mismatched and len(kinds) > 1:
            mismatched.add(group)
            yield of_number


def _grouped(texts: Iterable[tuple[int, object]]) -> Iterator[str]:
    """A line for the ranks of which the same is to be said. texts: (rank, what)."""
    lines = defaultdict(list)
    for rank, text in texts:
        lines[str(text)].append(rank)
    for text, ranks in lines.items():
        yield f"    {_ranks(ranks)}: {text}"


def main(argv: Sequence[str] | None = None) -> None:
    """Command line; raises UsageError where the folder holds nothing that can be read."""
    parser = ArgumentParser(description="Say which rank of a run that hung was late, and in what the others waited.")
    parser.add_argument("folder", type=Path, help="the folder of the run")
    folder = parser.parse_args(argv).folder
    records = read_ranks(folder)
    print("\n".join(explain(records)))


if __name__ == "__main__":
    run_main(main)
