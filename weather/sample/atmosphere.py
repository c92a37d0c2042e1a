"""An idealised atmosphere given by formulas: a random ensemble of Rossby-Haurwitz waves on a zonal jet.

The flow is nondivergent. With x = ln(1000 hPa / p), its streamfunction is a solid-body rotation plus waves,

    psi = -a^2 omega(x) sin(lat) + sum_k V_k(x) sum_nm Re[ a_knm(t) P_n^m(sin lat) exp(i m lon) ],

in a barotropic (k = 0) and a first baroclinic (k = 1) vertical mode. Each wave rotates at its angular speed

    nu_kn = omega_s - 2 (Omega + omega_s) / (n (n + 1) + gamma_k),    gamma_0 = 0,    gamma_1 = (a / L_d)^2,

where omega_s is the steering rotation. For gamma = 0 this solves the barotropic vorticity equation exactly
(Rossby et al. 1939; Haurwitz 1940; test case 6 of Williamson et al. 1992); gamma > 0 is the quasi-geostrophic
mode with deformation radius L_d. At each step an amplitude rotates, is damped, and receives random noise. Every
year is therefore a new draw from one climate, and the next state can be forecast up to a small error.
Geopotential follows from the wind by linear balance, and temperature from geopotential by hydrostatic balance.
Surface fields and humidity are plausible functions of these.

Haurwitz, B. 1940: The motion of atmospheric disturbances on the spherical earth. J. Marine Res. 3, 254-267.
Rossby, C.-G. et al. 1939: Relation between variations in the intensity of the zonal circulation of the
    atmosphere and the displacements of the semi-permanent centers of action. J. Marine Res. 2, 38-55.
Williamson, D. L. et al. 1992: A standard test set for numerical approximations to the shallow water equations
    in spherical geometry. J. Comput. Phys. 102, 211-224.
"""

from collections.abc import Sequence

import numpy as np
from scipy.special import sph_legendre_p_all

from weather.fields.channels import CHANNELS
from weather.fields.grid import latitudes, longitudes, year_frames

RADIUS = 6.371e6  # m
OMEGA = 7.292e-5  # rad s-1
GRAVITY = 9.80665  # m s-2
GAS = 287.04  # J kg-1 K-1, of dry air
STEP = 6 * 3600.0  # s between frames
MEMORY = 40 * 86400.0  # s, e-folding time tau of a wave
DEFORMATION = 1.2e6  # m, L_d of the baroclinic mode
STEERING = 6.0e-6  # rad s-1, omega_s: 38 m s-1 at the equator (Williamson et al. 1992 take 50)
JET = 1.6  # x of the jet: 200 hPa
SURFACE_WIND = 4.0  # m s-1, zonal wind at the equator at 1000 hPa
JET_WIND = 30.0  # m s-1, at the jet
SEASONAL_WIND = 2.5  # m s-1 by which the winter jet is stronger and the summer jet weaker, at 45 degrees
WAVE_WIND = (15.0, 7.0)  # m s-1, root-mean-square wind speed of each vertical mode where V_k = 1
TRUNCATION = 21  # largest total wavenumber n
PEAK = 7.5  # total wavenumber n with the most kinetic energy
LAPSE = 6.5e-3  # K m-1
PRESSURES = (1000, 850, 500, 50)  # hPa
LEVELS = {pressure: np.log(1000.0 / pressure) for pressure in PRESSURES}  # hPa -> x
NOISE = 0.01  # fraction of a channel's anomaly

# The standard deviation of each channel's anomaly, in the channel's units.
ANOMALY = {
    "u10": 4.6,
    "v10": 5.7,
    "t2m": 2.3,
    "sp": 800,
    "mslp": 800,
    "t850": 2.6,
    "u1000": 5.9,
    "v1000": 7.8,
    "z1000": 650,
    "u850": 5.9,
    "v850": 7.8,
    "z850": 650,
    "u500": 6.5,
    "v500": 8.6,
    "z500": 800,
    "t500": 3.4,
    "z50": 560,
    "r500": 22,
    "r850": 18,
    "tcwv": 5,
}


def vertical_modes(x: float) -> tuple[np.ndarray, np.ndarray]:
    """The vertical modes V_k(x) and their slopes dV_k/dx at x = ln(1000 hPa / p), each (2,)."""
    bump = 0.65 * np.exp(-((x - JET) ** 2))
    bump_slope = -2 * (x - JET) * bump
    barotropic = 0.45 + bump

    wave = np.pi * x / JET
    decay = np.exp(-x / 3)
    baroclinic = np.cos(wave) * decay
    wave_slope = np.pi / JET * np.sin(wave)
    baroclinic_slope = -(wave_slope + np.cos(wave) / 3) * decay

    modes = np.array([barotropic, baroclinic])
    slopes = np.array([bump_slope, baroclinic_slope])
    return modes, slopes


def zonal_profile(x: float) -> tuple[float, float]:
    """Height profile of the zonal jet, 0 at 1000 hPa and 1 at 200 hPa, and its slope."""
    phase = np.pi * x / (2 * JET)
    profile = np.sin(phase)
    slope = np.pi / (2 * JET) * np.cos(phase)
    return profile, slope


def saturation_pressure(t: np.ndarray) -> np.ndarray:
    """Saturation vapour pressure (Pa) over water at t (K): Bolton's (1980) fit of the Clausius-Clapeyron equation."""
    exponent = 17.67 * (t - 273.15) / (t - 29.65)
    return 611.2 * np.exp(exponent)


class Atmosphere:
    """Fields of the 20 `CHANNELS` on a regular grid, every 6 hours. The same seed and year give the same fields.

    img_size: (H, W), at least (8, 16); rows from the north pole, columns from Greenwich eastward.
    seed: non-negative integer that determines waves, noise and mountains.
    Raises ValueError if the grid is too small.
    """

    def __init__(self, img_size: Sequence[int], seed: int):
        height, width = img_size
        if height < 8 or width < 16:
            raise ValueError(f"img_size {height} x {width}: at least 8 x 16 is needed")
        self.img_size = (height, width)
        self.seed = seed
        # The largest total wavenumber that the grid resolves well.
        self.truncation = min(TRUNCATION, 3 * height // 8, 3 * width // 16)
        self.lat = np.deg2rad(latitudes(height))[:, None]  # (H, 1)
        self.lon = np.deg2rad(longitudes(width))  # (W,)
        self._amplitudes: dict[int, np.ndarray] = {}  # of the year that was requested last
        self._waves()
        self._tables()
        self._orography()

    def _waves(self) -> None:
        """Angular speed nu (k, 1, n), and each wave's one-step factor and standard deviation (k, m, n)."""
        n = np.arange(self.truncation + 1)
        m = np.arange(self.truncation + 1)[:, None]
        baroclinic = (RADIUS / DEFORMATION) ** 2
        gamma = np.array([0, baroclinic])[:, None, None]  # (k, 1, 1)
        stiffness = np.maximum(n * (n + 1) + gamma, 1)  # (k, 1, n); 1 keeps the mean, n = 0, finite
        self.nu = STEERING - 2 * (OMEGA + STEERING) / stiffness
        self.damping = np.exp(-STEP / MEMORY)
        rotation = -1j * m * self.nu * STEP  # (k, m, n)
        self.factor = self.damping * np.exp(rotation)

        # Kinetic energy decreases with n beyond PEAK. In m it is largest at 2/3 n, the waves of middle latitudes.
        relative = n / PEAK
        by_n = np.where(n >= 3, relative**5 / (1 + relative**8), 0)
        below_n = np.maximum(n + 1 - m, 0)  # no wave has m > n
        energy = by_n * m**2 * below_n / (n + 1) ** 4  # (m, n)
        # A wave with E|a|^2 = 2 s^2 has the mean square wind n (n + 1) s^2 / (4 pi a^2).
        laplacian = np.maximum(n * (n + 1), 1)
        variance = 4 * np.pi * RADIUS**2 * energy / energy.sum() / laplacian  # (m, n), for a wind of 1 m s-1
        wind = np.array(WAVE_WIND)[:, None, None]  # (k, 1, 1)
        self.spread = wind * np.sqrt(variance)

    def _tables(self) -> None:
        """Latitude functions (m, n, H) that turn amplitudes into psi, u, v, phi; the seasonal zonal flow (H, 1)."""
        size = self.truncation + 1
        theta = np.pi / 2 - self.lat[:, 0]  # colatitude, (H,)
        # The functions are orthonormal on the sphere, and their slope is d/dtheta: (m, n, H), n to truncation + 1.
        legendre = sph_legendre_p_all(size, size, theta, diff_n=1)  # (2, n, m, H), m also below 0
        p, slope = legendre.swapaxes(1, 2)[:, :size]
        n = np.arange(size + 1)
        m = np.arange(size)[:, None]

        # P / sin(theta) is needed times m. At a pole it has a finite limit for m = 1, and the limit 0 for m > 1.
        sine = np.sin(theta)
        at_pole = sine < 1e-9
        safe_sine = np.where(at_pole, 1, sine)
        over_sine = np.where(at_pole, slope * np.cos(theta), p / safe_sine)

        # Linear balance, laplacian(phi) = div(f grad psi), couples harmonic n only to n + 1 and n - 1.
        ratio = np.maximum(n**2 - m**2, 0) / (4 * n**2 - 1)
        eps = np.sqrt(ratio)  # (m, n)
        known = n[:-1]
        up = known / (known + 1) * eps[:, 1:]  # weight of n + 1
        below_weight = (n + 1) / np.maximum(n, 1) * eps
        down = np.where(n > 1, below_weight, 0)[:, :-1]  # weight of n - 1
        above = p[:, 1:]
        below = np.roll(p, 1, axis=1)[:, :-1]  # row n holds n - 1; the wrapped row, n = 0, has weight 0
        phi = 2 * OMEGA * (up[..., None] * above + down[..., None] * below)

        # The recurrence above needed one n more than the tables have.
        p = p[:, :-1]
        slope = slope[:, :-1]
        over_sine = over_sine[:, :-1]
        u = slope / RADIUS
        v = 1j * m[..., None] * over_sine / RADIUS
        self.tables = {"psi": p, "u": u, "v": v, "phi": phi}

        # The seasonal zonal flow is the harmonic (2, 0), scaled to SEASONAL_WIND at 45 degrees.
        harmonic_slope = np.sqrt(45 / (16 * np.pi))  # of (2, 0) at 45 degrees
        scale = -SEASONAL_WIND * RADIUS / harmonic_slope
        self.seasonal_u = scale * u[0, 2][:, None]
        self.seasonal_phi = scale * phi[0, 2][:, None]

    def _orography(self) -> None:
        """Constant smooth mountains (H, W) in m, 0 to 3000, from random harmonics whose amplitude falls with n."""
        rng = np.random.default_rng([self.seed, 2])
        a = np.zeros((self.truncation + 1, self.truncation + 1), np.complex128)  # (m, n)
        for n in range(1, min(self.truncation, 8) + 1):
            parts = rng.standard_normal((n + 1, 2))  # real and imaginary
            a[: n + 1, n] = parts @ [1, 1j] / n
        shape = self.synthesize("psi", a)
        # A logistic function makes plains of the low parts, and mountains of the high ones.
        above_plains = shape / shape.std() - 1.2
        self.orography = 3000 / (1 + np.exp(-3 * above_plains))

    def synthesize(self, name: str, amplitudes: np.ndarray) -> np.ndarray:
        """Sum the waves on the grid. name: psi (m2 s-1), u, v (m s-1) or phi (m2 s-2).

        amplitudes: complex (..., m, n) in m2 s-1. Returns float64 (..., H, W), not yet weighted by V_k.
        """
        spectrum = np.einsum("...mn,mnh->...hm", amplitudes, self.tables[name])
        spectrum[..., 1:] /= 2  # the transform adds the conjugate half
        return np.fft.irfft(spectrum, self.img_size[1], norm="forward")

    def amplitudes(self, year: int) -> np.ndarray:
        """The wave amplitudes of a year: complex (frames, k, m, n) in m2 s-1, the first drawn from the climate."""
        if year not in self._amplitudes:
            rng = np.random.default_rng([self.seed, 0, year])
            draw = rng.standard_normal((year_frames(year), *self.spread.shape, 2))
            a = draw.view(np.complex128)[..., 0] * self.spread
            # The noise makes up for the damping, so that the variance stays that of the first draw.
            a[1:] *= np.sqrt(1 - self.damping**2)
            for t in range(1, len(a)):
                a[t] += self.factor * a[t - 1]
            self._amplitudes = {year: a}
        return self._amplitudes[year]

    def level(
        self,
        x: float,
        waves: Sequence[np.ndarray],
        season: float,
    ) -> tuple[np.ndarray, ...]:
        """Wind u, v (m s-1), geopotential (m2 s-2) and temperature (K), each (H, W), at ln(1000 hPa / p) = x.

        waves: u, v, phi from `synthesize`, each (2, H, W). season: 1 in mid-January, -1 in mid-July.
        """
        modes, slopes = vertical_modes(x)
        profile, profile_slope = zonal_profile(x)
        wave_u, wave_v, wave_phi = waves

        # The global mean is in hydrostatic balance: dphi/dx = GAS t.
        decay = np.exp(-x / 1.5)
        mean_phi = 1150 + GAS * (205 * x + 88 * 1.5 * (1 - decay))
        mean_t = 205 + 88 * decay

        # The zonal flow is a solid-body rotation in gradient wind balance, and the seasonal wind in linear balance.
        shear = (JET_WIND - SURFACE_WIND) / RADIUS
        omega = SURFACE_WIND / RADIUS + shear * profile  # angular speed in rad s-1
        omega_slope = shear * profile_slope
        solid = -(RADIUS**2) * (np.sin(self.lat) ** 2 - 1 / 3)  # (H, 1)
        rotation = OMEGA * omega + omega**2 / 2
        rotation_slope = (OMEGA + omega) * omega_slope
        zonal_u = RADIUS * omega * np.cos(self.lat) + season * profile * self.seasonal_u
        zonal_phi = rotation * solid + season * profile * self.seasonal_phi
        zonal_t = rotation_slope * solid + season * profile_slope * self.seasonal_phi

        # The waves of both vertical modes come on top.
        mode0, mode1 = modes
        slope0, slope1 = slopes
        u = zonal_u + mode0 * wave_u[0] + mode1 * wave_u[1]
        v = mode0 * wave_v[0] + mode1 * wave_v[1]
        phi = mean_phi + zonal_phi + mode0 * wave_phi[0] + mode1 * wave_phi[1]
        phi_slope = zonal_t + slope0 * wave_phi[0] + slope1 * wave_phi[1]
        t = mean_t + phi_slope / GAS
        return u, v, phi, t

    def fields(self, amplitudes: np.ndarray, hours: float) -> np.ndarray:
        """All channels of one state, without noise: float64 (20, H, W).

        amplitudes: complex (k, m, n) in m2 s-1. hours: since the year began; they set the season and the time of day.
        """
        days_after_peak = hours / 24 - 15
        season = np.cos(2 * np.pi * days_after_peak / 365.25)
        waves = [self.synthesize(name, amplitudes) for name in ("u", "v", "phi")]
        levels = {}
        for pressure, x in LEVELS.items():
            levels[pressure] = self.level(x, waves, season)
        u1000, v1000, z1000, t1000 = levels[1000]
        u850, v850, z850, t850 = levels[850]
        u500, v500, z500, t500 = levels[500]
        _, _, z50, _ = levels[50]

        # Friction slows the wind and turns it towards low pressure: left in the north, right in the south.
        angle = 0.4 * np.tanh(self.lat / np.deg2rad(15))
        cosine = np.cos(angle)
        sine = np.sin(angle)
        u10 = 0.75 * (cosine * u1000 - sine * v1000)
        v10 = 0.75 * (sine * u1000 + cosine * v1000)

        # The air over land is colder with height, and warmest at 14 h local time.
        local_time = 2 * np.pi * (hours - 14) / 24 + self.lon
        daily_cycle = 1.5 * np.cos(self.lat) * np.cos(local_time)
        t2m = t1000 - LAPSE * self.orography + daily_cycle

        # The barometric formula takes the mean temperature of the air between sea level and the ground.
        mslp = 1e5 * np.exp(z1000 / (GAS * t1000))
        mean_t = t1000 - LAPSE * self.orography / 2
        sp = mslp * np.exp(-GRAVITY * self.orography / (GAS * mean_t))

        # Moist where the wind blows poleward and in troughs, dry in the subtropics.
        subtropics = np.sin(3 * self.lat) ** 2
        dry = 1.2 * subtropics * np.cos(self.lat) ** 2
        trough = sum(waves[2]) / 1200
        poleward = np.sin(2 * self.lat)
        moist_850 = 1.2 - dry + 0.10 * v850 * poleward - trough
        moist_500 = 0.3 - dry + 0.12 * v500 * poleward - trough
        r850 = 100 / (1 + np.exp(-moist_850))
        r500 = 100 / (1 + np.exp(-moist_500))
        tcwv = 0.024 * r850 / 100 * saturation_pressure(t850)

        # In the order of CHANNELS:
        surface = u10, v10, t2m, sp, mslp, t850
        lower = u1000, v1000, z1000, u850, v850, z850
        upper = u500, v500, z500, t500, z50
        moisture = r500, r850, tcwv
        return np.stack([*surface, *lower, *upper, *moisture])

    def frames(self, year: int, start: int, count: int) -> np.ndarray:
        """`count` frames of a year from `start`, 6-hourly since 1 January 00 UTC: float32 (count, 20, H, W).

        With white observation noise, 1 % of each channel's anomaly, drawn separately for each frame.
        """
        out = np.empty((count, len(CHANNELS), *self.img_size), np.float32)
        anomaly = np.array([ANOMALY[channel.name] for channel in CHANNELS], np.float32)
        scale = np.float32(NOISE) * anomaly[:, None, None]  # (20, 1, 1)
        for i, t in enumerate(range(start, start + count)):
            amplitudes = self.amplitudes(year)[t]
            out[i] = self.fields(amplitudes, 6 * t)
            rng = np.random.default_rng([self.seed, 1, year, t])
            out[i] += scale * rng.standard_normal(out.shape[1:], dtype=np.float32)
            moisture = out[i, -3:]  # a view of the last three channels: r500, r850, tcwv
            np.clip(moisture, 0, 100, out=moisture)  # humidity and vapour stay physical
        return out
