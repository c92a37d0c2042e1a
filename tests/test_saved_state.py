"""Whatever a model keeps is in its checkpoints once, and comes back under any layout; what cannot be is refused."""

from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file

from tests.support.layout_parity import build, check_chain, check_in_double, train_from, train_steps
from tests.support.marks import slow_but, slow_rows_but
from tests.support.refusals import refusal
from tests.test_training import check_resume, run  # noqa: F401  # a fixture
from tools.checkpoint import export
from training.checkpoints.state import collect_state, make_moments, restore_state
from training.checkpoints.weights import find, stored_tensors


def own(name):
    return f"tests.support.stateful_models:{name}"


def options_of(**arguments):
    return {"model": own("Everything"), "img_size": [11, 14], "patch_size": 1, "model_args": arguments}


STATEFUL = [
    {"model": own("Everything")},
    {"model": own("LayerDrop"), "model_args": "{by: numpy}"},
    {"model": "unet", "model_args": "{width: 4}", "enable_fused": True, "enable_channels_last": True},
]


@pytest.mark.parametrize(
    "options",
    slow_but(STATEFUL[:1], STATEFUL, "other things that a model keeps"),
    ids=["state of all kinds", "drawn layers", "fused, channels last"],
)
def test_a_stopped_run_continues_bit_for_bit(run, monkeypatch, options):  # noqa: F811
    check_resume(run, monkeypatch, 3, options | {"num_iters": 6, "checkpoint_every": 3})


def test_a_checkpoint_holds_a_weight_once_and_an_exported_file_under_every_name(run, tmp_path):  # noqa: F811
    folder = run(model=own("Everything"), num_iters=2, ema=0.5).folder
    stored = stored_tensors(find(folder)[0])
    assert "model.first.weight" in stored and "ema.first.weight" in stored
    assert not [name for name in stored if "second.weight" in name or "again" in name]
    export(folder, tmp_path / "model.safetensors")
    exported = load_file(tmp_path / "model.safetensors")
    for name in ("second.weight", "again.weight"):
        assert torch.equal(exported[name], exported["first.weight"])
    assert torch.equal(exported["again.bias"], exported["first.bias"])
    assert exported["count"] == 2 and exported["empty"].shape == (0, 3)


def test_a_run_starts_from_weights_that_have_two_names(run, tmp_path):  # noqa: F811
    first = run(model=own("Everything"), model_args="{draws: false, keeps: false}", num_iters=3, run_num="first")
    export(first.folder, tmp_path / "model.safetensors")
    told = {"model": own("Everything"), "model_args": "{draws: false, keeps: false}", "num_iters": 1, "lr": 1e-12}
    for number, source in enumerate((first.folder, tmp_path / "model.safetensors")):
        again = run(run_num=str(number), init_from=str(source), warmup=0, **told)
        assert again.summary["rmse"] == pytest.approx(first.summary["rmse"], rel=1e-4)


CHAINS = [
    (options_of(), ["serial", "domain2", "domain3", "serial"]),
    (options_of(draws=False, keeps=False), ["serial", "dp2,data_parallel=zero1", "dp2", "domain2xdp2", "serial"]),
]


@pytest.mark.parametrize(
    ("options", "layouts"), slow_rows_but([0], CHAINS, "weights with two names"), ids=["buffers", "shared weights"]
)
def test_a_checkpoint_goes_on_under_any_other_layout(ranks, tiny_config, tmp_path, options, layouts):
    check_chain(ranks, tiny_config, layouts, options, tmp_path)


def in_one_go(config, stops):
    """Losses of a training that makes its buffers ready to be saved at each stop, as a run does."""
    step, losses = build(config), []
    for start, stop in pairwise([0, *stops]):
        losses.append(train_steps(step, config, start, stop))
        step.parallel.share_buffers()
    return torch.cat(losses)


def in_parts(config, folder, stops):
    """The same from a checkpoint at each stop."""
    losses = [train_from(config, folder, start, stop) for start, stop in pairwise([0, *stops])]
    return torch.cat(losses)


def test_ranks_that_share_an_image_resume_bit_for_bit(ranks, tiny_config, tmp_path):
    """Buffers that became split, and draws of numpy and Python, are those of the uninterrupted run."""
    config = tiny_config(**options_of(), domain_parallel=2)
    whole = ranks(2, in_one_go, config, [3, 6])
    parts = ranks(2, in_parts, config, tmp_path, [3, 6])
    assert all(torch.equal(one, other) for one, other in zip(whole, parts, strict=True))


REFUSED = {
    "Sparse": r"could not be saved: model.graph: is a sparse_coo tensor, and only dense ones can be written",
    "Wide": r"could not be saved: model.waves: a tensor of complex128 cannot be written and read back",
    "Unspeakable": r"the model's state '_extra_state' is a dict that no checkpoint can hold",
    "Growing": r"the model's state 'history' was \[1\] float32 before the first step and is \[2\] float32 now",
}


@pytest.mark.parametrize("name", slow_but(["Sparse", "Growing"], REFUSED, "other state that no checkpoint can hold"))
def test_what_cannot_be_saved_ends_the_run_at_its_beginning(run, tmp_path, name):  # noqa: F811
    with refusal(REFUSED[name]):
        run(model=own(name), checkpoint_every=1000, num_iters=12)
    assert not list((tmp_path / "logs/quick/00/checkpoints").glob("iter-*"))


def test_moments_keep_the_strides_of_their_weights():
    model = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, fused=True)
    kept = collect_state(model, optimizer)
    kept["optimizer"]["weight"]["exp_avg"] = torch.randn(4, 3, 3, 3)
    restore_state(kept, model, optimizer)
    moment = optimizer.state[model.weight]["exp_avg"]
    assert moment.stride() == model.weight.stride()
    assert torch.equal(moment, kept["optimizer"]["weight"]["exp_avg"])


def test_moments_that_are_made_ahead_are_zero_and_change_no_weight():
    model = torch.nn.Linear(3, 2)
    before = model.weight.clone()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, weight_decay=0.5)
    make_moments(optimizer)
    assert torch.equal(model.weight, before) and model.weight.grad is None
    for state in optimizer.state.values():
        assert all(not value.any() for value in state.values())


@pytest.mark.parametrize("layout", slow_but(["domain2xtp2"], ["tp2", "domain2xtp2"], "tensor parallelism alone"))
def test_a_weight_that_two_blocks_share_is_split_once(ranks, tiny_config, layout):
    check_in_double(ranks, tiny_config, layout, {"model": own("SharedBlocks"), "img_size": [20, 24]})


@pytest.mark.parametrize(
    ("model", "option", "line"),
    [
        ("SharedOtherwise", "tensor_parallel", "'pos_drop.weight' and 'blocks.0.attn.proj.weight' are one weight"),
        ("SharedBlocks", "pipeline_parallel", "'blocks.0.attn.qkv.weight' and 'blocks.1.attn.qkv.weight' are one"),
    ],
)
def test_a_shared_weight_that_cannot_be_split_is_refused(ranks, tiny_config, model, option, line):
    config = tiny_config(model=own(model), img_size=[20, 24], gradient_accumulation=2, **{option: 2})
    with pytest.raises(AssertionError, match=f"UsageError: .*{line}"):
        ranks(2, build, config)
