"""Forecast with a trained model, score it by lead time, and show it: NetCDF, maps, an animation.

    python forecast.py --run_folder logs/demo/00
    python forecast.py --run_folder logs/demo/00 --dates 1985-01-15T00 1985-02-01T12 --lead_hours 240 --channel t2m
    torchrun --nproc_per_node 2 forecast.py --run_folder logs/demo/00 --domain_parallel 2

A forecast of several steps is a rollout: the output of each step is the input of the next step. Every key of the run's
config is an option here too, as in train.py (--device, --amp_mode, --inf_data_path ...). The layout of the run itself
does not matter. The exit status has the same meaning as for train.py.
"""

import argparse
import sys
import time

from tools.forecasting.dated_frames import DatedFrames, choose_starts, run_config
from tools.forecasting.output_files import LAYOUTS, attributes, prepare_folder
from tools.forecasting.rollout import lead_times, roll_out, shown_channel
from tools.forecasting.skill_report import read_skill, write_report
from training.assembly import build_parallel
from training.checkpoints.weights import check_origin, find, load_weights_into
from utils import agreement, comm, connection
from utils.config import SCRIPTS
from utils.errors import ArgumentParser, int_in_range
from utils.launch import read_launch
from weather.convert.climate_quantiles import read_quantiles

# A split of the data is named by a key of the config: {--split: key}.
DATA = {"test": "inf_data_path", "valid": "valid_data_path", "train": "train_data_path"}


def main(argv: list[str] | None = None) -> None:
    """Forecast with the options of a command line, by default that of this process."""
    given = sys.argv[1:] if argv is None else argv
    options, words = parse(given)
    launch = read_launch()
    # A forecast is split as train_shard.py splits a model, whatever split the run.
    splits = SCRIPTS["train_shard.py"].splits
    config = run_config(options.run_folder, words, launch.world_size, splits)
    layout = config.layout(launch.world_size, launch.ranks_per_node)
    device = connection.connect(config.device, config.comm_timeout)
    comm.build_mesh(device, layout)

    # What to forecast. A rank that finds a mistake tells the others, so that all of them end.
    data = getattr(config, DATA[options.split])
    frames = agreement.raise_on_all_ranks(lambda: DatedFrames(data, config, device))
    leads = agreement.raise_on_all_ranks(lambda: lead_times(config, frames.interval, options.lead_hours))
    wanted = options.dates or options.starts  # dates, or how many of them to choose
    starts = agreement.raise_on_all_ranks(lambda: choose_starts(frames, leads, wanted))
    all_names, all_units, grid = frames.dataset.description
    names = all_names[: config.n_out_channels]
    units = dict(zip(names, all_units, strict=False))
    others = agreement.on_main(lambda: {run: read_skill(run, starts, leads, units, grid) for run in options.compare})
    channel = agreement.raise_on_all_ranks(lambda: shown_channel(names, options.channel))

    # The checkpoint, and whether it has seen these frames.
    checkpoint, marker = agreement.on_main(lambda: find(options.run_folder, options.checkpoint))
    check_origin(config, checkpoint, marker)
    record = marker["trainer"].get("data", {})
    is_training_data = options.split == "train"
    notes = agreement.raise_on_all_ranks(lambda: frames.check(record, checkpoint, is_training_data))
    quantiles = agreement.raise_on_all_ranks(
        lambda: read_quantiles(config.global_stds_path, config.n_out_channels, config.img_size)
    )
    # Weights come from the checkpoint alone, so no initial ones are filled in.
    parallel = build_parallel(config, device, weights=())
    agreement.raise_on_all_ranks(lambda: load_weights_into(parallel, checkpoint))

    # The forecasts. The folder is emptied only now that nothing is left that could be refused.
    out = options.out or f"{options.run_folder}/forecast"
    agreement.on_main(lambda: prepare_folder(out))
    if comm.is_main():
        print(*notes, sep="\n")
    began = time.perf_counter()
    about = attributes(checkpoint, marker, options.split)
    files = None if options.skill_only else out
    result = roll_out(parallel, frames, starts, leads, config, channel, files, about, options.layout, quantiles)
    if comm.is_main():
        # All ranks share the forecasts, and rank 0 tells of them.
        seconds = time.perf_counter() - began
        print(f"{len(starts)} forecasts of {leads[-1]} hours in {seconds:.1f} s, from {checkpoint}")
        write_report(result, out, about, not options.skill_only, others)


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Split the words into this program's own options and the remaining words, which override the config."""
    parser = ArgumentParser(
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    option = parser.add_argument
    # Each has a second name, because torchrun reads --run and --start as abbreviations of its own options.
    option("--run_folder", "--run", required=True, metavar="FOLDER", help="of a training run, like logs/demo/00")
    option("--checkpoint", default="best", metavar="NAME", help="best, newest or iter-... (%(default)s)")
    option("--split", choices=DATA, default="test", help="initial states and truth (%(default)s)")
    option("--dates", "--start", nargs="+", metavar="DATE", help="start dates (UTC), like 1985-02-01T06")
    number = int_in_range(0, 10**6)
    option("--starts", type=number, default=8, metavar="N", help="start dates, spread evenly (%(default)s)")
    hours = int_in_range(1, 10**6)
    option("--lead_hours", type=hours, default=120, metavar="N", help="length of a forecast (%(default)s)")
    option("--channel", metavar="NAME", help="channel of the maps and the animation (z500)")
    option("--out", metavar="FOLDER", help="folder of the results (<run>/forecast)")
    option("--layout", choices=LAYOUTS, default="cf", help="of the forecasts' files (%(default)s)")
    option("--compare", nargs="+", default=[], metavar="RUN", help="show the scores of the forecasts of these too")
    option("--skill_only", action="store_true", help="write only scores, maps and animation, no fields")
    return parser.parse_known_args(argv)


if __name__ == "__main__":
    connection.run_ranks(main)
