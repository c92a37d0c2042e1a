"""The public name of FieldDataset; weather/years/dataset.py has it."""

from weather.years.dataset import FieldDataset

__all__ = ["FieldDataset"]
