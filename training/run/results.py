"""Results for people: the scores of a validation and the table at the end of a run."""

import contextlib
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from training.forecasting.metrics import FORECASTS
from training.run.loggers import Charts, Figures, Logger
from utils import comm
from utils.errors import ArgumentParser
from utils.schema import Config

# TensorBoard sorts by name, capitals first: its page opens on the losses and ends with the accuracy.
TAGS = {"val_loss": "Loss/valid", "acc": "valid_acc", "accuracy": "valid_accuracy"}


def write_validation(
    logger: Logger,
    scores: dict[str, Any],
    figures: Figures,
    iteration: int,
) -> None:
    """Log one validation: its scores, numbers or {channel: number}, and its pictures."""
    # Scores of channels have a tag each.
    values = {}
    for kind, score in scores.items():
        if not isinstance(score, dict):
            values[TAGS.get(kind, kind)] = score
            continue
        for number, (channel, value) in enumerate(score.items()):
            values[channel_tag(kind, number, channel)] = value
    tagged_figures = {f"forecast/{name}": figure for name, figure in figures.items()}
    logger.log(values, iteration, tagged_figures)


def channel_tag(kind: str, number: int, name: str) -> str:
    """The tag of a channel's score, numbered so that TensorBoard shows u10 first."""
    return f"{TAGS.get(kind, kind)}/{number:02d}_{name}"


def rmse_charts(channels: Sequence[str]) -> Charts:
    """A chart for each channel, of the RMSE of model, persistence and climatology; {} where none is scored."""
    charts: dict[str, list[Any]] = {}
    for number, name in enumerate(channels):
        tags = [channel_tag(kind, number, name) for kind in FORECASTS.values()]
        charts[name] = ["Multiline", tags]
    return {"RMSE of model, persistence, climatology": charts} if charts else {}


def print_result(summary: dict[str, Any], scores: str, config: Config) -> None:
    """Print, on rank 0, the result of a run for people, `scores` as text, and the command to try next."""
    if not comm.is_main():
        return
    with contextlib.suppress(OSError, ValueError):  # closed, or full: summary.json has all of it
        print(f"\n{scores}\n")
        print(f"finished {summary['iterations']} iterations, everything is in {summary['run']}")
        programs = os.path.relpath(Path(sys.executable).parent)  # of the virtual environment in use
        print(f"curves and maps:  {programs}/tensorboard --logdir {shlex.quote(config.expdir)}")
        if config.amp_mode == "none" and "SLURM_JOB_ID" not in os.environ:
            start = "python" if comm.world_size() == 1 else f"torchrun --nproc_per_node {comm.world_size()}"
            # The command is repeated with its own options, under another number.
            parser = ArgumentParser()
            parser.add_argument("--run_num")
            _, other_options = parser.parse_known_args()
            words = [os.path.relpath(sys.argv[0]), *other_options, "--run_num=bf16", "--amp_mode=bf16"]
            print(f"try next:         {programs}/{start} {shlex.join(words)}")
