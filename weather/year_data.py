"""The public name of an open year and of its dates; weather/years/year_data.py has them."""

from weather.years.year_data import YearFile, file_times

__all__ = ["YearFile", "file_times"]
