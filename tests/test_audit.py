"""Every fault that an audit of damaged files, hostile options and broken systems once found, and what holds it now.

A row is reproduced here: a command that must end with one line, a file that must be refused. Or it is held by a test
elsewhere, which is named, and must be there.
"""

import ast
import json
import os
import re
import signal
import subprocess
import time
from functools import cache
from pathlib import Path

import h5py
import numpy as np
import pytest

from tests.conftest import words_of
from tests.support import programs
from tests.support.workers import free_port
from tools.forecasting.dated_frames import file_times
from training.run_folder import read_summary
from utils import files
from utils.config import read_named_config
from utils.errors import UsageError
from weather.dataset import FieldDataset, read_statistics
from weather.year_reader import open_year

ELSEWHERE = {
    "a validation loss of NaN made the best checkpoint go": "checkpoint::a_score_that_is_no_number_is_no_score",
    "tensors that the marker does not list were loaded": "checkpoint::only_listed_tensors_are_read",
    "offsets of a linked file were applied to the one that links":
        "data_loader::fields_that_lie_in_another_file_are_read_from_there",
    "ranks outlived a killed torchrun": "launch::ranks_end_with_the_torchrun_that_started_them",
    "two runs wrote the same folder":
        "train_command::the_second_of_two_runs_in_one_folder_is_refused_and_the_first_goes_on",
    "the store listened on every interface": "launch::the_store_of_one_machine_is_not_open_to_others",
    "a folder without permission counted as empty": "checkpoint::a_folder_that_cannot_be_read_is_not_an_empty_one",
    "a shard without permission was a traceback": "checkpoint::a_file_that_cannot_be_read_is_passed_over",
    "the thread of the events met a full disk": "faults::a_broken_run_ends_like_an_undisturbed_one",
    "NaN in validation data ended as finished": "launch::a_value_that_is_no_number_is_named_by_every_rank",
    "names and coordinates of other types and sizes": "data_loader::years_that_differ_or_are_unfinished_are_named",
    "parts of a year that were never written": "data_loader::years_that_differ_or_are_unfinished_are_named",
    "fields of another type or size": "data_loader::bad_data_is_named",
    "statistics of other kinds": "data_loader::bad_statistics_are_named",
    "a summary of another kind": "terminal::a_summary_that_is_none_is_one_line",
    "channels or latitude in another order in one year": "data_loader::years_that_differ_or_are_unfinished_are_named",
    "other channels in the validation years": "data_loader::validation_data_of_other_channels_are_refused",
    "standard output or error closed, full, or gone": "terminal::a_run_goes_on_where_its_output_cannot",
    "a run_num outside the folder of runs": "terminal::a_run_stays_in_its_folder",
    "YAML that its reader refuses, and an alias bomb": "config::yaml_of_any_kind_is_one_line",
    "numbers of settings without a bound": "config::every_number_of_the_schema_has_bounds",
    "markers of another form with a right SHA-256": "checkpoint::a_marker_with_other_keys_is_passed_over",
    "a stray file or a loop among the checkpoints": "checkpoint::strangers_among_the_checkpoints_are_left_alone",
    "config.yaml deleted, and another size asked for":
        "terminal::settings_are_those_of_the_checkpoint_where_config_yaml_is_gone",
    "num_iters below the checkpoint": "terminal::a_run_that_is_further_than_it_is_asked_to_be_says_so",
    "an edited config.yaml was trusted over the checkpoint": "forecast::weights_of_another_model_are_refused",
    "launch variables out of bounds, or empty": "launch_variables::missing_and_contradictory_variables_are_named",
    "control characters printed raw": "config::a_value_that_is_long_is_cut_and_control_characters_are_escaped",
}  # fmt: skip


@cache
def names_in(name):
    """The names of the test functions of a file."""
    tree = ast.parse(Path(f"tests/test_{name}.py").read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("fault", ELSEWHERE)
def test_the_test_that_holds_it_is_there(fault):
    name, test = ELSEWHERE[fault].split("::")
    assert f"test_{test}" in names_in(name)


LONG = "a" * 5000
LAYOUT = ["-m", "utils.comm"]
TRAIN = ["train.py", "QUICK"]  # with the options of a tiny run
SAMPLE = ["-m", "weather.sample_data", "OUT"]
COMMANDS = {
    "a layout of 99,999,999 ranks started them": ["benchmark.py", "layouts", "mp", "--layouts", "tp99999999"],
    "rounds of nothing": ["benchmark.py", "layouts", "dp", "--rounds=0"],
    "a negative count of steps": ["benchmark.py", "layouts", "domain", "--sizes=32", "--steps=-1"],
    "a negative count of batches": ["benchmark.py", "data", "--batches=-1"],
    "a count of workers that is none": ["benchmark.py", "data", "--workers", "-3"],
    "a benchmark without a command": ["benchmark.py"],
    "groups of no rank": [*LAYOUT, "--world_size=8", "--dp_shard=0"],
    "groups of a negative number of ranks": [*LAYOUT, "--world_size=8", "--dp_shard=-1"],
    "a million million ranks": [*LAYOUT, "--world_size=1000000000000"],
    "workers without a bound": [*TRAIN, "--num_data_workers=100000"],
    "a seed of 40 digits": [*TRAIN, f"--seed=1{'0' * 40}"],
    "a size that no memory holds": [*TRAIN, "--embed_dim=1000000000"],
    "a timeout beyond the clock": [*TRAIN, "--comm_timeout=1000000000000"],
    "a patience beyond the clock": [*TRAIN, "--watchdog_timeout=1000000000000"],
    "an infinite learning rate": [*TRAIN, "--lr=.inf"],
    "a long name of a run": [*TRAIN, f"--run_num={LONG}"],
    "a long name of a config": [*TRAIN, f"--config={LONG}"],
    "a long name of the folder of runs": [*TRAIN, f"--expdir={LONG}"],
    "a long name of the data": [*TRAIN, f"--train_data_path={LONG}"],
    "a run folder with a long name": ["forecast.py", f"--run_folder={LONG}"],
    "a file of configs with a long name": ["plan.py", f"--yaml_config={LONG}"],
    "a plan written to a folder": ["plan.py", "--config=quick", "--gpus=1", "--json", "FOLDER"],
    "a picture written to a folder": ["plan.py", "--config=quick", "--gpus=1", "--png", "FOLDER"],
    "results of preflight written to a folder": ["-m", "tools.preflight", "--json", "FOLDER"],
    "a patience that is no number": ["-m", "tools.preflight", "--timeout=nan"],
    "no day of sample data": [*SAMPLE, "--days=0"],
    "a year that is no number": [*SAMPLE, "--train_years=nan"],
}


@pytest.mark.parametrize("fault", COMMANDS)
def test_a_command_that_cannot_be_obeyed_is_one_line(fault, tmp_path, tiny_options):
    words = [word.replace("OUT", str(tmp_path / "out")).replace("FOLDER", str(tmp_path)) for word in COMMANDS[fault]]
    if "QUICK" in words:
        at = words.index("QUICK")
        words[at : at + 1] = tiny_options()
    done = programs.run(words, timeout=60)
    assert done.returncode == 2, done
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and len(done.stderr) < 1300
    assert list(tmp_path.iterdir()) == []


def year(path, **others):
    """A small year file, with datasets that replace or join the usual ones."""
    usual = {
        "fields": np.ones((4, 2, 4, 8), "f4"), "latitude": np.linspace(90, -90, 4), "longitude": np.arange(8) * 45.0,
        "channel": ["a", "b"], "channel_units": ["K", "Pa"],
    }  # fmt: skip
    with h5py.File(path, "w") as file:
        for name, value in (usual | others).items():
            file[name] = value
            if name == "time":
                file[name].attrs["units"] = "hours since 1979-01-01"


YEARS = {
    "fewer names than channels": {"channel": ["a"]},
    "units that are no list": {"channel_units": "K"},
    "latitudes in two dimensions": {"latitude": np.zeros((4, 8))},
    "times that are NaN": {"time": np.full(4, np.nan)},
    "times beyond any calendar": {"time": np.full(4, 1e300)},
    "times that are text": {"time": ["a", "b", "c", "d"]},
}


@pytest.mark.parametrize("fault", YEARS)
def test_a_year_file_with_other_metadata_is_refused_by_name(fault, tmp_path):
    path = tmp_path / "1979.h5"
    year(path, **YEARS[fault])
    with pytest.raises(UsageError, match=re.escape(str(path))) as refused:
        file_times(FieldDataset(tmp_path, 2, (4, 8)).files[0])
    assert "\n" not in str(refused.value)


def test_a_year_file_without_dates_and_without_a_year_in_its_name_is_refused(tmp_path):
    year(tmp_path / "some.h5")
    with pytest.raises(UsageError, match="some.h5: has no `time` with units, and its name is not a year"):
        file_times(open_year(tmp_path / "some.h5"))


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
    with pytest.raises(UsageError, match=re.escape(str(path))) as refused:
        READERS[reader](path)
    assert "\n" not in str(refused.value)


def test_what_json_cannot_hold_becomes_null_and_is_on_disk_before_its_name_says_so(tmp_path, monkeypatch):
    done, rename = [], Path.replace
    monkeypatch.setattr(files.os, "fsync", lambda _: done.append("fsync"))
    monkeypatch.setattr(Path, "replace", lambda *paths: (done.append("rename"), rename(*paths)))
    files.write_json(tmp_path / "summary.json", {"val_loss": float("nan"), "best": float("inf"), "rmse": 1.5})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"val_loss": None, "best": None, "rmse": 1.5}
    assert done == ["fsync", "rename", "fsync"]


def test_rank_0_that_cannot_be_reached_is_one_line_without_the_stack_of_torch(tiny_options):
    env = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    done = programs.run(
        ["train.py", *tiny_options(comm_timeout=1)], env=os.environ | {k: str(v) for k, v in env.items()}
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done
    assert "error: rank 1: the 2 ranks could not connect within 1 s through 127.0.0.1:" in done.stderr


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
        name for name in listed.stdout.split() if name != "tests/test_audit.py" and calls.search(Path(name).read_text())
    ] == []
