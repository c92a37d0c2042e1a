"""The time line of all ranks: clocks, states, waiting, and the rank that is late."""

import gzip
import json

import pytest

from tests.support import programs
from tests.support.refusals import refusal
from tools import timeline

MS = 1000


def event(cat, name, start, stop, **args):
    return {"ph": "X", "cat": cat, "name": name, "ts": start * MS, "dur": (stop - start) * MS, "tid": 7, "args": args}


def write(folder, rank, events, world_size=2, clock=0, **more):
    """A trace whose clock is `clock` ms ahead."""
    path = folder / f"profile/trace-rank{rank}.json.gz"
    path.parent.mkdir(exist_ok=True)
    shifted = [e | {"ts": e["ts"] + clock * MS} if "ts" in e else e for e in events]
    content = {"distributedInfo": {"rank": rank, "world_size": world_size}, "traceEvents": shifted, **more}
    with gzip.open(path, "wt") as file:
        json.dump(content, file)
    return path


def steps(begins, length=100):
    """A step from each of these times on: data 0 to 10, forward to 40, backward to 90."""
    for b in begins:
        yield event("gpu_user_annotation", "step", b, b + length)
        for name, start, stop in (("data", 0, 10), ("forward", 10, 40), ("backward", 40, 90)):
            yield event("gpu_user_annotation", name, b + start, b + stop)


def nccl(group, start, stop, name="allreduce"):
    more = {"Process Group Name": group, "Collective name": name}
    return event("kernel", f"ncclDevKernel_{name}", start, stop, **more)


def tables(folder, capsys):
    """{first cell: other cells} of all tables, and the other lines."""
    timeline.main([str(folder)])
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")]
    return {row[0]: row[1:] for row in rows}, [line for line in lines if not line.startswith("|")]


def test_states_are_told_apart_and_the_late_rank_is_named(tmp_path, capsys):
    """Rank 1 computes until 70 ms and rank 0 until 50; the reduction ends at 80. Rank 1's clock is an hour ahead."""
    for rank, ready in ((0, 50), (1, 70)):
        events = list(steps([0, 200]))
        for b in (0, 200):
            events += [event("kernel", "gemm", b + 12, b + ready), nccl("0", b + ready, b + 80)]
            events += [event("kernel", "gemm", b + 75, b + 77)]  # hides a part of the reduction
        write(tmp_path, rank, events, clock=3_600_000 * rank)
    rows, said = tables(tmp_path, capsys)
    assert rows["0 data"][:5] == ["0.00", "0.00", "0.00", "10.00", "10.00"]
    assert rows["0 forward"][:5] == rows["1 forward"][:5] == ["28.00", "0.00", "0.00", "2.00", "30.00"]
    assert rows["0 backward"][:5] == ["12.00", "8.00", "20.00", "10.00", "50.00"]
    assert rows["1 backward"][:5] == ["32.00", "8.00", "0.00", "10.00", "50.00"]
    assert said == [
        "late: rank 1, the last in 2 of 2 collectives; the others wait 20.0 ms for it, in a step of 100.0 ms",
        "it takes 20.0 ms longer in backward than they do",
    ]
    assert (tmp_path / "profile/timeline.png").stat().st_size > 5000


def test_clocks_hold_against_late_ranks_and_reach_ranks_by_way_of_others(tmp_path):
    """Rank 2 shares collectives with rank 1 alone; ends that one rank saw late, and broadcasts, move no clock."""
    groups = {0: ["a"], 1: ["a", "b"], 2: ["b"]}
    saw_late = {(1, "a", 1): 7, (0, "a", 2): 5, (2, "b", 0): 3, (1, "b", 2): 4}
    for rank, mine in groups.items():
        events = list(steps([0]))
        for group in mine:
            for n, start in enumerate((20, 40, 60)):
                events.append(nccl(group, start + rank, start + 10 + saw_late.get((rank, group, n), 0)))
                events += [nccl(group, start + 11, start + 12 + 3 * rank, "broadcast")]
        write(tmp_path, rank, events, 3, clock=[0, -40, 900][rank])
    traces = [timeline.Trace(path) for path in sorted(tmp_path.glob("profile/*.gz"))]
    timeline.align(traces)
    assert [trace.of("step")[0, 0] for trace in traces] == [0, 0, 0]


def test_collectives_of_two_groups_of_gloo_are_told_apart_by_their_names(tmp_path, capsys):
    """Ranks 0 and 1 are one group, 2 and 3 another; the first call of the recorder was before the window."""
    for rank, start in enumerate((20, 30, 50, 50)):
        group = "ab"[rank // 2]
        calls = [{"group": group, "number": n, "operation": "all_reduce"} for n in (8, 9)]
        events = [e | {"cat": "user_annotation"} for e in steps([0])]
        events += [event("user_annotation", "gloo:all_reduce", start, 60), event("cpu_op", "aten::mm", 10, start)]
        events += [event("cpu_op", "aten::copy_", 60, 80), event("cpu_op", "_c10d_functional::wait_tensor", 58, 62)]
        write(tmp_path, rank, events, 4, collectives=calls)
    rows, said = tables(tmp_path, capsys)
    assert rows["0 backward"][:4] == ["18.00", "22.00", "0.00", "10.00"]  # after 62 it computes
    assert rows["0 forward"][:4] == ["10.00", "10.00", "10.00", "0.00"]
    assert said[0].startswith("late: rank 1, the last in 1 of 2 collectives")


def test_no_rank_is_called_late_where_none_is_and_one_without_a_trace_is_named(tmp_path, capsys):
    none = "no rank is late: none holds the others up for 2% of a step"
    missing = "no trace of rank 1: whoever waits for it seems to communicate"
    for rank, said in enumerate(([missing, none], [none])):
        write(tmp_path, rank, [*steps([0]), nccl("0", 50 + rank, 60)])
        assert tables(tmp_path, capsys)[1] == said


@pytest.mark.parametrize("damage", ["cut", "no gzip", "no JSON", "no rank", "no events", "odd events", "no step"])
def test_a_trace_that_is_damaged_is_one_line(tmp_path, damage):
    write(tmp_path, 0, [*steps([0]), nccl("0", 50, 60)], 3)
    path = write(tmp_path, 1, [*steps([0]), nccl("0", 50, 60)], 3)
    data = path.read_bytes()
    if damage == "no step":
        write(tmp_path, 1, [nccl("0", 50, 60)], 3)
    else:
        content = {
            "cut": data[: len(data) // 2], "no gzip": b"junk", "no JSON": gzip.compress(b"{"),
            "no rank": gzip.compress(b"{}"),
            "no events": gzip.compress(b'{"distributedInfo": {"rank": 1, "world_size": 3}}'),
            "odd events": gzip.compress(b'{"distributedInfo": {"rank": 1, "world_size": 3}, "traceEvents": [7]}'),
        }[damage]  # fmt: skip
        path.write_bytes(content)
    with refusal(".", path):
        timeline.main([str(tmp_path)])


def test_a_run_without_traces_is_one_line(tmp_path):
    with refusal(r"no trace-rank<N>.json.gz in its profile/: `train.py --profile ranks` writes"):
        timeline.main([str(tmp_path)])


@pytest.mark.slow("two ranks that are profiled")
def test_a_straggler_of_two_ranks_is_found(tiny_options, tmp_path, capsys):
    """The run of docs/profiling.md: every batch of rank 1 comes late."""
    words = tiny_options(profile="ranks", profile_start=3, profile_steps=4)
    for status, output in programs.run_ranks(["-m", "docs.examples.slow_rank", *words], LATE_SECONDS=0.3):
        assert status == 0, output
    rows, said = tables(tmp_path / "logs/quick/00", capsys)
    assert said[-2].startswith("late: rank 1, ") and said[-1].endswith(" longer in data than they do"), said
    assert float(rows["0 backward"][2]) > 200 > float(rows["1 backward"][2])
    assert not list(tmp_path.glob("logs/quick/00/profile/trace.json.gz"))
