"""One time line of all ranks, from the traces of --profile ranks: who computes, sends and waits, and for whom.

    python -m tools.timeline logs/quick/00

Prints two tables, and writes timeline.png, and timeline.json.gz for ui.perfetto.dev, with a process for each rank, into
the run's folder profile/. The clocks of the ranks are set by the ends of collectives, which come to all ranks at once.
"""

import gzip
import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from tools.pictures import finish, panels, save
from tools.tables import format_table
from training.profiling import TRACE
from training.timing import PHASES
from utils.errors import ArgumentParser, UsageError, reading, run_main
from utils.files import whole_file

OTHER = "other"  # than PHASES
STATES = {"compute": "#4477aa", "communication": "#222222", "waiting": "#cc3311", "idle": "#dddddd"}
ONE_END = ("reduce", "gather", "scatter", "alltoall", "barrier")  # of a broadcast the root is done before the others
NOTABLE = 0.02  # of a step
Interval = tuple[float, float]
Calls = dict[Any, list[tuple[float, int]]]  # by key of a collective: when each rank called it, the last one last


class Message(NamedTuple):
    """A collective as a rank saw it, from its call to its end. key: its group and its number there, where known."""

    name: str
    start: float
    stop: float
    key: tuple[str, int] | None


class Trace:
    """The trace of a rank; times in microseconds. Raises UsageError for a file that is damaged."""

    def __init__(self, path: Path):
        with reading(str(path)), gzip.open(path) as file:
            self.content = json.load(file)
            self.rank, self.world_size = (self.content["distributedInfo"][key] for key in ("rank", "world_size"))
            self.shift(self.content.get("baseTimeNanoseconds", 0) / 1000)
        if not self.steps:
            raise UsageError(f"{path}: no range 'step' in it: was it recorded with --profile ranks?")

    def shift(self, time: float) -> None:
        """Set the clock forward, and find what the events mean."""
        events, called = self.content["traceEvents"], defaultdict[Any, list[Any]](list)
        for event in (e for e in events if "ts" in e):
            event["ts"] += time
        for call in self.content.get("collectives", []):  # of gloo, in order; the trace may begin later
            called[f"gloo:{call['operation']}"].append((call["group"], call["number"]))
        gpu = any(e.get("cat") == "kernel" for e in events)
        self.spans, self.messages = defaultdict[str, list[Interval]](list), list[Message]()
        for e in sorted((e for e in events if e.get("ph") == "X"), key=lambda e: e["ts"], reverse=True):
            name, kind, args, interval = e["name"], e.get("cat"), e.get("args", {}), (e["ts"], e["ts"] + e["dur"])
            if kind == "user_annotation" and name.startswith("gloo:"):
                self.messages.append(Message(name, *interval, called[name].pop() if called[name] else None))
            elif kind == "kernel" and name.startswith("nccl"):
                called[group := args.get("Process Group Name")].append(e)  # numbered from the end, as on all ranks
                key = None if group is None else (group, len(called[group]))
                self.messages.append(Message(args.get("Collective name", name), *interval, key))
            elif kind == ("kernel" if gpu else "cpu_op"):
                self.spans["waits" if "wait_tensor" in name or name.startswith("c10d::") else "work"].append(interval)
            elif kind == ("gpu_user_annotation" if gpu else "user_annotation"):
                self.spans[name].append(interval)
        self.steps = self.spans["step"][::-1]


def align(traces: Sequence[Trace]) -> dict[int, float]:
    """Set all clocks to that of the first trace: {rank: microseconds that its clock was behind}.

    Two ranks differ by the median, over the collectives of both, of the differences between the ends they saw: whoever
    came late, the end is the same. A rank without such a collective keeps its clock, and is not in the answer.
    """
    ends = [
        {m.key: m.stop for m in t.messages if m.key and any(word in m.name.replace("_", "") for word in ONE_END)}
        for t in traces
    ]
    shifts, reached = {0: 0.0}, [0]
    for near in reached:  # grows
        for far in set(range(len(traces))) - set(shifts):
            if both := ends[near].keys() & ends[far].keys():
                shifts[far] = shifts[near] + median(ends[near][key] - ends[far][key] for key in both)
                reached.append(far)
    for number, shift in shifts.items():
        traces[number].shift(shift)
    return {traces[number].rank: shift for number, shift in shifts.items()}


def arrivals(traces: Sequence[Trace]) -> Calls:
    """Of every collective that several ranks called."""
    calls = defaultdict[Any, list[tuple[float, int]]](list)
    for trace in traces:
        for m in trace.messages:
            calls[m.key].append((m.start, trace.rank))
    return {key: sorted(starts) for key, starts in calls.items() if key and len(starts) > 1}


def states(trace: Trace, calls: Calls) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """(edges, (N + 1,); the number in STATES between two, (N,); {phase: whether it is under way, (N,)}) of a rank.

    Until the last rank calls a collective a rank waits, unless it computes; then it communicates.
    """
    meet = [(m, min(max(m.start, calls[m.key][-1][0] if m.key in calls else 0), m.stop)) for m in trace.messages]
    parts = {"waiting": [(m.start, t) for m, t in meet], "sending": [(t, m.stop) for m, t in meet]}
    parts |= {name: trace.spans[name] for name in ("work", "waits", "step", *PHASES)}
    arrays = {name: np.array(intervals).reshape(-1, 2) for name, intervals in parts.items()}
    edges, of = np.unique(np.concatenate(list(arrays.values()))), {}
    for name, array in arrays.items():
        change = np.zeros(len(edges), int)
        np.add.at(change, np.searchsorted(edges, array[:, 0]), 1)
        np.add.at(change, np.searchsorted(edges, array[:, 1]), -1)
        of[name] = np.cumsum(change)[:-1] > 0
    found = np.select([of["work"] & ~of["waits"], of["waiting"], of["sending"] | of["waits"]], [0, 2, 1], 3)
    phases = {phase: of["step"] & of[phase] for phase in PHASES}
    return edges, found, phases | {OTHER: of["step"] & ~np.any(list(phases.values()), 0)}


def summarize(traces: Sequence[Trace], calls: Calls, shifts: dict[int, float]) -> str:
    """Tables of ms of a step by rank, phase and state, and of who comes last; which rank is late, and where."""
    rows, own, steps = [], {}, 1000 * len(traces[0].steps)
    for trace in traces:
        edges, found, phases = states(trace, calls)
        for phase, inside in phases.items():
            time = [float((np.diff(edges) * inside)[found == n].sum()) / steps for n in range(len(STATES))]
            own[trace.rank, phase] = time[0] + time[3]
            if not any(time):  # no pipeline, nothing left to reduce
                continue
            rows.append([f"{trace.rank} {phase}", *time, sum(time)])
    titles = {"rank, phase: ms of a step": ""} | dict.fromkeys([*STATES, "all"], ".2f")
    late = Counter(starts[-1][1] for starts in calls.values())
    lost = {t.rank: sum(s[-1][0] - s[-2][0] for s in calls.values() if s[-1][1] == t.rank) / steps for t in traces}
    came = [[str(t.rank), late[t.rank], lost[t.rank], shifts.get(t.rank)] for t in traces]
    who = format_table({"rank": "", "comes last": "", "others wait, ms": ".2f", "clock behind, us": ".0f"}, came)
    whole = median(stop - start for t in traces for start, stop in t.steps) / 1000
    rank = max(lost, key=lambda rank: lost[rank])
    said = f"no rank is late: none holds the others up for {NOTABLE:.0%} of a step"
    if lost[rank] > NOTABLE * whole:
        more = {p: own[rank, p] - median(own[t.rank, p] for t in traces if t.rank != rank) for p in (*PHASES, OTHER)}
        phase = max(more, key=lambda phase: more[phase])
        said = f"late: rank {rank}, the last in {late[rank]} of {len(calls)} collectives; the others wait "
        said += f"{lost[rank]:.1f} ms for it, in a step of {whole:.1f} ms\n"
        said += f"it takes {more[phase]:.1f} ms longer in {phase} than they do"
    return "\n\n".join([format_table(titles, rows), who, said])


def merge(traces: Sequence[Trace], calls: Calls) -> dict[str, Any]:
    """One trace of all, from 0 on, with a process for each rank, and in it what it waits for."""
    origin, merged = min(t.steps[0][0] for t in traces), []
    for t in traces:
        for name, args in (("process_name", {"name": f"rank {t.rank}"}), ("thread_name", {"name": "waiting"})):
            merged.append({"ph": "M", "name": name, "pid": t.rank, "tid": 0, "args": args})
        for e in t.content["traceEvents"]:
            if e["ph"] != "M" or not e["name"].startswith("process_"):
                arrow = {"id": f"{t.rank}.{e['id']}"} if "id" in e else {}
                merged.append(e | arrow | {"pid": t.rank, "ts": e.get("ts", origin) - origin})
        for m in (m for m in t.messages if m.key in calls):
            late, rank = calls[m.key][-1]
            event = {"ph": "X", "cat": "waiting", "name": f"waits for rank {rank}", "pid": t.rank, "tid": 0}
            if late > m.start:
                merged.append(event | {"ts": m.start - origin, "dur": min(late, m.stop) - m.start})
    return {"traceEvents": merged, "displayTimeUnit": "ms"}


def draw(traces: Sequence[Trace], calls: Calls, path: Path) -> None:
    """The longest step of the first rank, on all ranks."""
    begin, end = max(traces[0].steps, key=lambda step: step[1] - step[0])
    figure, (axes,) = panels(len(traces), width=11)
    axes.set_yticks(range(len(traces)), [f"rank {trace.rank}" for trace in traces])
    axes.invert_yaxis()
    for row, trace in enumerate(traces):
        edges, found, _ = states(trace, calls)
        spans = np.stack([edges[:-1] - begin, np.diff(edges)], 1) / 1000
        inside = (edges[1:] > begin) & (edges[:-1] < end)
        for number, (name, colour) in enumerate(STATES.items()):
            chosen = spans[inside & (found == number)].tolist()
            axes.broken_barh(chosen, (row - 0.4, 0.8), facecolor=colour, label=None if row else name)
    finish(axes, title="the longest step, ms", xlim=(0, (end - begin) / 1000))
    save(figure, path)


def main(argv: Sequence[str] | None = None) -> None:
    """Command line; raises UsageError where no trace can be read."""
    parser = ArgumentParser(description="Merge the traces of all ranks of a run, and say which rank is late.")
    parser.add_argument("folder", type=Path, help="the folder of a run with --profile ranks")
    folder = parser.parse_args(argv).folder
    traces = []
    for path in (folder / "profile").glob(TRACE.format("*")):
        try:
            traces.append(Trace(path))
        except UsageError as error:
            print(f"left out: {error}")
    if not traces:
        raise UsageError(f"{folder}: no {TRACE.format('<N>')} in its profile/: `train.py --profile ranks` writes them")
    traces.sort(key=lambda trace: trace.rank)
    for rank in sorted(set(range(traces[0].world_size)) - {trace.rank for trace in traces}):
        print(f"no trace of rank {rank}: whoever waits for it seems to communicate")
    shifts, calls = align(traces), arrivals(traces)
    print(summarize(traces, calls, shifts))
    with whole_file(folder / "profile/timeline.json.gz") as part:
        part.write_bytes(gzip.compress(json.dumps(merge(traces, calls)).encode(), 5))
    draw(traces, calls, folder / "profile/timeline.png")


if __name__ == "__main__":
    run_main(main)
