"""`benchmark.py domain` measures every size in every layout, notes where memory runs out, and goes on."""

import json

import pytest
import torch

import benchmark
from tools.benchmarks import image_sizes
from tools.benchmarks.image_sizes import LAYOUTS, ONE, build_points, measure
from tools.instruments.team import Teams, is_out_of_memory
from tools.instruments.tracker import Tracker
from training.model import build_model
from utils.errors import UsageError, run_main

WORDS = ["--embed_dim=32", "--depth=2", "--num_heads=2", "--patch_size=4", "--num_classes=1000", "--device=cpu"]


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The summary, its rows by (layout, side, mode), and the folder with all that the command wrote."""
    folder = tmp_path_factory.mktemp("domain")
    benchmark.main([
        "domain", "--layouts", *LAYOUTS, "--sizes", "20", "68", "48", "--rounds=1", "--steps=1",
        f"--json={folder}/d.json", f"--png={folder}/d.png", *WORDS,
    ])  # fmt: skip
    result = json.loads((folder / "d.json").read_text())
    rows = {(row["layout"], row["image"][0], row["mode"]): row for row in result["rows"]}
    return result, rows, folder


def test_every_size_in_every_layout_has_a_row(measured):
    _, rows, folder = measured
    names = [ONE, *LAYOUTS]
    assert set(rows) == {(name, side, mode) for name in names for side in (20, 68) for mode in image_sizes.MODES}
    for (name, side, mode), row in rows.items():
        assert row["tokens"] == (side // 4) ** 2 and not row["out_of_memory"]
        assert min(row["seconds"], row["cpu_seconds"], row["peak"], row["speedup"]) > 0
        images = row["ranks"] // row["devices_of_an_image"]
        assert row["images_per_sec"] == pytest.approx(images / row["seconds"])
        assert (row["activations"] is None) == (mode == "forward")
        assert name != ONE or row["speedup"] == row["memory_reduction"] == 1
    assert (folder / "d.png").read_bytes().startswith(b"\x89PNG")


def test_all_layouts_compute_the_same_loss_of_the_same_images(measured):
    """A loss of the initial weights. dp2 has other images beside those of one device."""
    rows = measured[1]
    for (name, side, _), row in rows.items():
        if row["ranks"] == row["devices_of_an_image"]:
            assert row["loss"] == pytest.approx(rows[ONE, side, "forward"]["loss"], rel=1e-6), name
        assert row["loss"] == rows[name, side, "forward"]["loss"]


def test_memory_is_what_tensors_hold(measured):
    """Of one device: the weights in a forward pass; in training gradients, two moments and activations as well."""
    case = build_points(WORDS, [], sizes=(20, 20, 1))[0][0]
    weights = 4 * sum(p.numel() for p in build_model(case.config).parameters())
    forward, training = (measured[1][ONE, 20, mode] for mode in image_sizes.MODES)
    assert weights < forward["peak"] < 2 * weights
    assert 4 * weights < training["peak"] < 5 * weights + 2 * training["activations"]


def test_a_domain_keeps_less_than_one_device(measured):
    """Half of the tokens' activations and, with fsdp, half of the weights, gradients and moments."""
    one, domain2, whole_weights = (measured[1][name, 68, "training"] for name in (ONE, *LAYOUTS[1:]))
    assert domain2["activations"] == whole_weights["activations"] < 0.75 * one["activations"]
    assert domain2["peak"] < whole_weights["peak"] < one["peak"]
    assert domain2["memory_reduction"] == pytest.approx(one["peak"] / domain2["peak"])


def test_images_of_three_dimensions_and_mixed_precision(capsys):
    names = [LAYOUTS[1], f"{LAYOUTS[1]},amp_mode=bf16"]
    result = image_sizes.run(WORDS, names, sizes=(20, 20, 1), dims=3, steps=1, rounds=1)
    full, half = (row for row in result["rows"] if row["layout"] in names and row["mode"] == "training")
    assert full["image"] == [20, 20, 20] and full["tokens"] == 125
    assert half["activations"] < 0.9 * full["activations"]
    assert half["loss"] == pytest.approx(full["loss"], rel=0.02) and half["loss"] != full["loss"]
    assert "20 x 20 x 20" in capsys.readouterr().out


def test_where_memory_runs_out_the_sweep_goes_on(capsys):
    """The larger image fits in a forward pass, not in a training step."""
    options = {"sizes": (16, 48, 32), "steps": 1, "rounds": 2, "memory_limit_gib": 1.5e-3}
    rows = image_sizes.run(WORDS, ["dp2"], **options)["rows"]
    out = {(row["layout"], row["image"][0], row["mode"]) for row in rows if row["out_of_memory"]}
    assert out == {(ONE, 48, "training"), ("dp2", 48, "training")}
    for row in rows:
        assert (row["seconds"] is None) == row["out_of_memory"]
    assert "out of memory" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words, message",
    [
        (["--layouts", "domain2xdomain2"], "layout 'domain2xdomain2': expected sizes of domain, tp, dp"),
        (["--layouts", "cp2"], "layout 'cp2': expected sizes of domain, tp, dp"),
        (["--layouts", "domain1"], "layout 'domain1': it has one rank"),
        (["--layouts", "domain2,data_paralel=ddp"], "unknown option '--data_paralel' (did you mean '--data"),
        (["--sizes", "32", "16", "16"], "--sizes 32 16 16: expected START, a larger STOP"),
        (["--sizes", "30", "30", "1"], "img_size [30, 30] cannot be cut into patches of [4, 4]"),
        (["--layouts", "domain3,domain_method=all_to_all", "--num_heads", "2"], "cannot split 2 heads over 3 ranks"),
        (["--layouts", "domain4", "--sizes", "8", "8", "8"], "2 rows of patches cannot be split over 4 ranks"),
        (["--rounds", "0"], "argument --rounds: 0 is not within 1 to 1048576"),
        (["--memory_limit_gib", "0"], "argument --memory_limit_gib: 0 is not within"),
        (["--dims", "4"], "argument --dims: invalid choice"),
    ],
)  # fmt: skip
def test_bad_arguments_are_one_line_and_status_2(words, message, capfd):
    with pytest.raises(SystemExit) as end:
        run_main(lambda: benchmark.main(["domain", *WORDS, *words]))
    error = capfd.readouterr().err.splitlines()
    assert end.value.code == 2 and len(error) == 1 and error[0].startswith("error: ")
    assert message in error[0]


def test_a_rank_that_the_system_kills_is_out_of_memory_and_another_that_ends_is_not():
    case = build_points(WORDS, ["dp2"], sizes=(16, 16, 1))[0][1]
    with Teams(case.config) as teams:
        assert len(measure(teams, case, 1)) == 2
        ranks = teams.running[2]
        ranks.processes[1].kill()
        assert measure(teams, case, 1) is None
        assert not any(process.is_alive() for process in ranks.processes)
        assert len(measure(teams, case, 1)) == 2  # by new ones
        ranks = teams.running[2]
        ranks.processes[1].terminate()
        with pytest.raises(UsageError, match="rank 1 of 2 has ended|rank 0 of 2 failed"):
            measure(teams, case, 1)
    assert not any(process.is_alive() for process in ranks.processes)


def test_peak_memory_is_the_most_that_is_alive_at_once():
    x = torch.ones(1000)
    with Tracker([x]) as live:
        y = x + 1
        z = y.view(10, 100)  # no memory of its own
        del y
        w = z * 2
        del z, w
        x + 1
    assert live.memory()["peak"] == 3 * 4000
    with pytest.raises(MemoryError, match="the limit is 10000"), Tracker([x], limit=10_000):
        _ = x + 1, x + 2


def test_what_counts_as_out_of_memory():
    assert all(map(is_out_of_memory, (
        MemoryError(), torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: not enough memory: you tried to allocate"),
    )))  # fmt: skip
    assert not is_out_of_memory(RuntimeError("size mismatch")) and not is_out_of_memory(ValueError("out of memory"))
