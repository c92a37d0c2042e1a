"""Signals in the phases of a run that may be long: nothing is lost, and what was left is made up bit for bit."""

import os
import signal
import time

import pytest

from tests.support import programs
from tests.support.launch import losses
from tests.test_training import run, same_losses, scalars  # noqa: F401  # a fixture
from training.checkpoints.files import read_losses, read_marker, verify
from training.checkpoints.folder import CheckpointFolder
from training.tasks.validation import ForecastValidator
from utils.errors import STOPPED_STATUS, NonFiniteLossError


def stop_in_validation(monkeypatch, batch, number=signal.SIGTERM):
    """A signal arrives in a batch of the first validation."""
    whole_steps = ForecastValidator.whole_steps

    def stopping(self, *words):
        *_, now = words
        if now == batch:
            os.kill(os.getpid(), number)
        return whole_steps(self, *words)

    monkeypatch.setattr(ForecastValidator, "whole_steps", stopping)


def scored(folder):
    """{checkpoint: its loss}, as they stand in the markers."""
    found = read_losses(CheckpointFolder(folder / "checkpoints", 9).folders())
    return {path.name: loss for path, loss in found.items()}


RESUMED = {
    "nothing was due": {"checkpoint_every": 1000, "validate_every": 1},
    "a checkpoint was due": {"checkpoint_every": 10, "validate_every": 1, "ema": 0.9, "dropout": 0.1},
    "the last iteration": {"num_iters": 10, "validate_every": 4},
    "an ensemble": {"loss": "crps", "ensemble_size": 2, "validate_every": 1},
    "numbers are drawn": {"model": "tests.support.own_models:AlwaysDrops", "checkpoint_every": 10, "validate_every": 1},
}


@pytest.mark.parametrize("case", RESUMED)
def test_a_validation_ends_between_two_batches_and_the_resumed_run_makes_it_up(run, monkeypatch, case):  # noqa: F811
    options = {"num_iters": 12} | RESUMED[case]
    whole = run(run_num="whole", **options)
    with monkeypatch.context() as patch:
        stop_in_validation(patch, 2)
        stopped = run(run_num="parts", **options)
    assert stopped.status == STOPPED_STATUS and stopped.summary is None
    assert "Stopped in the validation" in stopped.log and "Stopped after saving iteration 10;" in stopped.log
    (saved,) = (stopped.folder / "checkpoints").glob("iter-*")
    assert verify(saved)["trainer"]["validation_due"]
    resumed = run(run_num="parts", **options)
    assert same_losses(whole, resumed)
    tag = "Loss/valid"
    assert scalars(whole.folder, tag) == scalars(resumed.folder, tag)
    assert scored(whole.folder) == scored(resumed.folder)


def test_what_is_due_is_saved_before_the_validation_and_its_tensors_once(run, tmp_path, monkeypatch):  # noqa: F811
    written = []
    save = CheckpointFolder.save

    def counted(self, iteration, *words, **more):
        written.append(iteration)
        return save(self, iteration, *words, **more)

    def look(self, *words):
        while not list(folder.glob("iter-*")):
            time.sleep(0.01)  # it is written meanwhile
        for path in folder.glob("iter-*"):
            saved.setdefault(path.name, read_marker(path)["trainer"]["validation_due"])
        return whole_steps(self, *words)

    saved, whole_steps = {}, ForecastValidator.whole_steps
    folder = tmp_path / "logs/quick/00/checkpoints"
    monkeypatch.setattr(CheckpointFolder, "save", counted)
    monkeypatch.setattr(ForecastValidator, "whole_steps", look)
    done = run(num_iters=19, checkpoint_every=10, validate_every=1, keep_checkpoints=1)
    assert written == [10, 19] and saved == {"iter-00000010": True, "iter-00000019": True}
    (newest,) = folder.glob("iter-*")
    assert read_marker(newest)["val_loss"] == done.summary["best_val_loss"]


def start(script, words, signals):
    return programs.start_ranks([script, *words], SIGNAL_AT=signals)


@pytest.mark.slow("ranks of which one alone knows of the signal, and what is there after a kill")
@pytest.mark.parametrize(
    ("number", "script", "layout"),
    [
        (signal.SIGTERM, "train.py", {}),
        (signal.SIGKILL, "train.py", {}),
        (signal.SIGTERM, "train_shard.py", {"domain_parallel": 2, "yaml_config": "config/ViT.yaml"}),
    ],
    ids=["warned", "killed", "warned where images are split"],
)
def test_a_signal_to_one_of_two_ranks_in_validation_costs_nothing(tiny_options, tmp_path, number, script, layout):
    signals = f"1 2 {int(number)}"
    own = {"model": "tests.support.own_models:Signalled", "num_iters": 14, "checkpoint_every": 10, "validate_every": 1}
    own |= layout
    for name, given in ("whole", "-1 0 0"), ("parts", signals), ("parts", "-1 0 0"):
        ended = [programs.finish(rank) for rank in start(script, tiny_options(run_num=name, **own), given)]
        if given == signals:
            assert number == signal.SIGKILL or [status for status, _ in ended] == 2 * [STOPPED_STATUS], ended
            (saved,) = (tmp_path / "logs/quick/parts/checkpoints").glob("iter-*")
            assert verify(saved)["iteration"] == 10
        else:
            assert [status for status, _ in ended] == [0, 0], ended
    assert losses(tmp_path, "whole") == losses(tmp_path, "parts")


def test_a_checkpoint_that_its_validation_shows_to_be_no_good_is_withdrawn(run, tmp_path, monkeypatch):  # noqa: F811
    score = ForecastValidator.run

    def score_nan(self, *words, **more):
        return score(self, *words, **more) | {"val_loss": float("nan")}

    monkeypatch.setattr(ForecastValidator, "run", score_nan)
    line = "iteration 10: the validation loss is nan; last good checkpoint: iter-00000005"
    with pytest.raises(NonFiniteLossError, match=line):
        run(num_iters=19, checkpoint_every=5, validate_every=1)
    assert [path.name for path in (tmp_path / "logs/quick/00/checkpoints").glob("iter-*")] == ["iter-00000005"]
