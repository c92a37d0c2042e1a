"""--deterministic: the same numbers in every repetition, or one line that says what stands against it."""

import os

import pytest
import torch
from torch import nn

import train
from tests.support.refusals import refusal
from training import start
from training.assembly import build_step, random_batch
from training.run.loggers import FILE_NAME, read_metrics
from training.step import determinism, step
from training.step.determinism import make_repeatable, prepare_environment
from utils import connection

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def as_before(monkeypatch, tiny_config):
    """What a process has set for itself ends with the test."""
    for name in (determinism.CUBLAS, "TORCHINDUCTOR_DETERMINISTIC"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    yield
    make_repeatable(tiny_config())


def switches():
    """What is switched in torch."""
    return {
        "algorithms": torch.are_deterministic_algorithms_enabled(),
        "only warns": torch.is_deterministic_algorithms_warn_only_enabled(),
        "cuDNN's attention": torch.backends.cuda.cudnn_sdp_enabled(),
        "flash attention": torch.backends.cuda.flash_sdp_enabled(),
    }


def test_it_takes_repeatable_kernels_and_no_attention_of_cudnn_and_gives_both_back(tiny_config):
    before = switches()
    build_step(tiny_config(deterministic=True), CPU)
    assert switches() == before | {"algorithms": True, "cuDNN's attention": False}
    assert before["cuDNN's attention"] and before["flash attention"]
    build_step(tiny_config(), CPU)
    assert switches() == before


def test_what_a_user_has_switched_off_stays_off(tiny_config):
    torch.backends.cuda.enable_cudnn_sdp(False)
    build_step(tiny_config(), CPU)
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)


def test_the_workspace_of_cublas_is_there_before_the_device_is_used(tiny_options, monkeypatch):
    seen = []

    def init(*_):
        seen.append(os.environ.get("CUBLAS_WORKSPACE_CONFIG"))
        return CPU

    monkeypatch.setattr(connection, "connect", init)
    start.start("train.py", tiny_options(), None)
    start.start("train.py", tiny_options(deterministic=True), None)
    assert seen == [None, ":4096:8"]


def test_a_workspace_that_does_not_repeat_its_numbers_is_refused(tiny_config, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    prepare_environment(tiny_config(deterministic=True))
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    prepare_environment(tiny_config())
    with refusal("--deterministic: CUBLAS_WORKSPACE_CONFIG=:0:0 in the environment .*: unset it, or set :4096:8"):
        prepare_environment(tiny_config(deterministic=True))


def test_a_repeated_run_gives_equal_numbers(tiny_options, tmp_path):
    words = {"num_iters": 6, "log_every": 1, "warmup": 0, "deterministic": True}
    losses = []
    for name in ("first", "second"):
        assert train.main(tiny_options(run_num=name, **words)) is None
        readings = read_metrics(tmp_path / "logs/quick" / name / FILE_NAME.format(0))
        losses.append([reading["Loss/train"] for reading in readings])
    assert losses[0] == losses[1] and len(losses[0]) == 6


class Unrepeatable(nn.Module):
    """Takes an operation whose result depends on the order of threads."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        y = self.model(x)
        places = torch.zeros(2, dtype=torch.long)
        y.detach().clone().put_(places, torch.ones(2))
        return y


def test_an_operation_without_a_repeatable_kernel_is_named(tiny_config, monkeypatch):
    config = tiny_config(deterministic=True)

    def run_step(self, x, y, log_norm):
        return step.StepOutput(Unrepeatable(self.parallel.module)(x).sum(), None)

    monkeypatch.setattr(step.TrainingStep, "run_step", run_step)
    built = build_step(config, CPU)
    x, y = random_batch(built.task, CPU)
    with refusal("^--deterministic: put_ gives other numbers each time on this device"):
        built(0, x, y)
    make_repeatable(tiny_config())
    assert built(0, x, y).loss.isfinite()
