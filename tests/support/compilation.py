"""Backends of torch.compile: most tests show that layers can be traced and that the numbers stay, some the code."""

from functools import partial
from unittest import mock

import torch

TRACED = "aot_eager"  # traces forward and backward as the default backend does, and generates no code
GENERATED = "inductor"


def compile_by(backend):
    """A context in which torch.compile has this backend."""
    return mock.patch.object(torch, "compile", partial(torch.compile, backend=backend))
