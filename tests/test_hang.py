"""The records of a run that hangs, and the command that reads them."""

import json

import pytest

from tests.support.programs import run, run_ranks
from tools.hang import explain, read_ranks

ANOTHER_ORDER = """
import sys, torch
from pathlib import Path
from torch import distributed as dist
from training.run.watchdog import Watchdog
from utils import connection, comm

def main():
    connection.connect("cpu", timeout=30)
    calls = [lambda: dist.broadcast(torch.ones(6), 2), lambda: comm.all_reduce(torch.ones(2, 3))]
    with Watchdog(timeout=3, folder=Path(sys.argv[1])):
        for call in calls[::-1] if comm.rank() == 1 else calls:
            call()
        dist.barrier()

connection.run_ranks(main)
"""
FAILING = """
import sys, torch
from pathlib import Path
from training.run.watchdog import Watchdog
from utils import comm, connection

def main():
    connection.connect("cpu")
    with Watchdog(timeout=600, folder=Path(sys.argv[1])):
        comm.all_reduce(torch.ones(3))
        if comm.rank() == 1:
            raise ValueError("no such luck")
        comm.all_reduce(torch.ones(5))

connection.run_ranks(main)
"""


def hang(folder):
    done = run(["-m", "tools.hang", folder])
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def refused(folder):
    """The error with which a folder is refused: one line that names the folder."""
    done = run(["-m", "tools.hang", folder])
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {folder}") and done.stderr.count("\n") == 1
    return done.stderr


def record(rank, *calls, size=2, groups=None, **changes):
    """A record of a rank; calls: (group, number, done)."""
    keys = ("group", "number", "done")
    other = {"operation": "all_reduce", "tensors": ["Float(8,)"]}
    return {
        "rank": rank, "world_size": size, "start": "1", "reason": "", "at": ["train.py:5 main"],
        "groups": groups or {"0": ["default_pg", list(range(size))]},
        "calls": [dict(zip(keys, call, strict=True)) | other for call in calls], **changes,
    }  # fmt: skip


def explained(folder, *records):
    for each in records:
        (folder / f"collectives-rank{each['rank']}.json").write_text(json.dumps(each))
    return list(explain(read_ranks(folder)))


def test_a_late_rank_is_named_with_the_collective_and_the_ranks_that_wait(tmp_path):
    statuses, outputs = zip(*run_ranks(["-m", "docs.examples.late_rank", tmp_path], ranks=3), strict=True)
    assert statuses == (1, 1, 1) and "error: rank" in "".join(outputs)
    said = hang(tmp_path)
    assert said[0] == "waiting for rank 1: ranks 0,2, in all_reduce Float(8,), number 4 of ranks 0-2"
    assert said[1] == "late: rank 1"
    places = {line.split(":")[0].strip(): line for line in said[3:]}
    assert "utils/comm.py" in places["ranks 0,2"] and "late_rank.py" in places["ranks 0,2"]
    assert places["rank 1"].startswith("    rank 1: docs/examples/late_rank.py:") and "read_batch" in places["rank 1"]
    assert all((tmp_path / f"stacks-rank{rank}.txt").exists() for rank in range(3))


def test_a_rank_with_another_order_of_collectives_is_named(tmp_path):
    script = tmp_path / "another_order.py"
    script.write_text(ANOTHER_ORDER)
    run_ranks([script, tmp_path], ranks=3)
    said = hang(tmp_path)
    assert said[0] == "the order of collectives differs: number 1 of ranks 0-2 is"
    assert said[1:3] == ["    ranks 0,2: broadcast Float(6,)", "    rank 1: all_reduce Float(2, 3)"]


def test_a_rank_that_fails_makes_every_rank_write_and_is_named_with_its_error(tmp_path):
    script = tmp_path / "failing.py"
    script.write_text(FAILING)
    run_ranks([script, tmp_path], ranks=3)
    said = hang(tmp_path)
    assert said[:2] == ["waiting for rank 1: ranks 0,2, in all_reduce Float(5,), number 2 of ranks 0-2", "late: rank 1"]
    assert any(line.startswith("    rank 1: ") and "ValueError: no such luck" in line for line in said)


def test_ranks_that_wait_for_one_another_in_two_groups(tmp_path):
    groups = {"a": ["mesh_tp", [0, 1]], "b": ["mesh_dp", [0, 1]]}
    said = explained(
        tmp_path,
        record(0, ("a", 1, False), groups=groups),
        record(1, ("b", 1, False), groups=groups),
    )
    assert "waiting for rank 1: rank 0, in all_reduce Float(8,), number 1 of ranks 0-1 (tp)" in said
    assert "waiting for rank 0: rank 1, in all_reduce Float(8,), number 1 of ranks 0-1 (dp)" in said
    assert said[2].startswith("the order of collectives differs: no rank is late")


def test_only_the_end_of_a_chain_is_late(tmp_path):
    groups = {"a": ["mesh_tp", [0, 1]], "b": ["mesh_dp", [1, 2]]}
    said = explained(
        tmp_path,
        record(0, ("a", 7, False), size=3, groups={"a": groups["a"]}),
        record(1, ("a", 6, True), ("b", 3, False), size=3, groups=groups),
        record(2, ("b", 2, True), size=3, groups={"b": groups["b"]}),
    )
    assert [line for line in said if line.startswith("late")] == ["late: rank 2"]


def test_ranks_that_all_came_are_not_called_late(tmp_path):
    said = explained(tmp_path, record(0, ("0", 4, False)), record(1, ("0", 4, False)))
    assert said[0].startswith("no rank waits for another that has not come")


def test_a_rank_without_a_record_and_one_of_an_earlier_start(tmp_path):
    explained(tmp_path, record(1, ("0", 9, False), start="an earlier one"))
    said = explained(tmp_path, record(0, ("0", 4, False)))
    assert said[0].startswith("no record of rank 1:")
    assert "waiting for rank 1: rank 0, in all_reduce Float(8,), number 4 of ranks 0-1" in said


@pytest.mark.parametrize("content", [None, '{"rank": 1'])
def test_no_record_or_a_damaged_one_is_one_line_and_status_2(tmp_path, content):
    if content is not None:
        (tmp_path / "collectives-rank0.json").write_text(content)
    refused(tmp_path)
