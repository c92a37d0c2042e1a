"""Relative humidity as ERA5 defines it."""

import numpy as np

TRIPLE_POINT = 273.16  # K; above it, vapour is in balance with water
ICE_ONLY = 250.16  # K; below it, with ice
GAS_RATIO = 287.0597 / 461.5250  # of the gas constants of dry air and of vapour


def relative_humidity(q: np.ndarray, t: np.ndarray, pressure: float) -> np.ndarray:
    """Relative humidity (%) from specific humidity (kg kg-1), temperature (K) and pressure (Pa).

    The vapour pressure is divided by its saturation value: over water above 0 degrees C, over ice below -23 degrees C,
    and over a mixture between them, which is quadratic in temperature (ECMWF 2016, IFS Documentation CY41R2, Part IV:
    Physical Processes, chapter 7). Saturation follows Tetens' formula with the parameters given there (Buck 1981;
    Alduchov and Eskridge 1996).
    """
    water_exponent = 17.502 * (t - TRIPLE_POINT) / (t - 32.19)
    ice_exponent = 22.587 * (t - TRIPLE_POINT) / (t + 0.7)
    over_water = 611.21 * np.exp(water_exponent)  # Pa
    over_ice = 611.21 * np.exp(ice_exponent)  # Pa

    # The share of water in the mixture is 0 where there is ice alone, and 1 where there is water alone.
    warmth = (t - ICE_ONLY) / (TRIPLE_POINT - ICE_ONLY)
    share = np.clip(warmth, 0, 1) ** 2
    saturation = share * over_water + (1 - share) * over_ice

    vapour = pressure * q / (GAS_RATIO + (1 - GAS_RATIO) * q)  # Pa
    return 100 * vapour / saturation
