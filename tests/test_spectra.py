"""Power spectra by lead time: against a plain formula, and of a pure wave."""

import numpy as np
import pytest
import torch

from tools.forecasting.spectra import EARTH_RADIUS, LeadTimeSpectra, spread
from training.forecasting.pictures import spectra_figure
from weather.fields.grid import Grid, latitudes, longitudes

CPU = torch.device("cpu")


def spectra_of(forecast, truth, grid, stds, batch=2):
    """Spectra of one lead time, in batches."""
    found = LeadTimeSpectra([6], grid, torch.tensor(stds).view(-1, 1, 1), CPU)
    for i in range(0, max(1, len(forecast)), batch):  # at least one batch, which may be empty
        found.update(0, forecast[i : i + batch], truth[i : i + batch])
    return found.compute()


def test_a_pure_wave_has_its_power_at_its_wavelength_and_half_its_amplitude_a_quarter():
    grid = Grid(np.array([90.0, 45, 0, -45]), longitudes(48))
    wave = 2 * torch.cos(9 * torch.deg2rad(torch.from_numpy(grid.longitude))).float().expand(1, 1, 4, 48)
    found = spectra_of(wave / 2, wave, grid, [1.0])
    around = 2 * np.pi * EARTH_RADIUS * np.sqrt(0.5)
    truth = found.power["truth"][0, 0]
    assert truth.argmax() == 8 and found.wavelengths[8] == pytest.approx(around / 9)
    assert truth[8] == pytest.approx(1000 * around * 2)  # Parseval: the circumference times the mean square
    assert truth.sum() == pytest.approx(truth[8])
    assert found.short == pytest.approx(around / 6)  # eight of 48 grid spacings
    assert found.ratio() == pytest.approx(0.25)


def test_a_region_has_wavelengths_of_its_own_width_and_needs_no_middle_latitudes():
    grid = Grid(np.array([10.0, 0, -10]), np.arange(16) * 5.0)  # 80 degrees wide
    found = spectra_of(torch.randn(1, 1, 3, 16), torch.randn(1, 1, 3, 16), grid, [1.0])
    width = np.deg2rad(80) * EARTH_RADIUS * (1 + 2 * np.cos(np.deg2rad(10))) / 3
    assert found.wavelengths[0] == pytest.approx(width)
    assert np.isfinite(found.ratio()).all()


def test_every_lead_time_that_is_shown_has_its_own_spectrum():
    leads, grid = list(range(6, 66, 6)), Grid(latitudes(16), longitudes(32))
    found = LeadTimeSpectra(leads, grid, torch.ones(1, 1, 1), CPU)
    field = torch.randn(3, 1, 16, 32)
    for step in range(len(leads)):
        found.update(step, (step + 1) * field, field)
    result = found.compute()
    assert result.leads == [leads[i] for i in spread(10)] == [6, 12, 24, 36, 48, 60]
    assert result.ratio()[0] == pytest.approx([(lead / 6) ** 2 for lead in result.leads])


def test_a_broken_or_empty_spectrum_is_still_drawn(recwarn, tmp_path):
    power = {"model": np.array([[np.nan, np.inf, 1.0], [1, 1, 1]]), "truth": np.array([[1.0, 1, 0], [0, 0, 0]])}
    figure = spectra_figure({"a": power}, np.array([9.0, 4.5, 3]), [6, 12], {"a": "%"})
    figure.savefig(tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size and not recwarn.list
    assert figure.axes[0].xaxis_inverted()
