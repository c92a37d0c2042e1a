"""Make the slides of each lesson, a file for each: `make slides`, or python -m docs.slides [FOLDER]."""

import sys
from pathlib import Path

from docs.slides.deck import HERE, deck_as_html, read_deck
from utils.errors import run_main


def main() -> None:
    """Write them into a folder, by default slides/."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "slides")
    folder.mkdir(parents=True, exist_ok=True)
    for file in sorted(HERE.glob("*.yml")):
        deck = read_deck(file)
        made = folder / f"{file.stem}.html"
        made.write_text(deck_as_html(deck))
        print(f"{made}: {len(deck.slides)} slides, {deck.minutes} minutes")


if __name__ == "__main__":
    run_main(main)
