"""Checkpoints: complete or not there, and never unpickled.

One folder per checkpoint, `iter-00000500`: tensors by torch.distributed.checkpoint in safetensors files, everything
else (iteration, running sums, scaler state) in `complete.json`. That file is the completion marker: written last, it
lists every other file with size and SHA-256. The folder is written under a temporary name and then renamed.
"""

import contextlib
import hashlib
import json
import logging
import os
import shutil
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from utils import comm

MARKER = "complete.json"
log = logging.getLogger(__name__)


class CheckpointError(Exception):
    """A checkpoint folder that is half written or damaged."""


def collect_state(model, optimizer):
    """All tensors of a run: weights and buffers, optimizer moments by parameter name, random state."""
    weights, optimizer_state = get_state_dict(model, optimizer)
    moments = {name: _contiguous(state) for name, state in optimizer_state["state"].items()}
    random = {f"cpu{comm.rank()}": torch.get_rng_state()}
    if torch.cuda.is_available():
        random[f"cuda{comm.rank()}"] = torch.cuda.get_rng_state()
    return {"model": _contiguous(weights), "optimizer": moments, "random": random}


def _contiguous(tensors):
    """The tensors themselves, copies only of those in another memory format (channels last)."""
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def restore_state(tensors, model, optimizer):
    """Put the tensors of `collect_state` back. The hyperparameters of the optimizer stay those of the config."""
    groups = get_state_dict(model, optimizer)[1]["param_groups"]
    optimizer_state = {"state": tensors["optimizer"], "param_groups": groups}
    set_state_dict(model, optimizer, model_state_dict=tensors["model"], optim_state_dict=optimizer_state)
    for name, state in tensors["random"].items():
        setter = torch.cuda.set_rng_state if name.startswith("cuda") else torch.set_rng_state
        setter(state)


class CheckpointFolder:
    """The checkpoints of a run. Keeps the newest `keep` and the best one (lowest val_loss).

    Raises OSError where the disk refuses; a checkpoint that was there before stays whole.
    """

    def __init__(self, path, keep):
        self.path, self.keep = Path(path), keep

    def save(self, iteration, tensors, trainer_state, val_loss=None):
        """Write one checkpoint, every rank its part; returns its folder. trainer_state: anything JSON can hold."""
        final = self.path / f"iter-{iteration:08d}"
        writing = self.path / f".{final.name}.writing"
        comm.on_main(lambda: self._begin(writing))
        with _without_single_process_warning():
            try:
                dcp.save(tensors, storage_writer=HuggingFaceStorageWriter(str(writing), save_distributed=True))
            except CheckpointException as error:  # wraps what went wrong on each rank
                raise next(iter(error.failures.values()))[0] from None
        comm.on_main(lambda: self._complete(writing, final, iteration, trainer_state, val_loss))
        return final

    def _begin(self, writing):
        shutil.rmtree(writing, ignore_errors=True)  # left by an interrupted write
        writing.mkdir(parents=True)

    def _complete(self, writing, final, iteration, trainer_state, val_loss):
        files = {path.name: _describe(path) for path in sorted(writing.iterdir())}
        marker = {"iteration": iteration, "val_loss": val_loss, "trainer": trainer_state, "files": files}
        with open(writing / MARKER, "w") as file:
            json.dump({"sha256": _digest(marker), **marker}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        shutil.rmtree(final, ignore_errors=True)  # a damaged one that was passed over
        writing.rename(final)
        self._prune()

    def load_newest(self, tensors):
        """Read the newest whole checkpoint into `tensors`; returns its marker, or None where there is none.

        A half-written or damaged one is passed over with a warning.
        """
        folder, marker = comm.on_main(self._newest_whole)
        if folder is None:
            return None
        reader = HuggingFaceStorageReader(str(folder))
        stored = reader.read_metadata().state_dict_metadata
        # The random state of a rank or device that the run did not have before is not there.
        tensors["random"] = {name: t for name, t in tensors["random"].items() if f"random.{name}" in stored}
        with _without_single_process_warning():
            dcp.load(tensors, storage_reader=reader)
        return marker

    def _newest_whole(self):
        for folder in self.folders():
            try:
                return folder, verify(folder)
            except CheckpointError as error:
                log.warning("%s; passing over it", error)
        return None, None

    def folders(self):
        """Checkpoint folders, newest first, damaged ones included."""
        return sorted(self.path.glob("iter-*"), reverse=True)

    def newest_name(self):
        """Name of the newest complete checkpoint, for messages."""
        return next((folder.name for folder in self.folders() if (folder / MARKER).is_file()), "none")

    def _prune(self):
        folders = self.folders()
        losses = {}
        for folder in folders:
            with contextlib.suppress(CheckpointError):
                losses[folder] = read_marker(folder)["val_loss"]
        best = min((folder for folder in losses if losses[folder] is not None), key=losses.get, default=None)
        for folder in [f for f in folders if f not in losses] + list(losses)[self.keep :]:
            if folder != best:
                shutil.rmtree(folder)


def read_marker(folder):
    """The marker of a checkpoint. Raises CheckpointError where it is missing or damaged."""
    try:
        marker = json.loads((folder / MARKER).read_text())
        if marker.pop("sha256") != _digest(marker):
            raise ValueError("it is damaged (SHA-256 differs)")
        return marker
    except FileNotFoundError:
        raise CheckpointError(f"checkpoint {folder}: was not written to its end") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"checkpoint {folder}: {MARKER} cannot be read: {error}") from None


def verify(folder):
    """The marker of a checkpoint all of whose files are as they were written; raises CheckpointError otherwise."""
    marker = read_marker(folder)
    for name, written in marker["files"].items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"checkpoint {folder}: {name} is missing")
        if _describe(path) != written:
            raise CheckpointError(f"checkpoint {folder}: {name} is damaged (size or SHA-256 differs)")
    return marker


def _describe(path):
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        os.fsync(file.fileno())
    return {"bytes": path.stat().st_size, "sha256": digest}


def _digest(marker):
    return hashlib.sha256(json.dumps(marker).encode()).hexdigest()


@contextlib.contextmanager
def _without_single_process_warning():
    """torch warns whenever a checkpoint is written or read without a process group; one process needs none."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
