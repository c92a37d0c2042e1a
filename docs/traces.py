"""The stored traces as data of the page that shows them (docs/profiling.md): ranges, work and messages of each rank."""

import json
from pathlib import Path

import numpy as np

from tools.timeline import Trace, align

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "example_logs/profiles/two_ranks/profile"
RANGES = ("data", "forward", "backward", "reduce", "optimizer")
CLOSE = 5.0  # microseconds: work with a shorter gap in between is shown as one piece


def pieces(spans: np.ndarray, close: float = 0.0) -> list[list[float]]:
    """What spans (N, 2) cover together, as [start, stop] one behind the other; gaps up to `close` are covered too."""
    covered: list[list[float]] = []
    for start, stop in sorted(spans.tolist()):
        if covered and start <= covered[-1][1] + close:
            covered[-1][1] = max(covered[-1][1], stop)
        else:
            covered.append([start, stop])
    return covered


def data() -> list[dict]:
    """Of each rank {"rank": ..., "ranges": [[name, start, stop], ...], "work": [[start, stop], ...], "messages": ...}.

    Microseconds since the first of them, by the clock of rank 0.
    """
    traces = [Trace(path) for path in sorted(FOLDER.glob("trace-rank*.json.gz"))]
    align(traces)
    first = min(trace.spans["start"].min() for trace in traces)
    ranks = []
    for trace in traces:
        ranges = []
        for name in RANGES:
            ranges += [[name, *span] for span in (trace.of(name) - first).round(1).tolist()]
        ranks.append(
            {
                "rank": trace.rank,
                "ranges": sorted(ranges, key=lambda each: each[1]),
                "work": np.array(pieces(trace.of("work") - first, CLOSE)).round(1).tolist(),
                "messages": sorted((trace.of("message") - first).round(1).tolist()),
            }
        )
    return ranks


def script() -> str:
    """The data as a script, which a page takes from a file too."""
    return f"const TRACES = {json.dumps(data(), separators=(',', ':'))};\n"
