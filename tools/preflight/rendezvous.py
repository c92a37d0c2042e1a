"""Ranks meet in a key-value store and exchange results of checks, before any of them calls a collective.

A collective that hangs cannot say which rank is missing. In the store each rank writes under its own key, so a rank
that never comes, or stops half-way, is known by its number and its node, and every wait has a time limit.
torch's monitored_barrier needs a group, which cannot be made while a rank is missing: it checks the groups later.
"""

import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from utils.connection import open_store
from utils.errors import first_line
from utils.launch import Launch
from utils.rank_failure import wait_until

LEAVE_SECONDS = 5  # the time that rank 0, which holds the store, waits for the others to leave it
ARRIVAL = "arrival"
T = TypeVar("T")


class Absent(Exception):
    """Ranks did not answer in time, or could not meet at all."""


def limited(seconds: float, function: Callable[..., T], *args: Any) -> T:
    """Call function(*args) in a thread. Raises TimeoutError if it takes too long; the thread is then left behind."""
    outcome: Future[T] = Future()

    def call():
        try:
            outcome.set_result(function(*args))
        except BaseException as error:
            # Whatever is raised belongs to the caller, who waits in another thread.
            outcome.set_exception(error)

    threading.Thread(target=call, daemon=True).start()  # a daemon that hangs lets the process end
    try:
        return outcome.result(seconds)
    except TimeoutError:
        raise TimeoutError(f"not done after {seconds:g} s") from None


class Rendezvous:
    """The meeting of all ranks of a Launch.

    patience: seconds that a rank waits for the others. nodes: the node of each rank, known once it has come.
    """

    def __init__(self, launch: Launch, patience: float):
        self.launch = launch
        self.rank = launch.rank
        self.size = launch.world_size
        self.patience = patience
        self.address = f"{launch.master_addr}:{launch.master_port}"
        # The commands of Slurm take its own name for a node.
        self.node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
        # Until a rank has come, its node is known by its number alone.
        self.nodes = [self.node] * self.size
        if launch.nodes > 1:
            self.nodes = [f"node {rank // launch.ranks_per_node + 1} of {launch.nodes}" for rank in range(self.size)]
        self.store: dist.Store | None = None

    def connect(self) -> None:
        """Open the store, which rank 0 or torchrun serves, and meet the other ranks there.

        Raises Absent with the ranks that did not come, or with the address or port that cannot be used.
        """
        try:
            # An unknown name fails here at once, and not at the time limit of the store.
            socket.getaddrinfo(self.launch.master_addr, self.launch.master_port)
            self.store = open_store(self.launch, 2 * self.patience)
        except (OSError, RuntimeError) as error:
            raise Absent(
                f"{self.names([0])} cannot be met at {self.address} from {self.node}: {first_line(error)} - is it "
                "running? is MASTER_ADDR its node? does a firewall, or another program, have MASTER_PORT?"
            ) from None
        self.nodes = self.exchange(ARRIVAL, self.node)

    def exchange(
        self,
        key: str,
        value: Any,
        patience: float | None = None,
    ) -> list[Any]:
        """The values of all ranks, in rank order. Each key can be used once. Raises Absent."""
        if self.store is None:
            return [value]
        patience = patience or self.patience
        store = self.store
        keys = [f"{key}/{rank}" for rank in range(self.size)]  # one of each rank

        def meet() -> list[Any]:
            store.set(keys[self.rank], json.dumps(value))
            store.wait(keys, timedelta(seconds=patience))
            # A rank's own value takes this way too, so that all ranks have equal lists.
            return [json.loads(text) for text in store.multi_get(keys)]

        # The store has a time limit of its own. The thread's is for a store that does not answer at all.
        try:
            return limited(2 * patience + 5, meet)
        except dist.DistStoreError:  # the wait is over
            absent = []
            for rank, name in enumerate(keys):
                if not store.check([name]):
                    absent.append(rank)
                elif key == ARRIVAL:
                    # Whoever has come has told its node.
                    self.nodes[rank] = json.loads(store.get(name))
            what = "come" if key == ARRIVAL else f"reach '{key}'"
            raise Absent(f"{self.names(absent)} did not {what} within {patience:g} s") from None
        except (RuntimeError, TimeoutError):
            raise Absent(f"{self.names([0])}, which holds the store, is gone or stuck at '{key}'") from None

    def leave(self) -> None:
        """Leave the store. Rank 0, which holds it, leaves last; it does not wait for a rank that has failed."""
        store = self.store
        if store:
            with contextlib.suppress(RuntimeError, TimeoutError):
                limited(LEAVE_SECONDS, store.add, "left", 1)
                if self.rank == 0:
                    # Adding nothing reads the counter.
                    wait_until(lambda: store.add("left", 0) >= self.size, LEAVE_SECONDS)

    def names(self, ranks: Iterable[int]) -> str:
        """The ranks of each node as text: 'rank 1,4-7 (node2)'."""
        texts = []
        for node, numbers in self.by_node(ranks).items():
            texts.append(f"rank {shortened(numbers)} ({node})")
        return "; ".join(texts)

    def by_node(self, ranks: Iterable[int]) -> dict[str, list[int]]:
        """{node: those of the ranks that are on it}."""
        places: dict[str, list[int]] = {}
        for rank in ranks:
            places.setdefault(self.nodes[rank], []).append(rank)
        return places


def shortened(numbers: Iterable[int]) -> str:
    """[1, 4, 5, 6] as '1,4-6'."""
    runs: list[list[int]] = []  # [first, last] of consecutive numbers, or [number]
    for number in sorted(numbers):
        if runs and runs[-1][-1] == number - 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs)


class CheckResult(NamedTuple):
    """level: ok, warn or FAIL. advice: what to do about a warn or a FAIL."""

    level: str
    what: str
    found: str
    advice: str = ""

    def line(self) -> str:
        """The result as one line of text."""
        advice = f" - {self.advice}" if self.advice and self.level != "ok" else ""
        return f"{self.level:<5} {self.what:<14} {self.found}{advice}"


def merge(
    answers: Iterable[list[list[str]]],
    ranks: Rendezvous,
) -> list[CheckResult]:
    """Join the results of all ranks, in rank order; a result that only some ranks have names them."""
    # Equal results become one line, at the place where the lowest rank has it.
    ranks_of: dict[CheckResult, list[int]] = {}
    for rank, results in enumerate(answers):
        for result in results:
            ranks_of.setdefault(CheckResult(*result), []).append(rank)
    merged = []
    for common, members in ranks_of.items():
        # A result that all ranks share needs no names.
        whose = f"{ranks.names(members)}: " if len(members) < ranks.size else ""
        merged.append(common._replace(found=f"{whose}{common.found}"))
    return merged
