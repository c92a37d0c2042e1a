"""Input that cannot be used is refused at once: one line, which says what is wrong and where, and status 2.

The tables hold what was once let through. `make fuzz` draws more; settings are in tests/test_config.py.
"""

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import h5py
import numpy as np
import pytest

from tests.conftest import words_of
from tests.support import programs
from tests.support.launch import outcome
from tests.support.refusals import refusal
from training.run.folder import read_summary
from utils import files
from utils.config import read_named_config
from weather.checks.statistics import read_statistics
from weather.years.dataset import FieldDataset
from weather.years.year_reader import open_year

LONG = "a" * 5000
LAYOUT = ["-m", "utils.layout"]
TRAIN = ["train.py", "QUICK"]  # with the options of a tiny run
SAMPLE = ["-m", "weather.sample_data", "OUT"]
COMMANDS = {
    "a layout of 99,999,999 ranks started them": ["benchmark.py", "layouts", "mp", "--layouts", "tp99999999"],
    "a negative count of batches": ["benchmark.py", "data", "--batches=-1"],
    "a count of workers that is none": ["benchmark.py", "data", "--workers", "-3"],
    "a benchmark without a command": ["benchmark.py"],
    "groups of no rank": [*LAYOUT, "--world_size=8", "--dp_shard=0"],
    "groups of a negative number of ranks": [*LAYOUT, "--world_size=8", "--dp_shard=-1"],
    "a million million ranks": [*LAYOUT, "--world_size=1000000000000"],
    "workers without a bound": [*TRAIN, "--num_data_workers=100000"],
    "a long name of a run": [*TRAIN, f"--run_num={LONG}"],
    "a long name of a config": [*TRAIN, f"--config={LONG}"],
    "a long name of the folder of runs": [*TRAIN, f"--expdir={LONG}"],
    "a long name of the data": [*TRAIN, f"--train_data_path={LONG}"],
    "a run folder with a long name": ["forecast.py", f"--run_folder={LONG}"],
    "a file of configs with a long name": ["plan.py", f"--yaml_config={LONG}"],
    "a picture written to a folder": ["plan.py", "--config=quick", "--gpus=1", "--png", "FOLDER"],
    "a patience that is no number": ["-m", "tools.preflight", "--timeout=nan"],
    "no day of sample data": [*SAMPLE, "--days=0"],
    "a year that is no number": [*SAMPLE, "--train_years=nan"],
    "a source of real data that is not there": ["-m", "weather.prepare_era5", "nowhere.nc", "--out", "OUT"],
}


@pytest.mark.parametrize("fault", COMMANDS)
def test_a_command_that_cannot_be_obeyed_is_one_line(fault, tmp_path, tiny_options):
    words = [word.replace("OUT", str(tmp_path / "out")).replace("FOLDER", str(tmp_path)) for word in COMMANDS[fault]]
    if "QUICK" in words:
        at = words.index("QUICK")
        words[at : at + 1] = tiny_options()
    done = programs.run(words, timeout=60)
    assert done.returncode == 2, done
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


SHARD, TRAIN, MP = "train_shard", "train", "train_mp"
NOT_HERE = "config/ViT.yaml: quick: train_shard.py goes without sequence_parallel and tp_backend dtensor"
NO_CONTEXT = "config/ViT.yaml: quick: domain_parallel goes without context_parallel, which splits the same tokens"
NO_PIPELINE = "config/ViT.yaml: quick: domain_parallel goes without pipeline_parallel, whose stages exchange whole"
TWO_PARTS = {"gradient_accumulation": 2}
RING = "ring attention cannot drop out attention weights; use gather or all_to_all"


@pytest.mark.parametrize(
    ("size", "script", "options", "line"),
    [
        (4, SHARD, {"domain_parallel": 3}, "4 ranks cannot be split as domain 3 x dp: 4 is not a multiple of 3"),
        (4, SHARD, {"domain_parallel": 4, "patch_size": 8},
         "quick: domain parallel: 2 rows of patches cannot be split over 4 ranks"),
        (2, SHARD, {"domain_parallel": 2, "sequence_parallel": True}, NOT_HERE),
        (4, SHARD, {"domain_parallel": 2, "context_parallel": 2}, NO_CONTEXT),
        (4, MP, {"domain_parallel": 2, "pipeline_parallel": 2, **TWO_PARTS}, NO_PIPELINE),
        (8, SHARD, {"domain_parallel": "2x1", "tensor_parallel": 2, "pipeline_parallel": 2, **TWO_PARTS}, NO_PIPELINE),
        (8, MP, {"domain_parallel": 2, "pipeline_parallel": 2, "tensor_parallel": 2, "sequence_parallel": True,
             **TWO_PARTS}, NO_PIPELINE),
        (4, SHARD, {"domain_parallel": 2, "tensor_parallel": 2, "tp_backend": "dtensor"}, NOT_HERE),
        (3, SHARD, {"domain_parallel": 3, "domain_method": "all_to_all", "global_batch_size": 3},
         "quick: domain parallel: all_to_all cannot split 2 heads over 3 ranks"),
        (2, SHARD, {"domain_parallel": 2, "domain_method": "ring", "dropout": 0.1}, f"quick: domain parallel: {RING}"),
        (2, SHARD, {"context_parallel": 2}, "context_parallel 2: the model is split by train_mp.py"),
        (2, TRAIN, {"domain_parallel": 2}, "domain_parallel 2: the model is split by train_shard.py"),
        (2, MP, {"domain_parallel": "1x2"}, "domain_parallel 1x2: the model is split by train_shard.py"),
        (2, MP, {"tensor_parallel": 2, "num_heads": 1},
         "quick: tensor parallel: 1 heads cannot be split over 2 ranks"),
        (2, MP, {"tensor_parallel": 2, "mlp_ratio": 33 / 32},
         "quick: tensor parallel: 33 hidden features cannot be split over 2 ranks"),
        (4, MP, {"tensor_parallel": 4, "num_heads": 4, "patch_size": 16, "sequence_parallel": True},
         "quick: sequence parallel: 2 tokens cannot be split over 4 ranks"),
        (2, MP, {"context_parallel": 2, "patch_size": 16},
         "quick: context parallel: 1 rows of patches cannot be split over 2 ranks"),
        (3, MP, {"context_parallel": 3, "cp_method": "all_to_all", "global_batch_size": 3},
         "quick: context parallel: all_to_all cannot split 2 heads over 3 ranks"),
        (2, MP, {"context_parallel": 2, "cp_method": "ring", "dropout": 0.1}, f"quick: context parallel: {RING}"),
        (2, MP, {"pipeline_parallel": 2, "depth": 3, "gradient_accumulation": 2},
         "quick: pipeline parallel: 3 blocks cannot be shared by 2 stages"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)  # fmt: skip
def test_a_layout_that_does_not_fit_is_the_same_line_on_every_rank(ranks, tiny_options, size, script, options, line):
    words = ["--yaml_config=config/ViT.yaml", *tiny_options(**{"global_batch_size": 8} | options)]
    for status, said in ranks(size, outcome, script, words):
        assert status == 2
        assert said.startswith(f"error: {line}") and said.count("\n") == 1, said


def year(path, others=None):
    """A small year file, with datasets that replace or join the usual ones; None leaves one out."""
    usual = {
        "fields": np.ones((4, 2, 4, 8), "f4"), "latitude": np.linspace(90, -90, 4), "longitude": np.arange(8) * 45.0,
        "channel": ["a", "b"], "channel_units": ["K", "Pa"],
    }  # fmt: skip
    with h5py.File(path, "w") as file:
        for name, value in (usual | (others or {})).items():
            if callable(value):
                value(file)
            elif value is not None:
                file[name] = value
        if "time" in file:
            file["time"].attrs["units"] = "hours since 1979-01-01"


def some_pieces(file):
    fields = file.create_dataset("fields", (4, 2, 4, 8), "f4", chunks=(1, 2, 4, 8))
    fields.write_direct(np.ones((3, 2, 4, 8), "f4"), dest_sel=np.s_[:3])


YEARS = [
    ({"fields": None}, "expected 'fields' [time, channel, lat, lon]"),
    ({"fields": np.zeros((4, 2, 4))}, "expected 'fields' [time, channel, lat, lon]"),
    ({"fields": np.ones((4, 2, 5, 8), "f4")}, "'latitude' has shape (4,), the fields need (5,)"),
    (
        {"fields": lambda file: file.create_dataset("fields", (4, 2, 4, 8), "f4")},
        "'fields': all of it was never written",
    ),
    ({"fields": some_pieces}, "'fields': 1 of 4 chunks were never written"),
    ({"channel": ["b", "a"]}, "channel 0 is 'b' and not 'a'"),
    ({"channel": ["a"]}, "'channel' has shape (1,), the fields need (2,)"),
    # Numbers are no names: xarray numbers what has none. The channels are then those of our own files.
    ({"channel": np.arange(2)}, "channel 0 is 'u10' and not 'a'"),
    ({"channel": 7}, "'channel' has shape (), the fields need (2,)"),
    ({"channel_units": ["K", "degC"]}, "the unit of channel 1 is 'degC' and not 'Pa'"),
    ({"channel_units": "K"}, "'channel_units' has shape ()"),
    ({"latitude": np.linspace(-90, 90, 4)}, "latitude is -"),
    ({"latitude": [200.0] * 4}, "'latitude' is not in degrees, -90 to 90"),
    ({"latitude": [1.0]}, "'latitude' has shape (1,), the fields need (4,)"),
    # A mesh may be read: it has one latitude in each row.
    ({"latitude": np.zeros((4, 8))}, "'latitude' is 0 in every row: was it never written?"),
    ({"latitude": np.zeros((8, 4))}, "'latitude' has shape (8, 4)"),
    ({"latitude": lambda file: file.create_group("latitude")}, "'latitude' cannot be read: "),
    ({"longitude": np.full(8, np.nan)}, "'longitude' is not in degrees"),
    ({"longitude": ["a"] * 8}, "'longitude' cannot be read: "),
    ({"time": np.full(4, np.nan)}, "time"),
    ({"time": np.full(4, 1e300)}, "time"),
    ({"time": ["a", "b", "c", "d"]}, "time"),
]


@pytest.mark.parametrize(("others", "line"), YEARS, ids=lambda value: value if isinstance(value, str) else "")
def test_a_year_that_differs_or_is_unfinished_is_named(tmp_path, others, line):
    year(tmp_path / "1979.h5")
    year(tmp_path / "1980.h5", others)
    with refusal(re.escape(line), tmp_path / "1980.h5"):
        FieldDataset(tmp_path, 2, (4, 8))


def test_a_year_file_without_dates_and_without_a_year_in_its_name_is_refused(tmp_path):
    year(tmp_path / "some.h5")
    with refusal("some.h5: has no `time` with units, and its name is not a year"):
        FieldDataset(tmp_path, 2, (4, 8)).dates([0], 1)


@pytest.mark.parametrize(
    ("asked", "line"),
    [
        ({"folder": "nowhere"}, "no such data folder; make sample data with `python -m weather.sample_data .* 4 8`"),
        ({"folder": "."}, "holds no .h5, .nc or .zarr"),
        ({"channels": 3}, "1979.h5: has 2 channels, 3 were asked for"),
        ({"img_size": (5, 8)}, r"1979.h5: has 4 x 8 points, img_size asks for \[5, 8\]"),
        ({"dt": 4}, "1979.h5: has 4 frames, dt 4 needs at least 5"),
    ],
)
def test_data_that_cannot_give_what_is_asked_for_are_named(tmp_path, asked, line):
    (tmp_path / "data").mkdir()
    year(tmp_path / "data/1979.h5")
    asked = {"channels": 2, "img_size": (4, 8)} | asked | {"folder": tmp_path / asked.get("folder", "data")}
    with refusal(line):
        FieldDataset(**asked)


@pytest.mark.parametrize(
    ("values", "line"),
    [
        (np.array([{}]), "cannot be read"),  # would need unpickling
        (np.ones((1, 2, 1, 1)), r"expected shape \(1, 3, 8, 4\), found \(1, 2, 1, 1\)"),
        (np.ones((1, 3, 4, 4)), r"expected shape \(1, 3, 8, 4\), found \(1, 3, 4, 4\)"),
        (np.full((1, 3, 8, 4), np.nan), "not finite"),
    ],
)
def test_statistics_that_are_none_are_named(tmp_path, values, line):
    np.save(tmp_path / "means.npy", values)
    with refusal(f"means.npy: .*{line}"):
        read_statistics(tmp_path / "means.npy", 3, img_size=(8, 4))


READERS = {
    "settings": lambda path: read_named_config(path, "quick"),
    "a year": open_year,
    "statistics": lambda path: read_statistics(path, 2),
    "a summary": lambda path: read_summary(path),
}


@pytest.mark.parametrize("kind", ["empty", "a pipe", "a folder", "noise", "absent"])
@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_such_file_is_refused_by_name(reader, kind, tmp_path):
    """A pipe would be waited for."""
    path = tmp_path / "file"
    if kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a folder":
        path.mkdir()
    elif kind != "absent":
        path.write_bytes(b"" if kind == "empty" else bytes(range(256)))
    with refusal(re.escape(str(path))):
        READERS[reader](path)


def test_what_json_cannot_hold_becomes_null_and_is_on_disk_before_its_name_says_so(tmp_path, monkeypatch):
    done, rename = [], Path.replace
    monkeypatch.setattr(files.os, "fsync", lambda _: done.append("fsync"))
    monkeypatch.setattr(Path, "replace", lambda *paths: (done.append("rename"), rename(*paths)))
    files.write_json(tmp_path / "summary.json", {"val_loss": float("nan"), "best": float("inf"), "rmse": 1.5})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"val_loss": None, "best": None, "rmse": 1.5}
    assert done == ["fsync", "rename", "fsync"]


def test_rank_0_that_cannot_be_reached_is_one_line_without_the_stack_of_torch(tiny_options):
    (rank,) = programs.start_ranks(["train.py", *tiny_options(comm_timeout=1)], only=[1])
    status, said = programs.finish(rank)
    assert status == 2 and said.count("\n") == 1, said
    assert "error: rank 1: the 2 ranks could not connect within 1 s through 127.0.0.1:" in said


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR2])
def test_a_run_saves_before_it_obeys_any_signal_that_asks_it_to_end(number, tiny_settings, tmp_path):
    words = words_of(tiny_settings | {"num_iters": 100_000, "checkpoint_every": 100_000, "expdir": tmp_path})
    run = programs.start(["train.py", *words])
    while "after the first forward pass" not in run.said() and run.poll() is None:
        time.sleep(0.05)
    run.send_signal(number)
    assert run.wait() == 75
    (saved,) = tmp_path.glob("quick/00/checkpoints/iter-*/complete.json")
    last = f"Stopped after saving iteration {int(saved.parent.name[5:])}; repeat the command to resume"
    for text in (run.said(), (tmp_path / "quick/00/out.log").read_text()):
        assert text.splitlines()[-1].endswith(last), text


def test_no_command_goes_through_a_shell():
    """A path with a space or a quote would become words of it."""
    listed = subprocess.run(["git", "ls-files", "*.py"], capture_output=True, text=True, check=True)
    calls = re.compile(r"shell=True|os\.system\(|os\.popen\(")
    assert [
        name
        for name in listed.stdout.split()
        if name != "tests/test_refusals.py" and calls.search(Path(name).read_text())
    ] == []
