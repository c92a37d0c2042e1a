"""Save the state of a training as a run does, and read it back into a training that begins anew."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from distributed.weight_shards import global_view
from training.checkpoints.folder import CheckpointFolder
from training.checkpoints.state import State, collect_named_state, collect_tensors, restore_tensors
from training.step.step import TrainingStep
from utils.errors import first_line


def save_state(step: TrainingStep, folder: CheckpointFolder, iteration: int) -> None:
    """Save weights, buffers, moments and averages of a training, on all its ranks together."""
    # Each data-parallel rank has running statistics of its own; a checkpoint holds those of the first one.
    step.parallel.share_buffers()
    view = global_view(collect_tensors(step), step.parallel.split)
    folder.save(iteration, storable(view), collect_named_state(step.parallel.model), wait=True)


def load_state(step: TrainingStep, folder: CheckpointFolder) -> None:
    """Read the newest state of a folder into a training, in any layout."""
    tensors = collect_tensors(step)
    view = global_view(tensors, step.parallel.split)
    marker = folder.load_newest(storable(view))
    # Every caller has saved a state before.
    assert marker is not None
    restore_tensors(step, tensors, view, marker)


def storable(view: State) -> State:
    """The same memory, as numbers that the format of checkpoints has: complex128 as pairs of float64."""

    # view_as_real shares the memory of its argument, so a checkpoint is read into the tensor itself.
    def pairs(value: Any) -> Any:
        is_wide = isinstance(value, Tensor) and value.dtype == torch.complex128
        return torch.view_as_real(value) if is_wide else value

    return tree_map(pairs, view)


def why_not_saved(step: TrainingStep, fresh: TrainingStep, path: Path) -> str:
    """Save a training, and read it back into a fresh one of the same config: "" where that goes well, else the reason.

    path: a folder for it, the same on all ranks. The fresh training has the state then.
    """
    # One state is enough, since it is read back at once.
    folder = CheckpointFolder(path, keep=1)
    try:
        save_state(step, folder, 1)
        load_state(fresh, folder)
    except Exception as error:  # whatever a model's own tensors lead to
        return f"{type(error).__name__}: {first_line(error)}"
    return ""
