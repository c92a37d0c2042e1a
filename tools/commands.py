"""The commands that `pip install` makes: each runs the script of its name, from any folder."""

import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main() -> None:
    """Run the script that this process is called after, as python would."""
    # A command such as .venv/bin/train lies far from train.py, so that only its name counts.
    called = Path(sys.argv[0])
    script = ROOT / called.with_suffix(".py").name
    runpy.run_path(str(script), run_name="__main__")
