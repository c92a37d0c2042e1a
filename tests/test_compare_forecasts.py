"""`python -m tools.forecasting.compare`: hours of use, and refusals in one line."""

import json

import pytest

from tools.forecasting.compare import main
from tools.forecasting.skill_report import useful_hours
from utils.errors import UsageError

LEADS = [6, 12, 18, 24]


def write(folder, model, **changes):
    spectra = {
        "lead_hours": [6, 24], "ratio_up_to_km": 3000.0, "ratio": {"z500": [1.0, 0.5]},
        "wavelengths_km": [9000.0, 3000.0],
        "power": {"z500": {"model": [[2.0, 1.0], [2.0, 0.5]], "truth": [[2.0, 1.0], [2.0, 1.0]]}},
    }  # fmt: skip
    rmse = {"model": {"z500": model}, "persistence": {"z500": [5, 9, 9, 9]}, "climatology": {"z500": [7, 7, 7, 7]}}
    record = {"starts": ["2000-01-01T00"], "lead_hours": LEADS, "units": {"z500": "m2 s-2"}, "rmse": rmse}
    (folder / "forecast").mkdir(parents=True)
    (folder / "forecast" / "skill.json").write_text(json.dumps(record | {"spectra": spectra, "acc": {}} | changes))
    return str(folder)


@pytest.mark.parametrize(
    ("model", "hours"), [([1, 2, 3, 4], 24), ([1, 2, 8, 4], 12), ([6, 2, 3, 4], 0), ([1, 2, float("nan"), 4], 12)]
)
def test_a_forecast_is_of_use_until_its_error_is_that_of_a_trivial_one(model, hours):
    trivial = {"persistence": {"z500": [5, 9, 9, 9]}, "climatology": {"z500": [7, 7, 7, 7]}}
    assert useful_hours({"model": {"z500": model}} | trivial, "z500", LEADS) == hours


def test_runs_side_by_side(tmp_path, capsys):
    one, two = write(tmp_path / "a/00", [1, 2, 8, None]), write(tmp_path / "b/00", [1, 2, 3, 4])
    main([one, two, "--out", str(tmp_path / "both.png")])
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()[:4]]
    assert rows[0] == ["run", "z500: of use up to (h)", "power of z500 at 24 h"]
    assert rows[2:] == [[one, "12", "0.50"], [two, "24", "0.50"]]
    assert (tmp_path / "both.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"starts": ["2000-02-01T00"]}, "b: its forecast has other starts than that of "),
        ({"lead_hours": [6]}, "b: its forecast has other lead_hours than that of "),
        ({"rmse": 3}, "b/forecast/skill.json: rmse: 3 should be a valid dictionary"),
        ({"spectra": {}}, "b/forecast/skill.json: .* missing"),
    ],
)
def test_forecasts_that_cannot_be_compared_are_refused(tmp_path, changes, error):
    one = write(tmp_path / "a", [1, 2, 3, 4])
    with pytest.raises(UsageError, match=error):
        main([one, write(tmp_path / "b", [1, 2, 3, 4], **changes)])


def test_a_run_without_forecast_is_told_the_command(tmp_path):
    with pytest.raises(UsageError, match=r"no forecast yet: python forecast.py --run_folder"):
        main([str(tmp_path)])
