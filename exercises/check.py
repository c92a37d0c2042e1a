"""Check an exercise, or list them all.

make exercise                        the list
make exercise N=3                    check exercises/03_*.py
make exercise N=3 SOLUTION=1         check its solution
make exercise N=3 SEED=17            with the random numbers of an earlier check
"""

import ast
import importlib
import os
import random
from collections.abc import Sequence
from pathlib import Path

from exercises.ranks import PATIENCE_SECONDS, preload, run_ranks
from utils.errors import ArgumentParser, UsageError, int_in_range, run_main
from utils.files import holds_no_code

FOLDER = Path(__file__).parent
WRONG_STATUS = 1


def exercises() -> dict[int, Path]:
    """{number: file} of all exercises."""
    return {int(file.name[:2]): file for file in sorted(FOLDER.glob("[0-9][0-9]_*.py"))}


def title(file: Path) -> tuple[str, str]:
    """(rung, what it is about) from the first line of a file, `Exercise 2, rung 2: ...`."""
    text = ast.get_docstring(ast.parse(file.read_text())) or ""
    first_line = text.partition("\n")[0]
    head, _, about = first_line.partition(": ")
    rung = head.split(", ")[1]
    return rung, about.rstrip(".")


def check_file(name: str, file: Path, seed: int, patience: float = PATIENCE_SECONDS) -> list[str]:
    """Check a file as the exercise `name`: lines that say what is wrong; none, if all is right."""
    if holds_no_code(file):
        return ["the file is empty: it holds no code"]
    check = importlib.import_module(f"exercises.checks.{name}")
    patience = getattr(check, "PATIENCE_SECONDS", patience)
    for size in check.WORLD_SIZES:
        lines = run_ranks(name, file, size, seed, patience)
        if lines and size > 1:
            return [f"with {size} ranks: {line}" for line in lines]
        if lines:
            return lines
    return []


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status: 0 where all is right, or the list was asked for."""
    parser = ArgumentParser(prog="python -m exercises.check", description="Check an exercise, or list them all.")
    files = exercises()
    parser.add_argument(
        "number", nargs="?", type=int_in_range(min(files), max(files)), help="of the exercise; none: the list"
    )
    parser.add_argument("--solution", action="store_true", help="check the solution")
    parser.add_argument("--file", type=Path, help="check this file instead, somebody's exercise of the number")
    parser.add_argument("--seed", type=int_in_range(0, 2**31 - 1), help="of the random sizes and values of a failure")
    options = parser.parse_args(argv)
    if options.number is None:
        for number, file in files.items():
            rung, about = title(file)
            print(f"{number:3}  {rung}  {about}")
        print("\nmake exercise N=1 checks the first; exercises/README.md says more")
        return 0
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # small tensors
    number = options.number
    file = files[number]
    name = file.stem
    _, about = title(file)
    if options.file:
        file = options.file.resolve()
    elif options.solution:
        file = FOLDER / "solutions" / file.name
    if options.solution and not file.is_file():
        raise UsageError(f"{file}: no such file; a class's clone has no solutions")
    if not file.is_file():
        raise UsageError(f"{file}: no such file")
    seed = options.seed
    if seed is None:
        seed = random.SystemRandom().randrange(10**6)
    preload([name])
    lines = check_file(name, file, seed)
    if not lines:
        print(f"Exercise {number}, {about}: right.")
        return 0
    print(f"Exercise {number}, {about}: not yet. {os.path.relpath(file)} (seed {seed})")
    for line in lines:
        print(f"  - {line}")
    return WRONG_STATUS


if __name__ == "__main__":
    run_main(main)
