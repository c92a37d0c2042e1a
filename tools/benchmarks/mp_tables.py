"""Tables and picture of `benchmark.py mp`, from its rows."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tools.benchmarks.data_parallel import MIB
from tools.benchmarks.mp_theory import PHASES
from tools.tables import format_table
from utils.files import whole_file

HELD = ("parameters", "gradients", "optimizer", "activations")


def print_tables(results: list[dict[str, Any]]) -> None:
    """Time, memory and messages of summarized cases."""
    columns = {"layout": "", "embed": "d", "ranks": "d", "ms a step": ".0f", "to one rank": ".2f", "in the rounds": ""}
    rows: list[tuple[Any, ...]] = []
    for r in results:
        spread = f"{min(r['ratio_of_rounds']):.2f} to {max(r['ratio_of_rounds']):.2f}"
        rows.append((r["layout"], r["embed_dim"], r["ranks"], 1000 * r["step_seconds"], r["ratio"], spread))
    print("Time of a step with the same whole batch, as ratio to one rank in the same round\n")
    print(format_table(columns, rows))

    columns = {"layout": "", "embed": "d", **dict.fromkeys(HELD[:3], ".2f"), "sum": ".2f", "formula": ".2f"}
    columns |= {"activations": ".2f", "its formula": ".2f", "allocated at most": ".2f"}
    rows = []
    for r in results:
        sizes, formula = (
            {name: None if size is None else size / MIB for name, size in r[key].items()}
            for key in ("memory", "predicted_memory")
        )
        rows.append(
            (r["layout"], r["embed_dim"], *(sizes[name] for name in HELD[:3]), sum(sizes[name] for name in HELD[:3]),
             sum(formula[name] for name in HELD[:3]), sizes["activations"], formula["activations"],
             sizes["allocated at most"])
        )  # fmt: skip
    print("\nMemory: MiB on the rank that holds most\n")
    print(format_table(columns, rows))

    columns = {"layout": "", "embed": "d", "pass": "", "collectives": "", "MiB": ".2f"}
    columns |= {"at least": "", "at least, MiB": ".2f"}
    rows = []
    for r in results:
        for phase in PHASES:
            sent, least = r["messages"][phase], r["predicted_messages"][phase]
            if sent or least:
                rows.append((r["layout"], r["embed_dim"], phase, *_in_words(sent), *_in_words(least)))
    print("\nMessages of a step: collectives, and MiB that a rank sends in them, beside the theory\n")
    print(format_table(columns, rows) + "\n")


def _in_words(messages: dict[str, tuple[float, float]]) -> tuple[str, float]:
    text = ", ".join(f"{calls:.0f} {kind}" for kind, (calls, _) in sorted(messages.items()))
    return text or "none", sum(size for _, size in messages.values()) / MIB


def write_picture(path: str, results: list[dict[str, Any]]) -> None:
    """Left: memory of a rank, stacked, the formula as a mark. Right: MiB sent in a step, forward, backward, update."""
    figure = Figure(figsize=(12, 1.8 + 0.4 * len(results)), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    colors = ("#4477aa", "#66ccee", "#ccbb44", "#bbbbbb")
    parts = [[r["memory"][name] for r in results] for name in HELD]
    _stack(axes[0], parts, HELD, colors)
    formula = [sum(size or 0 for size in r["predicted_memory"].values()) for r in results]
    _mark(axes[0], formula, "formula")
    parts = [[sum(size for _, size in r["messages"][phase].values()) for r in results] for phase in PHASES]
    _stack(axes[1], parts, PHASES, ("#cc6677", "#882255", "#ddaa99"))
    least = [sum(size for sent in r["predicted_messages"].values() for _, size in sent.values()) for r in results]
    _mark(axes[1], least, "at least")
    axes[0].set(title=f"memory of a rank, embed_dim {results[0]['embed_dim']}", xlabel="MiB")
    axes[1].set(title="sent by a rank in a step", xlabel="MiB")
    axes[0].set_yticks(range(len(results)), [r["layout"] for r in results])
    axes[0].invert_yaxis()
    for one in axes:
        one.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=3, fontsize="small", frameon=False)
        one.spines[["top", "right"]].set_visible(False)
    with whole_file(Path(path)) as part:
        figure.savefig(part, format="png", dpi=120)


def _stack(axes: Axes, parts: list[list[Any]], names: Sequence[str], colors: Sequence[str]) -> None:
    start = [0.0] * len(parts[0])
    for values, name, color in zip(parts, names, colors, strict=True):
        values = [(value or 0) / MIB for value in values]
        axes.barh(range(len(values)), values, left=start, label=name, color=color)
        start = [a + b for a, b in zip(start, values, strict=True)]


def _mark(axes: Axes, values: list[float], name: str) -> None:
    axes.plot([value / MIB for value in values], range(len(values)), "k|", markersize=14, label=name)
