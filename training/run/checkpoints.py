"""Checkpoints of a run: how far it is, what it saves of its training, and how it goes on from there."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any

from distributed.weight_shards import global_view
from training.checkpoints.files import CheckpointError
from training.checkpoints.folder import CheckpointFolder
from training.checkpoints.state import (
    check_unchanged,
    collect_extra,
    collect_named_state,
    collect_tensors,
    collect_weights,
    described,
    restore_tensors,
)
from training.checkpoints.weights import start_from
from training.run.folder import RunFolder
from training.run.report import describe_devices, log_notes
from training.step.step import TrainingStep
from utils import agreement
from utils.errors import FULL_DISK, UsageError, first_line
from utils.schema import Config

log = logging.getLogger(__name__)


@dataclass
class Progress:
    """How far a run is. A checkpoint has it, beside tensors.

    iteration: optimizer steps done. epoch_loss, epoch_iterations: the sum of losses in the epoch under way, and how
    many. train_loss: the mean over the last epoch. validation_due: one has begun and not ended.
    """

    iteration: int = 0
    epoch_loss: float = 0.0
    epoch_iterations: int = 0
    train_loss: float | None = None
    best_val_loss: float | None = None
    validation_due: bool = False

    def state(self) -> dict[str, Any]:
        """What a checkpoint has of it beside its number, which is the iteration."""
        own = asdict(self)
        own.pop("iteration")
        return own

    def restore(self, iteration: int, state: dict[str, Any]) -> None:
        """Take what a checkpoint has."""
        self.iteration = iteration
        for field in fields(self):
            # An older checkpoint lacks the newest.
            if field.name in state and field.name != "iteration":
                setattr(self, field.name, state[field.name])


class RunCheckpoints:
    """Saves a run into its folder, and resumes it.

    began: the first iteration of this process. newest: iteration of the newest checkpoint, None without one.
    """

    def __init__(self, config: Config, folder: RunFolder, step: TrainingStep, progress: Progress):
        self.config = config
        self.step = step
        self.model = step.parallel.model
        self.progress = progress
        self.folder = CheckpointFolder(folder.checkpoints, config.keep_checkpoints, config.model_dump())
        self.described: dict[str, str] = {}  # the model's state before the first step
        self.began = 0
        self.newest: int | None = None

    def resume(self) -> bool:
        """Go on from the newest checkpoint; False where there is none: the run is new.

        Raises UsageError, on every rank, for a model that cannot be saved, and for checkpoints that do not fit it.
        """
        tensors = collect_tensors(self.step)
        self.described = described(tensors["model"])
        view = global_view(tensors, self.step.parallel.split)
        agreement.raise_on_all_ranks(partial(collect_extra, self.model))
        # What cannot be saved ends the run now, and not after a day.
        self.folder.rehearse(view)
        devices = describe_devices(self.config, self.step.device)
        total = self.config.num_iters
        # Nothing is read where the run is new.
        marker = self.folder.load_newest(view)
        if marker is None:
            if self.config.init_from:
                start_from(self.config.init_from, self.config, self.step)
            log_notes(self.config, self.step)
            log.info("Starting training of %d iterations on %s", total, devices)
            return False

        restore_tensors(self.step, tensors, view, marker)
        state = marker["trainer"]
        self.step.task.check_data_record(state.get("data", {}), self.folder.path)
        self.progress.restore(marker["iteration"], state)
        self.began = self.progress.iteration
        self.newest = self.began
        # The scale of losses goes on as well.
        self.step.scaler.load_state_dict(state["scaler"])
        log_notes(self.config, self.step)
        log.info("Resuming at iteration %d of %d on %s", self.began, total, devices)
        return True

    def check_model_unchanged(self) -> None:
        """Raise UsageError, on every rank, where the model is no more one that a checkpoint can hold."""
        now = described(collect_weights(self.model))
        agreement.raise_on_all_ranks(partial(check_unchanged, self.described, now))

    def save(self, val_loss: float | None, wait: bool) -> None:
        """Save the run as it is. val_loss: of this state, where it was validated. wait: until all is written.

        Where a validation is due, `score` or `withdraw` follows. Raises UsageError where the folder cannot be written.
        """
        iteration = self.progress.iteration
        state = self.progress.state()
        state["scaler"] = self.step.scaler.state_dict()
        state["data"] = self.step.task.data_record()
        self.step.parallel.share_buffers()
        # The tensors of this rank, by name.
        own = collect_tensors(self.step)
        check_unchanged(self.described, described(own["model"]))
        state |= collect_named_state(self.model)
        # A checkpoint describes the whole tensors, whatever the layout.
        tensors = global_view(own, self.step.parallel.split)
        awaits_score = self.progress.validation_due
        with self._named():
            folder = self.folder.save(iteration, tensors, state, val_loss, wait, awaits_score)
        self.newest = iteration
        log.info("  Checkpoint %s held training up for %.3f s", folder.name, self.folder.stall_seconds)

    def has_this_state(self) -> bool:
        """Tell whether the newest checkpoint is of this iteration."""
        return self.newest == self.progress.iteration

    def score(self, val_loss: float) -> None:
        """Note in the checkpoint of this iteration what its validation gave. Raises UsageError as save does."""
        with self._named():
            self.folder.score(self.progress.iteration, val_loss, self.progress.state())

    def withdraw(self) -> None:
        """Remove the checkpoint of this iteration, whose weights are no good. Raises UsageError as save does."""
        with self._named():
            self.folder.withdraw(self.progress.iteration)
        self.newest = None

    def wait(self) -> None:
        """Return when the last checkpoint is written. Raises UsageError as save does."""
        with self._named():
            self.folder.wait()

    def raise_failed(self) -> None:
        """Raise UsageError as save does, as soon as it is known that a write in the background failed."""
        with self._named():
            self.folder.raise_failed()

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Turn an error of a write into a UsageError: which checkpoint, what is whole, and what to do."""
        try:
            yield
        except (OSError, CheckpointError) as error:
            failed = self.folder.failed or self.folder.path
            number = getattr(error, "errno", None)
            if number in FULL_DISK:
                fewer = self.config.keep_checkpoints > 1
                remedy = "make room on its disk" + fewer * f" (--keep_checkpoints, now {self.config.keep_checkpoints})"
            else:
                remedy = "see that it can be written"
            # What cannot be written can mostly be read.
            whole = "none"
            with suppress(OSError):
                whole = self.folder.newest_name()
            way_on = "begins anew" if whole == "none" else f"goes on from {whole}, which is whole"
            raise UsageError(
                f"{failed}: the checkpoint could not be written: {first_line(error)}: {remedy}, and repeat the "
                f"command, which {way_on}"
            ) from error

    def newest_in_words(self) -> str:
        """The name of the newest checkpoint, and its folder."""
        return f"{self.folder.newest_name()} in {self.folder.path}"
