"""Three runs that go wrong, each by a fault planted here, and what `plan.py check` records of them: exercise 16.

The causes are not printed: to name them is the exercise.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
from torch import nn

from distributed import model_parallel
from distributed.collectives import as_group
from distributed.shard.core import halo
from tools.instruments.ranks import Case, Process, Teams
from tools.layout_check.check import cases_of, default_dtype, record_serially, train_layout
from tools.layout_check.differences import TOLERANCES, errors_of
from tools.layout_check.record import STAGES, Key
from tools.tables import format_table
from training.step import step
from utils import comm

OPTIONS = (
    "--config=quick",
    "--device=cpu",
    "--img_size",
    "16",
    "32",
    "--global_batch_size=4",
    "--embed_dim=32",
    "--depth=2",
    "--num_heads=2",
)
DTYPE = "float64"


class ConvNet(nn.Sequential):
    """A model whose second convolution needs two rows on either side: (B, C, H, W) -> (B, C', H, W)."""

    def __init__(self, in_channels: int, out_channels: int, width: int = 8):
        super().__init__()
        self.lift = nn.Conv2d(in_channels, width, 1)
        self.wide = nn.Conv2d(width, width, 5, padding=2)
        self.norm = nn.GroupNorm(2, width)
        self.act = nn.GELU()
        self.head = nn.Conv2d(width, out_channels, 1)


@contextmanager
def sum_left_out() -> Iterator[None]:
    """Tensor parallelism does not add up the terms of one layer."""
    real = model_parallel.tensor_parallel

    def tensor_parallel(model, *args):
        dims = real(model, *args)
        model.blocks[1].mlp.fc2.group = as_group(None)
        return dims

    with mock.patch.object(model_parallel, "tensor_parallel", tensor_parallel):
        yield


@contextmanager
def short_halo() -> Iterator[None]:
    """Rank 0 lacks the last row of what it borrows from rank 1, and has zeros there."""
    real = halo.HaloExchange._arrive

    def arrive(fetch):
        blocks = real(fetch)
        if comm.rank() == 0:
            for i, block in blocks.items():
                kept, lost = block.split([block.shape[fetch.dim] - 1, 1], fetch.dim)
                blocks[i] = torch.cat((kept, torch.zeros_like(lost)), fetch.dim)
        return blocks

    with mock.patch.object(halo.HaloExchange, "_arrive", arrive):
        yield


@contextmanager
def other_rate() -> Iterator[None]:
    """Rank 1 has another learning rate."""
    real = step.learning_rate

    def learning_rate(*args):
        factor = 1 + 0.5 * comm.rank()
        return real(*args) * factor

    with mock.patch.object(step, "learning_rate", learning_rate):
        yield


Fault = Callable[[], AbstractContextManager[None]]


class Run(NamedTuple):
    """A run on two ranks: its layout, its model, and the fault in it."""

    layout: str
    model: str
    fault: Fault


RUNS = {
    "tensor": Run("tp2", "vit", sum_left_out),
    "domain": Run("domain2", "exercises.checks.broken_runs:ConvNet", short_halo),
    "data": Run("dp2", "vit", other_rate),
}


def show() -> None:
    """Train all runs, and print where each differs from one device."""
    cases = {}
    for name, run in RUNS.items():
        cases[name] = cases_of([*OPTIONS, f"--model={run.model}"], [run.layout])
    config = cases["data"][0].config
    with tempfile.TemporaryDirectory() as folder, Teams(config) as teams:
        for name, (serial, case) in cases.items():
            file = Path(folder, name)
            teams.call(1, record_serially, serial, file, DTYPE)
            of_ranks = teams.call(case.ranks, errors, case, file, RUNS[name].fault)
            print(f"\n{name}: {RUNS[name].layout}\n\n{tables(of_ranks)}")
    print(f"\nThe largest differences, relative, in {DTYPE}; up to {TOLERANCES[DTYPE]:.0e} counts as equal.")


def errors(rank: Process, case: Case, file: Path, fault: Fault) -> dict[Key, float]:
    """On every rank: the errors of a case that is trained with a fault."""
    of_one_device = torch.load(file, weights_only=True)["parts"]
    with default_dtype(DTYPE):
        with fault():
            found = train_layout(rank, case).found
        found_errors, _ = errors_of(found, of_one_device, case.config)
    return found_errors


def tables(of_ranks: Sequence[dict[Key, float]]) -> str:
    """A table of the largest error in each stage, and one of all that is compared in the first that differs."""
    compared: dict[str, dict[str, list[float]]] = {stage: {} for stage in STAGES}
    for stage, name in of_ranks[0]:
        if stage not in compared:  # consulted for the cause of a difference alone
            continue
        compared[stage][name or "the model"] = [errors[stage, name] for errors in of_ranks]
    largest = {}  # {stage: [largest error of each rank]}
    for stage, parts in compared.items():
        if parts:
            largest[stage] = [max(of_rank) for of_rank in zip(*parts.values(), strict=True)]
    differing = [stage for stage, errors in largest.items() if max(errors) > TOLERANCES[DTYPE]]
    first = differing[0]
    return f"{table('stage', largest)}\n\n{table(f'{first}, in order', compared[first])}"


def table(title: str, rows: Mapping[str, Sequence[float]]) -> str:
    """Lines of a table with a column for each rank."""
    columns = {title: "", "rank 0": ".1e", "rank 1": ".1e"}
    cells = [[name, *row] for name, row in rows.items()]
    return format_table(columns, cells)
