"""The weights of a trained run, loaded into a model of any layout."""

from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from distributed.global_view import global_view, take_parts
from distributed.parallel_model import ParallelModel
from training.checkpoint import CheckpointFolder, hush_single_process_warning
from training.checkpoint_files import MARKER, CheckpointError, Marker, config_of, is_score, read_marker, verify
from utils import comm
from utils.config import differing_keys
from utils.errors import UsageError, first_line
from utils.schema import Config


def find(path: Path | str) -> tuple[Path, Marker]:
    """Find and verify the checkpoint at `path`; returns (folder, marker).

    path: a checkpoint, a folder of checkpoints or the folder of a run; of several checkpoints the newest complete one.
    Raises UsageError if there is none, or if it is damaged.
    """
    path = Path(path)
    if not path.is_dir():
        raise UsageError(f"{path}: no such folder")
    if path.name.startswith("iter-") or (path / MARKER).exists():
        try:
            return path, verify(path)
        except CheckpointError as error:
            raise UsageError(error) from None
    inside = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    folder, marker = CheckpointFolder(inside, keep=1).newest_whole()
    if folder is None or marker is None:
        raise UsageError(f"{path}: no whole checkpoint in it")
    return folder, marker


def find_in_run(run: Path | str, which: str) -> tuple[Path, Marker]:
    """Folder and marker of a complete checkpoint of a run. One rank calls this.

    which: best (lowest validation loss; the newest if none has a loss), newest, or the name of a checkpoint. Raises
    UsageError if this checkpoint is missing or damaged.
    """
    folders = CheckpointFolder(Path(run) / "checkpoints", keep=1).folders()
    if not folders:
        raise UsageError(f"{run}: has no checkpoint yet")
    if which == "newest":
        return find(run)
    if which == "best":
        losses = {folder: loss for folder in folders if is_score(loss := _val_loss(folder))}
        for folder in sorted(losses, key=lambda folder: losses[folder]):
            try:
                return folder, verify(folder)
            except CheckpointError:
                continue
        return find(run)
    folder = Path(run) / "checkpoints" / which
    if folder not in folders:
        names = ", ".join(f.name for f in folders)
        raise UsageError(f"{run}: no checkpoint '{which}'; give best, newest or one of {names}")
    return find(folder)


def find_start(path: Path | str) -> tuple[Path, Marker]:
    """The checkpoint from which to start: `path` itself, or the best one where it is the folder of a run."""
    return find_in_run(path, "best") if (Path(path) / "checkpoints").is_dir() else find(path)


def check_start(config: Config) -> None:
    """Before the folder of a run is made: raise UsageError where it cannot begin with the weights of `init_from`."""
    if config.init_from and not (Path(config.expdir) / config.config / config.run_num / "checkpoints").exists():
        checkpoint, marker = comm.on_main(lambda: find_start(config.init_from or ""))
        check_origin(config, checkpoint, marker)


def check_origin(config: Config, checkpoint: Path, marker: Marker) -> None:
    """Raise UsageError where a checkpoint was trained with another model than that of a config."""
    trained = config_of(marker, str(checkpoint))
    for key in differing_keys(trained, config, "model"):
        raise UsageError(f"{checkpoint}: was trained with {key} {getattr(trained, key)}, not {getattr(config, key)}")


def stored_tensors(folder: Path) -> dict[str, TensorStorageMetadata]:
    """{name: TensorStorageMetadata} of a checkpoint: shape, dtype, and the shards as chunks."""
    stored = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {name: tensor for name, tensor in stored.items() if isinstance(tensor, TensorStorageMetadata)}


def load_weights_into(parallel: ParallelModel, folder: Path) -> None:
    """Load the weights of a checkpoint of any layout into a ParallelModel; each rank reads only its own shards.

    They are the averaged ones where the run kept an average. All ranks call this together. Raises UsageError if the
    checkpoint holds another model.
    """
    hush_single_process_warning()
    model = parallel.model
    state: dict[str, Any] = get_model_state_dict(model)
    weights = {name: tensor.contiguous() for name, tensor in state.items()}
    tensors = {"model": weights, "optimizer": {name: {} for name in weights}}
    view = global_view(tensors, parallel.split)
    stored = stored_tensors(folder)
    averaged = {name for name in weights if f"ema.{name}" in stored}
    wanted = {
        "model": {name: tensor for name, tensor in view["model"].items() if name not in averaged},
        "ema": {name: tensor for name, tensor in view["model"].items() if name in averaged},
    }
    try:
        dcp.load(wanted, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    except (CheckpointException, RuntimeError, ValueError) as error:
        cause = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
        why = f"{first_line(cause)} (was it trained by another version of the code?)"
        raise UsageError(f"{folder}: does not hold the weights of this model: {why}") from None
    take_parts(tensors, view, parallel.split)
    set_model_state_dict(model, weights)


def _val_loss(folder: Path) -> float | None:
    try:
        return read_marker(folder)["val_loss"]
    except CheckpointError:
        return None
