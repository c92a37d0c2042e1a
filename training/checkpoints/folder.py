"""Checkpoints: complete or not there, written while training goes on, read by any layout, and never unpickled.

One folder per checkpoint, `iter-00000500`: every rank's tensors in a safetensors file, by torch.distributed.checkpoint,
which reshards them for whoever loads them; everything else (iteration, running sums, scaler state, config) in
`complete.json`. That file is the completion marker: written last, it lists every other file with size and hash. The
folder is written under a temporary name and then renamed. A file is hashed while it is written, and not read back: what
a disk garbles is found at the next load, for which each rank hashes its share of the files.
`python -m tools.checkpoint` shows a checkpoint, and exports its weights.
"""

import atexit
import json
import logging
import re
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map

from training.checkpoints.files import (
    MARKER,
    CheckpointError,
    Marker,
    digest,
    read_losses,
    read_marker,
    verify,
    verify_together,
)
from training.checkpoints.state import State
from training.step.random_streams import accelerator
from utils import agreement, comm
from utils.errors import UsageError, first_line
from utils.files import sync_folder, whole_file
from utils.torch_private import VERSION, is_dtensor

if TYPE_CHECKING:
    from torch.distributed.checkpoint.staging import DefaultStager

EXIT_SECONDS = 10  # what a process that ends with a write in flight gives it
warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process does not need it
log = logging.getLogger(__name__)
NAME = re.compile(r"iter-\d{8,}")


def _from_the_start(tensor: Tensor) -> Tensor:
    """The stager fails on a DTensor whose local part begins in the middle of its memory (a parameter in a bucket)."""
    if not is_dtensor(tensor) or tensor.to_local().storage_offset() == 0:
        return tensor
    from torch.distributed.tensor import DTensor  # slow to import

    return DTensor.from_local(
        tensor.to_local().clone(),
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def _new_stager() -> "DefaultStager":
    """The stager: it copies tensors to host memory, on CUDA into pinned buffers that it keeps for the next save."""
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions  # slow to import

    cuda = torch.cuda.is_available()
    return DefaultStager(StagingOptions(cuda, False, False, use_non_blocking_copy=cuda))


class CheckpointFolder:
    """The checkpoints of a run. Keeps the newest `keep` and the best one (lowest val_loss).

    config: what JSON can hold, kept in every checkpoint.
    stall_seconds: how long the last `save` held up its caller; write_seconds: how long the last write took, which goes
    on in the background. Both None before the first. failed: the folder whose write went wrong.
    `save`, `wait` and `load_newest` are called by all ranks together. They raise OSError, on every rank, where the disk
    refuses, be it this write or the one before; a checkpoint that was there before stays whole.
    """

    def __init__(
        self,
        path: Path | str,
        keep: int,
        config: dict[str, Any] | None = None,
    ):
        self.path = Path(path)
        self.keep = keep
        self.config = config
        self.stall_seconds: float | None = None
        self.write_seconds: float | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.failed: Path | None = None
        self._group: dist.ProcessGroup | None = None
        self._stager: DefaultStager | None = None

    def save(
        self,
        iteration: int,
        tensors: State,
        trainer_state: dict[str, Any],
        val_loss: float | None = None,
        wait: bool = False,
        awaits_score: bool = False,
    ) -> Path:
        """Write one checkpoint, every rank its part; returns the folder that it will have.

        The tensors are copied to host memory, into the buffers of the save before, and written in the background: they
        may change as soon as this returns. Only one write is in flight: the one before is waited for.
        trainer_state: anything JSON can hold, not changed any more. wait: return when the checkpoint is complete.
        awaits_score: `score` or `withdraw` follows, and no older checkpoint is removed before.
        """
        started = time.perf_counter()
        self.wait()
        self._connect()
        final = self.path / f"iter-{iteration:08d}"
        marker: Marker = {
            "iteration": iteration,
            "val_loss": val_loss,
            "world_size": comm.world_size(),
            "config": self.config,
            "trainer": trainer_state,
        }
        if self._stager is None or VERSION < (2, 13):  # there a stager is spent after one use
            self._stager = _new_stager()
        # Training goes on as soon as the tensors are copied; the thread writes the copies.
        copies = self._stager.stage(tree_map(_from_the_start, tensors))
        device = torch.accelerator.current_device_index() if accelerator() else None
        to_write = copies, marker, final, device, not awaits_score
        self._thread = threading.Thread(target=self._write, args=to_write, daemon=True)
        self._thread.start()
        # A process that ends waits a little for its last checkpoint.
        atexit.register(self._thread.join, EXIT_SECONDS)
        if wait:
            self.wait()
        self.stall_seconds = time.perf_counter() - started
        return final

    def wait(self) -> None:
        """Return when no write is in flight. Raises what went wrong in the last one, once."""
        self._join()
        error = self._error
        self._error = None
        if error is not None:
            raise error

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            atexit.unregister(self._thread.join)
            self._thread = None

    def _connect(self) -> None:
        """Before a write or a read: several ranks need a process group of the background's own, on the CPU.

        Its collectives must not meet those of training, which run at the same time.
        """
        if self._group is None and comm.world_size() > 1:
            self._group = comm.new_cpu_group()

    def _write(
        self,
        tensors: State,
        marker: Marker,
        final: Path,
        device: int | None,
        prune: bool,
    ) -> None:
        """In the background, on every rank."""
        import torch.distributed.checkpoint as dcp  # slow to import

        from training.checkpoints.writer import ShardWriter

        if device is not None:  # a thread begins on device 0, where freeing pinned copies would take memory
            torch.accelerator.set_device_index(device)
        started = time.perf_counter()
        writing = self.path / f".{final.name}.writing"

        def complete(files: dict[str, Any]) -> None:
            self._complete(writing, final, {**marker, "files": files})
            if prune:
                self._prune()

        writer = ShardWriter(writing, complete)
        try:
            dcp.save(tensors, storage_writer=writer, process_group=self._group)
        except dcp.CheckpointException as error:  # wraps what went wrong on each rank; every rank gets it
            self._error = next(iter(error.failures.values()))[0]
        except Exception as error:
            self._error = error
        self.write_seconds = time.perf_counter() - started
        # An error is raised by the next call of wait.
        if self._error is not None:
            self.failed = final
        else:
            log.info("  Saved checkpoint %s, written in %.3f s", final.name, self.write_seconds)

    def _complete(self, writing: Path, final: Path, marker: Marker) -> None:
        # The marker is written last: without it the folder does not count as a checkpoint.
        write_marker(writing, marker)
        shutil.rmtree(final, ignore_errors=True)  # a damaged one that was passed over
        # From here on the checkpoint is there, whole.
        writing.rename(final)
        sync_folder(self.path)

    def score(self, iteration: int, val_loss: float, trainer_state: dict[str, Any]) -> None:
        """Note the loss of a checkpoint that was saved before its validation, and what this changes in its state.

        Called by all ranks. Its tensors are not written again. Raises OSError, and CheckpointError for a damaged one.
        """
        self.wait()

        def note() -> None:
            folder = self.path / f"iter-{iteration:08d}"
            marker = read_marker(folder)
            trainer = {**marker["trainer"], **trainer_state}
            write_marker(folder, {**marker, "val_loss": val_loss, "trainer": trainer})
            self._prune()

        agreement.on_main(note)

    def withdraw(self, iteration: int) -> None:
        """Remove a checkpoint that its validation has shown to be no good. Called by all ranks. Raises OSError."""
        self.wait()
        folder = self.path / f"iter-{iteration:08d}"
        agreement.on_main(lambda: shutil.rmtree(folder))

    def raise_failed(self) -> None:
        """Raise what went wrong in the last write, where that has ended. Nothing is waited for."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def load_newest(self, tensors: State) -> Marker | None:
        """Read the newest whole checkpoint into `tensors`; returns its marker, or None where there is none.

        tensors: of `collect_state`, in any layout; each rank reads what it holds.
        A half-written or damaged one is passed over with a warning, by all ranks alike. Raises UsageError, on every
        rank, for one that holds something else, and for a file that rank 0 sees and another rank does not.
        """
        self.wait()
        self._connect()
        found = first_whole(agreement.on_main(self.folders), verify_together)
        if found is None:
            return None
        import torch.distributed.checkpoint as dcp  # slow to import

        folder, marker = found
        reader = dcp.HuggingFaceStorageReader(str(folder))
        stored = reader.read_metadata().state_dict_metadata
        # The random state of a rank or device that the run did not have before is not there.
        streams = tensors["random"]
        tensors["random"] = {name: state for name, state in streams.items() if f"random.{name}" in stored}
        try:
            dcp.load(tensors, storage_reader=reader, process_group=self._group)
        except dcp.CheckpointException as error:
            cause = error.failures[min(error.failures)][0]
            raise UsageError(f"{folder}: does not hold the state of this run: {first_line(cause)}") from None
        return marker

    def rehearse(self, tensors: State) -> None:
        """Try out a checkpoint of these tensors, on all ranks together; raises UsageError as rehearsal.rehearse."""
        from training.checkpoints.rehearsal import rehearse  # slow to import

        self._connect()
        rehearse(tensors, self._group)

    def folders(self) -> list[Path]:
        """Checkpoint folders, newest first, damaged ones included. Raises OSError."""
        paths = self.path.iterdir() if self.path.exists() else ()
        folders = [path for path in paths if NAME.fullmatch(path.name) and path.is_dir()]
        return sorted(folders, key=lambda path: int(path.name[5:]), reverse=True)

    def newest_name(self) -> str:
        """Name of the newest complete checkpoint, for messages. Waits for a write in flight."""
        self._join()
        for folder in self.folders():
            is_complete = (folder / MARKER).is_file()
            if is_complete:
                return folder.name
        return "none"

    def _prune(self) -> None:
        folders = self.folders()
        losses = read_losses(folders)
        # The best one stays, however old it is.
        best = min(losses, key=losses.__getitem__, default=None)
        # Those whose marker cannot be read go, and of the others the older ones.
        damaged = [folder for folder in folders if folder not in losses]
        older = list(losses)[self.keep :]
        for folder in damaged + older:
            if folder != best:
                shutil.rmtree(folder)


def write_marker(folder: Path, marker: Marker) -> None:
    """Write the marker of a checkpoint, or replace it, as a whole. Raises OSError."""
    with whole_file(folder / MARKER) as part:
        part.write_text(json.dumps({"sha256": digest(marker), **marker}, indent=1))


def first_whole(
    folders: Iterable[Path],
    verify: Callable[[Path], Marker] = verify,
) -> tuple[Path, Marker] | None:
    """Folder and marker of the first whole one of these checkpoints, None where there is none.

    verify: gives the marker of a whole checkpoint, and raises CheckpointError for another; by default that of one
    process alone.
    """
    for folder in folders:
        try:
            return folder, verify(folder)
        except CheckpointError as error:
            if comm.is_main():
                log.warning("%s; passing over it", error)
    return None
