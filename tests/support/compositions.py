"""Compositions of `plan.py check --all` on the ranks of the tests, with faults planted into them."""

import time
from contextlib import nullcontext
from unittest import mock

import torch
from torch.distributed.fsdp import FSDPModule

from distributed.parallel_model import ParallelModel
from tests.support.layout_faults import after, forgotten_moments, identity, on_rank_1, patched
from tools.compositions import judge
from tools.compositions import trial as trial_module
from tools.compositions.choices import Choice
from tools.compositions.composition import Base, Composition
from tools.compositions.trial import try_out
from tools.instruments.ranks import Process
from utils.command_line import parse_command_line

CPU = torch.device("cpu")


def clip_unless_sharded():
    real = ParallelModel.clip_gradients

    def clip(parallel, *args):
        if not isinstance(parallel.module, FSDPModule):
            real(parallel, *args)

    return mock.patch.object(ParallelModel, "clip_gradients", clip)


def halved(parallel):
    for parameter in parallel.model.parameters():
        parameter.grad *= 0.5


def fails(*_):
    raise KeyError("no such bucket")


PLANTS = {
    "none": nullcontext,
    "a sum is left out": patched("distributed.layers.reduce_from_region", identity),
    "a rank has gradients of its own": after(ParallelModel, "finish_gradients", on_rank_1(halved)),
    "sharded ranks ignore clip_grad_norm": clip_unless_sharded,
    "an average is not updated": patched("training.step.averaged_weights.AveragedWeights.update", lambda *_: None),
    "no moments are read back": after(trial_module, "load_state", lambda step, _: forgotten_moments(step.optimizer)),
    "an error on all ranks": patched("distributed.data_parallel.replicate", fails),
}


def planted_trial(trial, plant):
    with PLANTS[plant]():
        return try_out(Process(device=CPU), trial)


def stuck(rank, trial):
    """A trial whose last rank does not answer."""
    if rank.number == trial.case.ranks - 1 > 0:
        time.sleep(1000)
    return try_out(rank, trial)


class PlantedTeams:
    """Teams of the test's ranks; on those of several a fault is planted."""

    def __init__(self, ranks, plant):
        self.ranks, self.plant, self.trials = ranks, plant, []

    def call(self, size, function, trial):
        assert function is judge.try_out
        self.trials.append(trial)
        return self.ranks(size, planted_trial, trial, self.plant if size > 1 else "none")


def composition_of(words, then=None):
    """The composition of some words: "dp=2 data_parallel=fsdp"; then: of the layout that goes on."""
    return Composition(choices(words), None if then is None else choices(then))


def choices(words):
    found = []
    for word in words.split():
        key, _, value = word.partition("=")
        takes_several = key in ("freeze", "forcings", "rollout_schedule")
        given = [f"--{key}", *value.split(";")] if takes_several else [f"--{word}"]
        options = {"dp": int(value)} if key == "dp" else parse_command_line(given, None, "config/ViT.yaml")
        found.append(Choice(word, {key: options[key]}))
    return tuple(found)


def verdict_of(ranks, words, then=None, plant="none"):
    with judge.Judge(Base([]), teams=PlantedTeams(ranks, plant), plans=False) as judged:
        return judged.judge(composition_of(words, then))
