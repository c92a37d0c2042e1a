"""The turns of a benchmark, each told on stderr: it computes for minutes before it prints its table."""

import sys
import time
from collections.abc import Container, Iterator, Mapping
from itertools import product
from typing import TypeVar

T = TypeVar("T")


def in_turns(
    cases: Mapping[str, T],
    rounds: int,
    left_out: Container[str] = (),
) -> Iterator[tuple[int, str, T]]:
    """All cases in each round, as (number of the round, name, case), but those that are left out by then."""
    started = time.monotonic()
    turns = list(product(range(rounds), cases))  # (round, name): a round ends when every case has had its turn
    for turn, (number, name) in enumerate(turns, 1):
        if name in left_out:  # the caller may have added it since the last turn
            continue
        seconds = time.monotonic() - started
        print(f"turn {turn} of {len(turns)}, after {seconds:.0f} s: {name}", file=sys.stderr, flush=True)
        yield number, name, cases[name]
