"""The phase of a training step: forward, backward or update."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

from training.step import TrainingStep

PHASES = ("forward", "backward", "update")


@contextmanager
def phases_of(step: TrainingStep, listener: Any) -> Iterator[None]:
    """Inside, listener.phase is the phase of a TrainingStep.

    forward: the forward pass and the loss. update: inside the optimizer. backward: everything else, including the
    reduction of gradients. listener.sent_forward: storages of the tensors that a pipeline sends to its next stage.
    """
    parallel, pipeline = step.parallel, step.parallel.pipeline
    listener.phase, listener.sent_forward = "backward", set()

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        before, listener.phase = listener.phase, name
        try:
            yield
        finally:
            listener.phase = before

    def within(name: str) -> Callable[..., Any]:
        def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            with phase(name):
                return function(*args, **kwargs)

        return call

    def sends(function, *args):
        made = function(*args)
        listener.sent_forward |= {one.tensor.untyped_storage()._cdata for one in made}
        return made

    def sends_back(function, *args):  # a gradient may reuse the storage of an activation that was sent
        made = function(*args)
        listener.sent_forward -= {one.tensor.untyped_storage()._cdata for one in made}
        return made

    def spans(function, x, y, loss, micro_batches, forward_span, backward_span):
        @contextmanager
        def forward():
            with forward_span(), phase("forward"):
                yield

        return function(x, y, partial(within("forward"), loss), micro_batches, forward, backward_span)

    with ExitStack() as stack:
        stack.enter_context(around(parallel, "forward_backward", spans))
        stack.enter_context(around(step.scaler, "step", within("update")))
        for stage in pipeline.stages if pipeline else ():
            stack.enter_context(around(stage, "forward_one_chunk", within("forward")))
            stack.enter_context(around(stage, "get_fwd_send_ops", sends))
            stack.enter_context(around(stage, "get_bwd_send_ops", sends_back))
        yield


def around(owner: object, name: str, function: Callable[..., Any]) -> AbstractContextManager:
    """Context: owner.name(...) is function(the method, ...)."""
    return patch.object(owner, name, partial(function, getattr(owner, name)))
