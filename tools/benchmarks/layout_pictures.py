"""Pictures of layouts that were measured: memory, speed and messages as bars, memory through a step as curves."""

from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

from pandas import DataFrame

from tools.instruments.tracker import PASSES
from tools.pictures import draw_bars, finish, panels, save
from tools.planner.trace import HELD
from tools.tables import MIB
from utils.errors import UsageError


def write_picture(path: str, figures: dict[str, Any]) -> None:
    """Of the last size: memory of a rank by use, samples/s, and MiB that a rank sends by phase."""
    rows = [row for row in _rows_of_last_size(figures) if "seconds" in row]
    if not rows:
        raise UsageError(f"{path}: memory ran out everywhere at the last size, there is nothing to draw")
    labels = [row["layout"] for row in rows]
    figure, (memory_axes, speed_axes, sent_axes) = panels(len(rows), 3, 16)

    memory = DataFrame([row["memory"] for row in rows], labels)
    held = memory[list(HELD)].fillna(0)  # (layouts, uses) bytes
    draw_bars(memory_axes, held / MIB)
    finish(memory_axes, title=f"{figures['config']}: memory of a rank", xlabel="MiB")

    speed = [row["samples_per_sec"] for row in rows]
    draw_bars(speed_axes, DataFrame({"all ranks": speed}, labels))
    finish(speed_axes, title="speed", xlabel="samples/s")

    sent = []
    for row in rows:
        sent.append({phase: sent_in(row, phase)["sent"] for phase in PASSES})
    draw_bars(sent_axes, DataFrame(sent, labels))
    finish(sent_axes, title="sent by a rank in a step", xlabel="MiB")
    save(figure, path)


def _rows_of_last_size(figures: dict[str, Any]) -> list[dict[str, Any]]:
    last = figures["rows"][-1]["size"]
    return [row for row in figures["rows"] if row["size"] == last]


def write_memory_picture(path: str, figures: dict[str, Any]) -> None:
    """Memory of rank 0 through a training step, a line for each layout of the last size.

    The phases of a step have the same width in all layouts, whatever number of allocations each has.
    """
    rows = [row for row in _rows_of_last_size(figures) if row.get("curve")]
    if not rows:
        raise UsageError(f"{path}: there is no training step to draw: memory ran out, or --inference was given")
    figure, (axes,) = panels(10, 1, 10)
    for row in rows:
        places, sizes = curve_of(row["curve"])
        axes.step(places, sizes, where="post", linewidth=1.2, label=row["layout"])
    names = [name for name, _ in stretches(rows[0]["curve"])]
    for number, name in enumerate(names):
        axes.axvline(number, color="black", linewidth=0.5, linestyle=":")
        above = axes.get_xaxis_transform()  # x counts phases, y is a fraction of the height
        axes.text(number + 0.5, 1.01, name, transform=above, ha="center", fontsize="small")
    # Places inside a phase count allocations and not seconds, so the axis has no numbers.
    axes.set_xticks([])
    axes.set_ylim(bottom=0)
    finish(axes, xlabel="a training step, by allocations and releases", ylabel="MiB on rank 0")
    save(figure, path)


def stretches(curve: Sequence[Sequence[Any]]) -> list[tuple[str, list[float]]]:
    """(phase, MiB of its points) of each stretch of a step, from the first forward pass to the end of the update."""
    found: list[tuple[str, list[float]]] = []
    for phase, points in groupby(curve, key=itemgetter(0)):
        found.append((phase, [size / MIB for _, size in points]))
    # The curve of a measured step may begin and end with work that belongs to no training step.
    names = [name for name, _ in found]
    first = names.index("forward") if "forward" in names else 0
    last = len(names) - names[::-1].index("update") if "update" in names else len(names)
    return found[first:last]


def curve_of(curve: Sequence[Sequence[Any]]) -> tuple[list[float], list[float]]:
    """(places, MiB) of a curve, each stretch of a phase one unit wide."""
    places: list[float] = []
    sizes: list[float] = []
    for number, (_, points) in enumerate(stretches(curve)):
        count = len(points)
        places += [number + i / count for i in range(count)]  # number <= place < number + 1
        sizes += points
    return places, sizes


def sent_in(row: dict[str, Any], phase: str) -> dict[str, Any]:
    """The messages of a phase of a row as values of a table; sizes in MiB."""
    kinds = row["messages"][phase]
    texts = []
    sent = 0
    for kind, (calls, size) in kinds.items():
        texts.append(f"{calls:.0f} {kind} {size / MIB:.2f}")
        sent += size
    return {"kinds": ", ".join(texts), "sent": sent / MIB}
