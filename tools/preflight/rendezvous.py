"""Ranks that talk through a store before they trust one another with a collective.

A collective that waits for a rank cannot say for which. Here each rank leaves a word under its own key, so a rank that
never comes, or comes no further, is known by its number and its node, and nobody waits longer than agreed.
"""

import contextlib
import datetime
import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from utils.errors import first_line
from utils.launch import Launch

POLL_SECONDS = 0.05
LEAVE_SECONDS = 5  # for all ranks to let go of the store
T = TypeVar("T")


class Absent(Exception):
    """Ranks that did not answer in time, or cannot meet at all. advice: what to do."""

    def __init__(self, message: str, advice: str):
        super().__init__(message)
        self.advice = advice


def limited(seconds: float, function: Callable[..., T], *args: Any) -> T:
    """function(*args) in a thread; raises TimeoutError where it takes longer, and leaves it behind."""
    outcome: dict[str, Any] = {}

    def call():
        try:
            outcome["result"] = function(*args)
        except BaseException as error:
            outcome["error"] = error

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise TimeoutError(f"not done after {seconds:g} s")
    if "error" in outcome:
        raise outcome["error"]
    return outcome["result"]


class RollCall:
    """The ranks of a Launch. patience: seconds a rank waits for the others. nodes: where each rank is, when it came."""

    def __init__(self, launch: Launch, patience: float):
        self.rank, self.size, self.launch, self.patience = launch.rank, launch.world_size, launch, patience
        self.node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
        self.nodes: list[str | None] = [self.node] if self.size == 1 else [None] * self.size
        self.store: dist.Store | None = None
        self.device: torch.device | None = None  # of the process group, once there is one

    def connect(self) -> None:
        """Open the store of rank 0, or of torchrun, and meet the others there.

        Raises Absent, which names the ranks that did not come, or the address or the port that cannot be used.
        """
        launch = self.launch
        address = f"{launch.master_addr}:{launch.master_port}"
        try:
            socket.getaddrinfo(launch.master_addr, launch.master_port)
        except OSError as error:
            message = f"MASTER_ADDR {launch.master_addr} is not known on {self.node}: {error.strerror}"
            raise Absent(message, "set MASTER_ADDR to a name or an address of rank 0's node") from None
        serve = self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        if not serve and not self._open(launch.master_addr, launch.master_port):
            message = f"{self.names([0])} did not come: {address} cannot be reached from {self.node}"
            raise Absent(f"{message} within {2 * self.patience:g} s", "is it running? does a firewall close the port?")
        try:
            arguments = launch.master_addr, launch.master_port, self.size, serve
            patience = datetime.timedelta(seconds=self.patience)
            store = limited(
                2 * self.patience, lambda: dist.TCPStore(*arguments, timeout=patience, wait_for_workers=False)
            )
        except (RuntimeError, TimeoutError) as error:
            what = "opened" if serve else "used"
            message = f"{address} cannot be {what} on {self.node}: {first_line(error)}"
            raise Absent(message, "another MASTER_PORT: another program may have this one") from None
        self.store = dist.PrefixStore(f"preflight{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
        self.nodes = self.exchange("arrival", self.node)

    def _open(self, host: str, port: int) -> bool:
        """Whether somebody listens there in time: rank 0 may have started later, and then has patience of its own."""
        deadline = time.monotonic() + 2 * self.patience
        while time.monotonic() < deadline:
            try:
                socket.create_connection((host, port), timeout=self.patience).close()
                return True
            except OSError:
                time.sleep(4 * POLL_SECONDS)
        return False

    def exchange(self, key: str, value: Any, patience: float | None = None) -> list[Any]:
        """Everyone's value under a key that is used once, in the order of ranks. Raises Absent."""
        if self.size == 1:
            return [value]
        patience = patience or self.patience
        try:
            return limited(2 * patience + 5, self._exchange, key, value, patience)
        except (RuntimeError, TimeoutError):  # the store is gone, or does not answer
            message = f"{self.names([0])}, which collects the answers, is gone or stuck at '{key}'"
            raise Absent(message, "its own output may say why") from None

    def _exchange(self, key, value, patience):
        keys = [f"{key}/{rank}" for rank in range(self.size)]
        self.store.set(keys[self.rank], json.dumps(value))
        if self.rank == 0:
            if self._seen(keys, patience):
                self.store.set(key, json.dumps([json.loads(v) for v in self.store.multi_get(keys)]))
            else:
                absent = [rank for rank, name in enumerate(keys) if not self.store.check([name])]
                self.store.set(key, json.dumps({"absent": absent}))
        elif not self._seen([key], 2 * patience):
            raise TimeoutError
        answer = json.loads(self.store.get(key))
        if isinstance(answer, dict):
            what, advice = f"did not reach '{key}'", "its own output may say why"
            if key == "arrival":
                what, advice = "did not come", "was it started? its own output may say why"
                self.nodes = [json.loads(self.store.get(k)) if self.store.check([k]) else None for k in keys]
            raise Absent(f"{self.names(answer['absent'])} {what} within {patience:g} s", advice)
        return answer

    def _seen(self, keys, patience):
        deadline = time.monotonic() + patience
        while not self.store.check(keys):
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_SECONDS)
        return True

    def leave(self) -> None:
        """The store lives in rank 0, which goes last; whoever is gone is not waited for."""
        if self.store:
            with contextlib.suppress(RuntimeError, TimeoutError):
                limited(LEAVE_SECONDS, self._leave)

    def _leave(self):
        left = self.store.add("left", 1)
        while self.rank == 0 and left < self.size:
            time.sleep(POLL_SECONDS)
            left = self.store.add("left", 0)

    def names(self, ranks: Iterable[int]) -> str:
        """'rank 1,4-7 (node2)', one such for each node; for a rank that never came the node where it should be."""
        places: dict[str, list[int]] = {}
        for rank in ranks:
            places.setdefault(self.nodes[rank] or self._planned_node(rank), []).append(rank)
        return "; ".join(f"rank {shortened(numbers)} ({node})" for node, numbers in places.items())

    def _planned_node(self, rank):
        number = rank // self.launch.ranks_per_node
        listed = os.environ.get("SLURM_STEP_NODELIST")
        try:
            names = ["scontrol", "show", "hostnames", listed]
            return subprocess.run(names, capture_output=True, text=True, timeout=5).stdout.split()[number]
        except (OSError, TypeError, IndexError, subprocess.TimeoutExpired):
            return self.node if self.launch.nodes == 1 else f"node {number + 1} of {self.launch.nodes}"


def shortened(numbers: Iterable[int]) -> str:
    """[1, 4, 5, 6] as '1,4-6'."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][-1] == number - 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs)
