"""Benchmarks measure what they say, on tiny sizes."""

import json
import math
import re
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import benchmark
from tests.support.refusals import refusal
from tools.benchmarks import ladder
from tools.benchmarks.loaders import PlainDataset
from tools.instruments.ranks import Process
from tools.tables import format_table, installed
from training.models.build import build_model
from training.tasks import build_task

CPU = torch.device("cpu")


def vit_flops(img_size, patch_size, in_channels, out_channels, embed_dim, depth, mlp_ratio):
    """Of a forward pass: matrix products of patch embedding, head, qkv, proj, fc1 and fc2, and the two of attention."""
    points = patch_size ** len(img_size)
    tokens = math.prod(img_size) // points
    ends = 2 * tokens * embed_dim * points * (in_channels + out_channels)
    block = 2 * tokens * embed_dim**2 * (4 + 2 * mlp_ratio) + 4 * tokens**2 * embed_dim
    return ends + depth * block


def test_flops_are_those_of_the_arithmetic(tiny_config):
    size = {"img_size": [16, 24], "patch_size": 4, "embed_dim": 32, "depth": 3, "mlp_ratio": 2}
    config = tiny_config(**size, num_heads=4, n_in_channels=3, n_out_channels=5)
    by_hand = vit_flops(**size, in_channels=3, out_channels=5)
    assert ladder.training_flops(config) == 3 * by_hand
    model, x = build_model(config, "cpu"), torch.randn(1, 3, 16, 24)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(x)
    assert counter.get_total_flops() == by_hand
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(x.requires_grad_()).sum().backward()
    assert counter.get_total_flops() == 3 * by_hand


def test_the_ladder_climbs_step_by_step_and_computes_the_same(tiny_options, tmp_path, monkeypatch, capsys):
    steps = ladder.ladder

    def first_steps(config, workers):
        return [step for step in steps(config, workers) if step[0] in ("0 workers", "2 workers", "bf16", "CUDA graphs")]

    monkeypatch.setattr(ladder, "ladder", first_steps)
    words = tiny_options(expdir=None, num_iters=50)
    benchmark.main(
        ["ladder", "--steps=2", "--rounds=1", f"--json={tmp_path}/l.json", f"--png={tmp_path}/l.png", *words]
    )
    result = json.loads((tmp_path / "l.json").read_text())["steps"]
    assert [step["step"] for step in result] == ["0 workers", "2 workers", "bf16"]
    assert all(step["samples_per_sec"] > 0 and 0 <= step["data_wait"] < 1 and step["mfu"] > 0 for step in result)
    assert result[0]["losses"] == result[1]["losses"] != result[2]["losses"]
    assert result[2]["losses"] == pytest.approx(result[0]["losses"], rel=0.02)
    assert (tmp_path / "l.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "| 2 workers" in printed and "CUDA graphs: skipped, needs a GPU" in printed
    assert all(step["spread"] is None for step in result) and "one round is a trial" in printed


def test_a_step_of_the_ladder_says_how_far_its_turns_are_apart(tiny_config):
    turn = {"wait": 0.0, "matmul_flops_per_sec": 1.0, "losses": [1.0], "peak_memory_bytes": 0}
    climb = ladder.Climb(tiny_config(global_batch_size=8), 1, None)
    climb.turns["bf16"] = [turn | {"seconds": seconds} for seconds in (1.0, 2.0, 4.0)]
    (row,) = climb.rows()
    assert (row["samples_per_sec"], row["spread"]) == (4.0, (8 - 2) / 4)


def test_a_slow_reader_measures_the_workers_alone_over_the_same_batches(tiny_options, tmp_path, capsys):
    words = ["--steps=1", "--rounds=1", f"--json={tmp_path}/l.json", *tiny_options(expdir=None, num_iters=50)]
    assert benchmark.main(["ladder", "--read_delay_ms=1.5", *words]) is None
    first, second = json.loads((tmp_path / "l.json").read_text())["steps"]
    assert (first["step"], second["step"]) == ("0 workers", "2 workers")
    assert first["losses"] == second["losses"]
    assert "each sample is read 1.5 ms late, on purpose" in capsys.readouterr().out


def test_every_read_is_delayed_and_reads_the_same(tiny_config, monkeypatch):
    slept = []
    monkeypatch.setattr(ladder.time, "sleep", slept.append)
    rank = Process(device=CPU)
    ladder._start(rank, tiny_config(num_data_workers=0), 0.25)
    ladder._end(rank)
    assert len(slept) >= (ladder.LEAD_IN + 1) * tiny_config().global_batch_size and set(slept) == {0.25}


def test_a_step_of_the_ladder_that_fails_is_told(tiny_options, tmp_path, monkeypatch, capsys):
    steps = [("0 workers", {}, None), ("broken", {"num_heads": 3}, None), ("bf16", {"amp_mode": "bf16"}, None)]
    monkeypatch.setattr(ladder, "ladder", lambda *_: steps)
    words = ["--steps=1", "--rounds=2", f"--json={tmp_path}/l.json", *tiny_options(expdir=None, num_iters=50)]
    assert benchmark.main(["ladder", *words]) == 1
    found = json.loads((tmp_path / "l.json").read_text())
    assert [step["step"] for step in found["steps"]] == ["0 workers", "bf16"] and list(found["failed"]) == ["broken"]
    printed = capsys.readouterr()
    assert printed.out.splitlines()[-1].endswith("embed_dim 32 is not a multiple of num_heads 3")
    told = re.findall(r"^turn (\d of \d), after \d+ s: (.*)$", printed.err, re.M)
    kept = [("4 of 6", "0 workers"), ("6 of 6", "bf16")]
    assert told == [("1 of 6", "0 workers"), ("2 of 6", "broken"), ("3 of 6", "bf16"), *kept]


def test_a_ladder_that_is_ended_leaves_the_steps_it_has_measured(tiny_options, tmp_path, monkeypatch, capsys):
    all_turns = ladder.in_turns

    def ended(*args):
        turns = all_turns(*args)
        yield next(turns)
        yield next(turns)
        raise KeyboardInterrupt

    monkeypatch.setattr(ladder, "in_turns", ended)
    with pytest.raises(KeyboardInterrupt):
        benchmark.main(["ladder", "--steps=1", f"--json={tmp_path}/l.json", *tiny_options(expdir=None, num_iters=50)])
    told = re.findall(r"^\| (\S+ \S+) +\|", capsys.readouterr().err, re.M)
    written = json.loads((tmp_path / "l.json").read_text())["steps"]
    assert told == [step["step"] for step in written] == ["0 workers", "2 workers"]


def test_every_step_adds_to_the_one_before_but_dali(tiny_config):
    names = [name for name, _, _ in ladder.ladder(tiny_config(), 3)]
    assert names[:3] == ["0 workers", "3 workers", "DALI"] and names[-1] == "CUDA graphs"


def test_who_waits_for_a_turn_holds_only_its_model(tiny_config, monkeypatch):
    """So all steps fit one GPU: the cache is emptied last, and the products of the probe count for no step."""
    done = []
    gpu = SimpleNamespace(reset_peak_memory_stats=lambda _: done.append("reset"))
    monkeypatch.setattr(ladder, "device_module", lambda *_: gpu)
    monkeypatch.setattr(ladder, "peak_memory_bytes", lambda _: done.append("peak"))
    monkeypatch.setattr(ladder, "matmul_flops_per_sec", lambda *_: done.append("products"))
    monkeypatch.setattr(ladder, "empty_cache", lambda _: done.append("emptied"))
    rank = Process(device=CPU)
    ladder._start(rank, tiny_config())
    ladder._turn(rank, 1)
    ladder._end(rank)
    assert done == ["emptied", "peak", "products", "emptied", "reset"]


def test_a_step_that_fails_is_named(tiny_options, sample_folder):
    words = tiny_options(train_data_path=sample_folder / "nowhere")
    with refusal("nowhere: no such data folder"):
        ladder.run(words, workers=2, steps=1, rounds=1)


def test_frames_that_make_no_batch_are_refused_rather_than_waited_for(tiny_options):
    with refusal("3 frames make 2 samples, fewer than a batch of 16: take --frames 17 or more"):
        benchmark.main(["data", "--frames=3", *tiny_options(global_batch_size=16)])


@pytest.mark.slow("every loader, read by processes")
def test_loaders_are_compared_with_the_plain_design(tiny_options, tmp_path, capsys):
    words = tiny_options(expdir=None, global_batch_size=2)
    benchmark.main(["data", "--workers", "1", "--batches=2", "--rounds=1", f"--json={tmp_path}/d.json", *words])
    loaders = {row["loader"]: row for row in json.loads((tmp_path / "d.json").read_text())["loaders"]}
    assert loaders["plain"]["ratio_to_plain"] == 1 and {"plain", "ours"} <= set(loaders)
    assert all(row["samples_per_sec"] > 0 for row in loaders.values())
    said = capsys.readouterr().out
    assert "| ours " in said
    if find_spec("zarr") is None:
        assert "Zarr: not installed (requirements/era5.txt)" in said
        return
    on_zarr = loaders["ours, Zarr, zstd"]["samples_per_sec"] / loaders["plain, Zarr, zstd"]["samples_per_sec"]
    assert loaders["ours, Zarr, zstd"]["ratio_to_plain_on_store"] == pytest.approx(on_zarr)


def test_the_yardstick_gives_the_same_samples(tiny_config):
    loader = build_task(tiny_config()).build_loaders(CPU)[0]
    means, stds, _ = loader.statistics
    plain = PlainDataset(loader.dataset.files[0].path, loader.statistics)
    assert len(plain) == len(loader.dataset) / len(loader.dataset.files)
    pair = np.empty(loader.dataset.shape, np.float32)
    for index in (0, 18):
        loader.dataset.read(index, pair)
        np.testing.assert_allclose(plain[index], (pair - means) / stds, rtol=1e-5)


def test_tables_line_up():
    lines = format_table({"a": "", "b": ".2f"}, [("x", 1.0), ("long", None)]).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[-1] == "| long |    - |"


def test_a_package_is_missing_also_where_the_one_around_it_is():
    assert installed("torch.nn") and not installed("no_such_package.dali") and not installed("torch.no_such_module")
