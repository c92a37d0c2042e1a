"""Files that are there whole or not at all."""

from contextlib import contextmanager


@contextmanager
def whole_file(path):
    """Yield a temporary name next to `path`: renamed to it when the block ends well, removed otherwise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    try:
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
