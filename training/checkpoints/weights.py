"""The weights that a run starts from, loaded into a model of any layout: of a trained run, or of another program.

`--init_from FILE` takes a file of another program. It is mapped into memory, and each rank copies from it only its own
part of each tensor. Names are matched exactly, after `--init_map` has changed them. Pickled files are read as tensors
alone: no code in them is run.
"""

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from distributed.parallel_model import ParallelModel
from distributed.split import Split
from distributed.weight_shards import fill_weights, global_view, take_parts
from training.checkpoints.files import MARKER, CheckpointError, Marker, config_of, read_losses, read_marker, verify
from training.checkpoints.folder import CheckpointFolder, first_whole
from training.checkpoints.state import collect_weights, restore_weights
from training.models.build import build_model, initial_weights
from training.step.step import TrainingStep
from utils import agreement
from utils.choices import choose
from utils.command_line import option_words
from utils.config import differing_keys
from utils.errors import UsageError, first_line, reported_as_usage_error
from utils.files import read_text
from utils.schema import Config
from utils.yaml_files import parse_yaml

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

log = logging.getLogger(__name__)
NESTED = "state_dict", "model_state_dict", "model", "module"  # where training programs keep the weights in their files
SHOWN = 6  # names of a list


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


def start_from(path: str, config: Config, step: TrainingStep) -> None:
    """Take the weights of a checkpoint, and nothing else of it, or those of another program's file.

    Raises UsageError, on every rank, where they do not fit the model.
    """
    model = step.parallel.model
    if is_external(path):
        found = agreement.raise_on_all_ranks(lambda: match_weights(config))
        load_external_weights(model, step.parallel.split, config, found)
        for line in found.misfits():
            log.info("Initial weights: %s", line)
    else:
        folder, marker = agreement.on_main(lambda: find(path, "best"))
        # An ensemble may begin as a single forecast, which had no weights for noise.
        trained = config_of(marker, str(folder))
        gains_noise = config.noise_of_model > 0 and trained.noise_of_model == 0
        new = load_weights_into(step.parallel, folder, may_lack=gains_noise)
        if new:
            log.info("Initial weights: drawn for noise (%d): %s", len(new), ", ".join(new))
        if trained.noise_of_model and not config.noise_of_model:
            log.info("Initial weights: those for noise are left out, since a single forecast takes none")
        path = str(folder)
    # An average that began with drawn weights would drag these towards them.
    if step.average:
        step.average.restart()
    log.info("Initial weights are those of %s", path)


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


class Weights(NamedTuple):
    """Tensors of a file by their names in the model, and what does not fit.

    partly: weights of convolutions with other input channels, of which the first ones are taken.
    missing, unexpected, reshaped: names of the model and of the file.
    """

    whole: dict[str, Tensor]
    partly: dict[str, Tensor]
    missing: list[str]
    unexpected: list[str]
    reshaped: list[str]

    def misfits(self) -> list[str]:
        """A line for each kind of name that does not fit."""
        kinds = {
            "missing": self.missing,
            "unexpected": self.unexpected,
            "of another shape": [*self.partly, *self.reshaped],
        }
        return [f"{kind} ({len(names)}): {_listed(names)}" for kind, names in kinds.items() if names]


def is_external(path: Path | str) -> bool:
    """Tell whether a path holds weights of another program: a file, or a folder of .safetensors without a marker."""
    path = Path(path)
    if path.is_file():
        return True
    is_our_checkpoint = (path / MARKER).exists()
    return any(path.glob("*.safetensors")) and not is_our_checkpoint


def match_weights(config: Config) -> Weights:
    """The weights of `config.init_from`, matched with the model of the config.

    Raises UsageError where the file cannot be read, a pattern of `init_map` matches nothing, nothing fits, or where
    something does not fit and init_missing is `error`.
    """
    path = Path(config.init_from or "")
    # The file's tensors, by the names that our model would give them.
    stored = _renamed(read_tensors(path), config.init_map)
    model = build_model(config)
    state = model.state_dict(keep_vars=True)
    wanted = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    # A parameter that several modules share is known by its first name.
    first_names: dict[int, str] = {}
    known = {name: first_names.setdefault(id(value), name) for name, value in wanted.items()}

    unexpected = [name for name in stored if name not in known]
    found = Weights(whole={}, partly={}, missing=[], unexpected=unexpected, reshaped=[])
    for name, value in stored.items():
        if name not in known:
            continue
        shape = wanted[name].shape
        # Names of one tied weight must agree.
        other = found.whole.get(known[name])
        if other is not None and not torch.equal(other, value):
            raise UsageError(
                f"{path}: '{known[name]}' and '{name}' are one weight of model {config.model}, but differ in this "
                "file: leave one of them out by --init_map"
            )
        if value.shape == shape:
            found.whole[known[name]] = value
        elif _differs_in_input_channels(value.shape, shape):
            found.partly[known[name]] = value
        else:
            found.reshaped.append(name)
    # Whatever the file does not fill is missing.
    there = {*found.whole, *found.partly, *found.reshaped}
    for name in dict.fromkeys(known.values()):
        if name not in there:
            found.missing.append(name)
    # Not one fits: the names are those of another kind of model.
    if not found.whole:
        raise UsageError(
            f"{path}: none of its tensors ({_listed(list(stored))}) fits model {config.model} "
            f"({_listed(list(wanted))}): --init_map gives them other names"
        )
    forbids = choose("init_missing", config.init_missing, {"error": True, "draw": False})
    problems = found.misfits() if forbids else []
    if problems:
        title = f"{path}: does not fit model {config.model} (--init_missing draw takes what fits):"
        raise UsageError("\n  ".join([title, *problems]))
    return found


def _differs_in_input_channels(stored: torch.Size, wanted: torch.Size) -> bool:
    """Tell whether two shapes are of the same convolution, (out, in, *kernel), but for their input channels."""
    is_convolution = len(stored) == len(wanted) > 3
    return is_convolution and (stored[0], stored[2:]) == (wanted[0], wanted[2:])


def load_external_weights(model: nn.Module, split: Split, config: Config, found: Weights) -> None:
    """Copy this rank's parts of the weights that were found into its part of the model. Nothing is communicated."""
    # Each rank copies its own part out of the mapped file.
    fill_weights(model, found.whole.items(), split)
    if found.partly:
        fill_weights(model, _with_new_channels(config, found.partly), split)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """{name: tensor} of a file, or of all .safetensors of a folder, mapped into memory. Raises UsageError."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    tensors: dict[str, Tensor] = {}
    for file in files:
        # Whatever a parser says of bytes that are none of its own.
        with reported_as_usage_error(Exception, f"{file}: cannot be read as weights"):
            tensors |= load_file(file) if file.suffix == ".safetensors" else _unpickled(file)
    return tensors


def _unpickled(file: Path) -> dict[str, Tensor]:
    try:
        content = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except RuntimeError:  # the format before torch 1.6 cannot be mapped
        content = torch.load(file, map_location="cpu", weights_only=True)
    # The weights are the file itself, or stand in it under a usual name.
    for name in (None, *NESTED):
        inner = content if name is None else content.get(name)
        if not inner:
            continue
        tensors = {key: value for key, value in inner.items() if isinstance(value, Tensor)}
        if tensors:
            return tensors
    raise ValueError(f"it holds no tensors by name, here or in {', '.join(NESTED)}")


def _renamed(
    tensors: dict[str, Tensor],
    path: str | None,
) -> dict[str, Tensor]:
    """The tensors by the names that a YAML file of {pattern: replacement} gives them; null leaves a tensor out."""
    if path is None:
        return tensors
    with reported_as_usage_error(ValueError, path):
        patterns = parse_yaml(read_text(path))
    if not isinstance(patterns, dict):
        raise UsageError(f"{path}: expected a mapping of regular expressions to replacements, like '^net\\.': ''")
    # Patterns act one after another, each on the names that the one before has left.
    for pattern, replacement in patterns.items():
        renamed: dict[str, Tensor] = {}
        matches = 0
        for name, value in tensors.items():
            with reported_as_usage_error((re.error, TypeError), f"{path}: '{pattern}: {replacement}'"):
                new, matched = re.subn(pattern, replacement or "", name)
            matches += matched
            if matched and replacement is None:
                continue
            if new in renamed:
                raise UsageError(f"{path}: '{pattern}: {replacement}' gives two tensors the name '{new}'")
            renamed[new] = value
        # A pattern without a match is a slip of the pen.
        if not matches:
            raise UsageError(f"{path}: '{pattern}' matches none of {_listed(list(tensors))}")
        tensors = renamed
    return tensors


def _with_new_channels(
    config: Config,
    partly: dict[str, Tensor],
) -> Iterator[tuple[str, Tensor]]:
    """(name, value) of weights of convolutions: the stored input channels, and behind them those that are drawn."""
    for name, drawn in initial_weights(config):
        if name in partly:
            stored = partly[name][:, : drawn.shape[1]].to(drawn.dtype)  # (out, in the file, *kernel)
            new = drawn.detach()[:, stored.shape[1] :]  # (out, the others, *kernel)
            yield name, torch.cat([stored, new], 1)


def _listed(names: list[str]) -> str:
    more = f", ... {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
