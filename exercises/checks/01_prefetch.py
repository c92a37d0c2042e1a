"""Batches must come in order, with exactly `depth` of them read ahead while the caller works: counted, not timed."""

import threading
import time
from types import ModuleType

from exercises.checks.common import Draw, Wrong, expect

WORLD_SIZES = (1,)
LONG = 2.0  # seconds that a read which should have begun is waited for
SHORT = 0.05  # that one which should not is waited for


class Reader:
    """Gives batches, and knows how many reads have begun."""

    def __init__(self, broken: int | None = None):
        self.caller = threading.get_ident()
        self.broken = broken
        self.begun = 0
        self.in_caller = False
        self.changed = threading.Condition()

    def __call__(self, i: int) -> tuple[str, int]:
        """Read batch i. Raises OSError for the one that is broken."""
        with self.changed:
            self.begun += 1
            self.in_caller |= threading.get_ident() == self.caller
            self.changed.notify_all()
        if i == self.broken:
            raise OSError(f"no batch {i}")
        return "batch", i

    def wait_for(self, count: int) -> int:
        """How many reads have begun: when `count` have, or after LONG, and SHORT later."""
        with self.changed:
            self.changed.wait_for(lambda: self.begun >= count, LONG)
        time.sleep(SHORT)
        return self.begun


def on_rank(exercise: ModuleType, rank: int, size: int, draw: Draw) -> None:
    """Check `prefetched`: order, depth, an early end, an error. Raises Wrong."""
    for depth in (1, draw.integer(2, 4)):
        count = draw.integer(8, 14)
        steps(exercise, count, depth)
        leave_early(exercise, count, depth)
    broken = draw.integer(2, 5)
    reader = Reader(broken)
    got = 0
    try:
        for _ in exercise.prefetched(reader, 8, 2):
            got += 1
    except OSError:
        expect(got == broken, f"read({broken}) failed: the error came after {got} batches, not after {broken}")
    else:
        raise Wrong(f"read({broken}) failed, and the caller was not told: take the result of every read")


def steps(exercise: ModuleType, count: int, depth: int) -> None:
    """Ask for all batches, and count at each step how many reads have begun."""
    reader = Reader()
    got = 0
    for i, batch in enumerate(exercise.prefetched(reader, count, depth)):
        expect(batch == ("batch", i), f"step {i} got {batch}, expected ('batch', {i}): batches must come in order")
        got = i + 1
        wanted = min(count, got + depth)
        begun = reader.wait_for(wanted)
        expect(not reader.in_caller, "read was called in the caller's thread: the step waits for all of it")
        expect(
            begun > got or wanted == got,
            f"while step {i} computed, no read had begun: the next step will wait for all of its batch",
        )
        ahead = f"while step {i} computed, {begun - got} batches were read ahead"
        expect(begun >= wanted, f"{ahead}, not {wanted - got}")
        one_more = ""
        if begun == wanted + 1:
            one_more = " (a thread that waits to put a batch into a full queue holds it too)"
        expect(begun <= wanted, f"{ahead}, depth is {depth}: the memory for them is not there{one_more}")
    expect(got == count, f"{got} batches came, expected {count}")


def leave_early(exercise: ModuleType, count: int, depth: int) -> None:
    """Ask for one batch only: no more than `depth` others may be read."""
    reader = Reader()
    batches = exercise.prefetched(reader, count, depth)
    next(batches)
    batches.close()
    begun = reader.wait_for(0)
    expect(begun <= 2 + depth, f"the caller left after the first batch, and {begun} were read all the same")
