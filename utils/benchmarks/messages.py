"""What a rank sends in one training step, by phase and kind of collective."""

from collections import defaultdict

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from distributed.counting import collective
from utils.benchmarks.phases import PHASES, phases_of


def messages_of_a_step(step, x, y):
    """{phase: {kind: (collectives, bytes)}} that this rank sends in step(0, x, y), a TrainingStep."""
    sent = defaultdict(lambda: (0, 0))

    def count(phase, found):
        calls, size = sent[phase, found.kind]
        sent[phase, found.kind] = calls + 1, size + found.sent

    with MessagesByPhase(count) as mode, phases_of(step, mode):
        step(0, x, y)
    return {name: {kind: figures for (phase, kind), figures in sent.items() if phase == name} for name in PHASES}


class MessagesByPhase(TorchDispatchMode):
    """Context: calls listener(phase, Collective) for all that is sent; phases_of keeps its phase."""

    def __init__(self, listener):
        super().__init__()
        self.listener, self.phase, self.sent_forward = listener, "forward", set()

    @classmethod
    def is_infra_mode(cls):
        return True  # torch.compile does not run under other modes; what compiled code sends comes by here as well

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if (found := collective(func, args, kwargs or {})) and found.kind != "recv":
            self.listener(phase_of(self, found), found)
        with torch._C.DisableTorchFunctionSubclass():  # what a ShardTensor is made of arrives here
            return func(*args, **(kwargs or {}))


def phase_of(listener, found):
    """Of a Collective: what is handed on to the next stage counts as forward, whenever it is sent."""
    if found.kind != "send":
        return listener.phase
    (tensor,) = found.tensors[0]
    return "forward" if tensor.untyped_storage()._cdata in listener.sent_forward else "backward"
