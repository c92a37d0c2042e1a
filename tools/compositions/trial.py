"""A composition on its ranks: a few steps of training, what they gave, and what the ranks held and sent."""

import gc
import hashlib
import logging
import warnings
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tools.instruments.ranks import Case, Process, use_mesh
from tools.layout_check.record import part_of_rank
from tools.layout_check.recording import drop_rounding, evaluate, random_batches
from tools.layout_check.saving import load_state, save_state
from tools.layout_check.wide import build_wide_step, quick_compilation, wide_casts
from tools.planner.trace import observe_step
from tools.planner.validate import counts
from training.checkpoints.folder import CheckpointFolder
from training.step.step import TrainingStep
from utils import agreement, comm
from utils.errors import UsageError

STEPS = 4
HALF = STEPS // 2  # after which a composition that is resumed is stopped
TRIALS_KEPT = 8  # whose models may wait to be freed


@dataclass(frozen=True)
class Trial:
    """What ranks are to do. steps: the first, and the one after the last. wide: in float64, without rounding.

    folder: for checkpoints. saves, loads: whether the state is saved at the end, or read at the beginning. counts:
    whether messages, memory and FLOP of one more step are counted.
    """

    case: Case
    start: int = 0
    stop: int = STEPS
    wide: bool = True
    folder: Path | None = None
    saves: bool = False
    loads: bool = False
    counts: bool = False


@dataclass
class Outcome:
    """What a rank has to tell. refused: the line with which it refused to begin; "" where it did not.

    losses, norms: of each step, over all ranks. validation: the loss after the last step, in evaluation. apart: names
    of weights and buffers that are not the same on ranks that hold copies. counted: see tools.planner.validate.counts.
    """

    refused: str = ""
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    validation: float = 0.0
    apart: list[str] = field(default_factory=list)
    counted: Counter[Any] | None = None


def try_out(rank: Process, trial: Trial) -> Outcome:
    """On a rank: train as a Trial says. Raises whatever is no refusal."""
    if "frozen" not in rank.kept:  # what is imported need not be looked at again by each collection
        gc.freeze()
        rank.kept["frozen"] = True
        logging.getLogger("torch").setLevel(logging.ERROR)  # its advice on speed, for each of many trials
    dtype = torch.float64 if trial.wide else torch.float32
    torch.set_default_dtype(dtype)
    try:
        silence = warnings.catch_warnings(action="ignore")  # those of torch, many times over
        with quick_compilation(trial.case.config), silence:
            use_mesh(rank, trial.case.layout)
            casts = wide_casts() if trial.wide else nullcontext()
            with casts:
                return train(rank, trial)
    finally:
        torch.set_default_dtype(torch.float32)
        collect_at_times(rank)


def collect_at_times(rank: Process) -> None:
    """Free the models of earlier trials, which are in cycles, each time that there are some."""
    trials = rank.kept.get("trials", 0) + 1
    rank.kept["trials"] = trials
    # To look through all objects takes as long as a small trial.
    if trials % TRIALS_KEPT == 0:
        gc.collect()


def train(rank: Process, trial: Trial) -> Outcome:
    """Build a training, or refuse it; make its steps, and look at what is there at the end."""
    # A rank that refuses alone would leave the others waiting, so all of them refuse.
    config = trial.case.config
    try:
        step = agreement.raise_on_all_ranks(lambda: build_wide_step(config, rank.device))
        step.task.check_model()
    except UsageError as refusal:
        return Outcome(refused=str(refusal))
    folder = checkpoints(rank, trial)
    if trial.loads and folder:
        load_state(step, folder)
    hooks = []
    if trial.wide:  # in half precision nothing is zero but for rounding
        model = step.parallel.model
        hooks.append(step.optimizer.register_step_pre_hook(lambda *_: drop_rounding(model)))
    losses = []
    norms = []
    batch = None
    for i, batch in enumerate(random_batches(step, trial.start, trial.stop), trial.start):
        try:
            output = step(i, *batch, log_norm=True)
        except UsageError as refusal:
            if i == trial.start and not trial.loads:  # the first operation that cannot be done
                return Outcome(refused=str(refusal))
            raise
        losses.append(output.loss.clone())
        assert output.grad_norm_squared is not None
        norms.append(output.grad_norm_squared)
    assert batch is not None
    # A loss is the mean over the ranks. The squares of the norms of their parts add up.
    mean_losses = comm.all_reduce(torch.stack(losses)) / comm.world_size()
    squares = comm.all_reduce(torch.stack(norms).double())
    outcome = Outcome(losses=mean_losses.tolist(), norms=squares.sqrt().tolist())
    if trial.saves and folder:
        save_state(step, folder, trial.stop)
    outcome.validation = validate(step, *batch)
    outcome.apart = replicas_apart(step)
    if trial.counts:
        for hook in hooks:  # its messages are not those of a run
            hook.remove()
        step(trial.stop, *batch)  # the validation has left parameters gathered
        outcome.counted = counts(observe_step(step, *batch))
    return outcome


def checkpoints(rank: Process, trial: Trial) -> CheckpointFolder | None:
    """The folder of checkpoints of a trial. It keeps its process group, which is made once."""
    if trial.folder is None:
        return None
    key = f"checkpoints in {trial.folder}"
    if key not in rank.kept:
        rank.kept[key] = CheckpointFolder(trial.folder, keep=1)
    return rank.kept[key]


@torch.no_grad()
def validate(step: TrainingStep, x: Tensor, y: Tensor) -> float:
    """The loss of a prediction of one step in evaluation, with averaged weights where there are any."""
    prediction = evaluate(step, x)
    if step.task.forecasts:
        y = y[:, : step.config.n_out_channels]
    with step.autocast():
        loss = step.task.loss(prediction, y, comm.get_group("image"))
    step.parallel.model.train()
    return (comm.all_reduce(loss.double()) / comm.world_size()).item()


@torch.no_grad()
def replicas_apart(step: TrainingStep) -> list[str]:
    """Names of the weights and buffers that are not the same, bit for bit, on ranks that hold copies of them."""
    split = step.parallel.split
    held: dict[str, tuple[Any, bytes]] = {}
    for name, value in [*step.parallel.model.named_parameters(), *step.parallel.model.named_buffers()]:
        part = part_of_rank(value, split.specs.get(name))
        place: list[int] = []  # among the ranks that hold other parts
        if name in split.dims:
            place.append(comm.get_rank("tp"))
        if part.spec is not None:
            place += [comm.get_rank("domain_lat"), comm.get_rank("domain_lon")]
        # Bytes are compared: two NaN are the same, and 0 and -0 are not.
        raw = part.value.cpu().contiguous().flatten().view(torch.uint8)
        held[name] = tuple(place), hashlib.sha256(raw.numpy().tobytes()).digest()
    of_places: dict[tuple[str, Any], set[bytes]] = {}
    # Ranks of one place hold copies, so they must have one digest.
    for of_rank in comm.gather(held):
        for name, (where, digest) in of_rank.items():
            of_places.setdefault((name, where), set()).add(digest)
    return sorted({name for (name, _), digests in of_places.items() if len(digests) > 1})
