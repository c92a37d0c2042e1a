"""Weights that another program has written, taken into a model of any layout: `--init_from FILE`.

A file is mapped into memory, and each rank copies from it only its own part of each tensor. Names are matched exactly,
after `--init_map` has changed them. Pickled files are read as tensors alone: no code in them is run.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from distributed.split import Split
from distributed.weight_shards import fill_weights
from training.checkpoints.files import MARKER
from training.models.build import build_model, initial_weights
from utils.choices import choose
from utils.errors import UsageError, reported_as_usage_error
from utils.files import read_text
from utils.schema import Config
from utils.yaml_files import parse_yaml

NESTED = "state_dict", "model_state_dict", "model", "module"  # where training programs keep the weights in their files
SHOWN = 6  # names of a list


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
