"""forecast.py with an ensemble: the same members in every layout, their files, scores and pictures."""

import contextlib
import gc
import json
import re
import shutil
import unittest.mock
import weakref

import numpy as np
import pytest
import torch
import xarray
from matplotlib.figure import Figure

import forecast
import train
import training.forecasting.pictures
from tests.conftest import words_of
from tests.support.launch import outcome
from tests.support.marks import slow_but
from tests.support.refusals import refusal
from tests.test_forecast import no_pictures
from tools.forecasting import skill_report
from tools.forecasting.dated_frames import run_config
from tools.forecasting.output_files import ForecastFile
from tools.forecasting.scores import LeadTimeEnsembles
from training.forecasting.metrics import latitude_weights
from training.forecasting.rollout import Rollout
from weather.convert.climate_quantiles import QUANTILES

MEMBERS = 3
WORDS = ["--lead_hours=18", "--starts=2"]


@pytest.fixture(scope="module")
def run(tiny_settings, tmp_path_factory):
    """The folder of a tiny trained ensemble."""
    own = {"expdir": tmp_path_factory.mktemp("logs"), "num_iters": 6, "warmup": 2, "lr": 3e-3}
    of_members = {"loss": "crps", "ensemble_size": MEMBERS, "noise_correlation": 0.5}
    settings = tiny_settings | {"yaml_config": "config/ViT.yaml"} | own | of_members
    train.main(words_of(settings))
    return settings["expdir"] / "quick/00"


def without_pictures():
    """Forecasts draw nothing: drawing takes longer than all the rest."""
    nothing = {name: lambda *_, **__: Figure() for name in ("ensemble_figure", "blur_figure")}
    stack = contextlib.ExitStack()
    stack.enter_context(no_pictures())
    stack.enter_context(unittest.mock.patch.multiple(skill_report, **nothing))
    return stack


@pytest.fixture(autouse=True, scope="module")
def _no_pictures():
    with without_pictures():
        yield


@pytest.fixture(name="ensemble_pictures")
def _ensemble_pictures(monkeypatch):
    """Forecasts of this test draw the pictures of an ensemble."""
    for name in ("ensemble_figure", "blur_figure"):
        monkeypatch.setattr(skill_report, name, getattr(training.forecasting.pictures, name))


def outcome_of(words):
    with without_pictures():
        return outcome("forecast", words)


def results_in(out):
    files = sorted(out.glob("forecast-*.nc"))
    return json.loads((out / "skill.json").read_text()), [xarray.load_dataset(file) for file in files]


def forecast_of(run, out, *words):
    forecast.main([f"--run_folder={run}", f"--out={out}", "--device=cpu", *WORDS, *words])


@pytest.fixture(scope="module")
def serial(run, tmp_path_factory):
    """Skill and files of the run's forecast on one device, and their folder."""
    out = tmp_path_factory.mktemp("serial")
    forecast_of(run, out)
    return *results_in(out), out


@pytest.fixture(scope="module")
def single(tiny_settings, tmp_path_factory):
    """The folder of a tiny model that was trained without members."""
    folder = tmp_path_factory.mktemp("single")
    own = {"yaml_config": "config/ViT.yaml", "expdir": folder, "run_num": "single", "num_iters": 2}
    train.main(words_of(tiny_settings | own))
    return folder / "quick/single"


def test_a_forecast_has_noise_as_alike_as_in_training(run):
    assert run_config(run, [], 1, ()).noise_correlation == 0.5
    assert run_config(run, ["--noise_correlation=0"], 1, ()).noise_correlation == 0


def test_the_summary_of_a_run_has_the_scores_of_its_ensemble(run):
    summary = json.loads((run / "summary.json").read_text())
    for score in ("crps", "spread", "spread_skill"):
        assert set(summary[score]) == set(summary["rmse"]) and min(summary[score].values()) > 0


def test_members_have_a_dimension_and_are_the_scored_ones(serial, sample_folder):
    skill, files, _ = serial
    assert files[0]["z500"].dims == ("forecast_reference_time", "lead_time", "number", "latitude", "longitude")
    assert files[0]["number"].attrs["standard_name"] == "realization" and files[0].sizes["number"] == MEMBERS
    assert skill["brier_quantiles"] == list(QUANTILES)
    for channel in ("z500", "t2m"):
        members = np.stack([file[channel].values[0] for file in files])  # (starts, L, M, H, W)
        assert (members.std(2) > 0).any()
        weights = latitude_weights(files[0]["latitude"].values)[:, None]
        variance = (members.var(2, ddof=1) * weights).mean((0, 2, 3)) / weights.mean()
        np.testing.assert_allclose(skill["spread"]["model"][channel], np.sqrt(variance), rtol=1e-3)
        assert np.shape(skill["rank_histogram"]["model"][channel]) == (3, MEMBERS + 1)
        np.testing.assert_allclose(np.sum(skill["rank_histogram"]["model"][channel], 1), 1, rtol=1e-5)
        assert np.shape(skill["brier"]["climatology"][channel]) == (3, len(QUANTILES))


def test_a_lead_time_is_in_the_file_before_the_next_is_computed(run, tmp_path, monkeypatch):
    """So a forecast holds the fields of one lead time, however long it is."""
    fields_written, seen = [], []
    write, steps = ForecastFile.write, Rollout.steps

    def noted_write(self, step, fields):
        write(self, step, fields)
        fields_written.append(weakref.ref(fields))

    def noted_steps(self, *arguments, **options):
        gc.collect()
        alive = [field for field in fields_written if field() is not None]
        seen.append((len(fields_written), len(alive) <= 1))
        return steps(self, *arguments, **options)

    monkeypatch.setattr(ForecastFile, "write", noted_write)
    monkeypatch.setattr(Rollout, "steps", noted_steps)
    forecast_of(run, tmp_path)
    assert seen == [(before, True) for before in range(6)]  # two starts of three steps


@pytest.mark.slow("pictures of an ensemble")
def test_pictures_and_table_show_the_ensemble(ensemble_pictures, run, tmp_path, capsys):
    forecast_of(run, tmp_path, "--skill_only")
    for name in ("ensemble.png", "blur.png"):
        assert (tmp_path / name).stat().st_size > 10_000
    shown = capsys.readouterr().out
    for words in ("CRPS persistence", "spread / skill", "Brier, over quantile 0.9", "ensemble.png"):
        assert words in shown


SPLIT = ["--ensemble_parallel=2", "--domain_parallel=1x2", "--ensemble_parallel=3"]


@pytest.mark.parametrize("layout", slow_but(SPLIT[:2], SPLIT, "a rank for each member"))
def test_any_layout_has_the_same_members(ranks, run, serial, tmp_path, layout):
    size = 3 if layout.endswith("3") else 2
    words = [f"--run={run}", f"--out={tmp_path}", *WORDS, layout]
    assert ranks(size, outcome_of, words) == [(None, "")] * size
    skill, files = results_in(tmp_path)
    for name, file in zip(files, serial[1], strict=True):
        xarray.testing.assert_allclose(name, file, rtol=1e-4, atol=1e-2)
    for score in ("rmse", "crps", "spread", "spread_skill"):
        for channel, values in serial[0][score]["model"].items():
            np.testing.assert_allclose(skill[score]["model"][channel], values, rtol=1e-4)


def test_more_members_than_in_training_begin_with_the_same(run, serial, tmp_path):
    forecast_of(run, tmp_path, "--ensemble_size=5", "--layout=weatherbench2")
    _, files = results_in(tmp_path)
    more = files[0]["2m_temperature"]
    assert more.sizes["number"] == 5
    first = serial[1][0]["t2m"].values
    np.testing.assert_allclose(more.sel(number=[0, 1, 2]).values, first, rtol=1e-5)


def test_a_single_forecast_stands_beside_the_members(run, single, tmp_path, capsys):
    """Its mean absolute error beside their CRPS, its spectrum beside theirs."""
    forecast.main([f"--run_folder={single}", "--device=cpu", "--skill_only", *WORDS])
    capsys.readouterr()
    forecast_of(run, tmp_path / "members", "--skill_only", "--compare", str(single))
    shown = capsys.readouterr().out
    errors = json.loads((single / "forecast/skill.json").read_text())["crps"]["model"]["t2m"]
    assert re.search(rf"t2m \(K\) +\| +CRPS {single} \| +{errors[0]:.3f} \|", shown)
    skill = json.loads((tmp_path / "members/skill.json").read_text())
    power = skill["spectra"]["power"]["z500"]
    assert set(power) == {"model", "truth", "mean"} and power["mean"] != power["model"]


@pytest.mark.parametrize("words", [[], ["--loss=squared_error"]])
def test_an_ensemble_of_one_is_refused(run, tmp_path, words):
    """Its weights for noise would be left out, and what is left was never trained."""
    with refusal("ensemble_size 1: its model was trained as an ensemble, and each member takes noise", run):
        forecast_of(run, tmp_path, "--ensemble_size=1", *words)


@pytest.mark.parametrize("words", [[], ["--loss=crps"]])
def test_members_of_a_model_without_noise_are_refused(single, tmp_path, words):
    with refusal("ensemble_size 4: its model takes no noise, so its members would be alike: train an ens", single):
        forecast_of(single, tmp_path, "--ensemble_size=4", *words)


def test_no_number_of_members_is_refused_as_any_value(single, tmp_path):
    with refusal("ensemble_size: 'many' should be a valid integer"):
        forecast_of(single, tmp_path, "--ensemble_size=many")


def test_a_run_of_some_of_the_channels_is_compared_in_these(run, tiny_settings, tmp_path, capsys):
    own = {"yaml_config": "config/ViT.yaml", "expdir": tmp_path, "run_num": "few", "num_iters": 2}
    of_wind = {"n_in_channels": 2, "n_out_channels": 2}  # u10 and v10
    train.main(words_of(tiny_settings | own | of_wind))
    few = tmp_path / "quick/few"
    forecast.main([f"--run_folder={few}", "--device=cpu", "--skill_only", *WORDS])
    capsys.readouterr()
    forecast_of(run, tmp_path / "members", "--skill_only", "--compare", str(few))
    shown = capsys.readouterr().out
    assert re.search(rf"RMSE below .*: u10 \d+ h, v10 \d+ h \({few}\)", shown)
    assert f"CRPS {few}" in shown


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"units": {"q500": "1"}}, "its forecast has none of u10, v10, t2m, z500: compare runs that share channels"),
        ({"units": {"u10": "m s-1", "t2m": "degC"}}, "its t2m is in degC, not in K: compare runs of the same units"),
        ({"points": "8 x 8 points"}, "its forecast is of 8 x 8 points, not of 16 x 32 points from 90 N 0 E to "),
    ],
)
def test_forecasts_that_do_not_compare_are_refused(run, serial, tmp_path, changed, line):
    record = serial[0] | changed
    other = tmp_path / "forecast"
    other.mkdir()
    (other / "skill.json").write_text(json.dumps(record))
    with refusal(line, other):
        forecast_of(run, tmp_path / "out", "--compare", str(tmp_path))


def test_quantiles_that_cannot_be_used_leave_the_forecasts_of_before(run, tiny_settings, tmp_path):
    """They are read before the folder is emptied."""
    for key in ("global_means_path", "global_stds_path"):
        shutil.copy(tiny_settings[key], tmp_path)
    np.save(tmp_path / "quantiles.npy", np.zeros((2, 20, 16, 32), np.float32))
    out = tmp_path / "out"
    out.mkdir()
    (out / "skill.json").write_text("of before")
    with refusal("quantiles.npy: expected shape .*, found .*: move it away, and make it anew"):
        forecast_of(run, out, f"--global_stds_path={tmp_path}/global_stds.npy")
    assert (out / "skill.json").read_text() == "of before"


def test_a_single_forecast_begins_with_an_ensemble_and_says_what_it_leaves(run, tiny_settings, tmp_path):
    own = {"yaml_config": "config/ViT.yaml", "expdir": tmp_path, "num_iters": 2, "init_from": str(run)}
    train.main(words_of(tiny_settings | own))
    log = (tmp_path / "quick/00/out.log").read_text()
    assert "those for noise are left out, since a single forecast takes none" in log


def test_a_single_forecast_is_scored_by_its_absolute_error():
    climatology = np.zeros((1, 4, 8), np.float32)
    statistics = [np.zeros((1, 1, 1), np.float32), np.full((1, 1, 1), 2, np.float32), climatology]
    scores = LeadTimeEnsembles(1, np.array([60.0, 20, -20, -60]), statistics, torch.device("cpu"))
    truth = torch.ones(1, 1, 4, 8)
    scores.update(0, truth * 3, truth[:, None] * 2, truth)
    found = scores.compute(["t2m"])
    assert found["crps"] == {"model": {"t2m": [2]}, "persistence": {"t2m": [4]}, "climatology": {"t2m": [2]}}
    assert "spread" not in found
