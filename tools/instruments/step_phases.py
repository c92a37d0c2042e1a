"""The phase that a training step is in, told to a tracker: forward, backward or update."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

from training.step.spans import listening, span
from training.step.step import TrainingStep
from utils.torch_private import storage_id

# Spans of a step by the phase that they belong to. Whatever is in none of them counts as backward.
PHASE_OF_SPAN = {"forward": "forward", "loss": "forward", "update": "update"}


class PhaseListener:
    """Listens to the spans of a step, and keeps `phase` of a tracker. changes: as of phases_of."""

    def __init__(self, tracker: Any, changes: Callable[[str, str], None]):
        self.tracker = tracker
        self.changes = changes

    def change(self, phase: str) -> None:
        """The phase is this one from now on."""
        before = self.tracker.phase
        if phase != before:
            self.changes(before, phase)
        self.tracker.phase = phase

    def start(self, name: str) -> str:
        """A span begins; returns the phase around it."""
        before = self.tracker.phase
        self.change(PHASE_OF_SPAN.get(name, before))
        return before

    def stop(self, name: str, mark: str) -> None:
        """It has ended."""
        self.change(mark)


@contextmanager
def phases_of(
    step: TrainingStep,
    tracker: Any,
    changes: Callable[[str, str], None],
) -> Iterator[None]:
    """Inside, tracker.phase is the phase of a TrainingStep.

    forward: the forward pass and the loss. update: inside the optimizer. backward: everything else, including the
    reduction of gradients. tracker.sent_forward: storages of the tensors that a pipeline sends to its next stage.
    changes: called with the phase that ends and the one that begins.
    """
    tracker.phase = "backward"
    tracker.sent_forward = set()
    listener = PhaseListener(tracker, changes)
    pipeline = step.parallel.pipeline
    stages = pipeline.stages if pipeline else ()
    with listening(listener), ExitStack() as stack:
        for stage in stages:
            stack.enter_context(_observed(stage, tracker))
        yield


@contextmanager
def _observed(stage: Any, tracker: Any) -> Iterator[None]:
    """Inside, a stage of a pipeline, which is torch's, has a span in its forward pass, and its sends are noted."""

    def sends(combine, method, *args):
        """Call a method of a stage that makes its sends, and note their storages. combine: with those before."""
        made = method(*args)
        storages = {storage_id(send.tensor) for send in made}
        tracker.sent_forward = combine(tracker.sent_forward, storages)
        return made

    replaced = {
        "forward_one_chunk": span("forward")(stage.forward_one_chunk),
        "get_fwd_send_ops": partial(sends, set.union, stage.get_fwd_send_ops),
        # A gradient may reuse the storage of an activation that was sent.
        "get_bwd_send_ops": partial(sends, set.difference, stage.get_bwd_send_ops),
    }
    with patch.multiple(stage, **replaced):
        yield
