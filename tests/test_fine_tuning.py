"""Fine-tuning: weights of another program, frozen weights, several input frames; on one device and in every layout."""

import h5py
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

import forecast
import train
from distributed.weight_shards import global_view
from tests.support.layout_parity import (
    CPU,
    build,
    check_chain,
    check_training,
    collectives_of_a_step,
    ranks_and_options,
)
from tests.support.marks import slow_but
from tests.test_forecast import no_pictures, results_in
from tools.checkpoint import load_weights
from tools.forecasting.dated_frames import run_config
from training.assembly import build_parallel
from training.checkpoints.state import collect_state
from training.checkpoints.weights import load_external_weights, match_weights
from training.models.build import build_model
from utils import comm
from utils.errors import UsageError

FROZEN = {
    "global_batch_size": 12, "depth": 3, "num_heads": 4,
    "freeze": ["patch_embed.*", "blocks.[01].*", "*.bias", "!blocks.0.attn.proj.*"],
    "num_iters": 50, "clip_grad_norm": 0.01,
}  # fmt: skip
LAYOUTS = (
    "dp2,gradient_accumulation=2",
    "dp2,data_parallel=zero1",
    "dp2,data_parallel=zero2",
    "dp3,data_parallel=fsdp",
    "tp2,sequence_parallel",
    "cp3",
    "domain3",
    "domain1x2xdp2,data_parallel=fsdp",
)
QUICK = LAYOUTS[3], LAYOUTS[6]


@pytest.mark.parametrize("layout", slow_but(QUICK, LAYOUTS, "other ways to hold a weight that is not trained"))
def test_ten_steps_with_frozen_weights_equal_those_of_one_device(ranks, tiny_config, layout):
    check_training(ranks, tiny_config, layout, FROZEN)


def held_of(config):
    """Names of frozen and of trained weights, bytes of optimizer state and of the trained weights; of this rank."""
    step = build(config)
    x, y = step.task.random_batch(torch.Generator().manual_seed(1))
    step(0, x[: len(x) // torch.distributed.get_world_size()], y[: len(y) // torch.distributed.get_world_size()])
    moments = [t for state in step.optimizer.state.values() for t in state.values() if t.dim()]
    trained = [p for p in step.parallel.model.parameters() if p.requires_grad]
    frozen = [name for name, p in step.parallel.model.named_parameters() if not p.requires_grad]
    return frozen, sum(map(size_of, moments)), sum(map(size_of, trained))


def size_of(tensor):
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes


@pytest.mark.parametrize("layout", slow_but(LAYOUTS[2:3], LAYOUTS[:3:2], "gradients that every rank has whole"))
def test_a_frozen_weight_has_no_optimizer_state_and_is_not_reduced(ranks, tiny_config, layout):
    size, own = ranks_and_options(layout)
    config = tiny_config(**FROZEN, **own)
    for frozen, moments, trained in ranks(size, held_of, config):
        assert {"patch_embed.proj.weight", "blocks.0.attn.qkv.weight", "blocks.2.mlp.fc1.bias"} <= set(frozen)
        assert not {"blocks.2.mlp.fc1.weight", "blocks.0.attn.proj.bias"} & set(frozen)
        assert moments == 2 * trained  # Adam's two
    whole = sum(p.nbytes for p in build_model(config, "cpu").parameters() if p.requires_grad)
    _, sent = ranks(size, collectives_of_a_step, config)[0]
    reduced = sent["all_reduce"] if "gradient" in layout else sent["reduce_scatter"] * size
    assert whole <= reduced <= whole + 64  # and the square of the norm


CHAINS = [(2, 6), (2, 6, 4, 0)]  # numbers of layouts


@pytest.mark.parametrize("chain", slow_but(CHAINS[:1], CHAINS, "more layouts, one after the other"), ids=str)
def test_frozen_weights_continue_under_any_other_layout(ranks, tiny_config, tmp_path, chain):
    check_chain(ranks, tiny_config, [LAYOUTS[i] for i in chain], FROZEN, tmp_path)


# Weights of another program


@pytest.fixture
def foreign(tiny_config, tmp_path):
    """Make a file of weights: (config that reads it, the weights by our names)."""

    def make(file="weights.safetensors", prefix="", nested=None, change=None, **settings):
        torch.manual_seed(7)
        weights = {name: torch.randn(value.shape) for name, value in build_model(tiny_config()).state_dict().items()}
        stored = {prefix + name: value for name, value in weights.items()}
        if change:
            change(stored)
        path = tmp_path / file
        if file.endswith(".safetensors"):
            save_file(stored, path)
        else:
            torch.save({nested: stored, "epoch": 3} if nested else stored, path)
        return tiny_config(init_from=str(path), **settings), weights

    return make


def taken_by(config):
    """The weights that a rank has after it has taken those of init_from, whole."""
    step = build(config)
    load_external_weights(step.parallel.model, step.parallel.split, config, match_weights(config))
    state = global_view(collect_state(step.parallel.model, step.optimizer), step.parallel.split)["model"]
    return {name: (t.full_tensor() if isinstance(t, DTensor) else t).clone() for name, t in state.items()}


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize(
    ("size", "layout"),
    [
        (3, {"domain_parallel": 3}),
        (2, {"data_parallel": "fsdp"}),
        (2, {"tensor_parallel": 2}),
        pytest.param(2, {"pipeline_parallel": 2, "gradient_accumulation": 2}, marks=pytest.mark.slow("stages")),
    ],
    ids=str,
)  # fmt: skip
def test_every_layout_takes_the_weights_of_a_file(ranks, foreign, size, layout):
    config, weights = foreign(**layout)
    results = ranks(size, taken_by, config)
    if "pipeline_parallel" in layout:
        assert_equal(results[0] | results[1], weights)
    else:
        for found in results:
            assert_equal(found, weights)


@pytest.mark.parametrize(
    ("file", "nested", "prefix"),
    [
        ("w.pt", None, ""),
        ("w.ckpt", "state_dict", "net."),
        ("w.pth", "model", "module."),
        ("w.safetensors", None, "a."),
    ],
)
def test_any_program_s_file_is_read_and_its_names_are_changed(ranks, foreign, tmp_path, file, nested, prefix):
    (tmp_path / "map.yaml").write_text(f"'^{prefix}': ''\nblocks: blocks\n" if prefix else "'^$|^b': b\n")
    config, weights = foreign(file, prefix, nested, init_map=str(tmp_path / "map.yaml"))
    assert_equal(ranks(1, taken_by, config)[0], weights)


def test_new_input_channels_are_drawn_and_the_others_taken(ranks, foreign, tiny_config):
    """From one input frame to two: the present frame keeps its weights."""
    config, weights = foreign(input_frames=2, init_missing="draw", change=lambda stored: stored.pop("norm.weight"))
    found, drawn = ranks(1, taken_by, config)[0], dict(build_model(config, "cpu").state_dict())
    kernel = found["patch_embed.proj.weight"]
    assert torch.equal(kernel[:, :20], weights["patch_embed.proj.weight"])
    assert torch.equal(kernel[:, 20:], drawn["patch_embed.proj.weight"][:, 20:])
    assert torch.equal(found["norm.weight"], drawn["norm.weight"])
    assert torch.equal(found["blocks.1.mlp.fc2.weight"], weights["blocks.1.mlp.fc2.weight"])
    assert match_weights(config).misfits() == [
        "missing (1): norm.weight", "of another shape (1): patch_embed.proj.weight",
    ]  # fmt: skip


class Hostile:
    def __reduce__(self):
        return print, ("run",)


def pickle_code(stored):
    stored["norm.weight"] = Hostile()


def rename(stored):
    stored["extra.weight"] = stored.pop("norm.weight")


def narrow(stored):
    stored["norm.weight"] = stored["norm.weight"][:3].clone()


@pytest.mark.parametrize(
    ("file", "change", "mapping", "line"),
    [
        ("w.safetensors", rename, None, r"missing \(1\): norm.weight\n  unexpected \(1\): extra.weight"),
        ("w.safetensors", narrow, None, r"of another shape \(1\): norm.weight"),
        ("w.pt", pickle_code, None, "w.pt: cannot be read as weights: Weights only load failed"),
        ("w.pt", dict.clear, None, "w.pt: cannot be read as weights: it holds no tensors"),
        ("w.safetensors", None, "'^no\\.': ''", r"map.yaml: '\^no\\.' matches none of"),
        ("w.safetensors", None, "'(': ''", r"map.yaml: '\(: ': missing \)"),
        ("w.safetensors", None, "'weight|bias': x", "gives two tensors the name"),
        ("w.safetensors", None, "[a]", "expected a mapping"),
        ("w.safetensors", None, "'^': 'net.'", r"none of its tensors .* fits model vit"),
    ],
)
def test_a_file_that_does_not_fit_is_named_before_a_folder_is_made(
    foreign, tiny_options, tmp_path, file, change, mapping, line, capsys
):
    options = {"init_map": str(tmp_path / "map.yaml")} if mapping else {}
    config, _ = foreign(file, change=change)
    if mapping:
        (tmp_path / "map.yaml").write_text(mapping)
    with pytest.raises(UsageError, match=line):
        train.main(tiny_options(init_from=config.init_from, **options))
    assert not (tmp_path / "logs").exists() and "run" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"init_map": "map.yaml"}, "init_map and init_missing belong to init_from"),
        ({"freeze": ["bloks.*"]}, "freeze 'bloks.*' matches no parameter of model vit, whose names are like"),
        ({"freeze": ["*"]}, "leaves no parameter of model vit to train"),
        ({"input_frames": 20}, "has 20 frames, dt 1 with 20 input frames needs at least 21"),
    ],
)
def test_options_that_cannot_be_followed_are_refused(tiny_options, tmp_path, options, line):
    with pytest.raises(UsageError, match=line.replace("*", r"\*")):
        train.main(tiny_options(**options))
    assert not (tmp_path / "logs").exists()


# Several input frames: loaders, rollouts and resumed runs are in the tests of each


def test_a_forecast_begins_with_the_frames_before_its_date(tiny_options, sample_folder, tmp_path):
    train.main(tiny_options(input_frames=2, num_iters=4))
    run, start, days = tmp_path / "logs/quick/00", np.datetime64("1982-01-02T06"), ["--lead_hours", "12"]
    with no_pictures():
        forecast.main(["--run", str(run), "--out", str(tmp_path / "out"), "--start", str(start), *days])
        _, found = results_in(tmp_path / "out")
        with pytest.raises(UsageError, match="start 1982-01-01T00: no data for it"):
            forecast.main(["--run", str(run), "--start", "1982-01-01T00", *days])
    model = build_model(run_config(run, [], 1, ()), "cpu").eval()
    model.load_state_dict(load_weights(run / "checkpoints/iter-00000004"))
    with h5py.File(sample_folder / "test/1982.h5", locking=False) as file:
        fields = torch.from_numpy(file["fields"][4:6])  # 2 January 06 UTC is the sixth frame
    means, stds = (torch.from_numpy(np.load(sample_folder / f"stats/global_{n}.npy")) for n in ("means", "stds"))
    earlier, now = ((fields - means) / stds).split(1)
    with torch.no_grad():
        for lead in (6, 12):
            earlier, now = now, model(torch.cat([now, earlier], 1))
            value = found[start]["u10"].sel(lead_time=lead)[0].values
            np.testing.assert_allclose(value, (now * stds + means)[0, 0], rtol=1e-4, atol=1e-4)


class WithTable(torch.nn.Conv2d):
    """A model with a buffer that no checkpoint holds."""

    def __init__(self, in_channels, out_channels):
        super().__init__(in_channels, out_channels, 1)
        self.register_buffer("table", torch.arange(5.0), persistent=False)


def test_a_model_whose_weights_are_loaded_has_the_buffers_that_are_not_saved(ranks, tiny_config):
    config = tiny_config(model="tests.test_fine_tuning:WithTable")
    assert all(torch.equal(table, torch.arange(5.0)) for table in ranks(2, table_of, config))


def table_of(config):
    comm.build_mesh(CPU, config.layout(comm.world_size()))
    return build_parallel(config, CPU, weights=()).model.table
