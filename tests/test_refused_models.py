"""What models do that a layout would get wrong is one line; what only looks so is trained, and checked."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.support.layout_parity import build, check_in_double, train
from tests.support.marks import slow_but
from tests.support.refusals import refusal
from tools.layout_check.saving import why_not_saved
from training.models.build import build_model
from training.models.info import inspect_model
from utils.errors import UsageError

HERE = "tests.test_refused_models"
SIZES = {"img_size": [16, 8], "patch_size": 4, "embed_dim": 8, "global_batch_size": 4}


class Clamped(nn.Module):
    """Its forward pass keeps a weight within bounds."""

    def __init__(self, in_channels, out_channels, by_data=False):
        super().__init__()
        self.a = nn.Conv2d(in_channels, out_channels, 1)
        self.by_data = by_data

    def forward(self, x):
        weight = self.a.weight.data if self.by_data else self.a.weight
        with torch.no_grad():
            weight.clamp_(-0.05, 0.05)
        return self.a(x)


class Renormed(nn.Module):
    """An embedding of torch that writes to its weight."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.a = nn.Conv2d(in_channels, out_channels, 1)
        self.table = nn.Embedding(6, out_channels, max_norm=0.5)

    def forward(self, x):
        number = torch.tensor([3], device=x.device)
        return self.a(x) + self.table(number).view(1, -1, 1, 1)


class ClampedLater(nn.Module):
    """Keeps a weight within bounds where the image is not all zeros, as it is when a model is looked at."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.first = nn.Conv2d(in_channels, in_channels, 1)
        self.scale = nn.Parameter(torch.ones(in_channels, 1, 1))
        self.a = nn.Conv2d(in_channels, out_channels, 1)

    def forward(self, x):
        if x.abs().sum() > 0:
            with torch.no_grad():
                self.scale.clamp_(-0.05, 0.05)
        return self.a(self.first(x) * self.scale)


class Made(nn.Module):
    """Makes a weight, or a layer, where it sees the first image. attribute: which."""

    def __init__(self, in_channels, out_channels, attribute):
        super().__init__()
        self.a = nn.Conv2d(in_channels, out_channels, 1)
        self.attribute, self.scale, self.layer = attribute, None, None

    def forward(self, x):
        if self.attribute == "scale" and self.scale is None:
            self.scale = nn.Parameter(torch.ones(x.shape[1], 1, 1, device=x.device))
        if self.attribute == "layer" and self.layer is None:
            self.layer = nn.Conv2d(x.shape[1], x.shape[1], 1, device=x.device)
        return self.a(x)


class Listed(nn.Module):
    """Layers in a container that nn.Module does not see. kind: of container."""

    def __init__(self, in_channels, out_channels, kind="list"):
        super().__init__()
        layers = [nn.Conv2d(in_channels, 4, 1), nn.Conv2d(4, out_channels, 1)]
        self.layers = {"list": list, "tuple": tuple, "set": set, "dict": lambda all: {"two": all}}[kind](layers)
        self.scale = nn.Parameter(torch.ones(out_channels, 1, 1))

    def forward(self, x):
        return x * self.scale


class Named(nn.Module):
    """A plain list beside the registered modules, and of modules without weights, and of tensors."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.a = nn.Conv2d(in_channels, out_channels, 1)
        self.order = [self.a]
        self.activations = [nn.GELU()]
        self.offsets = [torch.ones(out_channels, 1, 1)]

    def forward(self, x):
        for module in (*self.order, *self.activations):
            x = module(x)
        return x + self.offsets[0]


class Found(nn.Module):
    """Asks where a condition holds, also with two operands."""

    def __init__(self, in_channels, out_channels, indices=True):
        super().__init__()
        self.a = nn.Conv2d(in_channels, out_channels, 1)
        self.indices = indices

    def forward(self, x):
        h = self.a(x)
        if self.indices:
            return h + 0 * len(torch.where(h.detach() > 0)[0])
        return torch.where(h > 0, h, 0.5 * h)


class Compiled(nn.Module):
    """Compiles a layer by itself."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.a = nn.Conv2d(in_channels, out_channels, 1)
        self.a.compile(backend="eager")

    def forward(self, x):
        return self.a(x)


class CompiledFunction(nn.Module):
    """Compiles a function that its forward pass calls."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.a = nn.Conv2d(in_channels, out_channels, 1)
        self.activate = torch.compile(torch.relu, backend="eager")

    def forward(self, x):
        return self.activate(self.a(x))


class OfWholeTensors(nn.Module):
    """Chooses channels by their means, which every rank has whole, with operations that have no rule."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.a = nn.Conv2d(in_channels, out_channels, 1)

    def forward(self, x):
        h = self.a(x)
        means = h.mean((0, 2, 3))
        order = torch.nonzero(means.detach() > -100).squeeze(1)
        values, _ = torch.linalg.eigh(torch.outer(means, means) + torch.diag(means.detach() + 1))
        return h[:, order.flip(0)] + values.sum()


class Typed(nn.Module):
    """Names the type of its weights, and products of it do not promote; counts in an extra state."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.a = nn.Conv2d(in_channels, out_channels, 1, dtype=torch.float32)
        self.spectral = nn.Parameter(torch.ones(out_channels, out_channels, dtype=torch.cfloat) / 8)
        self.steps = 0

    def get_extra_state(self):
        return {"steps": self.steps}

    def set_extra_state(self, state):
        self.steps = state["steps"]

    def forward(self, x):
        self.steps += self.training
        modes = torch.fft.rfft(F.gelu(self.a(x)))
        return torch.fft.irfft(torch.einsum("bchw,cd->bdhw", modes, self.spectral), n=x.shape[-1])


def refused(config):
    """The line with which a layout refuses a model, "" where it does not."""
    try:
        build(config)
    except UsageError as error:
        return str(error)
    return ""


WRITES = [
    {"model": f"{HERE}:Clamped", "model_args": {"by_data": True}}, {"model": f"{HERE}:Clamped"},
    {"model": f"{HERE}:Renormed"},
]  # fmt: skip


@pytest.mark.parametrize("options", slow_but(WRITES[:1], WRITES, "other ways to write"), ids=str)
def test_a_weight_that_a_forward_pass_writes_to_is_not_gathered_for_it(ranks, tiny_config, options):
    for line in ranks(2, refused, tiny_config(**SIZES, **options, data_parallel="fsdp")):
        assert "forward pass writes to the weight" in line and "use ddp or zero1" in line
    for strategy in ("ddp", "zero1"):
        check_in_double(ranks, tiny_config, f"dp2,data_parallel={strategy}", SIZES | options)


@pytest.mark.parametrize("strategy", slow_but(["fsdp"], ["zero2", "fsdp"], "weights that stay gathered"))
def test_a_weight_that_only_some_passes_write_to_ends_the_run_that_would_lose_it(ranks, tiny_config, strategy):
    config = tiny_config(**SIZES, model=f"{HERE}:ClampedLater", data_parallel=strategy)
    for line in ranks(2, fails, config):
        assert "UsageError: the forward pass writes to the weight 'scale'" in line and "use ddp or zero1" in line
    check_in_double(ranks, tiny_config, "dp2,data_parallel=zero1", SIZES | {"model": f"{HERE}:ClampedLater"})


@pytest.mark.parametrize("attribute", ["scale", "layer"])
def test_a_weight_that_a_forward_pass_makes_is_named(tiny_config, attribute):
    with refusal(f"makes the weight '{attribute}.* in its forward pass, so no optimizer would train it"):
        inspect_model(tiny_config(**SIZES, model=f"{HERE}:Made", model_args={"attribute": attribute}))


@pytest.mark.parametrize("kind", ["list", "tuple", "set", "dict"])
def test_weights_in_a_plain_container_are_refused(tiny_config, kind):
    with refusal(f"'layers' is a plain {kind} that holds a Conv2d, whose weights nothing would train"):
        build_model(tiny_config(model=f"{HERE}:Listed", model_args={"kind": kind}))


def test_a_plain_list_of_registered_modules_is_none(ranks, tiny_config):
    check_in_double(ranks, tiny_config, "dp2,data_parallel=fsdp", SIZES | {"model": f"{HERE}:Named"})


def fails(config):
    """What a training step in a layout raises."""
    try:
        train(config, 1)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_indices_of_a_condition_have_no_rule_and_a_choice_between_two_has(ranks, tiny_config):
    options = SIZES | {"model": f"{HERE}:Found"}
    for line in ranks(2, fails, tiny_config(**options, domain_parallel=2)):
        assert "no rule for where" in line
    check_in_double(ranks, tiny_config, "domain2", options | {"model_args": {"indices": False}})


def test_a_model_that_compiles_a_layer_itself_is_not_split(ranks, tiny_config):
    for line in ranks(2, refused, tiny_config(**SIZES, model=f"{HERE}:Compiled", domain_parallel=2)):
        assert "module 'a' is compiled by the model itself" in line


def test_a_function_that_a_model_compiles_itself_is_named_by_its_place(ranks, tiny_config):
    options = SIZES | {"model": f"{HERE}:CompiledFunction"}
    lines = ranks(2, fails, tiny_config(**options, domain_parallel=2))
    if not any(lines):  # torch 2.11 traces into the rules of ShardTensor
        check_in_double(ranks, tiny_config, "domain2", options)
        return
    for line in lines:
        assert "UsageError: a function is compiled by the model itself (test_refused_models.py, line" in line


def test_what_every_rank_has_whole_needs_no_rule(ranks, tiny_config):
    check_in_double(ranks, tiny_config, "domain2", SIZES | {"model": f"{HERE}:OfWholeTensors"})


def test_the_check_widens_every_look_at_a_model(ranks, tiny_config):
    check_in_double(ranks, tiny_config, "dp2", SIZES | {"model": f"{HERE}:Typed"})


def test_the_check_saves_what_a_model_counts(tiny_config, tmp_path):
    config = tiny_config(**SIZES, model=f"{HERE}:Typed")
    trained, fresh = build(config), build(config)
    trained.parallel.model.steps = 7
    assert why_not_saved(trained, fresh, tmp_path) == ""
    assert fresh.parallel.model.steps == 7
