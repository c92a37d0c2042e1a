"""Plan a layout on one CPU before a job is queued: memory, communication and time of a step.

    python plan.py --yaml_config config/mp.yaml --config mp --gpus 16 --gpu a100-40gb     the best layouts of 16 GPUs
    python plan.py --yaml_config config/mp.yaml --config mp --gpus 16 --tensor_parallel 4     one layout, in detail
    python plan.py --yaml_config config/mp.yaml --config mp --gpus 8..4096     how far it scales
    python plan.py ... --inference     a forward pass without gradients: latency and memory
    python plan.py ... --gpus 1..8 --grid img_size=256,512     GPUs that share an image x values of a key
    python plan.py --verify     small layouts, run on this machine as well
    python plan.py ... --submit='-t 02:00:00'     the best (or --choose 3) as a job of Slurm
    python plan.py compare logs/mp/03     a finished run against the plan of its config
    python plan.py check --config quick --layouts tp2 domain2     layouts run here and compared with one device
    python plan.py check --all --minutes 20     compositions of all options, drawn, run here and compared

Every other option is a key of the config, as in the training scripts. docs/plan.md says how each number is computed,
and what is left out: above all reading the data.
"""

import json
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

from tools.planner import grid
from tools.planner import plan_text as report
from tools.planner.compare import compare
from tools.planner.hardware import Gpu, load_gpu
from tools.planner.search import LAYOUT_OPTIONS, Request, best_layouts, gpu_counts, scaling, submit_plan
from utils.connection import run_ranks
from utils.errors import ArgumentParser, UsageError, int_in_range


def main(argv: list[str] | None = None) -> int:
    """Run the command line `argv`, by default that of the process; returns the exit status."""
    words = sys.argv[1:] if argv is None else argv
    # The first word may be a command. Each imports what it alone needs, so that a plan appears at once.
    if words[:1] == ["compare"]:
        return print_comparison(words[1:])
    if words[:1] == ["check"] and "--all" in words:
        from tools.compositions import search

        return search.main(words[1:])
    if words[:1] == ["check"]:
        from tools.layout_check import check

        return check.main(words[1:])

    # Without a command it is a plan. Words that are no options of this program are keys of the config.
    options, words = read_options(words)
    # These two plan nothing for the user: one checks the planner, the other measures the machine.
    if options.verify:
        from tools.planner.validate import build_cases, verify

        return 1 if verify(build_cases()) else 0
    if options.calibrate:
        # What is measured becomes a GPU that --gpu can name.
        from tools.planner import calibrate

        return calibrate.main(words)
    gpu = load_gpu(options.gpu)
    counts = gpu_counts(options.gpus)
    if options.grid:
        return print_grid(words, gpu, counts, options)
    return print_plans(Request(words, gpu, options.inference), counts, options)


def read_options(words: list[str]) -> tuple[Namespace, list[str]]:
    """Options of this program, and the other words: options of a config."""
    parser = ArgumentParser(prog="plan.py", description=__doc__.partition("\n")[0], allow_abbrev=False)
    option = parser.add_argument
    option("--gpus", default="1", metavar="N|N..M", help="GPUs of the job; 8..4096: a curve (1)")
    option("--gpu", default="a100-40gb", help="a name in config/hardware.yaml (%(default)s)")
    option("--top", type=int_in_range(1, 10**6), metavar="N", help="compare layouts, and show the N best (10)")
    option("--inference", action="store_true", help="a forward pass without gradients, in place of a training step")
    text = "a table of GPUs that share an image x values of a key: local_batch_size=1,2,4 or img_size=256,512"
    option("--grid", metavar="KEY=V1,V2", help=text)
    option("--calibrate", action="store_true", help="measure this machine, for --gpu")
    option("--json", action="store_true", help="print the plans as JSON")
    option("--png", metavar="FILE", help="write a picture")
    option("--verify", action="store_true", help="run small layouts for real and compare them with plans")
    # Both options below act on one layout of the list.
    option("--choose", type=int_in_range(1, 10**6), metavar="N", help="of the layouts, the one of this number")
    option("--submit", nargs="?", const="", metavar="WORDS", help="queue it; WORDS: options of sbatch")
    return parser.parse_known_args(words)


def print_plans(request: Request, counts: list[int], options: Namespace) -> int:
    """Print one plan, the best of a search, or a curve over numbers of GPUs; draw and submit what is asked for."""
    # Some options exclude one another, which is said before anything is computed.
    is_curve = len(counts) > 1
    submits = options.submit is not None
    if options.inference and (is_curve or options.top or submits):
        raise UsageError(
            "--inference plans one layout; --grid compares numbers of GPUs: --gpus 1..8 --grid img_size=256"
        )
    if is_curve and (options.choose or submits):
        raise UsageError("--choose and --submit take a layout of one number of --gpus")

    # --top asks for a search even where the words name a key of the layout.
    names_a_layout = options.top is None and not request.named.isdisjoint(LAYOUT_OPTIONS)
    # Each kind of result has a text of its own, made from the same arguments.
    describe: Callable[..., str]
    if is_curve:
        plans = scaling(request, counts)
        describe = report.scaling_text
    elif names_a_layout or counts == [1] or options.inference:  # one GPU has nothing to split
        plans = [request.plan(counts[0])]
        describe = report.plan_text
    else:
        plans = best_layouts(request, counts[0], options.top or 10)
        describe = report.search_text
    # One layout is chosen by its number in the list, the best unless told.
    if options.choose or submits:
        number = options.choose or 1
        if number > len(plans):
            raise UsageError(f"--choose {number}: the search lists {len(plans)} layouts; --top {number} lists more")
        plans = [plans[number - 1]]
        describe = report.plan_text

    if options.json:
        print(json.dumps([plan.to_json() for plan in plans], indent=1))
    else:
        print(describe(plans, request))
    if options.png:
        from tools.planner.plan_pictures import layouts_picture, scaling_picture

        # A curve has a point for each number of GPUs, all others a bar for each layout.
        draw = scaling_picture if is_curve else layouts_picture
        draw(plans, options.png)
    if submits:
        print(submit_plan(plans[0], request, options.submit))
    return 0


def print_comparison(words: list[str]) -> int:
    """Print a finished run beside its plan; returns the exit status."""
    parser = ArgumentParser(prog="plan.py compare", description="Compare a run with its plan.")
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a finished run")
    parser.add_argument("--gpu", metavar="NAME", help="in config/hardware.yaml, or measured (that of the run)")
    options = parser.parse_args(words)
    print(compare(options.run, options.gpu))
    return 0


def print_grid(words: list[str], gpu: Gpu, counts: list[int], options: Namespace) -> int:
    """Print the tables of --grid, or its plans as JSON; returns the exit status."""
    # A table of many plans has no best one to list, draw or queue.
    if options.top or options.png or options.choose or options.submit is not None:
        raise UsageError("--grid goes without --top, --png, --choose and --submit: it prints tables, or --json")
    axis = grid.parse_axis(options.grid)
    cells = grid.plan_grid(words, gpu, counts, axis, options.inference)
    if options.json:
        print(json.dumps(grid.grid_json(cells, axis), indent=1))
    else:
        print(grid.grid_text(cells, axis, options.inference))
    return 0


if __name__ == "__main__":
    run_ranks(main)
