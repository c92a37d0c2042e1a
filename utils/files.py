"""Files of others, read with care; and files that are written whole or not at all."""

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from utils.errors import UsageError, reported_as_usage_error


def check_file(path: Path | str) -> None:
    """Raise UsageError for what is not a file that can be opened: a pipe, which would be waited for, or a folder."""
    try:
        kind = Path(path).stat()
    except (OSError, ValueError) as error:  # a name with a NUL character
        raise UsageError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    # A pipe would block whoever reads it.
    if not stat.S_ISREG(kind.st_mode):
        raise UsageError(f"{path}: is {'a folder' if stat.S_ISDIR(kind.st_mode) else 'not a regular file'}")


def read_text(path: Path | str) -> str:
    """The text of a small file. Raises UsageError, naming it, where there is no such file, or no text in it."""
    check_file(path)
    with reported_as_usage_error(UnicodeDecodeError, f"{path}: not a text file"):
        return Path(path).read_text("utf-8")


def holds_no_code(file: Path) -> bool:
    """Tell whether a Python file holds nothing, or comments alone."""
    lines = file.read_bytes().splitlines()
    return all(not line.strip() or line.strip().startswith(b"#") for line in lines)


def read_json(path: Path | str) -> Any:
    """Read a small JSON file. Raises UsageError, naming the file, if it cannot be read."""
    text = read_text(path)
    with reported_as_usage_error((ValueError, RecursionError), f"{path}: is not JSON"):
        return json.loads(text)


def write_json(path: Path | str, record: Any) -> None:
    """Write a record as JSON; NaN and infinity, which JSON does not have, become null."""
    # json writes NaN and infinity, which no other reader takes, and reads them as constants.
    finite = json.loads(json.dumps(record), parse_constant=lambda _: None)
    with whole_file(Path(path)) as part:
        part.write_text(json.dumps(finite, indent=1) + "\n")


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a temporary name next to `path`: renamed to it when the block ends well, removed otherwise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    try:
        yield part
        with open(part, "rb") as file:
            os.fsync(file.fileno())  # before the name says that it is complete
        # Readers see the old file or the new one, never a part.
        part.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        error.filename = error.filename or str(path)  # a disk that fills names no file
        raise
    finally:
        part.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Return when the names in a folder, after a rename, are on disk, where its file system can say so."""
    # A rename is an entry of the folder, which has to be written too.
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
