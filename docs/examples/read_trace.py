"""Read a trace of `--profile torch`: time by range and kind of operation, and what messages cost.

python -m docs.examples.read_trace logs/quick/trace/profile/trace.json.gz --png step.png
"""

import gzip
import json
from collections import defaultdict
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from matplotlib.figure import Figure

from tools.tables import format_table
from utils.errors import ArgumentParser, UsageError, run_main

RANGES = ("data", "forward", "backward", "optimizer")
# Parts of the names of operations (CPU) and kernels (GPU). The first kind that fits counts.
KINDS = {
    "waiting for messages": ("wait_tensor", "c10d"),
    "attention": ("attention", "flash", "fmha"),
    "matrix products": (
        "aten::mm",
        "aten::addmm",
        "aten::bmm",
        "convolution",
        "gemm",
        "cutlass",
        "nvjet",
        "xmma",
    ),
    "norms": ("norm",),
    "GELU": ("gelu",),
}
OTHER = "other"
COLOURS = ("#cc3311", "#ee7733", "#4477aa", "#009988", "#aa4499", "#bbbbbb")


@dataclass(frozen=True)
class Span:
    """Something that took time. start, stop: microseconds."""

    name: str
    start: float
    stop: float

    @property
    def length(self) -> float:
        """Microseconds from start to stop."""
        return self.stop - self.start


def main(argv: list[str] | None = None) -> None:
    """Print two tables of a trace."""
    parser = ArgumentParser(description="What a trace of --profile torch says.")
    parser.add_argument("trace", type=Path, help="a trace.json.gz")
    parser.add_argument("--png", type=Path, help="write a picture of the second step, or of the only one")
    options = parser.parse_args(argv)
    if not options.trace.is_file():
        raise UsageError(f"{options.trace}: no such file; `train.py --profile torch` writes one")
    with gzip.open(options.trace) as file:
        content = json.load(file)
    events = [event for event in content["traceEvents"] if event.get("ph") == "X"]

    # On a GPU, the kernels are the work, and those of NCCL are messages. Gloo's messages are ranges of the CPU.
    on_gpu = any(event.get("cat") == "kernel" for event in events)
    if on_gpu:
        ranges = spans(events, "gpu_user_annotation")
        kernels = spans(events, "kernel")
        messages = [kernel for kernel in kernels if is_message(kernel)]
        work = [kernel for kernel in kernels if not is_message(kernel)]
    else:
        ranges = spans(events, "user_annotation")
        messages = [span for span in ranges if is_message(span)]
        work = own_time(events)
    steps = [span for span in ranges if span.name == "step"]
    if not steps:
        raise UsageError(f"{options.trace}: no range 'step' in it: was it recorded with --profile torch?")

    print(time_table(ranges, work, len(steps)))
    if messages:
        print(f"\n{message_table(messages, work, steps)}")
    if options.png:
        *_, shown = steps[:2]
        write_picture(options.png, shown, ranges, work, messages)


def spans(events: list[dict], category: str) -> list[Span]:
    """Spans of a category of events, by their start."""
    found = []
    for event in events:
        if event.get("cat") == category:
            start = event["ts"]
            found.append(Span(event["name"], start, start + event["dur"]))
    return sorted(found, key=attrgetter("start"))


def is_message(span: Span) -> bool:
    """Tell whether a span is a collective or a message of gloo or NCCL."""
    return span.name.lower().startswith(("gloo:", "nccl"))


def own_time(events: list[dict]) -> list[Span]:
    """Operations of the CPU without the operations that they call: pieces that do not overlap in a thread."""
    ops = [event for event in events if event.get("cat") == "cpu_op"]
    pieces = []
    for thread in {op["tid"] for op in ops}:
        of_thread = [op for op in ops if op["tid"] == thread]
        pieces += own_time_of_thread(spans(of_thread, "cpu_op"))
    return [piece for piece in pieces if piece.length > 0]


def own_time_of_thread(ops: list[Span]) -> list[Span]:
    """Pieces of the operations of one thread, by their start: each piece belongs to the innermost one under way."""
    pieces: list[Span] = []
    under_way: list[Span] = []  # the innermost last
    now = 0.0

    def go_on_to(time: float) -> None:
        nonlocal now
        while under_way and under_way[-1].stop <= time:
            ended = under_way.pop()
            pieces.append(Span(ended.name, now, ended.stop))
            now = ended.stop
        if under_way:
            pieces.append(Span(under_way[-1].name, now, time))
        now = time

    for op in ops:
        go_on_to(op.start)
        under_way.append(op)
    go_on_to(float("inf"))
    return pieces


def kind(span: Span) -> str:
    """Row of the table that an operation belongs to."""
    name = span.name.lower()
    for kind, parts in KINDS.items():
        if any(part in name for part in parts):
            return kind
    return OTHER


def hidden(spans: list[Span], others: list[Span]) -> float:
    """Share of the time of spans in which others run too, on however many streams."""
    total = covered(spans)
    if not total:
        return 0.0
    together = total + covered(others) - covered(spans + others)
    return together / total


def covered(spans: list[Span]) -> float:
    """Microseconds in which one of the spans at least is under way."""
    time = 0.0
    reached = float("-inf")
    for span in sorted(spans, key=attrgetter("start")):
        time += max(0.0, span.stop - max(span.start, reached))
        reached = max(reached, span.stop)
    return time


def time_table(ranges: list[Span], work: list[Span], steps: int) -> str:
    """Milliseconds of a step, by kind of operation and range."""
    time: dict[str, dict[str, float]] = {name: defaultdict(float) for name in RANGES}
    for span in ranges:
        if span.name not in RANGES:
            continue
        of_range = time[span.name]
        inside = starting_in(span, work)
        for operation in inside:
            of_range[kind(operation)] += operation.length / steps / 1000
        idle_share = 1 - hidden([span], inside)
        of_range["no operation"] += span.length * idle_share / steps / 1000

    totals = [sum(time[name].values()) for name in RANGES]
    whole = sum(totals)
    rows = []
    for row in (*KINDS, OTHER, "no operation"):
        figures = [time[name][row] for name in RANGES]
        if any(figures):
            rows.append([row, *figures, sum(figures) / whole])
    rows.append(["all", *totals, 1.0])
    columns = {"ms of a step": "", **dict.fromkeys(RANGES, ".2f"), "share": ".1%"}
    return format_table(columns, rows)


def starting_in(span: Span, others: list[Span]) -> list[Span]:
    """The other spans that start within a span."""
    return [other for other in others if span.start <= other.start < span.stop]


def message_table(messages: list[Span], work: list[Span], steps: list[Span]) -> str:
    """Messages of a step: how many, how long, and how much of that under other work."""
    # A rank that waits is not busy: only work that it would have to do anyway hides a message.
    compute = [operation for operation in work if kind(operation) != "waiting for messages"]
    all_steps = Span("steps", steps[0].start, steps[-1].stop)
    counted = starting_in(all_steps, messages)
    rows = []
    for name in sorted({message.name for message in counted}):
        of_name = [message for message in counted if message.name == name]
        time = sum(message.length for message in of_name)
        rows.append([name, len(of_name) / len(steps), time / len(steps) / 1000, hidden(of_name, compute)])
    columns = {
        "messages": "",
        "a step": ".0f",
        "ms of a step": ".2f",
        "while this rank computes": ".0%",
    }
    return format_table(columns, rows)


def write_picture(path: Path, step: Span, ranges: list[Span], work: list[Span], messages: list[Span]) -> None:
    """One step as a time line: ranges, operations in the colour of their kind, messages."""
    figure = Figure(figsize=(11, 3), layout="constrained")
    axes = figure.subplots()

    def row(y: float, found: list[Span], colour: str, label: str | None = None) -> None:
        bars = [((span.start - step.start) / 1000, span.length / 1000) for span in found]
        axes.broken_barh(bars, (y, 0.8), facecolor=colour, label=label if bars else None)

    # The ranges, with their names where there is room.
    ranges = starting_in(step, ranges)
    shades = ("#777777", "#cccccc", "#999999", "#777777")
    for name, shade in zip(RANGES, shades, strict=True):
        row(2, [span for span in ranges if span.name == name], shade)
    for span in ranges:
        has_room = span.length > 0.04 * step.length
        if span.name in RANGES and has_room:
            middle = (span.start + span.stop) / 2
            axes.text((middle - step.start) / 1000, 2.4, span.name, ha="center", va="center")

    work = starting_in(step, work)
    for name, colour in zip((*KINDS, OTHER), COLOURS, strict=True):
        row(1, [operation for operation in work if kind(operation) == name], colour, name)
    row(0, starting_in(step, messages), "#222222", "messages")
    axes.set_yticks([0.4, 1.4, 2.4], ["messages", "operations", "ranges"])
    axes.set(xlabel="ms", xlim=(0, step.length / 1000))
    figure.legend(loc="outside upper center", ncols=7, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    run_main(main)
