"""MLflow and Weights & Biases. Neither needs a network: both write on this machine unless their variables say more."""

import os
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from matplotlib.figure import Figure

from training.trackers import Tracker, Values, known
from utils.files import read_text
from utils.schema import Config

PROJECT = "deep-learning-at-scale"  # unless MLFLOW_EXPERIMENT_NAME or WANDB_PROJECT names another


class MLflow(Tracker):
    """A run of MLflow at MLFLOW_TRACKING_URI, by default mlflow.db in the folder of all runs."""

    name = "MLflow's run"

    def __init__(self, folder: Path, config: Config):
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow.entities import Metric, Param
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        self.errors, self.metric = (OSError, MlflowException), Metric
        runs, server = folder.parents[1].absolute(), os.environ.get("MLFLOW_TRACKING_URI")
        client = self.client = MlflowClient(server or f"sqlite:///{runs}/mlflow.db")

        def new() -> str:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
            found = client.get_experiment_by_name(name)
            place = None if server else (runs / "mlartifacts").as_uri()
            experiment = found.experiment_id if found else client.create_experiment(name, place)
            run = client.create_run(experiment, run_name=f"{config.config}/{config.run_num}").info.run_id
            client.log_batch(run, params=[Param(key, str(value)[:500]) for key, value in config.model_dump().items()])
            return run

        self.run = known_id(folder, "mlflow", new)
        client.update_run(self.run, "RUNNING")

    def tell(self, values: Values, iteration: int, figures: Mapping[str, Figure] | None = None) -> None:
        """Hand numbers to a thread of MLflow, which training does not wait for; store pictures over those before."""
        now = int(time.time() * 1000)
        metrics = [self.metric(name, value, now, iteration) for name, value in known(values).items()]
        self.client.log_batch(self.run, metrics=metrics, synchronous=False)
        for name, figure in (figures or {}).items():
            self.client.log_figure(self.run, figure, f"{name}.png")

    def close(self) -> None:
        """Wait for the thread, and end the run."""
        self.client.set_terminated(self.run)


class WandB(Tracker):
    """A run of Weights & Biases, in the run's folder alone (`wandb sync` sends it) unless WANDB_MODE is online."""

    name = "the run of Weights & Biases"

    def __init__(self, folder: Path, config: Config):
        os.environ.setdefault("WANDB_MODE", "offline")
        import wandb

        self.errors, self.image = (OSError, wandb.Error), wandb.Image
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT), name=f"{config.config}/{config.run_num}", dir=folder,
            id=known_id(folder, "wandb", lambda: secrets.token_hex(4)), resume="allow", config=config.model_dump(),
            settings=wandb.Settings(console="off", silent=True),
        )  # fmt: skip

    def tell(self, values: Values, iteration: int, figures: Mapping[str, Figure] | None = None) -> None:
        """Hand it to the process of Weights & Biases."""
        pictures = {name: self.image(figure) for name, figure in (figures or {}).items()}
        self.run.log({**known(values), **pictures}, step=iteration)

    def close(self) -> None:
        """End the run."""
        self.run.finish()


KINDS = {"mlflow": MLflow, "wandb": WandB}


def known_id(folder: Path, tracker: str, new: Callable[[], str]) -> str:
    """The name under which a tracker knows the run in this folder: that of an earlier start, or a new one."""
    path = folder / f"{tracker}-run"
    if not path.exists():
        path.write_text(new())
    return read_text(path).strip()
