"""Drawings that explain, each a function that makes one SVG: `make drawings`, or `python -m docs.drawings`."""
