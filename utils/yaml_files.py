"""Files of named mappings in YAML 1.2, where `5e-4` is a number."""

import contextlib
import copy
from functools import lru_cache
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from utils.errors import UsageError, first_line, reported_as_usage_error
from utils.files import read_text

ROOT = Path(__file__).parents[1]


def read_mappings(
    path: Path | str,
    kind: str,
) -> dict[str, dict[str, Any]]:
    """All named mappings of a YAML file, unchecked. kind: what they are, for the message of the UsageError."""
    text = read_text(_or_ours(path))
    with reported_as_usage_error(ValueError, str(path)):
        mappings = parse_yaml(text)
    is_named = isinstance(mappings, dict)
    # A file of YAML may hold anything.
    if not is_named or not all(isinstance(mapping, dict) for mapping in mappings.values()):
        raise UsageError(f"{path}: expected named {kind}, each a mapping of keys to values")
    # YAML reads names such as 1 or null as other things than text.
    for mapping in (mappings, *mappings.values()):
        for name in mapping:
            if not isinstance(name, str):
                raise UsageError(f"{path}: {name!r} is not a name: put it in quotes")
    return mappings


def parse_yaml(text: str) -> Any:
    """Parse YAML text. Raises ValueError, with the line, for text that is no YAML."""
    # Whoever asks may change what he gets, so it is a copy of what is kept.
    return copy.deepcopy(_parse_once(text))


@lru_cache(maxsize=512)  # a search reads one file thousands of times, and the parser takes 50 ms for it
def _parse_once(text: str) -> Any:
    """What YAML text says, parsed once. Raises ValueError as parse_yaml does."""
    try:
        return yaml().load(text)
    except MarkedYAMLError as error:
        # The parser knows the line, counted from 0.
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else "?"
        raise ValueError(f"line {line}: {error.problem}") from None
    except (YAMLError, ValueError, TypeError, AttributeError, KeyError, OverflowError, RecursionError) as error:
        raise ValueError(f"cannot be read as YAML: {first_line(error)}") from None


def yaml() -> YAML:
    """A reader and writer of YAML 1.2."""
    loader = YAML(typ="safe", pure=True)  # pure Python: the C parser is YAML 1.1, where 5e-4 is a string
    loader.default_flow_style = None
    loader.sort_base_mapping_type_on_output = False  # type: ignore[assignment]  # declared as None
    return loader


def _or_ours(path: Path | str) -> Path | str:
    """`path`, or this repository's file of that name, such as config/mp.yaml, where the working folder has none."""
    with contextlib.suppress(OSError, ValueError):  # no name of a file; whoever opens it says so
        if not Path(path).exists() and (ROOT / path).is_file():
            return ROOT / path
    return path
