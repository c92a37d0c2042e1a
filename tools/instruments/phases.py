"""The phase of a training step: forward, backward or update."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

from training.profiling import span
from training.step import TrainingStep
from utils.torch_private import storage_id

PHASES = ("forward", "backward", "update")


@contextmanager
def phases_of(
    step: TrainingStep, listener: Any, changes: Callable[[str, str], None] = lambda before, phase: None
) -> Iterator[None]:
    """Inside, listener.phase is the phase of a TrainingStep.

    forward: the forward pass and the loss. update: inside the optimizer. backward: everything else, including the
    reduction of gradients. listener.sent_forward: storages of the tensors that a pipeline sends to its next stage.
    changes: called with the phase that ends and the one that begins.
    """
    pipeline = step.parallel.pipeline
    listener.phase, listener.sent_forward = "backward", set()

    def change(phase: str) -> None:
        if phase != listener.phase:
            changes(listener.phase, phase)
        listener.phase = phase

    @contextmanager
    def within(phase: str) -> Iterator[None]:
        before = listener.phase
        change(phase)
        yield
        change(before)

    @contextmanager
    def span_and_phase(name: str) -> Iterator[None]:
        with span(name), within("forward" if name == "forward" else listener.phase):
            yield

    def sends(change, function, *args):
        made = function(*args)
        listener.sent_forward = change(listener.sent_forward, {storage_id(one.tensor) for one in made})
        return made

    with ExitStack() as stack:

        def replace(owner: object, name: str, wrap: Callable[[Any], Any]) -> None:
            stack.enter_context(patch.object(owner, name, wrap(getattr(owner, name))))

        stack.enter_context(patch("training.step.span", span_and_phase))
        replace(step, "loss", within("forward"))  # which a pipeline calls
        replace(step.scaler, "step", within("update"))
        for stage in pipeline.stages if pipeline else ():
            replace(stage, "forward_one_chunk", within("forward"))
            replace(stage, "get_fwd_send_ops", lambda method: partial(sends, set.union, method))
            # A gradient may reuse the storage of an activation that was sent.
            replace(stage, "get_bwd_send_ops", lambda method: partial(sends, set.difference, method))
        yield
