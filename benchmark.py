"""Tables of speed and memory, measured on this machine.

    python benchmark.py ladder --config=quick     the steps of rung 1, one after another: what each gains
    python benchmark.py data --config=short       data loaders alone

Every other option is a key of the config, as in train.py: --local_batch_size 4, --device cpu, ...
"""

import sys

from utils.benchmarks import ladder, loaders
from utils.config import load_config
from utils.errors import ArgumentParser, run_main


def main(argv=None):
    parser = ArgumentParser(prog="benchmark.py", description=__doc__.partition("\n")[0], allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)

    command = commands.add_parser("ladder", help="the steps of rung 1", allow_abbrev=False)
    command.add_argument("--workers", type=int, default=2, help="data workers of the steps after the first")
    command.add_argument("--steps", type=int, default=10, help="timed iterations of each turn (%(default)s)")
    command.add_argument("--png", metavar="FILE", help="write a bar chart")
    command.set_defaults(run=lambda config, o: ladder.run(config, o.workers, o.steps, o.rounds, o.json, o.png))

    data = commands.add_parser("data", help="data loaders alone", allow_abbrev=False)
    data.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2], help="numbers of data workers")
    data.add_argument("--frames", type=int, default=24, help="frames of the data to copy and read (%(default)s)")
    data.add_argument("--batches", type=int, default=12, help="timed batches of each turn (%(default)s)")
    data.set_defaults(run=lambda config, o: loaders.run(config, o.workers, o.frames, o.batches, o.rounds, o.json))

    for each in (command, data):
        each.add_argument("--rounds", type=int, default=3, help="turns of each case; medians count (%(default)s)")
        each.add_argument("--json", metavar="FILE", help="write the figures as JSON")
    options, words = parser.parse_known_args(sys.argv[1:] if argv is None else argv)
    options.run(load_config(words), options)


if __name__ == "__main__":
    run_main(main)
