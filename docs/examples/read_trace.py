"""Read a trace of `--profile torch`: time by range and kind of operation, and what messages cost.

python -m docs.examples.read_trace logs/quick/trace/profile/trace.json.gz --png step.png
"""

import gzip
import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from tools.tables import format_table
from utils.errors import ArgumentParser, UsageError, run_main

RANGES = ("data", "forward", "backward", "optimizer")
KINDS = {  # parts of the names of operations (CPU) and kernels (GPU), the first that fits
    "waiting for messages": ("wait_tensor", "c10d"),
    "attention": ("attention", "flash", "fmha"),
    "matrix products": ("aten::mm", "aten::addmm", "aten::bmm", "convolution", "gemm", "cutlass", "nvjet", "xmma"),
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


def main(argv: list[str] | None = None) -> None:
    """Print two tables of a trace."""
    parser = ArgumentParser(description="What a trace of --profile torch says.")
    parser.add_argument("trace", type=Path, help="a trace.json.gz")
    parser.add_argument("--png", type=Path, help="write a picture of the second step, or of the only one")
    options = parser.parse_args(argv)
    if not options.trace.is_file():
        raise UsageError(f"{options.trace}: no such file; `train.py --profile torch` writes one")
    with gzip.open(options.trace) as file:
        events = [e for e in json.load(file)["traceEvents"] if e.get("ph") == "X"]

    on_gpu = any(e.get("cat") == "kernel" for e in events)
    ranges = spans(events, "gpu_user_annotation" if on_gpu else "user_annotation")
    steps = [s for s in ranges if s.name == "step"]
    if not steps:
        raise UsageError(f"{options.trace}: no range 'step' in it: was it recorded with --profile torch?")
    work = spans(events, "kernel") if on_gpu else own_time(events)
    messages = [s for s in (work if on_gpu else ranges) if s.name.lower().startswith(("gloo:", "nccl"))]
    work = [s for s in work if s not in messages] if on_gpu else work

    print(time_table(ranges, work, len(steps)))
    if messages:
        print(f"\n{message_table(messages, work, steps)}")
    if options.png:
        write_picture(options.png, steps[:2][-1], ranges, work, messages)


def spans(events: list[dict], category: str) -> list[Span]:
    """Spans of a category of events, by their start."""
    found = [Span(e["name"], e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") == category]
    return sorted(found, key=lambda s: s.start)


def own_time(events: list[dict]) -> list[Span]:
    """Operations of the CPU without the operations that they call: pieces that do not overlap in a thread."""
    pieces = []
    ops = [e for e in events if e.get("cat") == "cpu_op"]
    for thread in {e["tid"] for e in ops}:
        stack: list[Span] = []
        now = 0.0

        def until(time: float, stack: list[Span] = stack) -> None:
            nonlocal now
            while stack and stack[-1].stop <= time:
                pieces.append(Span(stack[-1].name, now, stack[-1].stop))
                now = stack.pop().stop
            if stack:
                pieces.append(Span(stack[-1].name, now, time))
            now = time

        for op in spans([e for e in ops if e["tid"] == thread], "cpu_op"):
            until(op.start)
            stack.append(op)
        until(float("inf"))
    return [p for p in pieces if p.stop > p.start]


def kind(span: Span) -> str:
    """Row of the table that an operation belongs to."""
    name = span.name.lower()
    return next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), OTHER)


def hidden(spans: list[Span], others: list[Span]) -> float:
    """Share of the time of spans in which others run too, on however many streams."""
    total = covered(spans)
    return (total + covered(others) - covered(spans + others)) / total if total else 0.0


def covered(spans: list[Span]) -> float:
    """Microseconds in which one of the spans at least is under way."""
    time, reached = 0.0, float("-inf")
    for span in sorted(spans, key=lambda s: s.start):
        time += max(0.0, span.stop - max(span.start, reached))
        reached = max(reached, span.stop)
    return time


def time_table(ranges: list[Span], work: list[Span], steps: int) -> str:
    """Milliseconds of a step, by kind of operation and range."""
    time: dict[str, dict[str, float]] = {name: defaultdict(float) for name in RANGES}
    for span in (r for r in ranges if r.name in RANGES):
        inside = [w for w in work if span.start <= w.start < span.stop]
        for w in inside:
            time[span.name][kind(w)] += (w.stop - w.start) / steps / 1000
        time[span.name]["no operation"] += (span.stop - span.start) * (1 - hidden([span], inside)) / steps / 1000
    whole = sum(sum(time[name].values()) for name in RANGES)
    rows = []
    for row in (*KINDS, OTHER, "no operation"):
        figures = [time[name][row] for name in RANGES]
        if any(figures):
            rows.append([row, *figures, sum(figures) / whole])
    rows.append(["all", *(sum(time[name].values()) for name in RANGES), 1.0])
    return format_table({"ms of a step": "", **dict.fromkeys(RANGES, ".2f"), "share": ".1%"}, rows)


def message_table(messages: list[Span], work: list[Span], steps: list[Span]) -> str:
    """Messages of a step: how many, how long, and how much of that under other work."""
    rows = []
    compute = [w for w in work if kind(w) != "waiting for messages"]
    for name in sorted({m.name for m in messages}):
        of_steps = [m for m in messages if m.name == name and steps[0].start <= m.start < steps[-1].stop]
        time = sum(m.stop - m.start for m in of_steps)
        if of_steps:
            rows.append([name, len(of_steps) / len(steps), time / len(steps) / 1000, hidden(of_steps, compute)])
    return format_table(
        {"messages": "", "a step": ".0f", "ms of a step": ".2f", "while this rank computes": ".0%"}, rows
    )


def write_picture(path: Path, step: Span, ranges: list[Span], work: list[Span], messages: list[Span]) -> None:
    """One step as a time line: ranges, operations in the colour of their kind, messages."""
    figure = Figure(figsize=(11, 3), layout="constrained")
    axes = figure.subplots()

    def row(y: float, found: list[Span], colour: str, label: str | None = None) -> None:
        bars = [((s.start - step.start) / 1000, (s.stop - s.start) / 1000) for s in found]
        axes.broken_barh(bars, (y, 0.8), facecolor=colour, label=label if bars else None)

    ranges, work, messages = ([s for s in f if step.start <= s.start < step.stop] for f in (ranges, work, messages))
    for name, shade in zip(RANGES, ("#777777", "#cccccc", "#999999", "#777777"), strict=True):
        row(2, [r for r in ranges if r.name == name], shade)
    for r in ranges:
        if r.name in RANGES and r.stop - r.start > 0.04 * (step.stop - step.start):  # else its name has no room
            axes.text(((r.start + r.stop) / 2 - step.start) / 1000, 2.4, r.name, ha="center", va="center")
    for name, colour in zip((*KINDS, OTHER), COLOURS, strict=True):
        row(1, [w for w in work if kind(w) == name], colour, name)
    row(0, messages, "#222222", "messages")
    axes.set_yticks([0.4, 1.4, 2.4], ["messages", "operations", "ranges"])
    axes.set(xlabel="ms", xlim=(0, (step.stop - step.start) / 1000))
    figure.legend(loc="outside upper center", ncols=7, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    run_main(main)
