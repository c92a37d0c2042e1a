"""Load a trained run from its folder: config, checkpoint and weights, for a layout that may differ from the run's."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from distributed.global_view import global_view, take_parts
from distributed.parallel_model import ParallelModel
from tools.checkpoint import find
from training.checkpoint import CheckpointFolder, hush_single_process_warning
from training.checkpoint_marker import CheckpointError, Marker, config_of, is_score, read_marker, verify
from training.tasks import forecast, task_of
from utils.config import check_config, differing_keys, load_config, read_mappings, read_named_config
from utils.errors import UsageError, first_line
from utils.schema import Config, keys_that_affect


def run_config(folder: Path | str, words: Sequence[str], world_size: int, splits: Collection[str]) -> Config:
    """The Config of the run in a folder, overridden by the words of a command line.

    splits: the keys by which this program can split a model; the layout of the run itself does not matter. The local
    batch size is 1 unless the words set it. Raises UsageError if the folder holds no run of a forecasting model, or if
    the words contradict its weights.
    """
    file = Path(folder) / "config.yaml"
    if not file.is_file():
        raise UsageError(f"{folder}: no run there (it has no config.yaml); give the folder of one, like logs/quick/00")
    name = next(iter(read_mappings(file, "configs")), "")
    trained = check_config(read_named_config(file, name), name, f"{file}: {name}")
    if not isinstance(task_of(trained), forecast.Trained):
        raise UsageError(f"{folder}: is a run of task {trained.task}, which forecasts nothing")
    # Layout and regularisation of the training do not matter here: the defaults take their place.
    preset = {key: Config.model_fields[key].default for key in keys_that_affect("layout", "training")}
    preset |= {"local_batch_size": 1}
    words = [f"--yaml_config={file}", f"--config={name}", *words]
    config = load_config(words, world_size=world_size, splits=splits, preset=preset)
    for key in differing_keys(trained, config, "model"):
        raise UsageError(f"{folder}: was trained with {key} {getattr(trained, key)}, not {getattr(config, key)}")
    return config.model_copy(update={"noddp": True})  # no gradients: nothing to average


def find_checkpoint(run: Path | str, which: str) -> tuple[Path, Marker]:
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


def check_origin(config: Config, checkpoint: Path, marker: Marker) -> None:
    """Raise UsageError where config.yaml, which people can edit, is not what a checkpoint was trained with."""
    trained = config_of(marker, str(checkpoint))
    for key in differing_keys(trained, config, "model"):
        raise UsageError(f"{checkpoint}: was trained with {key} {getattr(trained, key)}, not {getattr(config, key)}")


def load_weights_into(parallel: ParallelModel, folder: Path) -> None:
    """Load the weights of a checkpoint of any layout into a ParallelModel; each rank reads only its own shards.

    All ranks call this together. Raises UsageError if the checkpoint holds another model.
    """
    hush_single_process_warning()
    model = parallel.model
    state: dict[str, Any] = get_model_state_dict(model)
    weights = {name: tensor.contiguous() for name, tensor in state.items()}
    tensors = {"model": weights, "optimizer": {name: {} for name in weights}}
    view = global_view(tensors, parallel.split)
    try:
        dcp.load({"model": view["model"]}, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
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
