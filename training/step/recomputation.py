"""Activation checkpointing that leaves no trace: what is computed again changes nothing, and draws the same numbers.

A forward pass may do more than compute its result. BatchNorm moves its running statistics, a model may keep a mean
field in a buffer, and layers may be skipped by Python's `random`. A second forward pass, in the backward pass, has to
find the buffers and generators as the first one did, and to leave them as they were before it.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint, noop_context_fn

from utils.host_random import drawn_again, host_states

Contexts = tuple[AbstractContextManager, AbstractContextManager]
Buffers = list[tuple[nn.Module, str, Tensor]]  # (module, attribute, value)


def checkpointed(
    forward: Callable[..., Any],
    module: nn.Module | None,
    inner: Callable[[], Contexts] | None = None,
    **options: Any,
) -> Callable[..., Any]:
    """A function that keeps only its arguments for the backward pass, where it is called a second time.

    module: whose buffers it may change; None inside a compiled function, whose graph changes them once. inner: makes
    further contexts of the first and the second call.
    """
    # The second call must find the buffers of the first.
    if module is not None:
        options["context_fn"] = partial(paired_contexts, module, inner or noop_context_fn)
    elif inner is not None:
        options["context_fn"] = inner
    # Without either it stays torch's own: a compiled function takes no other one that makes no modes.
    return partial(checkpoint, forward, use_reentrant=False, **options)


def paired_contexts(module: nn.Module, inner: Callable[[], Contexts]) -> Contexts:
    """The contexts of one call of a module, and of the same call computed again."""
    found = FoundState(module)
    in_first, in_second = inner()
    return found.first_call(in_first), found.second_call(in_second)


class FoundState:
    """The buffers and the generators of the host as the first call of a module has found them."""

    def __init__(self, module: nn.Module):
        self.module = module
        self.buffers: Buffers = []
        self.generators: Any = None

    @contextmanager
    def first_call(self, inner: AbstractContextManager) -> Iterator[None]:
        """Inside, the module is called; of the copies of its buffers those stay that it has changed."""
        self.generators = host_states()
        # Which buffers change is known only afterwards.
        copies = copied_buffers(self.module)
        held = [_with_version(owner, name) for owner, name, _ in copies]
        with inner:
            yield
        for (owner, name, copy), of_before in zip(copies, held, strict=True):
            before, version = of_before
            now, version_now = _with_version(owner, name)
            is_same = now is before and version_now == version
            if not is_same or isinstance(owner, _NormBase):  # torch's kernel moves running statistics unseen
                self.buffers.append((owner, name, copy))

    @contextmanager
    def second_call(self, inner: AbstractContextManager) -> Iterator[None]:
        """Inside, the module is called again."""
        with drawn_again(self.generators), with_buffers(self.buffers), inner:
            yield


def _with_version(owner, name):
    """A buffer, and how often it has been written in place."""
    buffer = owner._buffers[name]
    return buffer, None if buffer is None else buffer._version


def copied_buffers(module: nn.Module) -> Buffers:
    """Copies of all buffers of a module and of those inside."""
    copies = []
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                copies.append((owner, name, buffer.clone()))
    return copies


@contextmanager
def with_buffers(buffers: Buffers) -> Iterator[None]:
    """Inside, modules have these buffers, which they may change; afterwards they have their own again.

    The tensors change places, and nothing is copied: autograd may keep a buffer for the backward pass.
    """
    # These buffers stand in the modules now, and come back at the end.
    own = [owner._buffers[name] for owner, name, _ in buffers]
    try:
        for owner, name, buffer in buffers:
            owner._buffers[name] = buffer
        yield
    finally:
        for (owner, name, _), before in zip(buffers, own, strict=True):
            owner._buffers[name] = before
