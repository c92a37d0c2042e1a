"""The phase of a training step: forward, backward or update."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

from training.profiling import span
from training.step import TrainingStep
from utils.torch_private import storage_id

PHASES = ("forward", "backward", "update")


@contextmanager
def phases_of(step: TrainingStep, listener: Any) -> Iterator[None]:
    """Inside, listener.phase is the phase of a TrainingStep.

    forward: the forward pass and the loss. update: inside the optimizer. backward: everything else, including the
    reduction of gradients. listener.sent_forward: storages of the tensors that a pipeline sends to its next stage.
    """
    pipeline = step.parallel.pipeline
    listener.phase, listener.sent_forward = "backward", set()

    def within(phase: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with patch.object(listener, "phase", phase):
            return function(*args, **kwargs)

    def sends(change, function, *args):
        made = function(*args)
        listener.sent_forward = change(listener.sent_forward, {storage_id(one.tensor) for one in made})
        return made

    @contextmanager
    def span_and_phase(name: str) -> Iterator[None]:
        with span(name), patch.object(listener, "phase", "forward" if name == "forward" else listener.phase):
            yield

    with ExitStack() as stack:
        stack.enter_context(patch("training.step.span", span_and_phase))
        stack.enter_context(around(step, "loss", partial(within, "forward")))  # which a pipeline calls
        stack.enter_context(around(step.scaler, "step", partial(within, "update")))
        for stage in pipeline.stages if pipeline else ():
            stack.enter_context(around(stage, "forward_one_chunk", partial(within, "forward")))
            stack.enter_context(around(stage, "get_fwd_send_ops", partial(sends, set.union)))
            # A gradient may reuse the storage of an activation that was sent.
            stack.enter_context(around(stage, "get_bwd_send_ops", partial(sends, set.difference)))
        yield


def around(owner: object, name: str, function: Callable[..., Any]) -> AbstractContextManager:
    """Context: owner.name(...) is function(the method, ...)."""
    return patch.object(owner, name, partial(function, getattr(owner, name)))
