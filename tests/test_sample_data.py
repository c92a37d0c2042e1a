"""The sample atmosphere obeys its equations; its files are whole, reproducible and free of leakage."""

import h5py
import numpy as np
import pytest

from tests.support.refusals import refusal
from weather.checks import data_check
from weather.fields import grid
from weather.fields.channels import CHANNELS
from weather.sample import atmosphere
from weather.sample.atmosphere import GAS, LEVELS, OMEGA, RADIUS, STEP, Atmosphere, vertical_modes
from weather.sample_data import make_sample_data
from weather.year_files import parse_years

C = {channel.name: i for i, channel in enumerate(CHANNELS)}
SMALL = {
    "img_size": (8, 16),
    "train_years": (1979, 1980),
    "valid_years": (1981,),
    "test_years": (1982,),
    "days": 2,
}


@pytest.fixture(scope="module")
def fine():
    """Waves of the 32 x 64 default on a grid fine enough for finite differences, without the pole."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(atmosphere, "TRUNCATION", 12)
        return Atmosphere((361, 720), seed=0)


@pytest.fixture(scope="module")
def year():
    """Every tenth frame of a year on the default grid: (146, 20, 32, 64)."""
    model = Atmosphere((32, 64), seed=0)
    return np.concatenate([model.frames(1979, t, 1) for t in range(0, 1460, 10)]).astype(np.float64)


def d_lon(x):
    return (np.roll(x, -1, -1) - np.roll(x, 1, -1)) / (4 * np.pi / x.shape[-1])


def d_lat(x):
    return -np.gradient(x, np.pi / (x.shape[-2] - 1), axis=-2)  # rows run southward


def divergence(model, u, v):
    """Divergence of (u, v) on the sphere by central differences, away from the poles."""
    cos = np.cos(model.lat)
    return ((d_lon(u) + d_lat(v * cos)) / (RADIUS * np.where(cos < 1e-9, 1, cos)))[20:-20]


def gradient(model, x):
    cos = np.cos(model.lat)
    return d_lon(x) / (RADIUS * np.where(cos < 1e-9, 1, cos)), d_lat(x) / RADIUS


def relative(x, reference):
    return np.sqrt(np.mean(x**2) / np.mean(reference**2))


def single_wave(model, k, n, m):
    """Amplitudes of one wave, (k, m, n)."""
    a = np.zeros_like(model.factor)
    a[k, m, n] = model.spread[k, m, n] * (1 + 1j)
    return a


# ---- physics


def test_the_wind_is_nondivergent_and_its_vorticity_is_the_laplacian_of_psi(fine):
    u, v, psi = (fine.synthesize(name, fine.amplitudes(1979)[0][0]) for name in ("u", "v", "psi"))
    vorticity = divergence(fine, v, -u)
    assert relative(divergence(fine, u, v), vorticity) < 2e-3
    assert relative(vorticity - divergence(fine, *gradient(fine, psi)), vorticity) < 1e-2

    n = 7
    wave = single_wave(fine, 0, n, 4)[0]
    u, v, psi = (fine.synthesize(name, wave) for name in ("u", "v", "psi"))
    laplacian = -n * (n + 1) / RADIUS**2 * psi[20:-20]
    assert relative(divergence(fine, v, -u) - laplacian, laplacian) < 2e-3


def test_geopotential_is_in_linear_balance_with_the_wind(fine):
    psi, phi = (fine.synthesize(name, fine.amplitudes(1979)[0][1]) for name in ("psi", "phi"))
    f = 2 * OMEGA * np.sin(fine.lat)
    balance = divergence(fine, *(f * component for component in gradient(fine, psi)))
    assert relative(divergence(fine, *gradient(fine, phi)) - balance, balance) < 5e-3


def test_the_zonal_flow_is_in_gradient_wind_balance(fine):
    calm = [np.zeros((2, *fine.img_size))] * 3
    for x in LEVELS.values():
        u, _, phi, _ = fine.level(x, calm, season=0)
        force = 2 * OMEGA * np.sin(fine.lat) * u + u**2 * np.tan(fine.lat) / RADIUS
        pressure = d_lat(phi) / RADIUS
        assert relative((force + pressure)[20:-20], force[20:-20]) < 1e-3


def test_temperature_is_the_slope_of_geopotential(fine):
    waves = [fine.synthesize(name, fine.amplitudes(1979)[0]) for name in ("u", "v", "phi")]
    h = 1e-4
    for x in LEVELS.values():
        above, below = fine.level(x + h, waves, 0.7)[2], fine.level(x - h, waves, 0.7)[2]
        t = fine.level(x, waves, 0.7)[3]
        np.testing.assert_allclose((above - below) / (2 * h * GAS), t, rtol=1e-5)
    for x in (0.1, 1.0, 2.5):
        slope = (vertical_modes(x + h)[0] - vertical_modes(x - h)[0]) / (2 * h)
        np.testing.assert_allclose(slope, vertical_modes(x)[1], atol=1e-6)


@pytest.mark.parametrize("k, n, m", [(0, 4, 4), (0, 9, 6), (1, 6, 3)])
def test_an_undamped_wave_travels_at_the_speed_of_haurwitz(k, n, m):
    model = Atmosphere((32, 64), seed=0)
    wave, steps = single_wave(model, k, n, m), 40
    gamma = (0, (RADIUS / atmosphere.DEFORMATION) ** 2)[k]
    steering = atmosphere.STEERING
    nu = steering - 2 * (OMEGA + steering) / (n * (n + 1) + gamma)
    later = model.synthesize("v", wave * (model.factor / model.damping) ** steps)[k]
    spectrum = np.fft.rfft(model.synthesize("v", wave)[k])
    eastward = np.exp(-1j * np.arange(33) * nu * STEP * steps)  # rotates the field by nu t
    np.testing.assert_allclose(np.fft.irfft(spectrum * eastward), later, atol=1e-9 * np.abs(later).max())


def test_pole_rows_are_one_point():
    model = Atmosphere((33, 64), seed=3)
    fields = model.fields(model.amplitudes(1979)[5], hours=30)
    for row in (0, -1):
        scalars = np.delete(fields[:, row], [i for name, i in C.items() if name[0] in "uv"], axis=0)
        assert np.all(np.ptp(scalars, axis=-1) <= 1e-9 * np.abs(scalars).max(-1))
        for level in ("10", "1000", "850", "500"):
            u, v = fields[C["u" + level], row], fields[C["v" + level], row]
            direction = 1 if row == 0 else -1
            vector = (u + 1j * v) * np.exp(direction * 1j * model.lon)  # in axes fixed at the pole
            assert np.abs(vector).mean() > 0.01
            np.testing.assert_allclose(vector, vector[0], atol=1e-9)


def test_magnitudes_are_those_of_the_atmosphere(year):
    means, stds = year.mean((0, 2, 3)), year.std((0, 2, 3))
    expected = {  # mean and standard deviation, each from and to
        "u10": (-3, 3, 3.5, 7),
        "v10": (-1, 1, 3.5, 7),
        "t2m": (278, 290, 10, 22),
        "mslp": (100500, 101500, 800, 1500),
        "sp": (95000, 101000, 1000, 10000),
        "t850": (270, 285, 10, 18),
        "u500": (5, 15, 7, 15),
        "z500": (53000, 56000, 2400, 4000),
        "r500": (30, 70, 10, 30),
        "r850": (40, 90, 10, 30),
        "tcwv": (12, 30, 8, 25),
    }
    for name, (low, high, narrow, wide) in expected.items():
        assert low < means[C[name]] < high and narrow < stds[C[name]] < wide, name
    assert year[:, [C["r500"], C["r850"], C["tcwv"]]].min() >= 0
    assert year[:, [C["r500"], C["r850"]]].max() <= 100
    assert np.all(year[:, C["z50"]] > year[:, C["z500"]]) and np.all(year[:, C["z850"]] > year[:, C["z1000"]])


def test_persistence_is_beatable():
    """Turning every wave by its own speed forecasts 6 hours far better than no change at all."""
    model = Atmosphere((32, 64), seed=0)
    state, times = model.amplitudes(1979), range(0, 1400, 100)
    truth = np.stack([model.fields(state[t + 1], 6 * t + 6) for t in times])
    now = np.stack([model.fields(state[t], 6 * t) for t in times])
    ideal = np.stack([model.fields(state[t] * model.factor, 6 * t + 6) for t in times])
    climatology = truth - truth.mean(0)
    for name in ("u10", "v10", "z500"):
        error, persistence, spread = (x[:, C[name]].std() for x in (ideal - truth, now - truth, climatology))
        assert error < 0.35 * persistence
        assert 0.3 * spread < persistence < 0.65 * spread


# ---- randomness and calendar


def test_frames_depend_on_seed_and_year_but_not_on_chunks():
    whole = Atmosphere((16, 32), seed=5).frames(1979, 0, 12)
    model = Atmosphere((16, 32), seed=5)
    model.frames(1980, 3, 1)
    chunks = [model.frames(1979, start, count) for start, count in ((0, 5), (5, 1), (6, 6))]
    assert np.array_equal(whole, np.concatenate(chunks))
    for other in (Atmosphere((16, 32), seed=6).frames(1979, 0, 12), model.frames(1980, 0, 12)):
        assert abs(np.corrcoef(whole[:, C["v500"]].ravel(), other[:, C["v500"]].ravel())[0, 1]) < 0.5


def test_a_leap_year_has_its_day():
    assert grid.year_frames(1980) == 1464 and grid.year_frames(1900) == 1460
    model = Atmosphere((8, 16), seed=0)
    assert model.frames(1980, 1463, 1).shape == (1, 20, 8, 16)


def test_grids_of_odd_and_even_height():
    assert grid.latitudes(5).tolist() == [90, 45, 0, -45, -90]
    assert grid.latitudes(4).tolist() == [90, 45, 0, -45]
    assert np.array_equal(grid.latitudes(720), grid.latitudes(721)[:-1])


# ---- files


def check_year_file(file, year):
    """An open year file says what its axes, channels, dates and points are."""
    fields = file["fields"]
    assert fields.dtype == np.float32 and fields.chunks is None
    assert [fields.dims[i][0].name for i in range(4)] == ["/time", "/channel", "/latitude", "/longitude"]
    assert list(file["channel"].asstr()) == list(C)
    assert list(file["channel_units"].asstr()) == [channel.units for channel in CHANNELS]
    assert file["time"][0] * 3600 == np.datetime64(f"{year}-01-01", "s").astype(int)
    assert np.all(np.diff(file["time"]) == 6)
    assert np.array_equal(file["latitude"], grid.latitudes(fields.shape[2]))
    assert np.array_equal(file["longitude"], grid.longitudes(fields.shape[3]))


def test_files_describe_themselves(tmp_path):
    assert make_sample_data(tmp_path, **SMALL) == 4
    with h5py.File(tmp_path / "train" / "1980.h5") as file:
        check_year_file(file, 1980)
        assert np.array_equal(file["fields"], Atmosphere((8, 16), seed=0).frames(1980, 0, 8))


def test_statistics_come_from_the_training_years_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(data_check, "BLOCK_BYTES", 3 * 20 * 8 * 16 * 4)  # 3 frames, of 8 a file
    make_sample_data(tmp_path, **SMALL)
    model = Atmosphere((8, 16), seed=0)
    x = np.concatenate([model.frames(year, 0, 8) for year in SMALL["train_years"]]).astype(np.float64)
    expected = {
        "global_means": x.mean((0, 2, 3), keepdims=True),
        "global_stds": x.std((0, 2, 3), keepdims=True),
        "time_means": x.mean(0, keepdims=True),
    }
    for name, value in expected.items():
        found = np.load(tmp_path / "stats" / f"{name}.npy")
        assert found.dtype == np.float32 and found.shape == value.shape
        np.testing.assert_allclose(found, value, rtol=1e-6, atol=1e-6)


def test_a_second_call_keeps_what_is_there(tmp_path, capsys):
    make_sample_data(tmp_path, **SMALL)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.*")}
    capsys.readouterr()
    assert make_sample_data(tmp_path, **SMALL) == 0
    out = capsys.readouterr().out
    assert "nothing to do" in out and out.count("\n") == 1
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.*")}

    (tmp_path / "stats" / "time_means.npy").unlink()
    assert make_sample_data(tmp_path, **SMALL) == 0
    assert (tmp_path / "stats" / "time_means.npy").exists()


def test_another_training_year_renews_the_statistics(tmp_path):
    make_sample_data(tmp_path, **SMALL)
    before = np.load(tmp_path / "stats" / "global_stds.npy")
    assert make_sample_data(tmp_path, **{**SMALL, "train_years": (1978, 1979, 1980)}) == 1
    assert not np.array_equal(before, np.load(tmp_path / "stats" / "global_stds.npy"))


@pytest.mark.parametrize("change", [{"seed": 1}, {"days": 1}, {"img_size": (9, 16)}, {"train_years": [1979]}])
def test_other_settings_are_refused(tmp_path, change):
    make_sample_data(tmp_path, **SMALL)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.*")}
    with refusal("or of other settings: choose another folder"):
        make_sample_data(tmp_path, **{**SMALL, **change})
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*.*")}


@pytest.mark.parametrize("name", ["train/1979.h5", "train/2000.h5", "stats/global_means.npy"])
def test_data_of_others_is_never_touched(tmp_path, name):
    path = tmp_path / name
    path.parent.mkdir()
    path.write_bytes(b"observations")
    with refusal("choose another folder"):
        make_sample_data(tmp_path, **SMALL)
    assert path.read_bytes() == b"observations"


@pytest.mark.parametrize(
    "change, message",
    [
        ({"valid_years": (1980,)}, "1980 is in train and in valid"),
        ({"train_years": (1979, 1979)}, "1979 is in train and in train"),
        ({"train_years": ()}, "no training year"),
        ({"img_size": (-8, 16)}, "at least 8 x 16"),
        ({"img_size": (10**6, 10**6)}, "GB free"),
    ],
)
def test_bad_settings_write_nothing(tmp_path, change, message):
    with refusal(message):
        make_sample_data(tmp_path / "new", **{**SMALL, **change})
    assert not (tmp_path / "new").exists()


def test_years_are_read_as_ranges_and_lists():
    assert parse_years("1979-1981, 1985") == (1979, 1980, 1981, 1985)
    for text in ("", "1980-1979", "1979-", "79", "1979--1980", "all"):
        with refusal("years"):
            parse_years(text)
