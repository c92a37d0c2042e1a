"""One optimizer step."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from distributed.parallel_model import ParallelModel, transform_forward
from training.forecasting.ensemble import training_noise
from training.step.averaged_weights import AveragedWeights
from training.step.cuda_graphs import CapturedStep
from training.step.determinism import unrepeatable_as_usage_error
from training.step.loss_scaler import OwnScaler
from training.step.optimizer import learning_rate, set_learning_rate
from training.step.random_streams import RandomStreams
from training.step.recomputation import copied_buffers, with_buffers
from training.step.spans import span
from training.tasks import Task
from utils import comm
from utils.choices import choose
from utils.device import on_capture_stream, to_device
from utils.host_random import drawn_again
from utils.schema import Config

AMP_DTYPES = {"none": None, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}  # of what fp8 leaves


def autocast(config: Config, device: torch.device) -> torch.autocast:
    """The context in which the model runs: mixed precision where the config asks for it."""
    dtype = choose("amp_mode", config.amp_mode, AMP_DTYPES)
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)


class StepOutput(NamedTuple):
    """Result of an optimizer step: scalars on the device, which the host has not read.

    loss: mean over this rank's samples. grad_norm_squared: this rank's share of the square of the gradient's L2 norm
    before clipping (the shares of all ranks add up to it); None where it was not asked for.
    """

    loss: Tensor
    grad_norm_squared: Tensor | None


class TrainingStep:
    """Forward, loss, backward, reduction, update: step(iteration, x, y) returns a StepOutput.

    task: gives prediction and loss (training/tasks). Nothing in here waits for the device, so the host runs ahead of it
    (with fp16 only if the optimizer is fused, and not zero1: it then skips a step that overflowed by itself). Made last
    of all that draws random numbers: it seeds dropout.
    """

    def __init__(
        self,
        config: Config,
        device: torch.device,
        parallel: ParallelModel,
        optimizer: Optimizer,
        task: Task,
    ):
        self.config = config
        self.device = device
        self.parallel = parallel
        self.optimizer = optimizer
        self.task = task
        self.model_parallel = bool(parallel.split.dims or parallel.split.specs or parallel.pipeline)
        scales = config.amp_mode == "fp16"
        averaged_over = comm.get_size("grad_reduce")
        if self.model_parallel:  # ranks with different parameters must agree whether a step has overflowed
            from training.step.shared_scaler import SharedScaler  # slow to import

            self.scaler: OwnScaler | SharedScaler = SharedScaler(device.type, scales, averaged_over)
        else:
            self.scaler = OwnScaler(device.type, scales, averaged_over)
        self.scaler.scale(torch.zeros((), device=device))  # its state exists from here on, also where no loss is made
        for stage in parallel.split.stages:  # the pipeline calls them, forward and backward in turns
            transform_forward(stage, self.autocast())
        parallel.model.train()  # from the first step on, as after a validation
        self.average = AveragedWeights(parallel.model, config.ema) if config.ema is not None else None
        self.captured: dict[torch.Size, CapturedStep] = {}  # by the target's shape: one for each length of a rollout
        self.streams = RandomStreams(config.seed, config.sequence_parallel)

    def __call__(
        self,
        iteration: int,
        x: Tensor,
        y: Tensor,
        log_norm: bool = False,
    ) -> StepOutput:
        """One step, of an iteration from 0, on this rank's part of the batch: input x and target y, (B, ...).

        log_norm: measure the norm of the gradient. It is also measured where it is needed for clipping, and in a CUDA
        graph, which is the same in every iteration.
        """
        # The rate is a function of the iteration alone, so a resumed run needs no state for it.
        set_learning_rate(self.optimizer, learning_rate(self.config, iteration))
        noise = self.noise(iteration, x, y)
        with self.streams.host, unrepeatable_as_usage_error():
            if self.config.enable_cuda_graphs:
                captured = self.captured.setdefault(y.shape, CapturedStep(self.parallel.replicated))
                output = StepOutput(*captured(self.run_measured_step, x, y, *noise).unbind())
            else:
                output = self.run_step(x, y, *noise, log_norm=log_norm)
        if self.average:
            self.average.update(iteration)
        return output

    def noise(self, iteration: int, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        """The noise of this rank's members of each sample, (B, m, steps, K), or nothing without an ensemble."""
        if self.config.ensemble_size == 1:
            return ()
        steps = y.shape[1] // self.config.n_out_channels
        return (training_noise(self.config, iteration, steps, x),)

    def run_measured_step(self, x: Tensor, y: Tensor, *noise: Tensor) -> Tensor:
        """The step with the norm of its gradient, as one tensor, which is what a CUDA graph returns: (2,)."""
        output = self.run_step(x, y, *noise, log_norm=True)
        assert output.grad_norm_squared is not None
        return torch.stack([output.loss, output.grad_norm_squared])

    def run_step(self, x: Tensor, y: Tensor, *noise: Tensor, log_norm: bool) -> StepOutput:
        """The step itself, operation by operation. Arguments as of __call__, and the result of `noise`."""
        if self.parallel.pipeline:
            with span("pipeline"):
                losses = self.parallel.pipeline.step(x, y, self.loss_of_stage, self.scaler.scale)
        else:
            # Gradients of all micro-batches add up, and are reduced with the last one.
            losses = []
            count = self.config.gradient_accumulation
            for x_part, y_part, *noise_part in self.parallel.micro_batches(count, x, y, *noise):
                with span("forward"), self.autocast():
                    loss = self.loss(self.task.predict(self.parallel, x_part, y_part, *noise_part), y_part)
                with span("backward"):
                    self.scaler.scale(loss).backward()
                losses.append(loss.detach())
        with span("reduce"):
            # Some strategies reduce here what the backward pass has left.
            self.parallel.finish_gradients()
        with span("optimizer"):
            square = self.update(log_norm)
        # The mean over the batch: each micro-batch has its share.
        total = sum(losses, torch.zeros((), device=self.device))
        total = total * comm.get_size("pp")  # only the last stage has one, and the mean over all ranks is logged
        return StepOutput(total, square)

    def loss(self, prediction: Tensor, target: Tensor) -> Tensor:
        """This micro-batch's share of the loss of the whole batch, a scalar."""
        return self.task.loss(prediction, target, comm.get_group("image")) / self.config.gradient_accumulation

    def loss_of_stage(self, prediction: Tensor, target: Tensor) -> Tensor:
        """The loss, as the last stage of a pipeline computes it, with a range of its own."""
        with span("loss"):
            return self.loss(prediction, target)

    def update(self, log_norm: bool) -> Tensor | None:
        """Clip the gradients where asked, let the optimizer use them, and forget them.

        Returns this rank's share of the square of their norm, before they are clipped; None where nobody asks.
        """
        clip = self.config.clip_grad_norm
        square = None
        unscaled = bool(clip or self.model_parallel)
        # Clipping, and ranks that must agree, need the gradients themselves.
        if unscaled:
            self.scaler.unscale_(self.optimizer)
        if clip or log_norm:
            squared = self.parallel.squared_norm()
            if clip:
                self.parallel.clip_gradients(squared, clip)
            square = to_device(squared, self.device)
            if self.scaler.is_enabled() and not unscaled:
                # The gradients still carry the scale of the loss.
                scale = self.scaler.scale(torch.ones((), device=self.device))
                square = square / scale.square()
        # The scaler skips the step where a gradient overflowed.
        with span("update"):
            self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return square

    def best_weights(self) -> AbstractContextManager[None]:
        """The context in which the model has its averaged weights, where there is an average."""
        return self.average.in_use() if self.average else nullcontext()

    def autocast(self) -> Any:
        """The context, also a decorator, in which this step's model runs."""
        return autocast(self.config, self.device)

    def warm_up_ddp_buckets(self, x: Tensor, y: Tensor) -> None:
        """Before the first step of a resumed run: let DDP arrange its buckets, which it does in a backward pass.

        Without it that step would add up the gradients of several ranks in another order than an uninterrupted run.
        """
        if self.parallel.replicated and not self.parallel.pipeline:
            # DDP remembers the stream of its first backward pass; the warm-up and the capture are on that of graphs.
            graphs = self.config.enable_cuda_graphs
            inputs = (x, y, *self.noise(0, x, y))
            first = [tensor.chunk(self.config.gradient_accumulation)[0] for tensor in inputs]
            # The warm-up draws numbers, which must not be missing afterwards.
            devices = [self.device] if self.device.type != "cpu" else []
            for _ in range(2):  # it looks at the order in one pass, and rearranges them for the next
                with (
                    on_capture_stream() if graphs else nullcontext(),
                    torch.random.fork_rng(devices, device_type=self.device.type),
                    drawn_again(self.streams.host.states()),
                    unrepeatable_as_usage_error(),
                    with_buffers(copied_buffers(self.parallel.model)),
                    self.autocast(),
                ):
                    self.task.predict(self.parallel, *first).sum().backward()
            self.optimizer.zero_grad(set_to_none=True)
