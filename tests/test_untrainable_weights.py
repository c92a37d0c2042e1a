"""Weights that no layout could train are refused in one line; what a loop of plain PyTorch would do is done."""

import functools
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.support.layout_parity import build, check_in_double
from tests.support.refusals import refusal
from training.forecasting.rollout import Rollout
from training.models.build import model_class
from training.models.info import inspect_model
from utils.errors import UsageError

HERE = "tests.test_untrainable_weights"
SIZES = {"img_size": [11, 14], "patch_size": 1}


class Base(nn.Module):
    """Convolutions around `middle`, which a class changes."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.first, self.last = nn.Conv2d(in_channels, 4, 1), nn.Conv2d(4, out_channels, 1)
        self.mid = nn.Conv2d(4, 4, 1)
        self.prepare()

    def prepare(self):
        pass

    def middle(self, x):
        return self.mid(x)

    def forward(self, x):
        return self.last(self.middle(F.gelu(self.first(x))))


class Hook(Base):
    def prepare(self):
        self.mid.weight.register_hook(lambda gradient: 0 * gradient)


class LaterHook(Base):
    def prepare(self):
        self.mid.weight.register_post_accumulate_grad_hook(lambda weight: None)


class Listed(Base):
    def prepare(self):
        self.kernels = [self.mid.weight]

    def middle(self, x):
        return F.conv2d(x, self.kernels[0])


class Bound(Base):
    def prepare(self):
        self.convolve = functools.partial(F.conv2d, weight=self.mid.weight)

    def middle(self, x):
        return self.convolve(x)


class OnMeta(Base):
    def prepare(self):
        self.mid = nn.Conv2d(4, 4, 1, device="meta")


class SparseGradients(Base):
    def prepare(self):
        self.table = nn.Embedding(3, 4, sparse=True)


class SparseWeight(Base):
    def prepare(self):
        self.table = nn.Parameter(torch.eye(4).to_sparse())


class Traced(Base):
    def prepare(self):
        with torch.device("cpu"):
            self.mid = torch.jit.trace(nn.Conv2d(4, 4, 1), torch.zeros(1, 4, 3, 3))


class Frozen(Base):
    def prepare(self):
        self.requires_grad_(False)


class Recurrent(Base):
    """torch's own list of weights is no list of the model's."""

    def prepare(self):
        self.rows = nn.GRU(4, 4, batch_first=True)

    def middle(self, x):
        rows, _ = self.rows(x.flatten(2).transpose(1, 2))
        return rows.transpose(1, 2).reshape_as(x)


class Empty(Base):
    def prepare(self):
        self.nothing = nn.Parameter(torch.zeros(0, 4))

    def middle(self, x):
        return self.mid(x) + self.nothing.sum()


class FixedNorm(Base):
    """Its norm stays as in evaluation."""

    def prepare(self):
        self.norm = nn.BatchNorm2d(4)

    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()

    def middle(self, x):
        return self.norm(self.mid(x))


class Gradient(Base):
    """Adds the gradient of a potential, which it computes in the forward pass."""

    def middle(self, x):
        with torch.enable_grad():
            if not x.requires_grad:
                x = x.detach().requires_grad_()
            potential = self.mid(x).tanh().sum()
            (gradient,) = torch.autograd.grad(potential, x, create_graph=True)
        return x + gradient


class ReadGradient(Gradient):
    """As Gradient, by its input; it reads a value too, so that no look at it is possible on the meta device."""

    def middle(self, x):
        is_large = x.abs().max().item() > 1e9
        return x if is_large else x + super().middle(x.detach())


class WrongWidth(Base):
    def middle(self, x):
        return F.linear(x, torch.ones(2, 3))


class OneByOne(Base):
    """Calls a module inside of torch.vmap."""

    def middle(self, x):
        weights = dict(self.mid.named_parameters())
        return torch.vmap(lambda sample: torch.func.functional_call(self.mid, weights, (sample,)))(x)


REFUSED = {
    "Hook": "the weight 'mid.weight' has a hook on its gradient, which would not be called",
    "LaterHook": "the weight 'mid.weight' has a hook on its gradient, which would not be called",
    "Listed": "'kernels' is a plain list that holds the weight 'mid.weight' too",
    "Bound": "'convolve' is a plain partial that holds the weight 'mid.weight' too",
    "OnMeta": "the weight 'mid.weight' is made on the meta device and has no values",
    "SparseGradients": "'table' has sparse gradients, which no rank reduces or clips: sparse=False",
    "SparseWeight": "the weight 'table' is sparse, and none is trained so: make it dense",
    "Traced": "'mid' is made by torch.jit, whose weights cannot be moved or split: use the module itself",
    "Frozen": "has no weight with requires_grad: nothing can be trained",
}


@pytest.mark.parametrize("name", REFUSED)
def test_weights_that_cannot_be_trained_are_refused(tiny_config, name):
    with refusal(REFUSED[name]):
        build(tiny_config(**SIZES, model=f"{HERE}:{name}"))


def line_of_refusal(config):
    with pytest.raises(UsageError) as error:
        build(config)
    return str(error.value)


def test_empty_weights_are_refused_where_they_would_be_shared_out(ranks, tiny_config):
    options = SIZES | {"model": f"{HERE}:Empty"}
    for line in ranks(2, line_of_refusal, tiny_config(**options, data_parallel="fsdp")):
        assert "fsdp cannot share out 'nothing', which has no elements: use ddp" in line
    build(tiny_config(**options))


@pytest.mark.parametrize("layout", ["dp2", "dp2,data_parallel=zero1"])
def test_empty_weights_are_trained_and_saved_where_they_stay_whole(ranks, tiny_config, layout):
    check_in_double(ranks, tiny_config, layout, SIZES | {"model": f"{HERE}:Empty"})


@pytest.mark.parametrize("name", ["Gradient", "ReadGradient", "Recurrent"])
def test_models_that_plain_torch_trains_are_looked_at(tiny_config, name):
    assert inspect_model(tiny_config(**SIZES, model=f"{HERE}:{name}")).output_shape == (1, 20, 11, 14)


def test_a_failure_inside_of_torch_is_told_by_the_line_of_the_model(tiny_config):
    with refusal(r"RuntimeError: .*\(.*test_untrainable_weights.py, line \d+\)"):
        inspect_model(tiny_config(**SIZES, model=f"{HERE}:WrongWidth"))


def test_a_module_is_called_inside_of_vmap(ranks, tiny_config):
    check_in_double(ranks, tiny_config, "dp2", SIZES | {"model": f"{HERE}:OneByOne"})


def test_a_model_is_put_into_training_mode_before_the_first_step(tiny_config):
    """By its own train(), which may leave a part as it is."""
    model = build(tiny_config(**SIZES, model=f"{HERE}:FixedNorm")).parallel.model
    assert model.training and not model.norm.training


@pytest.mark.parametrize("call", ["torch.set_default_dtype(torch.float64)", "torch.set_grad_enabled(False)"])
def test_a_module_that_changes_the_whole_program_is_refused(tmp_path, monkeypatch, call):
    (tmp_path / "global_change.py").write_text(f"import torch\n{call}\nclass Net(torch.nn.Module): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "global_change", raising=False)
    try:
        with refusal("global_change calls torch.set_default_dtype or torch.set_grad_enabled where it is imported"):
            model_class("global_change:Net")
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)


def test_a_state_that_the_model_has_overwritten_is_not_built_on(tiny_config):
    def writes(x):
        return x.mul_(2)

    x = torch.ones(1, 20, 4, 4)
    plain = Rollout(tiny_config())
    assert plain.forecast(writes, x.clone(), 1).eq(2).all()  # nobody needs the state of before
    change = Rollout(tiny_config(), change_scale=torch.ones(20, 1, 1))
    with refusal("the model writes to its input, of which the next state is made"):
        change.forecast(writes, x, 1)
