"""The weights of a trained run, loaded into a model of any layout."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed.parallel_model import ParallelModel
from distributed.weight_shards import global_view, take_parts
from training.checkpoints.external_weights import is_external, match_weights
from training.checkpoints.files import MARKER, CheckpointError, Marker, config_of, read_losses, read_marker, verify
from training.checkpoints.folder import CheckpointFolder, first_whole
from training.checkpoints.model_state import collect_weights, restore_weights
from utils import agreement
from utils.command_line import option_words
from utils.config import differing_keys
from utils.errors import UsageError, first_line
from utils.schema import Config

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata


def find(path: Path | str, which: str = "newest") -> tuple[Path, Marker]:
    """Find and verify a checkpoint; returns (folder, marker). One rank calls this.

    path: a checkpoint, a folder of checkpoints or the folder of a run. which: of several checkpoints the newest whole
    one, the best (lowest validation loss; the newest if none has a loss), or the one of this name. Raises UsageError if
    there is none, or if it is damaged.
    """
    path = Path(path)
    if not path.is_dir():
        raise UsageError(f"{path}: no such folder")
    # The path is a checkpoint itself.
    if path.name.startswith("iter-") or (path / MARKER).exists():
        try:
            return path, verify(path)
        except CheckpointError as error:
            raise UsageError(error) from None
    # Or it is the folder of a run, or of checkpoints.
    inside = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    folders = CheckpointFolder(inside, keep=1).folders()
    if which in ("newest", "best"):
        losses = read_losses(folders)
        best_first = sorted(losses, key=losses.__getitem__)
        in_order = folders if which == "newest" else best_first
        checkpoint = first_whole(in_order)
        if checkpoint is None:
            raise UsageError(f"{path}: no whole checkpoint in it")
        return checkpoint
    if inside / which not in folders:
        names = ", ".join(folder.name for folder in folders)
        raise UsageError(f"{path}: no checkpoint '{which}'; give best, newest or one of {names}")
    return find(inside / which)


def check_start(config: Config) -> None:
    """Before the folder of a run is made: raise UsageError where it cannot begin with the weights of `init_from`."""
    path = config.init_from
    run_folder = Path(config.expdir) / config.config / config.run_num
    is_resumed = (run_folder / "checkpoints").exists()
    if not path or is_resumed:
        return
    # A file of another program is matched by names and shapes.
    if is_external(path):
        agreement.raise_on_all_ranks(lambda: match_weights(config))
        return
    if config.init_map or config.init_missing != "error":
        raise UsageError(f"{path}: init_map and init_missing are for files of other programs, not for runs of this one")
    # A run of this program must have had the same model.
    checkpoint, marker = agreement.on_main(lambda: find(path, "best"))
    check_origin(config, checkpoint, marker)


def check_origin(config: Config, checkpoint: Path, marker: Marker) -> None:
    """Raise UsageError where a checkpoint was trained with another model than that of a config."""
    trained = config_of(marker, str(checkpoint))
    for key in differing_keys(trained, config, "model"):
        # A single forecast takes no noise. An ensemble that begins with it draws the weights of noise.
        if key == "noise_features" and not trained.noise_of_model:
            continue
        there = getattr(trained, key)
        as_trained = " ".join(option_words(key, there))
        raise UsageError(
            f"{checkpoint}: was trained with {key} {there}, not {getattr(config, key)}: give {as_trained}, or other "
            "weights"
        )


def stored_tensors(folder: Path) -> dict[str, "TensorStorageMetadata"]:
    """{name: TensorStorageMetadata} of a checkpoint: shape, dtype, and the shards as chunks."""
    from torch.distributed.checkpoint import HuggingFaceStorageReader  # slow to import
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    stored = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {name: tensor for name, tensor in stored.items() if isinstance(tensor, TensorStorageMetadata)}


def load_weights_into(parallel: ParallelModel, folder: Path, may_lack: bool = False) -> list[str]:
    """Load the weights of a checkpoint of any layout into a ParallelModel; each rank reads only its own shards.

    They are the averaged ones where the run kept an average. may_lack: weights that the checkpoint lacks stay as they
    are; returns their names. All ranks call this together. Raises UsageError if the checkpoint holds another model.
    """
    import torch.distributed.checkpoint as dcp  # slow to import

    # The weights are read into the model's own tensors.
    model = parallel.model
    weights = collect_weights(model)
    no_moments: dict[str, Any] = {name: {} for name in weights}
    tensors: dict[str, Any] = {"model": weights, "optimizer": no_moments}
    # Each rank asks for its own parts of the stored tensors.
    view = global_view(tensors, parallel.split)
    stored = stored_tensors(folder)
    averaged = {name for name in weights if f"ema.{name}" in stored}
    wanted: dict[str, dict[str, Any]] = {"model": {}, "ema": {}}
    lacking: list[str] = []
    for name, tensor in view["model"].items():
        is_stored = name in averaged or f"model.{name}" in stored
        if may_lack and not is_stored:
            lacking.append(name)
            continue
        kind = "ema" if name in averaged else "model"
        wanted[kind][name] = tensor
    try:
        dcp.load(wanted, storage_reader=dcp.HuggingFaceStorageReader(str(folder)), no_dist=True)
    except (dcp.CheckpointException, RuntimeError, ValueError) as error:
        cause: BaseException = error
        if isinstance(error, dcp.CheckpointException):
            cause = next(iter(error.failures.values()))[0]  # of the first rank that failed
        why = f"{first_line(cause)} (was it trained by another version of the code?)"
        raise UsageError(f"{folder}: does not hold the weights of this model: {why}") from None
    # The parts that this rank holds are taken out of what was read.
    take_parts(tensors, view, parallel.split)
    extra = read_marker(folder)["trainer"].get("extra", {})
    restore_weights(model, weights, extra)
    return lacking
