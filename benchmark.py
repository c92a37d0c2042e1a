"""Tables of speed and memory, measured on this machine.

    python benchmark.py ladder --config=quick     the steps of rung 1, one after another: what each gains
    python benchmark.py data --config=short       data loaders alone
    python benchmark.py dp --config=quick         the strategies of rung 2: speed, memory, messages of every rank
    python benchmark.py mp --config=mp_quick      the layouts of rung 3 x model sizes: the same of a split model
    python benchmark.py domain --sizes 32 96 32   rung 4: image sizes x layouts of devices that share an image
    python benchmark.py scaling --study quick     real training runs of all rungs: speedup, cost

Every other option is a key of the config, as in train.py: --local_batch_size 4, --device cpu, ...
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

from tools.benchmarks import image_sizes, ladder, layouts, loaders, scaling
from utils.config import load_config
from utils.errors import FAILED_STATUS, ArgumentParser, real, run_main, whole
from utils.files import write_json

MANY = whole(1, 2**20)


def main(argv: Sequence[str] | None = None) -> int | None:
    """Measure what the words of a command line ask for; returns the exit status, None for 0."""
    options, words = build_parser().parse_known_args(sys.argv[1:] if argv is None else argv)
    given = vars(options)  # named as the arguments of the function that runs the command
    command, run = given.pop("command"), given.pop("run")
    files = [(given.pop(kind, None), given.pop(f"write_{kind}", None)) for kind in ("json", "png")]
    if command == "ladder":  # after each of its turns too
        given["json"] = files[0][0]
    figures = run(words, **given)
    for path, write in files:
        if path:
            write(path, figures)
    return FAILED_STATUS if figures.get("failed") else None


def build_parser() -> ArgumentParser:
    """The parser of all commands; the words that it does not know are options of the config."""
    parser = ArgumentParser(prog="benchmark.py", description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)

    def command(
        name: str,
        run: Callable[..., Any],
        text: str,
        write_png: Callable[..., Any] | None = None,
        rounds: bool = True,
    ) -> Any:
        """Add a command that measures; returns what adds its own options."""
        added = commands.add_parser(name, help=text, allow_abbrev=False)
        added.set_defaults(run=run, write_json=write_json, write_png=write_png)
        if rounds:
            added.add_argument("--rounds", type=MANY, default=3, help="turns of each case; medians count (%(default)s)")
        added.add_argument("--json", metavar="FILE", help="write the figures as JSON")
        if write_png:
            added.add_argument("--png", metavar="FILE", help="write a picture")
        return added.add_argument

    def of_config(run: Callable[..., Any]) -> Callable[..., Any]:
        return lambda words, **given: run(load_config(words), **given)

    cases = {"nargs": "+", "metavar": "NAME[,KEY=VALUE...]"}
    own_options = "each with config keys of its own"

    option = command("ladder", of_config(ladder.run), "the steps of rung 1", ladder.write_picture)
    option("--workers", type=whole(0, 256), default=2, help="data workers of the steps after the first")
    option("--steps", type=MANY, default=10, help="timed iterations of each turn (%(default)s)")

    option = command("data", of_config(loaders.run), "data loaders alone")
    option("--workers", type=whole(0, 256), nargs="+", default=[0, 1, 2], help="numbers of data workers")
    option("--frames", type=MANY, default=24, help="frames of the data to copy and read (%(default)s)")
    option("--batches", type=MANY, default=12, help="timed batches of each turn (%(default)s)")

    option = command("dp", layouts.run_dp, "data-parallel strategies x world sizes", layouts.write_dp)
    text = f"{own_options}: fsdp,wrap_policy=none ddp,activation_checkpointing=full"
    option("--strategies", default=layouts.STRATEGIES, help=text, **cases)
    option("--world_sizes", type=MANY, nargs="+", default=[1, 2], metavar="N", help="numbers of ranks (1 2)")
    option("--steps", type=MANY, default=4, help="timed steps of each turn (%(default)s)")

    option = command("mp", layouts.run_mp, "layouts of a split model x model sizes", layouts.write_mp)
    option("--layouts", default=layouts.LAYOUTS, help=f"{own_options}: tp2xdp2 cp4,cp_method=ring", **cases)
    option("--embed_dims", type=MANY, nargs="+", default=[], metavar="N", help="model sizes (the config's)")
    option("--steps", type=MANY, default=2, help="timed steps of each turn (%(default)s)")

    option = command("domain", image_sizes.run, "image sizes x layouts that share an image", image_sizes.write_picture)
    option(
        "--sizes", type=MANY, nargs=3, default=image_sizes.SIZES, metavar=("START", "STOP", "STEP"),
        help="points along each side of an image (32 64 32)",
    )  # fmt: skip
    option("--dims", type=int, choices=(2, 3), default=2, help="of an image (%(default)s)")
    text = f"besides one device, {own_options}: dp2 domain2xdp2 domain2,data_parallel=ddp"
    option("--layouts", default=image_sizes.LAYOUTS, help=text, **cases)
    option("--memory_limit_gib", type=real(1e-6, 1e6), metavar="X", help="memory a rank may use (all)")
    option("--steps", type=MANY, default=3, help="timed steps of each turn (%(default)s)")

    option = command("scaling", scaling.run, "real training runs", scaling.write_picture, rounds=False)
    option("--study", default="quick", metavar="NAME", help="named study (%(default)s)")
    option("--study_file", default="config/scaling.yaml", metavar="FILE", help="default: %(default)s")
    option("--only", type=whole(0, 100_000), metavar="N", help="in a job: make the run of this number")
    option("--list", dest="list_runs", action="store_true", help="print the runs, and jobs for Slurm")
    option("--report_only", action="store_true", help="make no run")

    return parser


if __name__ == "__main__":
    run_main(main)
