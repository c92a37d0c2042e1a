"""A grid of plans: GPUs that share an image, and values of one key, such as batch sizes or sides of an image."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from tools.planner.hardware import Gpu
from tools.planner.plan import Plan, plan_layout
from tools.tables import GIB, format_table
from utils.config import SCRIPTS, load_config
from utils.errors import UsageError

SCRIPT = "train_shard.py"  # the only script that splits images
OUT_OF_MEMORY = "out of memory"


class Axis(NamedTuple):
    """The columns of a grid: a key of the config, and its values as words of a command line."""

    key: str
    values: Sequence[str]

    def options(self, value: str) -> list[str]:
        """The words that set a value; a single number of img_size is the side of a square."""
        if self.key != "img_size":
            return [f"--{self.key}={value}"]
        # One number is both sides of a square, as 256 of 256x256.
        sides = value.split("x")
        if len(sides) == 1:
            sides *= 2
        return [f"--{self.key}", *sides]


class Cell(NamedTuple):
    """A plan, or why there is none: `refusal` of the config. value: of the column."""

    gpus: int
    value: str
    plan: Plan | None
    refusal: str = ""


def parse_axis(text: str) -> Axis:
    """'local_batch_size=1,2,4' -> Axis. Raises UsageError for anything else."""
    key, _, listed = text.partition("=")
    values = [value for value in listed.split(",") if value]
    if not key.isidentifier() or not values:
        raise UsageError(
            f"--grid '{text}': expected a key and its values, as local_batch_size=1,2,4 or img_size=256,512"
        )
    return Axis(key, values)


def plan_grid(
    words: Sequence[str],
    gpu: Gpu,
    counts: Sequence[int],
    axis: Axis,
    inference: bool,
) -> list[Cell]:
    """The Cells of all numbers of GPUs and all values, row by row.

    words: options of the config. counts: GPUs; all of a row share an image, by domain parallelism. inference: a forward
    pass without gradients, in place of a training step. Raises UsageError where no cell can be planned at all.
    """
    cells = []
    for gpus in counts:
        for value in axis.values:
            # Options of the cell come last, so that they win.
            own_words = [*words, f"--domain_parallel={gpus}", *axis.options(value)]
            # A refused cell is a dash in the table, with the reason below.
            try:
                config = load_config(own_words, world_size=gpus, splits=SCRIPTS[SCRIPT].splits)
                layout = config.layout(gpus, gpu.gpus_per_node)
                plan = plan_layout(config, layout, gpu, inference=inference)
            except UsageError as error:
                cells.append(Cell(gpus, value, None, str(error)))
            else:
                cells.append(Cell(gpus, value, plan))
    # One cell that can be planned makes a table. A refusal of all is most likely a mistake in the words.
    refusals = [cell.refusal for cell in cells]
    if all(refusals):
        raise UsageError(refusals[0])
    return cells


def grid_text(cells: Sequence[Cell], axis: Axis, inference: bool) -> str:
    """Tables of a grid: samples/s or latency, memory, and both beside one GPU."""
    beside: dict[str, Plan] = {}  # of each column, the plan of the fewest GPUs on which it fits
    for cell in cells:
        if cell.plan and cell.plan.fits != "no":
            # Rows have ever more GPUs, so the first plan that fits has the fewest.
            beside.setdefault(cell.value, cell.plan)

    # A function for each table: the words of a plan, given also the plan of the fewest GPUs in its column.
    def speed(plan: Plan, _: Plan) -> str:
        return f"{plan.time.seconds * 1e3:.1f}" if inference else f"{plan.samples_per_sec:.3g}"

    def memory(plan: Plan, _: Plan) -> str:
        return f"{plan.peak / GIB:.2f}"

    def gain(plan: Plan, few: Plan) -> str:
        return f"{plan.samples_per_sec / few.samples_per_sec:.2f}"

    def reduction(plan: Plan, few: Plan) -> str:
        return f"{few.peak / plan.peak:.2f}"

    speed_title = "ms of a forward pass" if inference else "samples/s in training"
    texts = [
        _table(cells, axis, beside, speed_title, speed),
        _table(cells, axis, beside, "GiB allocated at most on a rank", memory),
        _table(cells, axis, beside, "speed-up, beside the fewest GPUs that it fits on", gain),
        _table(cells, axis, beside, "reduction of memory, beside the same", reduction),
    ]
    # Many cells share a refusal, which is told once.
    refusals = dict.fromkeys(cell.refusal for cell in cells if cell.refusal)
    texts += [f"-: {refusal}" for refusal in refusals]
    return "\n\n".join(texts)


def _table(cells, axis, beside, title, words_of):
    """One table: a row for each number of GPUs, a column for each value. words_of: the text of a plan that fits."""
    rows: dict[int, list[Any]] = {}
    for cell in cells:
        if cell.plan is None:
            words = "-"
        elif cell.plan.fits == "no":
            words = OUT_OF_MEMORY
        else:
            # A plan that fits always has one beside it, if only itself.
            words = words_of(cell.plan, beside[cell.value])
        # The first column names the row.
        rows.setdefault(cell.gpus, [cell.gpus]).append(words)
    columns = {f"{title}; GPUs an image": ""}
    for value in axis.values:
        columns[f"{axis.key} {value}"] = ""
    return format_table(columns, list(rows.values()))


def grid_json(
    cells: Sequence[Cell],
    axis: Axis,
) -> list[dict[str, Any]]:
    """The cells as JSON has them."""
    found = []
    for cell in cells:
        place: dict[str, Any] = {"gpus": cell.gpus, axis.key: cell.value}
        plan = cell.plan.to_json() if cell.plan else {"refused": cell.refusal}
        found.append(place | plan)
    return found
