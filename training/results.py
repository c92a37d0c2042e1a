"""Results for people: TensorBoard pages and the table at the end of a run."""

import contextlib
import logging
import os
import shlex
import sys
import threading
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from torch.utils.tensorboard import SummaryWriter

from utils import comm
from utils.config import SPLITS
from utils.schema import Config

log = logging.getLogger(__name__)
HEADLINE = ("u10", "v10", "t2m", "z500")
FORECASTS = {"model": "rmse", "persistence": "persistence_rmse", "climatology": "climatology_rmse"}


class _NoWriter:
    """Takes what a SummaryWriter takes and writes nothing."""

    def __getattr__(self, _name):
        return lambda *_args, **_kwargs: None


class _PatientWriter:
    """A SummaryWriter that gives up, and says so once, where the disk refuses: checkpoints need the room more."""

    def __init__(self, folder: Path, purge_step: int):
        self.inner: Any = SummaryWriter(folder, purge_step=purge_step)
        self.usual_hook, threading.excepthook = threading.excepthook, self._of_thread

    def __getattr__(self, name):
        function = getattr(self.inner, name)

        def call(*args: Any, **options: Any) -> Any:
            try:
                return function(*args, **options)
            except OSError as error:
                self._give_up(error)

        return call

    def close(self) -> None:
        """Close the events, and leave the errors of threads to whom they were left before."""
        threading.excepthook = self.usual_hook
        with contextlib.suppress(OSError):
            self.inner.close()

    def _of_thread(self, args):
        """It writes in a thread, whose traceback nobody needs: the next call meets the same error."""
        if args.thread is None or type(args.thread).__name__ != "_AsyncWriterThread":
            self.usual_hook(args)

    def _give_up(self, error):
        log.warning("TensorBoard's events cannot be written from here on: %s", error.strerror or error)
        self.inner = _NoWriter()


Writer = _PatientWriter | _NoWriter


def open_writer(folder: Path, purge_step: int) -> Writer:
    """TensorBoard writer of rank 0; the other ranks write nothing. Events from purge_step on are forgotten."""
    return _PatientWriter(folder, purge_step) if comm.is_main() else _NoWriter()


def write_validation(writer: Writer, scores: dict[str, Any], figures: dict[str, Figure], iteration: int) -> None:
    """Write one validation to TensorBoard: its scores, numbers or {channel: number}, and its pictures."""
    for kind, score in scores.items():
        if not isinstance(score, dict):
            writer.add_scalar("loss/valid" if kind == "val_loss" else kind, score, iteration)
            continue
        for number, (name, value) in enumerate(score.items()):
            # Numbered, because TensorBoard sorts by name and u10 is to come first.
            writer.add_scalar(f"{kind}/{number:02d}_{name}", value, iteration)
    for name, figure in figures.items():
        writer.add_figure(f"forecast/{name}", figure, iteration, close=False)
    writer.flush()


def skill_table(summary: dict[str, Any]) -> str:
    """RMSE of the headline channels beside persistence and climatology, as lines of text."""
    lines = [f"{'RMSE':<18}" + "".join(f"{name:>14}" for name in FORECASTS)]
    for name in [name for name in HEADLINE if name in summary["rmse"]] or list(summary["rmse"])[:4]:
        values = (summary.get(kind, {}).get(name) for kind in FORECASTS.values())
        label = f"{name} ({summary['units'][name]})"
        lines.append(f"{label:<18}" + "".join(f"{'-' if v is None else format(v, '.3f'):>14}" for v in values))
    return "\n".join(lines)


def print_result(summary: dict[str, Any], scores: str, config: Config) -> None:
    """Print, on rank 0, what a reader wants to see at the end of a run, and the command to try next.

    scores: the main scores as text.
    """
    if not comm.is_main():
        return
    with contextlib.suppress(OSError, ValueError):  # closed, or full: summary.json has all of it
        _print_result(summary, scores, config)


def _print_result(summary, scores, config):
    print(f"\n{scores}\n")
    print(f"finished {summary['iterations']} iterations, everything is in {summary['run']}")
    programs = os.path.relpath(Path(sys.executable).parent)  # of the virtual environment in use
    print(f"curves and maps:  {programs}/tensorboard --logdir {shlex.quote(config.expdir)}")
    if config.amp_mode != "none" or "SLURM_JOB_ID" in os.environ:
        return
    start = "python" if comm.world_size() == 1 else f"torchrun --nproc_per_node {comm.world_size()}"
    command = f"{programs}/{start} {os.path.relpath(Path(sys.argv[0]))} --config={config.config}"
    for name in (*SPLITS, "data_parallel", "gradient_accumulation"):
        if (value := getattr(config, name)) != Config.model_fields[name].default:
            command += f" --{name}={value}"
    print(f"try next:         {command} --run_num=bf16 --amp_mode=bf16")
