"""forecast.py: the rollout is that of calling the model by hand, in every layout; its scores, files and refusals."""

import json
import shutil
import subprocess
import unittest.mock

import h5py
import numpy as np
import pytest
import torch
import xarray
from matplotlib.figure import Figure
from PIL import Image

import forecast
import train
import training.forecasting.pictures
from tests.conftest import words_of
from tests.faults import can_mount, mount
from tests.support import programs
from tests.support.full_disk import fill_disk
from tests.support.launch import outcome
from tests.support.layout_parity import ranks_and_options
from tests.support.marks import slow_but
from tests.support.refusals import refusal
from tools.checkpoint import load_weights
from tools.forecasting import skill_report
from tools.forecasting.dated_frames import run_config
from tools.forecasting.output_files import prepare_folder
from tools.forecasting.skill_report import useful_hours
from training.forecasting.metrics import latitude_weights
from training.forecasting.rollout import Rollout
from training.models.build import build_model
from utils.errors import os_errors_as_usage_errors
from weather.fields.channels import CHANNELS

NAMES = [channel.name for channel in CHANNELS]
START = np.datetime64("1982-01-02T06")
FIRST, LAST = "1982-01-01T00", "1982-01-05T18"  # of the test data


@pytest.fixture(scope="module")
def settings(tiny_settings, tmp_path_factory):
    """Settings of a tiny run on the sample data."""
    own = {"expdir": tmp_path_factory.mktemp("logs"), "num_iters": 12, "warmup": 2, "checkpoint_every": 9, "lr": 3e-3}
    return tiny_settings | {"yaml_config": "config/ViT.yaml"} | own


@pytest.fixture(scope="module")
def run(settings):
    """The folder of a tiny trained run."""
    train.main(words_of(settings))
    return settings["expdir"] / "quick/00"


DRAWN = ("skill_figure", "lead_time_figure", "spectra_figure", "animate")


def no_pictures():
    """Forecasts draw nothing: drawing takes longer than all the rest."""
    nothing = {name: lambda *_: Figure() for name in DRAWN}
    return unittest.mock.patch.multiple(skill_report, **nothing)


@pytest.fixture(autouse=True, scope="module")
def _no_pictures():
    with no_pictures():
        yield


@pytest.fixture(name="pictures")
def _pictures(monkeypatch):
    """Forecasts of this test draw pictures."""
    for name in DRAWN:
        monkeypatch.setattr(skill_report, name, getattr(training.forecasting.pictures, name))


def forecast_of(run, out, *words):
    """Scores and files of a forecast in this process: (what skill.json holds, {start: Dataset})."""
    forecast.main(["--run", str(run), "--out", str(out), *map(str, words)])
    return results_in(out)


def results_in(out):
    files = sorted(out.glob("*.nc"))
    data = [xarray.load_dataset(file, engine="h5netcdf") for file in files]
    return json.loads((out / "skill.json").read_text()), {d.forecast_reference_time.values[0]: d for d in data}


@pytest.fixture(scope="module")
def serial(run, tmp_path_factory):
    """Three forecasts of a day by one device."""
    return forecast_of(run, tmp_path_factory.mktemp("serial"), "--lead_hours", 24, "--starts", 3)


def frames_of(sample_folder):
    """The test frames in physical units, (T, C, H, W), and means and stds, (C, 1, 1)."""
    with h5py.File(sample_folder / "test/1982.h5", locking=False) as file:
        fields = file["fields"][:]
    return fields, *(np.load(sample_folder / f"stats/global_{name}.npy")[0] for name in ("means", "stds"))


def test_a_rollout_is_the_model_called_step_by_step(run, sample_folder, tmp_path):
    _, found = forecast_of(run, tmp_path, "--start", START, "--lead_hours", 18, "--checkpoint", "newest")
    model = build_model(run_config(run, [], 1, ()), "cpu").eval()
    model.load_state_dict(load_weights(run / "checkpoints/iter-00000012"))
    fields, means, stds = frames_of(sample_folder)
    x = torch.from_numpy((fields[5:6] - means) / stds)  # 2 January 06 UTC is the sixth frame
    with torch.no_grad():
        for lead in (6, 12, 18):
            x = model(x)
            expected = x[0].numpy() * stds + means
            for c, name in enumerate(NAMES):
                values = found[START][name].sel(lead_time=lead)[0].values
                assert np.abs(values - expected[c]).max() < 1e-5 * stds[c].item() + 1e-6 * np.abs(expected[c]).max()


def test_skill_after_one_step_is_that_of_the_validation(run, tmp_path):
    options = ("--split", "valid", "--lead_hours", 6, "--starts", 19, "--skill_only", "--checkpoint", "newest")
    skill, files = forecast_of(run, tmp_path, *options, "--local_batch_size", 4)
    summary = json.loads((run / "summary.json").read_text())
    assert not files and skill["lead_hours"] == [6]
    for name in NAMES:
        assert skill["rmse"]["model"][name] == pytest.approx([summary["rmse"][name]], rel=1e-5)
        assert skill["acc"]["model"][name] == pytest.approx([summary["acc"][name]], abs=3e-5)
        assert skill["rmse"]["persistence"][name] == pytest.approx([summary["persistence_rmse"][name]], rel=1e-5)
        assert skill["rmse"]["climatology"][name] == pytest.approx([summary["climatology_rmse"][name]], rel=1e-5)


def outcome_of(words):
    with no_pictures():
        return outcome("forecast", words)


# Three starts over two ranks; bands and tiles. Of the others, bands of 2, 1, 1 rows, and a rank without a start.
QUICK = ["dp2", "domain2xtp2"]
LAYOUTS = [
    *QUICK, "domain2", "domain3,domain_method=ring", "domain2x2", "domain2x2,data_parallel=fsdp", "tp2",
    "domain2xdp2,local_batch_size=2", "dp4,data_parallel=fsdp",
]  # fmt: skip


@pytest.mark.parametrize("layout", slow_but(QUICK, LAYOUTS, "a forecast by each of the other kinds of parallelism"))
def test_any_layout_gives_the_forecast_of_one_device(ranks, run, serial, tmp_path, layout):
    size, options = ranks_and_options(layout)
    words = [f"--{name}={value}" for name, value in options.items()]
    words += ["--run", str(run), "--out", str(tmp_path), "--lead_hours", "24", "--starts", "3"]
    assert ranks(size, outcome_of, words) == [(None, "")] * size
    skill, found = results_in(tmp_path)
    assert found.keys() == serial[1].keys()
    for start, expected in serial[1].items():
        for name in NAMES:
            scale = float(expected[name].std())
            np.testing.assert_allclose(found[start][name], expected[name], rtol=1e-5, atol=1e-5 * scale)
    for forecast_name, by_channel in serial[0]["rmse"].items():
        for name, values in by_channel.items():
            assert skill["rmse"][forecast_name][name] == pytest.approx(values, rel=1e-5)
    spectra, expected = skill["spectra"], serial[0]["spectra"]
    for name in NAMES:
        assert spectra["ratio"][name] == pytest.approx(expected["ratio"][name], rel=1e-4)
    for name, power in expected["power"].items():
        for key, values in power.items():
            np.testing.assert_allclose(spectra["power"][name][key], values, rtol=1e-3)


def test_a_run_that_was_itself_split_is_read_like_any_other(ranks, run, settings, tmp_path):
    """How the run was split and compiled, its config says; the forecast does not ask."""
    shutil.copytree(run, tmp_path / "run")
    config = tmp_path / "run/config.yaml"
    lines = config.read_text().replace("tensor_parallel: 1", "tensor_parallel: 2")
    lines = lines.replace("data_parallel: ddp", "data_parallel: fsdp")
    config.write_text(lines.replace("enable_jit: false", "enable_jit: true"))
    skill, _ = forecast_of(tmp_path / "run", tmp_path / "a", "--lead_hours", 12, "--starts", 2, "--skill_only")
    assert skill == forecast_of(run, tmp_path / "b", "--lead_hours", 12, "--starts", 2, "--skill_only")[0] | {
        key: skill[key] for key in ("source", "history")
    }


def test_mixed_precision_is_that_of_the_config_or_of_an_option(run, serial, tmp_path):
    skill, found = forecast_of(run, tmp_path, "--lead_hours", 24, "--starts", 3, "--amp_mode", "bf16")
    expected, values = serial[1][START := min(serial[1])]["z500"], found[START]["z500"]
    error = float(np.abs(values - expected).max() / expected.std())
    assert 1e-5 < error < 0.1
    assert values.dtype == np.float32
    assert skill["rmse"]["model"]["z500"] == pytest.approx(serial[0]["rmse"]["model"]["z500"], rel=0.05)


def test_files_are_cf_and_open_in_xarray(serial):
    assert len(serial[1]) == 3
    for start, data in serial[1].items():
        assert data.attrs["Conventions"] == "CF-1.11"
        assert {"title", "source", "history", "comment"} <= set(data.attrs)
        assert list(data.data_vars) == NAMES
        for channel in CHANNELS:
            variable = data[channel.name]
            assert variable.dims == ("forecast_reference_time", "lead_time", "latitude", "longitude")
            assert variable.shape == (1, 4, 16, 32) and variable.dtype == np.float32
            assert variable.attrs["units"] == channel.units and variable.attrs["long_name"] == channel.long_name
            assert variable.attrs["standard_name"]
            assert "_FillValue" not in variable.encoding or np.isnan(variable.encoding["_FillValue"])
        for name, standard_name, units in (
            ("lead_time", "forecast_period", "hours"),
            ("latitude", "latitude", "degrees_north"),
            ("longitude", "longitude", "degrees_east"),
            ("p500", "air_pressure", "hPa"),
            ("height10", "height", "m"),
        ):
            assert (data[name].attrs["standard_name"], data[name].attrs["units"]) == (standard_name, units)
        assert data.time.attrs["standard_name"] == "time"
        assert list(data.lead_time.values) == [6, 12, 18, 24]
        assert data.time.values[0, -1] == start + np.timedelta64(24, "h")
        assert data.z500.encoding["coordinates"] == "time p500" and data.p500.item() == 500
        assert data.u10.attrs["standard_name"] == "eastward_wind"
        assert data.u10.encoding["coordinates"] == "time height10" and data.height10.item() == 10
        assert data.mslp.attrs["standard_name"] == "air_pressure_at_mean_sea_level"


@pytest.mark.slow("xarray joins files")
def test_several_files_open_as_one(run, tmp_path):
    _, found = forecast_of(run, tmp_path, "--lead_hours", 12, "--starts", 3)
    whole = xarray.concat(found.values(), "forecast_reference_time")
    assert whole.sizes["forecast_reference_time"] == len(found) == 3
    _, found = forecast_of(run, tmp_path, "--lead_hours", 12, "--starts", 1)
    assert len(found) == len(list(tmp_path.glob("*.nc"))) == 1  # the earlier went


@pytest.mark.parametrize(
    ("model", "hours"), [([1, 2, 3, 4], 24), ([1, 2, 8, 4], 12), ([6, 2, 3, 4], 0), ([1, 2, float("nan"), 4], 12)]
)
def test_a_forecast_is_of_use_until_its_error_is_that_of_a_trivial_one(model, hours):
    trivial = {"persistence": {"z500": [5, 9, 9, 9]}, "climatology": {"z500": [7, 7, 7, 7]}}
    assert useful_hours({"model": {"z500": model}} | trivial, "z500", [6, 12, 18, 24]) == hours


def test_forecasts_of_somebody_else_stay(run, tmp_path):
    theirs = tmp_path / "forecast-2020-01-01T00.nc"
    theirs.write_text("theirs")
    with refusal("was not written by a forecast of this program: choose another --out"):
        forecast_of(run, tmp_path, "--lead_hours", 6, "--starts", 1)
    assert theirs.read_text() == "theirs"


@pytest.mark.slow("two runs that are compared")
def test_forecasts_of_other_runs_from_the_same_dates_are_compared(run, tmp_path, capsys):
    options = ("--lead_hours", 12, "--starts", 3)
    forecast_of(run, tmp_path / "other/forecast", *options)
    capsys.readouterr()
    forecast_of(run, tmp_path / "out", *options, "--compare", tmp_path / "other")
    one, other = (line for line in capsys.readouterr().out.splitlines() if line.startswith("RMSE below"))
    assert other == f"{one} ({tmp_path}/other)" and "z500 " in one
    for runs, words, line in (
        (tmp_path / "none", options, "no forecast yet: python forecast.py --run_folder"),
        (tmp_path / "other", ("--lead_hours", 6, "--starts", 3), "its forecast has other dates or lead times"),
        (tmp_path / "other", ("--lead_hours", 12, "--starts", 2), "its forecast has other dates or lead times"),
    ):
        with refusal(line):
            forecast_of(run, tmp_path / "out", *words, "--compare", runs)


def test_the_layout_of_weatherbench2_holds_the_same_forecasts(run, serial, tmp_path):
    words = ["--run", str(run), "--out", str(tmp_path), "--lead_hours", "24", "--starts", "3"]
    forecast.main([*words, "--layout", "weatherbench2"])
    files = [xarray.open_dataset(path, engine="h5netcdf") for path in sorted(tmp_path.glob("*.nc"))]
    whole = xarray.concat(files, "time")  # as docs/forecast.md
    assert whole.sizes["time"] == 3
    for start, expected in serial[1].items():
        np.testing.assert_array_equal(whole.geopotential.sel(time=start, level=500), expected.z500[0])
        np.testing.assert_array_equal(whole["2m_temperature"].sel(time=start), expected.t2m[0])


def test_scores_are_those_of_the_forecasts_in_the_files(serial, sample_folder):
    frames, squares = frames_of(sample_folder)[0], []
    for start, data in serial[1].items():
        at = int((start - np.datetime64(FIRST)) / np.timedelta64(6, "h"))
        errors = data.z500[0].values - frames[at + 1 : at + 5, NAMES.index("z500")]  # (L, H, W)
        squares.append((errors.astype(float) ** 2).mean(2) @ latitude_weights(data.latitude.values) / 16)
    np.testing.assert_allclose(serial[0]["rmse"]["model"]["z500"], np.sqrt(np.mean(squares, 0)), rtol=1e-4)
    spectra = serial[0]["spectra"]
    assert spectra["lead_hours"] == [6, 12, 18, 24] and set(spectra["power"]) == {"u10", "v10", "t2m", "z500"}


def test_pictures_are_there_and_the_animation_has_a_frame_for_each_lead_time(pictures, run, tmp_path):
    forecast_of(run, tmp_path, "--lead_hours", 18, "--starts", 1, "--channel", "t2m", "--skill_only")
    assert Image.open(tmp_path / "t2m.webp").n_frames == 3
    for name in ("t2m.png", "skill.png", "spectra.png"):
        assert min(Image.open(tmp_path / name).size) > 100


def test_a_rollout_that_breaks_down_says_where(run, tmp_path, capsys):
    factors = iter([1, torch.inf, torch.nan])
    with unittest.mock.patch.object(Rollout, "next_state", lambda _, state, output: output * next(factors)):
        skill, _ = forecast_of(run, tmp_path, "--lead_hours", 18, "--starts", 1)
    assert "not finite from 12 hours on" in capsys.readouterr().out
    assert skill["rmse"]["model"]["u10"][1:] == [None, None]


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--start", "1982-01-01T03"], f"start 1982-01-01T03: .*test has {FIRST} to {LAST}, every 6 hours"),
        (["--start", "1982-01-05T00"], "every step of the 24 hours after it.* start is 1982-01-04T18"),
        (["--start", "tomorrow"], "start 'tomorrow': write a date"),
        (["--lead_hours", "120"], f"no date has 120 hours of data after it .*{FIRST} to {LAST}"),
        (["--lead_hours", "10"], "lead_hours 10: the model makes steps of 6 hours; give a multiple of 6"),
        (["--starts", "17"], "starts 17: 1 to 16 dates have 24 hours after them"),
        (["--starts", "0"], "starts 0: 1 to 16 dates have 24 hours after them"),
        (["--channel", "z50o"], r"channel 'z50o': not forecast \(did you mean 'z50"),
        (
            ["--checkpoint", "iter-00000007"],
            "no checkpoint 'iter-00000007'; give best, newest or one of iter-00000012, ",
        ),
        (["--embed_dim", "64"], "was trained with embed_dim 32, not 64"),
        (["--inf_data_path", "nowhere"], "nowhere: no such data folder"),
        (["--lead_hour", "6"], "unknown option '--lead_hour'"),
        (["--layout", "weatherbench"], "layout.*invalid choice: 'weatherbench'"),
    ],
)
def test_bad_input_is_one_line(run, tmp_path, options, line):
    with refusal(line):
        forecast_of(run, tmp_path / "out", "--lead_hours", "24", *options)
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_written_leads_to_another(tmp_path):
    (tmp_path / "file").write_text("")
    with refusal(r"file/forecast: the forecasts cannot be written there \(Not a directory\): choose another --out"):
        prepare_folder(tmp_path / "file/forecast")


def test_a_disk_that_fills_is_one_line_and_what_is_whole_stays(run, tmp_path, monkeypatch):
    fill_disk(monkeypatch, files=1)
    line = r"forecast-.*\.nc.*: No space left on device: free some space, or write to another folder"
    with refusal(line), os_errors_as_usage_errors():
        forecast_of(run, tmp_path, "--lead_hours", 6, "--dates", "1982-01-01", "1982-01-02", "--local_batch_size", 1)
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.slow("a real file system that is full, on which HDF5 ends the process")
@pytest.mark.parametrize("size", ["60k", "1200k"])
def test_a_file_system_that_is_full_is_one_line(run, tmp_path, size):
    if not can_mount():
        pytest.skip("needs the right to mount a file system")
    mount(tmp_path / "small", size)
    try:
        words = ["forecast.py", "--run_folder", run, "--out", tmp_path / "small/out", "--lead_hours", 24]
        done = programs.run(words)
    finally:
        subprocess.run(["umount", tmp_path / "small"], check=True)
    assert done.returncode == 2, done.stderr
    assert "No space left on device: free some space" in done.stderr and done.stderr.count("error: ") == 1


def test_folders_that_are_no_forecasting_run_are_refused(run, tmp_path):
    config = (run / "config.yaml").read_text()
    classes = config.replace("task: forecast", "task: classify").replace("num_classes: null", "num_classes: 3")
    for text, line in (
        (None, "no run there"),
        (config, "no whole checkpoint in it"),
        ("{{{", "config.yaml: line 1: expected"),
        (classes, "is a run of task classify, which forecasts nothing"),
    ):
        if text:
            (tmp_path / "config.yaml").write_text(text)
        with refusal(line, tmp_path):
            forecast.main(["--run", str(tmp_path), "--lead_hours", "24"])


def test_fewer_channels_out_than_in_allow_one_step(pictures, settings, tmp_path):
    train.main(words_of(settings | {"n_out_channels": 3, "num_iters": 2, "warmup": 0, "expdir": tmp_path}))
    run = tmp_path / "quick/00"
    with refusal("takes 20 channels and forecasts 3, not enough for a second step"):
        forecast.main(["--run", str(run), "--lead_hours", "12"])
    skill, files = forecast_of(run, tmp_path / "out", "--lead_hours", "6", "--starts", "2")
    assert list(skill["rmse"]["model"]) == NAMES[:3] and len(files) == 2
    assert (tmp_path / "out/u10.webp").exists()


def test_a_damaged_best_checkpoint_gives_way_to_another(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    newest = tmp_path / "run/checkpoints/iter-00000012"
    next(newest.glob("*.safetensors")).write_bytes(b"")
    skill, _ = forecast_of(tmp_path / "run", tmp_path / "out", "--lead_hours", "6", "--starts", "1", "--skill_only")
    assert "iter-00000012" not in skill["source"]
    with refusal("is damaged"):
        forecast.main(["--run", str(tmp_path / "run"), "--lead_hours", "6", "--checkpoint", "iter-00000012"])


def test_weights_of_another_model_are_refused(run, settings, tmp_path, monkeypatch):
    train.main(words_of(settings | {"depth": 1, "num_iters": 2, "warmup": 0, "expdir": tmp_path}))
    other = tmp_path / "quick/00"
    (other / "config.yaml").write_text((other / "config.yaml").read_text().replace("depth: 1", "depth: 2"))
    with refusal("iter-00000002: was trained with depth 1, not 2"):  # config.yaml was edited
        forecast.main(["--run", str(other), "--lead_hours", "6"])
    monkeypatch.setattr(forecast, "check_origin", lambda *_: None)  # as if the code had changed since
    with refusal(r"does not hold the weights of this model: .*blocks.1.*another version"):
        forecast.main(["--run", str(other), "--lead_hours", "6"])


def test_a_refusal_is_the_same_line_on_every_rank(ranks, run, tmp_path):
    words = ["--run", str(run), "--out", str(tmp_path), "--lead_hours", "24"]
    for extra, line in (
        (["--start", "1999-01-01T00"], "start 1999-01-01T00: "),
        (["--checkpoint", "iter-1"], f"{run}: no checkpoint"),
        (["--context_parallel", "2"], "context_parallel 2: the model is split by train_mp.py"),
        (["--domain_parallel", "3"], "2 ranks cannot be split as domain 3 x dp"),
        (["--domain_parallel", "2", "--patch_size", "16"], f"{run}: was trained with patch_size 4, not 16"),
    ):
        for status, said in ranks(2, outcome_of, words + extra):
            assert status == 2 and said.startswith(f"error: {line}") and said.count("\n") == 1, said


def test_the_command_line_end_to_end(run, tmp_path):
    words = ["forecast.py", "--run_folder", run, "--out", tmp_path, "--lead_hours", "12"]
    done = programs.run([*words, "--starts", "2"])
    assert done.returncode == 0, done.stderr
    assert "2 forecasts of 12 hours" in done.stdout and "ACC model" in done.stdout
    assert "power model" in done.stdout and "power: of the model at wavelengths up to " in done.stdout
    assert done.stdout.splitlines()[-1] == f"animation:  {tmp_path}/z500.webp" and (tmp_path / "z500.webp").exists()
    words += ["--domain_parallel", "2", "--dates", "1982-01-01T06", "1982-01-03"]
    (status, output), (other, _) = programs.run_ranks(words)
    assert status == other == 0 and "animation:" in output, output
    assert {file.name for file in tmp_path.glob("*.nc")} == {
        "forecast-1982-01-01T06.nc", "forecast-1982-01-03T00.nc"
    }  # fmt: skip
