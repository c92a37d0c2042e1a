"""The communication of a rank in one training step, by phase and kind of collective."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from torch import Tensor

from tools.instruments.counting import Collective, collective
from tools.instruments.phases import PHASES, phases_of
from tools.instruments.watching import Watch
from training.step import TrainingStep


def messages_of_a_step(step: TrainingStep, x: Tensor, y: Tensor) -> dict[str, dict[str, tuple[int, float]]]:
    """{phase: {kind: (collectives, bytes)}} that this rank sends in step(0, x, y), a TrainingStep."""
    sent: dict[tuple[str, str], tuple[int, float]] = defaultdict(lambda: (0, 0))

    def count(phase: str, found: Collective) -> None:
        calls, size = sent[phase, found.kind]
        sent[phase, found.kind] = calls + 1, size + found.sent

    with MessagesByPhase(count) as mode, phases_of(step, mode):
        step(0, x, y)
    return {name: {kind: figures for (phase, kind), figures in sent.items() if phase == name} for name in PHASES}


class MessagesByPhase(Watch):
    """Context: calls listener(phase, Collective) for each message; phases_of keeps `phase` up to date."""

    def __init__(self, listener: Callable[[str, Collective], None]):
        super().__init__()
        self.listener, self.phase = listener, "forward"
        self.sent_forward: set[int] = set()

    def saw(self, func: Any, args: tuple, kwargs: dict[str, Any], result: Any) -> None:
        """Tell the listener of a collective."""
        if (found := collective(func, args, kwargs)) and found.kind != "recv":
            self.listener(phase_of(self, found), found)


def phase_of(listener: MessagesByPhase, found: Collective) -> str:
    """The phase of a Collective: a message to the next stage of a pipeline counts as forward, whenever it is sent."""
    if found.kind != "send":
        return listener.phase
    (tensor,) = found.tensors[0]
    return "forward" if tensor.untyped_storage()._cdata in listener.sent_forward else "backward"
