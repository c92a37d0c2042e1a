"""Names in a config: each stands for something, or is refused. An optimizer or a loss is one entry of a table."""

import inspect
from typing import Literal, get_args, get_origin

import pytest
import torch
from torch import nn

from tests.support.layout_parity import build, ranks_and_options, train_steps
from tests.support.refusals import refusal
from tools.planner import textbook
from training.checkpoints.state import make_moments
from training.checkpoints.weights import check_start
from training.forecasting.losses import relative_l2
from training.models.build import initial_weights
from training.run.profiling import build_profiler
from training.tasks import build_task
from utils import comm
from utils.choices import LOSSES, OPTIMIZERS, LossKind, OptimizerKind, load
from utils.config import check_config, read_named_config
from utils.errors import UsageError
from utils.schema import Config

CPU = torch.device("cpu")
UNKNOWN = "unheard_of"
RADAM = OptimizerKind("torch.optim:RAdam", {"decoupled_weight_decay": True}, takes=("betas", "capturable"), moved=14)
NADAM = OptimizerKind(
    "torch.optim:NAdam", {"decoupled_weight_decay": True}, takes=("betas", "capturable"), initial={"mu_product": 1.0}
)
SGD = OptimizerKind("torch.optim:SGD", {"momentum": 0.9}, takes=("fused",), decouples=False, moments=1)
ADDED = {"RAdam": RADAM, "NAdam": NADAM, "SGD": SGD}
# Keys whose name is looked at in a layout or with other settings alone. All others are looked at on one device.
WHERE = {
    "data_parallel": "dp2", "gradient_compression": "dp2", "wrap_policy": "dp2,data_parallel=fsdp",
    "gather_dtype": "dp2,data_parallel=fsdp", "tp_backend": "tp2", "pp_schedule": "pp2", "cp_method": "cp2",
    "domain_method": "domain2", "domain_fallback": "domain2",
}  # fmt: skip
NEEDS_WEIGHTS = ("init_missing",)
ELSEWHERE = {"tracker"}  # a name of it is that of a package: tests/test_terminal.py


def names_of(annotation):
    """The names that a field of the schema allows, where it lists them."""
    kinds = get_args(annotation)
    return kinds if get_origin(annotation) is Literal and all(isinstance(kind, str) for kind in kinds) else ()


LISTED = [key for key, field in Config.model_fields.items() if names_of(field.annotation)]


def begin(config):
    """Whatever a run does with a config up to its first step."""
    check_start(config)
    comm.build_mesh(CPU, config.layout(comm.world_size()))
    build_task(config).loaders(CPU)
    build_profiler(config, CPU, None)
    train_steps(build(config), config, 0, 1)


@pytest.mark.parametrize("key", sorted({*LISTED, *WHERE} - ELSEWHERE))
def test_a_name_that_nothing_stands_for_is_refused(ranks, tiny_config, tmp_path, key):
    size, options = ranks_and_options(WHERE.get(key, "serial"))
    config = tiny_config(depth=2, num_heads=4, global_batch_size=4, warmup=0, **options)
    if key in NEEDS_WEIGHTS:
        torch.save(dict(initial_weights(config)), tmp_path / "weights.pt")
        config = config.model_copy(update={"init_from": str(tmp_path / "weights.pt")})
    config = config.model_copy(update={key: UNKNOWN})  # as if the schema had it
    if size == 1:
        with pytest.raises(UsageError, match=UNKNOWN):
            begin(config)
    else:
        with pytest.raises(AssertionError, match=f"Error: .*{UNKNOWN}"):
            ranks(size, begin, config)


@pytest.fixture
def added(monkeypatch, tiny_config):
    """Call with the name of an optimizer that is added, to get a config that names it."""
    for name, kind in ADDED.items():
        monkeypatch.setitem(OPTIMIZERS, name, kind)
    return lambda name, **options: tiny_config(**options).model_copy(update={"optimizer": name})


@pytest.mark.parametrize("decay", [None, 0.05])
def test_an_added_optimizer_is_itself(added, decay):
    config = added("RAdam", weight_decay=decay, warmup=0, lr_schedule="constant", betas=[0.8, 0.9])
    step = build(config)
    model = step.parallel.model
    twin = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    groups = []
    for name, parameter in twin.items():
        decays = decay and name.endswith(".weight") and "norm" not in name and "pos_embed" not in name
        groups.append({"params": [parameter], "weight_decay": decay if decays else 0.0})
    reference = torch.optim.RAdam(groups, lr=config.lr, betas=(0.8, 0.9), decoupled_weight_decay=True)

    def update_twin(*_):
        for name, parameter in model.named_parameters():
            twin[name].grad = parameter.grad.clone()
        reference.step()

    step.optimizer.register_step_pre_hook(update_twin)
    train_steps(step, config, 0, 8)  # rectified from the sixth step on
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), twin[name].detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", [*OPTIMIZERS, *ADDED])
def test_a_checkpoint_before_the_first_step_changes_nothing(added, name):
    if OPTIMIZERS[name].trains_matrices:
        return  # tests/test_muon.py
    config, values = added(name), []
    for is_saved in (False, True):
        step = build(config)
        if is_saved:
            make_moments(step.optimizer)
        train_steps(step, config, 0, 3)
        values.append([p.detach().clone() for p in step.parallel.model.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*values, strict=True))


@pytest.mark.parametrize("name", [*OPTIMIZERS, *ADDED])
def test_an_entry_says_what_its_class_takes_and_keeps(added, name):
    kind = OPTIMIZERS[name]
    known = inspect.signature(load(kind.build)).parameters
    takes = {option for option in ("betas", "fused", "capturable") if option in known}
    assert set(kind.takes) == takes - ({"capturable"} if kind.trains_matrices else set())
    if kind.trains_matrices:
        return
    config = added(name)
    step = build(config)
    make_moments(step.optimizer)
    for parameter, state in step.optimizer.state.items():
        moments = [value for value in state.values() if value.shape == parameter.shape and parameter.dim()]
        assert len(moments) == kind.moments
    (trace,) = textbook.textbook_traces(config, config.layout(1))
    parameters = sum(p.numel() for p in step.parallel.model.parameters())
    assert trace.memory["optimizer"] == pytest.approx(4 * kind.moments * parameters, rel=0.02)


def test_what_an_optimizer_lacks_is_refused(monkeypatch):
    monkeypatch.setitem(OPTIMIZERS, "Adam", SGD)
    settings = {"optimizer": "Adam"}
    for own, line in (
        ({"weight_decay": 0.1}, "weight_decay goes without optimizer Adam, which would add it to the gradient"),
        ({"enable_cuda_graphs": True}, "enable_cuda_graphs goes without optimizer Adam"),
    ):
        with refusal(line):
            check_config(quick() | settings | own, "quick", "test")
    monkeypatch.setitem(OPTIMIZERS, "Adam", RADAM)
    with refusal("enable_fused goes without optimizer Adam, which has no fused kernel"):
        check_config(quick() | settings | {"enable_fused": True}, "quick", "test")


def quick():
    return read_named_config("config/ViT.yaml", "quick")


def huber(prediction, target, weights, image_group):
    """A weighted loss that is added."""
    errors = nn.functional.huber_loss(prediction, target, reduction="none") * weights
    return errors.flatten(1).sum(1)


def test_an_added_loss_is_itself(monkeypatch, tiny_config):
    monkeypatch.setitem(LOSSES, "huber", LossKind("tests.test_choices:huber", is_weighted=True))
    config = tiny_config().model_copy(update={"loss": "huber"})
    task = build_task(config)
    task.loaders(CPU)
    _, y = task.random_batch(torch.Generator().manual_seed(0))
    prediction = y + torch.randn_like(y)
    expected = huber(prediction, y, task.weights(True, CPU), None).mean()
    torch.testing.assert_close(task.loss(prediction, y, None), expected)
    assert not torch.isclose(expected, relative_l2(prediction, y).mean())
