"""The message about input that cannot be used: one line."""

from contextlib import contextmanager

import pytest

from utils.errors import UsageError


@contextmanager
def refusal(line, start=""):
    """Expect a UsageError of one line. line: a regular expression in it; start: the text that it begins with."""
    with pytest.raises(UsageError, match=line) as caught:
        yield
    assert str(caught.value).startswith(str(start)) and "\n" not in str(caught.value)
