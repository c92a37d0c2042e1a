"""Check that the installed torch is one that the tests know; `make setup` runs it before it installs other packages."""

import sys

OLDEST = 2, 11


def main() -> int:
    """Print one line; returns the exit status: 0, or 2 where torch is missing or too old."""
    try:
        # A missing torch is told in one line, so the import may fail.
        import torch
    except ImportError as error:
        print(f"error: no torch ({error}): load the module that has it, or leave SITE_TORCH out", file=sys.stderr)
        return 2
    # The third number may have letters, as in 2.11.0+cu128.
    version = tuple(int(number) for number in torch.__version__.split(".")[:2])
    if version < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        print(f"error: torch {torch.__version__} is too old: the tests know {oldest} and newer", file=sys.stderr)
        return 2
    print(f"torch {torch.__version__} of {torch.__file__}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
