"""Quantiles of each point over the training years: from which frames, and what is done without them."""

import numpy as np
import pytest

from tests.support.refusals import refusal
from weather.convert import climate_quantiles
from weather.convert.climate_quantiles import QUANTILES, read_quantiles
from weather.convert.climate_quantiles import climate_quantiles as quantiles_of
from weather.sample_data import make_sample_data
from weather.year_files import main as make_statistics
from weather.years.year_reader import open_year


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Two training years of 60 frames each, and their frames, (T, C, H, W)."""
    folder = tmp_path_factory.mktemp("data")
    make_sample_data(folder, (8, 16), train_years=[1979, 1980], valid_years=[], test_years=[], days=15)
    paths = sorted((folder / "train").glob("*.h5"))
    return folder, paths, np.concatenate([open_year(path).frames(0, 60) for path in paths])


def test_they_are_of_all_training_frames_and_lie_beside_the_other_statistics(data):
    folder, _, frames = data
    found = read_quantiles(folder / "stats/global_stds.npy", 20, (8, 16))
    np.testing.assert_array_equal(found, np.quantile(frames, QUANTILES, axis=0).astype("f4"))
    some = read_quantiles(folder / "stats/global_stds.npy", 3, (6, 16))
    np.testing.assert_array_equal(some, found[:, :3, :6])


def test_of_many_frames_some_are_taken_evenly_and_by_bands_of_rows(data, monkeypatch):
    _, paths, frames = data
    monkeypatch.setattr(climate_quantiles, "MOST_FRAMES", 18)
    monkeypatch.setattr(climate_quantiles, "BAND_BYTES", 3 * 4 * 18 * 20 * 16)  # three rows of eight
    chosen = frames[::7]  # the first and the last of 120, and every seventh in between
    assert len(chosen) == 18
    np.testing.assert_array_equal(quantiles_of(paths), np.quantile(chosen, QUANTILES, axis=0).astype("f4"))


def test_too_few_frames_have_none_and_data_of_before_get_theirs(data, tmp_path, sample_folder, capsys):
    folder, paths, _ = data
    assert quantiles_of(paths[:1]) is None
    assert not (sample_folder / "stats/quantiles.npy").exists()
    assert read_quantiles(sample_folder / "stats/global_stds.npy", 20, (16, 32)) is None
    make_statistics([str(folder / "train"), str(tmp_path)])
    assert str(tmp_path / "quantiles.npy") in capsys.readouterr().out
    expected = (folder / "stats/quantiles.npy").read_bytes()
    assert (tmp_path / "quantiles.npy").read_bytes() == expected


@pytest.mark.parametrize(
    ("values", "line"),
    [
        (np.zeros((2, 20, 8, 16), "f4"), r"expected shape \(3, 20, 8, 16\), found \(2, 20, 8, 16\): move it away"),
        (np.zeros((3, 20, 8, 15), "f4"), r"found \(3, 20, 8, 15\)"),
        (np.full((3, 20, 8, 16), np.nan, "f4"), "holds values that are not finite"),
        (np.ones((3, 20, 8, 16), "f4") * [[[[3]]], [[[2]]], [[[1]]]], "its quantiles do not grow from one to the next"),
    ],
)  # fmt: skip
def test_a_file_that_holds_something_else_is_refused_in_one_line(tmp_path, values, line):
    np.save(tmp_path / "quantiles.npy", values)
    with refusal(line):
        read_quantiles(tmp_path / "global_stds.npy", 20, (8, 16))
