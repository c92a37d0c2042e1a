"""One time line of all ranks, from the traces of --profile ranks: who computes, sends and waits, and for whom.

    python -m tools.timeline logs/quick/00

Prints a table, and writes timeline.png into the run's folder profile/. The clocks of the ranks are set by the ends of
collectives, which come to all ranks at once.
"""

import gzip
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from pandas import DataFrame, Series, concat

from tools.pictures import finish, panels, save
from tools.tables import format_table
from training.profiling import TRACE
from training.timing import PHASES
from utils.errors import ArgumentParser, UsageError, reading, run_main

STATES = {"compute": "#4477aa", "communication": "#222222", "waiting": "#cc3311", "idle": "#dddddd"}
ONE_END = "reduce|gather|scatter|alltoall|barrier"  # of a broadcast the root is done before the others
NOTABLE = 0.02  # of a step


class Trace:
    """The trace of a rank; times in microseconds. Raises UsageError for a file that is damaged.

    spans: a row for each. what: work, waits, message, or the name of a range. key: of a collective its group, its
    number there, and its name, where known.
    """

    def __init__(self, path: Path):
        rows: list[tuple[Any, ...]] = []
        with reading(str(path)), gzip.open(path) as file:
            content = json.load(file)
            self.rank, self.world_size = (content["distributedInfo"][key] for key in ("rank", "world_size"))
            clock, called = content.get("baseTimeNanoseconds", 0) / 1000, defaultdict[Any, list[Any]](list)
            for call in content.get("collectives", []):  # of gloo, in order; the trace may begin later
                called[f"gloo:{call['operation']}"].append(f"{call['group']} {call['number']}")
            events = [event for event in content["traceEvents"] if event.get("ph") == "X"]
            gpu = any(event.get("cat") == "kernel" for event in events)
            for e in sorted(events, key=lambda event: event["ts"], reverse=True):
                what, kind, args, key = e["name"], e.get("cat"), e.get("args", {}), None
                if kind == "user_annotation" and what.startswith("gloo:"):
                    key = f"{called[what].pop()} {what}" if called[what] else None
                    what = "message"
                elif kind == "kernel" and what.startswith("nccl"):
                    called[group := args.get("Process Group Name")].append(e)  # numbered from the end, as on all ranks
                    key = f"{group} {len(called[group])} {args.get('Collective name', what)}" if group else None
                    what = "message"
                elif kind == ("kernel" if gpu else "cpu_op"):
                    what = "waits" if "wait_tensor" in what or what.startswith("c10d::") else "work"
                elif kind != ("gpu_user_annotation" if gpu else "user_annotation"):
                    continue
                rows.append((self.rank, what, key, clock + e["ts"], clock + e["ts"] + e["dur"]))
        self.spans = DataFrame(rows, columns=["rank", "what", "key", "start", "stop"])
        if not len(self.of("step")):
            raise UsageError(f"{path}: no range 'step' in it: was it recorded with --profile ranks?")

    def of(self, what: str) -> np.ndarray:
        """Start and stop of spans, (N, 2)."""
        return self.spans.loc[self.spans["what"] == what, ["start", "stop"]].to_numpy()


def of_ranks(traces: Sequence[Trace], column: str) -> DataFrame:
    """A column of the messages: a row for each collective, a column for each rank."""
    messages = concat([trace.spans for trace in traces]).dropna(subset="key")
    return messages.pivot(index="key", columns="rank", values=column).reindex(columns=[t.rank for t in traces])


def align(traces: Sequence[Trace]) -> None:
    """Set all clocks to that of the first trace.

    Two ranks differ by the median, over the collectives of both, of the differences between the ends they saw: whoever
    came late, the end is the same. A rank without such a collective keeps its clock.
    """
    ends = of_ranks(traces, "stop")
    ends = ends[ends.index.str.replace("_", "").str.contains(ONE_END)]
    by_rank = {trace.rank: trace for trace in traces}
    shifts, reached = {traces[0].rank: 0.0}, [traces[0].rank]
    for near in reached:  # grows
        for far in by_rank.keys() - shifts:
            apart = (ends[near] - ends[far]).median()
            if not np.isnan(apart):  # they share some
                shifts[far] = shifts[near] + apart
                reached.append(far)
    for rank, shift in shifts.items():
        by_rank[rank].spans[["start", "stop"]] += shift


def states(
    trace: Trace,
    last: Series,
) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """(edges, (N + 1,); the number in STATES between two, (N,); {phase: whether it is under way, (N,)}) of a rank.

    last: when the last rank called each collective. Until then a rank waits, unless it computes; then it communicates.
    """
    messages = trace.spans[trace.spans["what"] == "message"]
    start, stop = messages["start"], messages["stop"]
    met = messages["key"].map(last).fillna(start).clip(start, stop)
    parts = {name: trace.of(name) for name in ("work", "waits", "step", *PHASES)}
    parts |= {"waiting": np.stack([start, met], 1), "sending": np.stack([met, stop], 1)}
    edges, of = np.unique(np.concatenate([*parts.values()])), {}
    for name, spans in parts.items():
        change = np.zeros(len(edges), int)
        np.add.at(change, np.searchsorted(edges, spans[:, 0]), 1)
        np.add.at(change, np.searchsorted(edges, spans[:, 1]), -1)
        of[name] = np.cumsum(change)[:-1] > 0
    found = np.select([of["work"] & ~of["waits"], of["waiting"], of["sending"] | of["waits"]], [0, 2, 1], 3)
    return edges, found, {phase: of["step"] & of[phase] for phase in PHASES}


def summarize(traces: Sequence[Trace], starts: DataFrame) -> str:
    """A table of ms of a step by rank, phase and state; which rank is late, and where. starts: of shared messages."""
    rows, own, steps, last = [], {}, 1000 * len(traces[0].of("step")), starts.max(axis=1)
    for trace in traces:
        edges, found, phases = states(trace, last)
        for phase, inside in phases.items():
            time = [float((np.diff(edges) * inside)[found == n].sum()) / steps for n in range(len(STATES))]
            own[trace.rank, phase] = time[0] + time[3]
            if any(time):  # no pipeline, nothing left to reduce
                rows.append([f"{trace.rank} {phase}", *time, sum(time)])
    table = format_table({"rank, phase: ms of a step": ""} | dict.fromkeys([*STATES, "all"], ".2f"), rows)
    whole = median(stop - start for trace in traces for start, stop in trace.of("step")) / 1000
    said = f"no rank is late: none holds the others up for {NOTABLE:.0%} of a step"
    if len(starts):
        late = starts.idxmax(axis=1)
        lost = (last - starts.T.apply(lambda times: times.nlargest(2).iloc[-1])).groupby(late).sum() / steps
        rank = lost.idxmax()
        if lost[rank] > NOTABLE * whole:
            more = {p: own[rank, p] - median(own[t.rank, p] for t in traces if t.rank != rank) for p in PHASES}
            phase = max(more, key=lambda phase: more[phase])
            said = f"late: rank {rank}, the last in {sum(late == rank)} of {len(late)} collectives; the others wait "
            said += f"{lost[rank]:.1f} ms for it, in a step of {whole:.1f} ms\n"
            said += f"it takes {more[phase]:.1f} ms longer in {phase} than they do"
    return f"{table}\n\n{said}"


def draw(traces: Sequence[Trace], last: Series, path: Path) -> None:
    """The longest step of the first rank, on all ranks."""
    begin, end = max(traces[0].of("step"), key=lambda step: step[1] - step[0])
    figure, (axes,) = panels(len(traces), width=11)
    axes.set_yticks(range(len(traces)), [f"rank {trace.rank}" for trace in traces])
    axes.invert_yaxis()
    for row, trace in enumerate(traces):
        edges, found, _ = states(trace, last)
        spans = np.stack([edges[:-1] - begin, np.diff(edges)], 1) / 1000
        inside = (edges[1:] > begin) & (edges[:-1] < end)
        for number, (name, colour) in enumerate(STATES.items()):
            chosen = spans[inside & (found == number)].tolist()
            axes.broken_barh(chosen, (row - 0.4, 0.8), facecolor=colour, label=None if row else name)
    finish(axes, title="the longest step, ms", xlim=(0, (end - begin) / 1000))
    save(figure, path)


def main(argv: Sequence[str] | None = None) -> None:
    """Command line; raises UsageError where a trace cannot be read."""
    parser = ArgumentParser(description="Merge the traces of all ranks of a run, and say which rank is late.")
    parser.add_argument("folder", type=Path, help="the folder of a run with --profile ranks")
    folder = parser.parse_args(argv).folder
    traces = sorted(map(Trace, (folder / "profile").glob(TRACE.format("*"))), key=lambda trace: trace.rank)
    if not traces:
        raise UsageError(f"{folder}: no {TRACE.format('<N>')} in its profile/: `train.py --profile ranks` writes them")
    for rank in sorted(set(range(traces[0].world_size)) - {trace.rank for trace in traces}):
        print(f"no trace of rank {rank}: whoever waits for it seems to communicate")
    align(traces)
    starts = of_ranks(traces, "start")
    starts = starts[starts.count(axis=1) > 1]
    print(summarize(traces, starts))
    draw(traces, starts.max(axis=1), folder / "profile/timeline.png")


if __name__ == "__main__":
    run_main(main)
