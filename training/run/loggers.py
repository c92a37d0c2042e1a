"""Experiment loggers: TensorBoard, a file of JSON lines for each rank, and on demand MLflow or Weights & Biases.

A failing logger (a full disk, a server that is gone) is dropped with one warning; it never stops training. MLflow and
Weights & Biases need no network: both write on this machine unless their variables say more.
"""

import contextlib
import errno
import importlib.util
import json
import logging
import math
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from utils import comm
from utils.errors import UsageError, first_line
from utils.files import whole_file
from utils.schema import Config

if TYPE_CHECKING:  # it is slow to import, and rank 0 alone draws
    from matplotlib.figure import Figure

messages = logging.getLogger(__name__)
Values = Mapping[str, float | None]
Figures = Mapping[str, "Figure"]
Charts = Mapping[str, Mapping[str, list[Any]]]  # {title of a group: {title: [kind of chart, tags]}}
PROJECT = "deep-learning-at-scale"  # unless MLFLOW_EXPERIMENT_NAME or WANDB_PROJECT names another


class Logger:
    """One place that a run is logged to. name: for a warning. errors: what it raises where it cannot go on."""

    name = ""
    errors: tuple[type[Exception], ...] = (OSError,)

    def log(self, values: Values, iteration: int, figures: Figures | None = None) -> None:
        """Log numbers of an iteration (None, NaN: not known), and pictures of a validation."""
        raise NotImplementedError

    def close(self) -> None:
        """End the record."""


class Loggers(Logger):
    """Several as one."""

    def __init__(self) -> None:
        self.open: list[Logger] = []

    def add(self, kind: type[Logger], *args: Any) -> None:
        """Open one more."""
        with self._watched(kind):
            self.open.append(kind(*args))

    def log(self, values: Values, iteration: int, figures: Figures | None = None) -> None:
        """Hand it on."""
        self._each(lambda logger: logger.log(values, iteration, figures))

    def close(self) -> None:
        """Close all that are left."""
        self._each(lambda logger: logger.close())

    def _each(self, call: Callable[[Logger], None]) -> None:
        for logger in self.open[:]:
            with self._watched(logger):
                call(logger)

    @contextlib.contextmanager
    def _watched(self, logger: Any) -> Iterator[None]:
        try:
            yield
        except logger.errors as error:
            # The others go on without it.
            self.open = [other for other in self.open if other is not logger]
            why = getattr(error, "strerror", None) or first_line(error)
            messages.warning("%s cannot be written from here on: %s", logger.name, why)


class TensorBoard(Logger):
    """Events in the run's folder; those from purge_step on are forgotten.

    charts: the layout of the page Custom Scalars, which draws several curves together.
    """

    name = "TensorBoard's events"

    def __init__(self, folder: Path, purge_step: int, charts: Charts):
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and rank 0 alone writes

        self.writer = SummaryWriter(folder, purge_step=purge_step)
        # This page of TensorBoard draws several curves in one chart.
        if charts:
            self.writer.add_custom_scalars(charts)
        self.usual_hook = threading.excepthook
        threading.excepthook = self._of_thread

    def _of_thread(self, args):
        """It writes in a thread, whose traceback nobody needs: the next call meets the same error."""
        if args.thread is None or type(args.thread).__name__ != "_AsyncWriterThread":
            self.usual_hook(args)

    def log(self, values: Values, iteration: int, figures: Figures | None = None) -> None:
        """Note it; what is known of a validation is on disk at once."""
        for name, value in finite(values).items():
            self.writer.add_scalar(name, value, iteration)
        for name, figure in (figures or {}).items():
            self.writer.add_figure(name, figure, iteration, close=False)
        if figures is not None:
            self.writer.flush()

    def close(self) -> None:
        """Close the events, and leave the errors of threads to whom they were left before."""
        threading.excepthook = self.usual_hook
        with contextlib.suppress(OSError):
            self.writer.close()


def finite(values: Values) -> dict[str, float]:
    """Those values that are finite numbers."""
    known = {name: value for name, value in values.items() if value is not None}
    return {name: value for name, value in known.items() if math.isfinite(value)}


def check_tracker(config: Config) -> None:
    """Raise UsageError where --tracker needs a package that is not installed."""
    if config.tracker != "none" and importlib.util.find_spec(config.tracker) is None:
        raise UsageError(
            f"--tracker {config.tracker}: this package is not installed: pip install -r requirements/trackers.txt, or "
            "leave --tracker out (TensorBoard's events and metrics-rank0.jsonl are written anyway)"
        )


FILE_NAME = "metrics-rank{}.jsonl"


class MetricsFile(Logger):
    """A line for every reading of this rank; lines of iterations after `iteration`, where the run goes on, are dropped.

    A line is with the system at once, whatever ends this process. Numbers that JSON does not have are null.
    """

    name = "metrics of this rank"

    def __init__(self, folder: Path, iteration: int, device: str):
        for path in folder.glob(FILE_NAME.format("*")):  # of more ranks, maybe, than there are now
            number = path.stem.removeprefix("metrics-rank")
            if number.isdecimal() and int(number) % comm.world_size() == comm.rank():
                # What a resumed run does again is written again.
                kept = [record for record in read_metrics(path) if record["iteration"] <= iteration]
                lines = [json.dumps(record) + "\n" for record in kept]
                with whole_file(path) as part:
                    part.write_text("".join(lines))
        self.device = device
        self.file = open(folder / FILE_NAME.format(comm.rank()), "ab", buffering=0)

    def log(self, values: Values, iteration: int, figures: Figures | None = None) -> None:
        """Write a line."""
        # Numbers that are not finite become null.
        numbers = dict.fromkeys(values) | finite(values)
        record = {
            "iteration": iteration,
            "time": time.time(),
            "device": self.device,
            **numbers,
        }
        line = json.dumps(record).encode() + b"\n"
        before = self.file.tell()
        if self.file.write(line) < len(line):  # the disk is full: no part of a line stays
            self.file.truncate(before)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        """Close the file."""
        self.file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The readings of a rank. The last line may be half a line, of a killed run: it is left out."""
    readings = []
    for line in path.read_text().splitlines():
        with contextlib.suppress(ValueError):
            readings.append(json.loads(line))
    return readings


class MLflow(Logger):
    """A run of MLflow at MLFLOW_TRACKING_URI, by default mlflow.db in the folder of all runs."""

    name = "MLflow's run"

    def __init__(self, folder: Path, config: Config):
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow.entities import Metric, Param
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        self.errors = (OSError, MlflowException)
        self.metric = Metric
        runs = folder.parents[1].absolute()
        server = os.environ.get("MLFLOW_TRACKING_URI")
        client = MlflowClient(server or f"sqlite:///{runs}/mlflow.db")
        self.client = client

        def new() -> str:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
            known = client.get_experiment_by_name(name)
            if known:
                experiment = known.experiment_id
            else:
                # A server has a place of its own for the files of runs.
                place = None if server else (runs / "mlartifacts").as_uri()
                experiment = client.create_experiment(name, place)
            created = client.create_run(experiment, run_name=f"{config.config}/{config.run_num}")
            run = created.info.run_id
            # Long values are cut, since MLflow bounds their length.
            settings = config.model_dump().items()
            params = [Param(key, str(value)[:500]) for key, value in settings]
            client.log_batch(run, params=params)
            return run

        # A resumed run goes on in the same record.
        self.run = known_id(folder, "mlflow", new)
        client.update_run(self.run, "RUNNING")

    def log(self, values: Values, iteration: int, figures: Figures | None = None) -> None:
        """Hand numbers to a thread of MLflow, which training does not wait for; store pictures over those before."""
        # MLflow takes milliseconds.
        now = int(time.time() * 1000)
        metrics = []
        for name, value in finite(values).items():
            metrics.append(self.metric(name, value, now, iteration))
        self.client.log_batch(self.run, metrics=metrics, synchronous=False)
        for name, figure in (figures or {}).items():
            self.client.log_figure(self.run, figure, f"{name}.png")

    def close(self) -> None:
        """Wait for the thread, and end the run."""
        self.client.set_terminated(self.run)


class WandB(Logger):
    """A run of Weights & Biases, in the run's folder alone (`wandb sync` sends it) unless WANDB_MODE is online."""

    name = "the run of Weights & Biases"

    def __init__(self, folder: Path, config: Config):
        # Nothing is sent unless somebody asks for it.
        os.environ.setdefault("WANDB_MODE", "offline")
        import wandb

        self.errors = (OSError, wandb.Error)
        self.image = wandb.Image
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=f"{config.config}/{config.run_num}",
            dir=folder,
            id=known_id(folder, "wandb", lambda: secrets.token_hex(4)),
            resume="allow",
            config=config.model_dump(),
            settings=wandb.Settings(console="off", silent=True),
        )

    def log(self, values: Values, iteration: int, figures: Figures | None = None) -> None:
        """Hand it to the process of Weights & Biases."""
        figures = figures or {}
        pictures = {name: self.image(figure) for name, figure in figures.items()}
        self.run.log({**finite(values), **pictures}, step=iteration)

    def close(self) -> None:
        """End the run."""
        self.run.finish()


KINDS = {"mlflow": MLflow, "wandb": WandB}


def known_id(folder: Path, logger: str, new: Callable[[], str]) -> str:
    """The name under which a logger knows the run in this folder: that of an earlier start, or a new one."""
    path = folder / f"{logger}-run"
    if not path.exists():
        path.write_text(new())
    return path.read_text().strip()
