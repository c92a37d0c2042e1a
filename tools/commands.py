"""The commands that `pip install` makes: each runs the script of its name, from any folder."""

import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main() -> None:
    """Run the script that this process is called after, as python would."""
    runpy.run_path(str(ROOT / Path(sys.argv[0]).with_suffix(".py").name), run_name="__main__")
