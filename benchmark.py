"""Tables of speed and memory, measured on this machine.

    python benchmark.py ladder --config=quick     the steps of rung 1, one after another: what each gains
    python benchmark.py data --config=short       data loaders alone
    python benchmark.py layouts dp                the strategies of rung 2: speed, memory, messages of every rank
    python benchmark.py layouts mp                the layouts of rung 3 x model sizes: the same of a split model
    python benchmark.py layouts domain            the layouts of rung 4 x image sizes: devices that share an image
    python benchmark.py scaling --study quick     real training runs of all rungs: speedup, cost

Every other option is a key of the config, as in train.py: --local_batch_size 4, --device cpu, ...
"""

import sys
from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

from tools.benchmarks import ladder, layouts, loaders, scaling
from tools.benchmarks.layouts import write_memory_picture, write_picture
from utils.errors import FAILED_STATUS, ArgumentParser, UsageError, float_in_range, int_in_range, run_main
from utils.files import write_json
from utils.launch import read_launch

MANY = int_in_range(1, 2**20)
Run = Callable[..., Any]  # measures, and returns its figures
Draw = Callable[[str, Any], None]  # writes a picture of them into a file


def main(argv: Sequence[str] | None = None) -> int | None:
    """Measure what the words of a command line ask for; returns the exit status, None for 0."""
    command_line = sys.argv[1:] if argv is None else argv
    options, words = build_parser().parse_known_args(command_line)
    # Each process of torchrun would start ranks of its own. A rank of a study's job (--only) is already one.
    if read_launch().world_size > 1 and vars(options).get("only") is None:
        raise UsageError("benchmark.py starts its ranks itself: start it with plain python, in one process")

    # What is left of the options are the arguments of the function that runs the command, by their names.
    given = vars(options)
    run = given.pop("run")
    write_png = given.pop("write_png")
    png = given.pop("png", None)
    memory_png = given.pop("memory_png", None)  # of layouts alone
    if memory_png and given["inference"]:
        raise UsageError("--memory_png goes without --inference: it draws a training step")
    writes_json = given.pop("writes_json")
    path = given["json"] if writes_json else given.pop("json")
    # Measuring takes long, so its figures are written before any picture of them.
    figures = run(words, **given)
    if path:
        write_json(path, figures)
    if png:
        write_png(png, figures)
    if memory_png:
        write_memory_picture(memory_png, figures)
    # A study goes on after a failed run, and names it in its figures.
    return FAILED_STATUS if figures.get("failed") else None


def build_parser() -> ArgumentParser:
    """The parser of all commands; the words that it does not know are options of the config."""
    parser = ArgumentParser(prog="benchmark.py", description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Run, text: str, write_png: Draw | None = None, rounds: bool = True) -> Any:
        """Add a command that measures; returns what adds its own options. write_png: draws what `run` returns."""
        added = commands.add_parser(name, help=text, allow_abbrev=False)
        takes_file = "json" in signature(run).parameters  # it writes figures as they come
        added.set_defaults(run=run, write_png=write_png, writes_json=takes_file)
        # Cases take turns, so that what else the machine does falls on all of them.
        if rounds:
            added.add_argument("--rounds", type=MANY, default=3, help="turns of each case; medians count (%(default)s)")
        added.add_argument("--json", metavar="FILE", help="write the figures as JSON")
        if write_png:
            added.add_argument("--png", metavar="FILE", help="write a picture")
        return added.add_argument

    option = command("ladder", ladder.run, "the steps of rung 1", ladder.write_picture)
    workers = int_in_range(0, 256)
    option("--workers", type=workers, default=2, help="data workers of the steps after the first")
    option("--steps", type=MANY, default=10, help="timed iterations of each turn (%(default)s)")
    milliseconds = float_in_range(0, 10_000)
    text = "milliseconds added to the reading of each sample; measures reading ahead alone"
    option("--read_delay_ms", type=milliseconds, default=0.0, metavar="X", help=text)

    option = command("data", loaders.run, "data loaders alone")
    option("--workers", type=workers, default=2, help="data workers of each loader (%(default)s)")
    option("--frames", type=MANY, default=24, help="frames of the data to copy and read (%(default)s)")
    option("--batches", type=MANY, default=12, help="timed batches of each turn (%(default)s)")

    option = command("layouts", layouts.run, "layouts of rungs 2 to 4: speed, memory, messages", write_picture)
    # The first word chooses what is compared; --layouts and --sizes replace its lists.
    option("preset", choices=layouts.PRESETS, help="strategies (dp), split models (mp), shared images (domain)")
    text = "instead of the preset's, each with config keys of its own: fsdp,wrap_policy=none tp2xdp2 domain2x2"
    option("--layouts", nargs="+", default=[], metavar="NAME[,KEY=VALUE...]", help=text)
    text = "numbers of ranks (dp), embedding sizes (mp), points along each side of an image (domain)"
    option("--sizes", type=MANY, nargs="+", default=[], metavar="N", help=text)
    gib = float_in_range(1e-6, 1e6)
    option("--memory_limit_gib", type=gib, metavar="X", help="memory a rank may use (all)")
    option("--steps", type=MANY, default=3, help="timed steps of each turn (%(default)s)")
    text = "write a picture: memory through a training step, a line for each layout"
    option("--memory_png", metavar="FILE", help=text)
    option("--inference", action="store_true", help="forward passes without gradients: latency and memory")

    option = command("scaling", scaling.run, "real training runs", scaling.write_picture, rounds=False)
    option("--study", default="quick", metavar="NAME", help="named study (%(default)s)")
    option("--study_file", default="config/scaling.yaml", metavar="FILE", help="default: %(default)s")
    number = int_in_range(0, 100_000)
    option("--only", type=number, metavar="N", help="in a job: make the run of this number")
    option("--list", dest="list_runs", action="store_true", help="print the runs, and jobs for Slurm")
    option("--report_only", action="store_true", help="make no run")

    return parser


if __name__ == "__main__":
    run_main(main)
