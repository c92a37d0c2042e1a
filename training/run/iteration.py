"""One iteration of a training run: its batch, and what is due after its step."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field

from training.step.spans import span
from training.step.step import StepOutput
from utils.data_loader import Batch
from utils.errors import ConnectionLostError


@dataclass
class Iteration:
    """Inside `with iteration`, from its batch to the end of its step, is the range "step" of profiles.

    number: from 0. is_read: the losses are read after this iteration, so it is worth measuring the gradient's norm.
    watched: the watchdog of the step. next_batch, after_step, stop_without_data: what the run does. Data that are lost
    for good end the block early: the run saves what it has, and has no further iterations.
    """

    number: int
    is_read: bool
    watched: AbstractContextManager[None]
    next_batch: Callable[[], Batch]
    after_step: Callable[[StepOutput], None]
    stop_without_data: Callable[[ConnectionLostError], None]
    step_range: ExitStack = field(default_factory=ExitStack)
    lost_data: ConnectionLostError | None = None

    def __enter__(self) -> "Iteration":
        self.step_range.enter_context(span("step"))
        self.step_range.enter_context(self.watched)
        return self

    def batch(self) -> Batch:
        """This rank's part of the batch: (input, target), each (B, ...)."""
        try:
            return self.next_batch()
        except ConnectionLostError as error:
            # __exit__ tells this error from one that the step raises.
            self.lost_data = error
            raise

    def finish(self, output: StepOutput) -> None:
        """End the range, count the step, and log, validate and save where it is due."""
        self.step_range.close()
        self.after_step(output)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: object,
    ) -> bool:
        self.step_range.close()
        # Any other error goes on to whoever runs the loop.
        if self.lost_data is None or error is not self.lost_data:
            return False
        # The run saves and stops; the block ends as if nothing had happened.
        self.stop_without_data(self.lost_data)
        return True
