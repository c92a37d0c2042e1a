"""One time line of all ranks, from the traces of --profile ranks: who computes, sends and waits, and for whom.

    python -m tools.timeline logs/quick/00

Prints a table, and writes timeline.png into the run's folder profile/. The clocks of the ranks are set by the ends of
collectives, which come to all ranks at once.
"""

import gzip
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from operator import attrgetter, itemgetter
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from pandas import DataFrame, Series, concat

from tools.pictures import finish, panels, save
from tools.tables import format_table
from training.run.profiling import TRACE
from training.run.telemetry import PHASES
from utils.errors import ArgumentParser, UsageError, reading, run_main

STATES = {
    "compute": "#4477aa",
    "communication": "#222222",
    "waiting": "#cc3311",
    "idle": "#dddddd",
}
COMPUTE, COMMUNICATION, WAITING, IDLE = range(len(STATES))  # the number of each state in STATES
ONE_END = "reduce|gather|scatter|alltoall|barrier"  # of a broadcast the root is done before the others
NOTABLE = 0.02  # of a step


class Trace:
    """The trace of a rank; times in microseconds. Raises UsageError for a file that is damaged.

    spans: a row for each. what: work, waits, message, or the name of a range. key: of a collective its group, its
    number there, and its name, where known.
    """

    def __init__(self, path: Path):
        with reading(str(path)), gzip.open(path) as file:
            content = json.load(file)
            process = content["distributedInfo"]
            self.rank = process["rank"]
            self.world_size = process["world_size"]
            rows = list(_read_spans(content, self.rank))
        self.spans = DataFrame(rows, columns=["rank", "what", "key", "start", "stop"])
        if not len(self.of("step")):
            raise UsageError(f"{path}: no range 'step' in it: was it recorded with --profile ranks?")

    def of(self, what: str) -> np.ndarray:
        """Start and stop of spans, (N, 2)."""
        chosen = self.spans["what"] == what
        return self.spans.loc[chosen, ["start", "stop"]].to_numpy()


def _read_spans(content: dict[str, Any], rank: int) -> Iterator[tuple[Any, ...]]:
    """The rows of Trace.spans, the last one first."""
    # The recorder of gloo begins before the trace or with it. Both end together, so calls are matched from the end.
    gloo_calls = defaultdict[str, list[str]](list)
    for call in content.get("collectives", []):
        gloo_calls[f"gloo:{call['operation']}"].append(f"{call['group']} {call['number']}")
    nccl_calls = Counter[str]()  # kernels of each group so far, numbered from the end, as on all ranks

    clock = content.get("baseTimeNanoseconds", 0) / 1000
    events = [event for event in content["traceEvents"] if event.get("ph") == "X"]
    has_gpu = any(event.get("cat") == "kernel" for event in events)
    work_kind = "kernel" if has_gpu else "cpu_op"
    range_kind = "gpu_user_annotation" if has_gpu else "user_annotation"
    for event in sorted(events, key=itemgetter("ts"), reverse=True):
        name = event["name"]
        kind = event.get("cat")
        what = name
        key = None
        if kind == "user_annotation" and name.startswith("gloo:"):
            what = "message"
            if gloo_calls[name]:
                key = f"{gloo_calls[name].pop()} {name}"
        elif kind == "kernel" and name.startswith("nccl"):
            what = "message"
            args = event.get("args", {})
            group = args.get("Process Group Name")
            nccl_calls[group] += 1
            if group:
                key = f"{group} {nccl_calls[group]} {args.get('Collective name', name)}"
        elif kind == work_kind:
            is_wait = "wait_tensor" in name or name.startswith("c10d::")
            what = "waits" if is_wait else "work"
        elif kind != range_kind:
            continue
        start = clock + event["ts"]
        yield rank, what, key, start, start + event["dur"]


def of_ranks(traces: Sequence[Trace], column: str) -> DataFrame:
    """A column of the messages: a row for each collective, a column for each rank."""
    spans = concat([trace.spans for trace in traces])
    messages = spans.dropna(subset="key")
    ranks = [trace.rank for trace in traces]
    return messages.pivot(index="key", columns="rank", values=column).reindex(columns=ranks)


def align(traces: Sequence[Trace]) -> None:
    """Set all clocks to that of the first trace.

    Two ranks differ by the median, over the collectives of both, of the differences between the ends they saw: whoever
    came late, the end is the same. A rank without such a collective keeps its clock.
    """
    ends = of_ranks(traces, "stop")
    names = ends.index.str.replace("_", "")
    ends = ends[names.str.contains(ONE_END)]
    first = traces[0].rank
    by_rank = {trace.rank: trace for trace in traces}

    # From the first rank outward: whoever shares collectives with a rank whose shift is known gets its own shift.
    shifts = {first: 0.0}
    reached = [first]
    for near in reached:  # grows within the loop
        for far in by_rank.keys() - shifts:
            difference = (ends[near] - ends[far]).median()
            if np.isnan(difference):  # no collective of both
                continue
            shifts[far] = shifts[near] + difference
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
    start = messages["start"]
    stop = messages["stop"]
    # A message that no other rank shares waits for nobody.
    met = messages["key"].map(last).fillna(start).clip(start, stop)
    spans_of = {name: trace.of(name) for name in ("work", "waits", "step", *PHASES)}
    spans_of["waiting"] = np.stack([start, met], 1)
    spans_of["sending"] = np.stack([met, stop], 1)

    # Between two neighbouring edges nothing begins or ends, so that each kind of span is under way or is not.
    edges = np.unique(np.concatenate([*spans_of.values()]))  # (N + 1,)
    under_way = {}  # {kind: (N,)}
    for name, spans in spans_of.items():
        change = np.zeros(len(edges), int)
        np.add.at(change, np.searchsorted(edges, spans[:, 0]), 1)
        np.add.at(change, np.searchsorted(edges, spans[:, 1]), -1)
        under_way[name] = np.cumsum(change)[:-1] > 0

    computes = under_way["work"] & ~under_way["waits"]
    communicates = under_way["sending"] | under_way["waits"]
    # The first condition that holds decides.
    conditions = [computes, under_way["waiting"], communicates]
    state = np.select(conditions, [COMPUTE, WAITING, COMMUNICATION], IDLE)
    phases = {phase: under_way["step"] & under_way[phase] for phase in PHASES}
    return edges, state, phases


def summarize(traces: Sequence[Trace], starts: DataFrame) -> str:
    """A table of ms of a step by rank, phase and state; which rank is late, and where. starts: of shared messages."""
    last = starts.max(axis=1)
    scale = 1000 * len(traces[0].of("step"))  # from microseconds of all steps to milliseconds of one
    rows = []
    own_ms = {}  # what a rank takes without communicating or waiting, by (rank, phase)
    for trace in traces:
        edges, state, phases = states(trace, last)
        for phase, inside in phases.items():
            durations = np.diff(edges) * inside
            times = []
            for number in range(len(STATES)):
                of_state = durations[state == number]
                times.append(float(of_state.sum()) / scale)
            own_ms[trace.rank, phase] = times[COMPUTE] + times[IDLE]
            if any(times):  # a phase may be empty, as without a pipeline
                rows.append([f"{trace.rank} {phase}", *times, sum(times)])
    columns = dict.fromkeys([*STATES, "all"], ".2f")
    table = format_table({"rank, phase: ms of a step": ""} | columns, rows)
    return f"{table}\n\n{_describe_late_rank(traces, starts, own_ms)}"


def _describe_late_rank(traces: Sequence[Trace], starts: DataFrame, own_ms: dict[tuple[int, str], float]) -> str:
    """The rank that holds the others up the longest, in words. starts: as in summarize. own_ms: by (rank, phase)."""
    nobody = f"no rank is late: none holds the others up for {NOTABLE:.0%} of a step"
    if not len(starts):
        return nobody

    # A collective is held up from when the last but one rank has called it until the last one does.
    late = starts.idxmax(axis=1)
    last = starts.max(axis=1)
    last_but_one = starts.T.apply(lambda times: times.nlargest(2).iloc[-1])
    number_of_steps = len(traces[0].of("step"))
    scale = 1000 * number_of_steps
    lost = (last - last_but_one).groupby(late).sum() / scale  # ms of a step, by rank
    rank = lost.idxmax()
    durations = [stop - start for trace in traces for start, stop in trace.of("step")]
    whole = median(durations) / 1000
    if lost[rank] <= NOTABLE * whole:
        return nobody

    # The phase in which this rank takes the most time beyond that of the others is where it is late.
    longer = {}
    for phase in PHASES:
        of_others = [own_ms[trace.rank, phase] for trace in traces if trace.rank != rank]
        longer[phase] = own_ms[rank, phase] - median(of_others)
    phase = max(PHASES, key=longer.__getitem__)
    times_last = sum(late == rank)
    return (
        f"late: rank {rank}, the last in {times_last} of {len(late)} collectives; the others wait "
        f"{lost[rank]:.1f} ms for it, in a step of {whole:.1f} ms\n"
        f"it takes {longer[phase]:.1f} ms longer in {phase} than they do"
    )


def draw(traces: Sequence[Trace], last: Series, path: Path) -> None:
    """The longest step of the first rank, on all ranks."""
    steps = traces[0].of("step")
    longest = np.diff(steps, axis=1).argmax()
    begin, end = steps[longest]
    figure, (axes,) = panels(len(traces), width=11)
    axes.set_yticks(range(len(traces)), [f"rank {trace.rank}" for trace in traces])
    axes.invert_yaxis()
    for row, trace in enumerate(traces):
        edges, state, _ = states(trace, last)
        offsets = edges[:-1] - begin
        spans = np.stack([offsets, np.diff(edges)], 1) / 1000  # (N, 2): ms since the step began, ms
        inside = (edges[1:] > begin) & (edges[:-1] < end)
        bar = (row - 0.4, 0.8)
        for number, (name, colour) in enumerate(STATES.items()):
            chosen = spans[inside & (state == number)].tolist()
            # Only the first row names the colours, so that each stands once in the legend.
            label = name if row == 0 else None
            axes.broken_barh(chosen, bar, facecolor=colour, label=label)
    finish(axes, title="the longest step, ms", xlim=(0, (end - begin) / 1000))
    save(figure, path)


def main(argv: Sequence[str] | None = None) -> None:
    """Command line; raises UsageError where a trace cannot be read."""
    parser = ArgumentParser(description="Merge the traces of all ranks of a run, and say which rank is late.")
    parser.add_argument("folder", type=Path, help="the folder of a run with --profile ranks")
    folder = parser.parse_args(argv).folder
    files = (folder / "profile").glob(TRACE.format("*"))
    traces = sorted(map(Trace, files), key=attrgetter("rank"))
    if not traces:
        raise UsageError(f"{folder}: no {TRACE.format('<N>')} in its profile/: `train.py --profile ranks` writes them")
    ranks = {trace.rank for trace in traces}
    for rank in range(traces[0].world_size):
        if rank not in ranks:
            print(f"no trace of rank {rank}: whoever waits for it seems to communicate")
    align(traces)
    starts = of_ranks(traces, "start")
    is_shared = starts.count(axis=1) > 1
    starts = starts[is_shared]
    print(summarize(traces, starts))
    draw(traces, starts.max(axis=1), folder / "profile/timeline.png")


if __name__ == "__main__":
    run_main(main)
