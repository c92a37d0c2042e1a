"""Tables of speed and memory, measured on this machine.

    python benchmark.py ladder --config=quick     the steps of rung 1, one after another: what each gains
    python benchmark.py data --config=short       data loaders alone
    python benchmark.py dp --config=quick         the strategies of rung 2: speed, memory, messages of every rank
    python benchmark.py mp --config=mp_quick      the layouts of rung 3 x model sizes: the same of a split model
    python benchmark.py domain --sizes 32 96 32   rung 4: image sizes x layouts of devices that share an image
    python benchmark.py scaling --study quick     real training runs of all rungs: speedup, time to an error, cost

Every other option is a key of the config, as in train.py: --local_batch_size 4, --device cpu, ...
"""

import sys
from argparse import SUPPRESS
from collections.abc import Sequence

from tools.benchmarks import image_sizes, ladder, layouts, loaders, scaling
from utils.config import load_config
from utils.errors import ArgumentParser, real, run_main, whole
from utils.files import write_json

MANY = whole(1, 2**20)


def main(argv: Sequence[str] | None = None) -> int | None:
    """Measure what the words of a command line ask for; returns the exit status, None for 0."""
    options, words = build_parser().parse_known_args(sys.argv[1:] if argv is None else argv)
    given = vars(options)  # named as the arguments of the function that runs the command
    command, run = given.pop("command"), given.pop("run")
    if command == "scaling":
        return run(words, **given)
    files = [(given.pop(kind, None), given.pop(f"write_{kind}", None)) for kind in ("json", "png")]
    figures = run(words, **given)
    for path, write in files:
        if path:
            write(path, figures)
    return None


def build_parser() -> ArgumentParser:
    """The parser of all commands; the words that it does not know are options of the config."""
    parser = ArgumentParser(prog="benchmark.py", description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    own_options = "each with config keys of its own"

    rung1 = commands.add_parser("ladder", help="the steps of rung 1", allow_abbrev=False)
    rung1.set_defaults(run=lambda words, **given: ladder.run(load_config(words), **given))
    rung1.add_argument("--workers", type=whole(0, 256), default=2, help="data workers of the steps after the first")
    rung1.add_argument("--steps", type=MANY, default=10, help="timed iterations of each turn (%(default)s)")

    data = commands.add_parser("data", help="data loaders alone", allow_abbrev=False)
    data.set_defaults(run=lambda words, **given: loaders.run(load_config(words), **given))
    data.add_argument("--workers", type=whole(0, 256), nargs="+", default=[0, 1, 2], help="numbers of data workers")
    data.add_argument("--frames", type=MANY, default=24, help="frames of the data to copy and read (%(default)s)")
    data.add_argument("--batches", type=MANY, default=12, help="timed batches of each turn (%(default)s)")

    dp = commands.add_parser("dp", help="data-parallel strategies x world sizes", allow_abbrev=False)
    dp.set_defaults(run=layouts.run_dp)
    dp.add_argument(
        "--strategies", nargs="+", default=layouts.STRATEGIES, metavar="NAME[,KEY=VALUE...]",
        help=f"{own_options}: fsdp,wrap_policy=none ddp,activation_checkpointing=full",
    )  # fmt: skip
    dp.add_argument("--world_sizes", type=MANY, nargs="+", default=[1, 2], metavar="N", help="numbers of ranks (1 2)")
    dp.add_argument("--steps", type=MANY, default=4, help="timed steps of each turn (%(default)s)")

    mp = commands.add_parser("mp", help="layouts of a split model x model sizes", allow_abbrev=False)
    mp.set_defaults(run=layouts.run_mp)
    mp.add_argument(
        "--layouts", nargs="+", default=layouts.LAYOUTS, metavar="NAME[,KEY=VALUE...]",
        help=f"{own_options}: tp2xdp2 cp4,cp_method=ring",
    )  # fmt: skip
    mp.add_argument("--embed_dims", type=MANY, nargs="+", default=[], metavar="N", help="model sizes (the config's)")
    mp.add_argument("--steps", type=MANY, default=2, help="timed steps of each turn (%(default)s)")

    domain = commands.add_parser("domain", help="image sizes x layouts that share an image", allow_abbrev=False)
    domain.set_defaults(run=image_sizes.run)
    domain.add_argument(
        "--sizes", type=MANY, nargs=3, default=image_sizes.SIZES, metavar=("START", "STOP", "STEP"),
        help="points along each side of an image (32 64 32)",
    )  # fmt: skip
    domain.add_argument("--dims", type=int, choices=(2, 3), default=2, help="of an image (%(default)s)")
    domain.add_argument(
        "--layouts", nargs="+", default=image_sizes.LAYOUTS, metavar="NAME[,KEY=VALUE...]",
        help=f"besides one device, {own_options}: dp2 domain2xdp2 domain2,data_parallel=ddp",
    )  # fmt: skip
    domain.add_argument("--memory_limit_gib", type=real(1e-6, 1e6), metavar="X", help="memory a rank may use (all)")
    domain.add_argument("--steps", type=MANY, default=3, help="timed steps of each turn (%(default)s)")

    study = commands.add_parser("scaling", help="training runs over layouts and sizes", allow_abbrev=False)
    study.set_defaults(run=scaling.run)
    study.add_argument("--study", dest="name", default="quick", metavar="NAME", help="named study (%(default)s)")
    study.add_argument("--study_file", default="config/scaling.yaml", metavar="FILE", help="default: %(default)s")
    study.add_argument("--out", metavar="FOLDER", help="of the report (logs/scaling/<study>)")
    study.add_argument("--only", type=whole(0, 100_000), metavar="N", help="make this one run, and no report")
    study.add_argument("--target", metavar="FIELD=RMSE", help="error to reach, as z500=300 (the study's)")
    for action, text in scaling.ACTIONS.items():
        study.add_argument(
            f"--{action}", dest="action", action="store_const", const=action, default=SUPPRESS, help=text
        )

    for each in (rung1, data, dp, mp, domain):
        each.set_defaults(write_json=write_json)
        each.add_argument("--rounds", type=MANY, default=3, help="turns of each case; medians count (%(default)s)")
        each.add_argument("--json", metavar="FILE", help="write the figures as JSON")
    for each, write in (
        (rung1, ladder.write_picture), (dp, layouts.write_dp), (mp, layouts.write_mp),
        (domain, image_sizes.write_picture),
    ):  # fmt: skip
        each.set_defaults(write_png=write)
        each.add_argument("--png", metavar="FILE", help="write a picture")
    return parser


if __name__ == "__main__":
    run_main(main)
