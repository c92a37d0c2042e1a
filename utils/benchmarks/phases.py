"""Which part of a training step is under way: forward, backward or update."""

from contextlib import ExitStack, contextmanager
from functools import partial
from unittest.mock import patch

PHASES = ("forward", "backward", "update")


@contextmanager
def phases_of(step, listener):
    """Inside, listener.phase tells what a TrainingStep is doing.

    forward: the forward pass and the loss. update: inside the optimizer. backward: all else, the reduction of gradients
    included. listener.sent_forward: storages of what a pipeline hands on to its next stage, whenever it is sent.
    """
    parallel, pipeline = step.parallel, step.parallel.pipeline
    listener.phase, listener.sent_forward = "backward", set()

    @contextmanager
    def phase(name):
        before, listener.phase = listener.phase, name
        try:
            yield
        finally:
            listener.phase = before

    def within(name):
        def call(function, *args, **kwargs):
            with phase(name):
                return function(*args, **kwargs)

        return call

    def sends(function, *args):
        made = function(*args)
        listener.sent_forward |= {one.tensor.untyped_storage()._cdata for one in made}
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
        yield


def around(owner, name, function):
    """Context: owner.name(...) is function(the method, ...)."""
    return patch.object(owner, name, partial(function, getattr(owner, name)))
