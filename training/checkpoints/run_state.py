"""What a run saves of its training, and what it begins with."""

import logging
from typing import Any

from torch import nn

from distributed.weight_shards import take_parts
from training.checkpoints.external_weights import is_external, load_external_weights, match_weights
from training.checkpoints.files import Marker, config_of
from training.checkpoints.model_state import collect_extra, later_names
from training.checkpoints.state import State, collect_state, restore_state
from training.checkpoints.trained_weights import find, load_weights_into
from training.step.step import TrainingStep
from utils import agreement, comm
from utils.schema import Config

log = logging.getLogger(__name__)


def collect_tensors(step: TrainingStep) -> State:
    """The tensors of this rank: of the model, the optimizer, random streams, and averaged weights if there are any."""
    tensors = collect_state(step.parallel.model, step.optimizer, step.streams)
    if step.average:
        tensors |= {"ema": step.average.weights}
    return tensors


def restore_tensors(step: TrainingStep, tensors: State, view: State, marker: Marker) -> None:
    """Put a checkpoint back into a step. tensors: of collect_tensors; view: their global view, into which it was read.

    marker: of the checkpoint.
    """
    # Tensors that the domain ranks split were gathered for the view, so each rank takes its part of what was read.
    take_parts(tensors, view, step.parallel.split)
    restored = tensors | {"random": view["random"]}
    extra = marker["trainer"].get("extra")
    restore_state(restored, step.parallel.model, step.optimizer, step.streams, extra)


def collect_named_state(model: nn.Module) -> dict[str, Any]:
    """Extra states and further names of weights, of all ranks: each stage of a pipeline has its own."""
    found: dict[str, Any] = {"extra": {}, "tied": {}}
    own = collect_extra(model), later_names(model)
    # The first rank that has a name is the one whose state counts.
    for extra, tied in reversed(comm.gather(own)):
        found["extra"] |= extra
        found["tied"] |= tied
    return found


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
