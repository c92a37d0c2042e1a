"""A training run in its folder: batches, and what happens between two steps. Every run resumes exactly.

The host never waits for the device inside a step. Losses stay on the device and are read together every `log_every`
iterations, at the end of an epoch and before a checkpoint.
"""

import logging
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from tqdm import tqdm

from training.checkpoints.weights import check_start
from training.run.checkpoints import Progress, RunCheckpoints
from training.run.folder import RunFolder
from training.run.iteration import Iteration
from training.run.loggers import KINDS, Loggers, MetricsFile, TensorBoard, check_tracker
from training.run.profiling import build_profiler
from training.run.report import log_memory, print_result, rmse_charts, write_validation
from training.run.telemetry import Telemetry, words_of_seconds
from training.run.watchdog import Watchdog
from training.step.cuda_graphs import DDP_WARMUP_STEPS
from training.step.spans import listening, span
from training.step.step import StepOutput, TrainingStep
from training.tasks import Task
from utils import agreement, comm
from utils.data_loader import Batch, BatchLoader
from utils.device import device_name, peak_memory_bytes, synchronize
from utils.errors import STOPPED_STATUS, ConnectionLostError, NonFiniteLossError, StoppedError
from utils.files import write_json
from utils.schema import Config
from utils.signals import StopRequest, StopSignal

log = logging.getLogger(__name__)
FIRST_STEP_SECONDS = 5  # that the first step of a process, and what comes before it, may take after a stop signal


class Run:
    """One run of a config, from the newest checkpoint in its folder to its last iteration.

        with Run(config, step, task, loaders) as run:
            for iteration in run.iterations():
                with iteration:
                    x, y = iteration.batch()
                    output = step(iteration.number, x, y, log_norm=iteration.is_read)
                    iteration.finish(output)
        return run.status()

    loaders: of training and validation. Raises UsageError where the folder cannot be used; inside the block
    NonFiniteLossError, naming the iteration and the last checkpoint, where the loss is NaN or infinite. A run that is
    finished already has no batches and only shows its result.
    """

    def __init__(
        self,
        config: Config,
        step: TrainingStep,
        task: Task,
        loaders: Sequence[BatchLoader],
    ):
        # Whatever can be refused is refused before the folder is made.
        check_start(config)
        check_tracker(config)
        self.folder = RunFolder(config)
        self.config = self.folder.config  # its run_num is known now
        self.step = step
        self.device = step.device
        self.train_loader, valid_loader = loaders
        self.validator = task.build_validator(valid_loader)
        self.progress = Progress()
        self.checkpoints = RunCheckpoints(self.config, self.folder, step, self.progress)
        self.resumed = False  # and no step has been made since
        self.result: dict[str, Any] = {}  # of the last validation
        # Of this process. Before its first step is done nothing can be lost, and to compile it may take minutes.
        self.stop_request = StopRequest(raises=True, seconds=FIRST_STEP_SECONDS)
        self.stopping = False  # all ranks know of a request and stop after the same step
        self.vote = agreement.Vote()  # on whether any rank was asked to stop
        self.telemetry = Telemetry(self.config, step)
        self.clock = self.telemetry.clock
        self.run_loggers = Loggers()  # of rank 0
        self.loggers = Loggers()  # of this rank's readings
        self.watchdog = Watchdog(self.config.watchdog_timeout, self.folder.path)
        self.open = ExitStack()  # what ends with the run

    def __enter__(self) -> "Run":
        """Resume, and do what was left undone; a finished run is only read."""
        self.summary = self.folder.summary()
        if not self.summary:
            try:
                self._begin()
            except StopSignal as stop:
                self.__exit__(type(stop), stop)
                raise
        return self

    def _begin(self) -> None:
        with ExitStack() as opened:
            opened.enter_context(self.stop_request)
            # The state comes first: all else depends on the iteration.
            self.resumed = self.checkpoints.resume()
            self.profiler = build_profiler(self.config, self.device, self.folder.path / "profile")
            if self.profiler:
                self.profiler.check(self.config.num_iters - self.progress.iteration)
            log_memory(self.step)
            self._open_loggers(opened)
            opened.enter_context(listening(self.telemetry.times))
            hidden = None if comm.is_main() else True  # None: silent in a batch log, shown on a terminal
            total = self.config.num_iters
            bar = tqdm(
                total=total,
                initial=self.progress.iteration,
                unit="it",
                dynamic_ncols=True,
                disable=hidden,
                leave=False,
            )
            self.bar = opened.enter_context(bar)
            opened.enter_context(self.watchdog)
            # All went well, so what was opened stays open until the run ends.
            self.open = opened.pop_all()
        if self.progress.iteration == self.config.num_iters or self.progress.validation_due:
            self._validate_or_stop()  # as the process before this one would have done

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None = None, trace: Any = None) -> None:
        """Close what is open; where all iterations are done, write the summary and print it."""
        if self.summary and kind is None:
            log.info("%s is a finished run; its result:", self.folder.path)
        self.open.__exit__(kind, error, trace)
        if kind is None:  # after an error other ranks may be missing, which the device would wait for
            synchronize(self.device)
        self.step.captured.clear()  # who leaves a process group waits until no CUDA graph holds NCCL's collectives
        if comm.get_size("domain") > 1:
            from distributed.shard.missing_rules import fallback  # only rung 4 has imported it

            for line in fallback.fallback_lines():  # operations and results that were not split
                log.info(line)
        # A run that was stopped has no summary: its folder shows that it can go on.
        is_done = self.progress.iteration == self.config.num_iters and not self.progress.validation_due
        if kind is None and not self.summary and is_done:
            self.summary = self._summarize()
            if comm.is_main():
                write_json(self.folder.summary_file, self.summary)
        is_stopped = kind is StopSignal or (kind is None and self.stopping)
        if is_stopped and not self.summary:
            saved = self.checkpoints.newest
            when = "before the first iteration" if saved is None else f"after saving iteration {saved}"
            log.info("Stopped %s; repeat the command to resume", when)
        self.folder.close()
        if kind is None and self.summary:
            print_result(self.summary, self.validator.describe(self.summary), self.config)

    def status(self) -> int | None:
        """The exit status: None (success) where the run is finished, STOPPED_STATUS where a signal stopped it."""
        return None if self.summary else STOPPED_STATUS

    def iterations(self) -> Iterator[Iteration]:
        """The iterations that are left, one at a time; ends early at a signal, and where the data were lost."""
        if self.summary:
            return
        # Batches follow from the iteration alone, so a resumed run goes on with the right one.
        batches = self.train_loader.train(self.config.seed, self.progress.iteration, self.config.num_iters)
        self.clock.start()
        while self.progress.iteration < self.config.num_iters and not self.stopping:
            if self.profiler:
                self.profiler.step()
            yield Iteration(
                self.progress.iteration,
                self._is_read(self.progress.iteration + 1),
                self.watchdog.within(self._step_seconds()),
                partial(self._next_batch, batches),
                self._after_step,
                self._stop_without_data,
            )
        if self.profiler:
            self.profiler.close()
        batches.close()

    def _next_batch(self, batches: Iterator[Batch]) -> Batch:
        """The next batch. A resumed run brings DDP to where it was by its first one."""
        with span("data"):
            x, y = next(batches)
        if self.resumed:
            self.step.warm_up_ddp_buckets(x, y)
            self.resumed = False
        return x, y

    def _after_step(self, output: StepOutput) -> None:
        """Count the step, and log, validate and save where it is due."""
        self.stop_request.raises = False  # from here on a signal must not interrupt what would be lost
        self.telemetry.add(output)
        # After its first step the model must still be one that a checkpoint can hold.
        if self.progress.iteration == self.checkpoints.began:
            self.checkpoints.check_model_unchanged()
        self.progress.iteration += 1
        self.checkpoints.raise_failed()
        self.bar.update()
        self._between_steps()
        self.watchdog.beat()

    def _stop_without_data(self, error: ConnectionLostError) -> None:
        """Save and stop, as at a signal: the data cannot be read any more. Every rank raised the same error."""
        log.error("%s", error)
        self.stopping = True
        if self.telemetry.losses:
            self._read_losses()
        if self.progress.iteration not in (0, self.checkpoints.newest):
            self._save(None)

    def _is_read(self, done: int) -> bool:
        """Tell whether the losses are read after so many iterations. A signal can ask for it at any other one."""
        config = self.config
        whole = done % config.log_every == 0 or done % config.checkpoint_every == 0 or done == config.num_iters
        return whole or self._epochs(done) > self._epochs(done - 1)

    def _between_steps(self) -> None:
        done = self.progress.iteration
        config = self.config
        finished = done == config.num_iters
        if self.telemetry.is_vote_due(done):
            self.stopping = self.vote(self.stop_request.made)
        if not (self.stopping or self._is_read(done)):
            return
        epoch = self._epochs(done)  # completed
        end_of_epoch = epoch > self._epochs(done - 1)
        if finished and not end_of_epoch:  # the run ends within an epoch
            epoch += 1
            end_of_epoch = True
        # The newest state is saved now and then, and whenever it is the best.
        save_due = finished or done % config.checkpoint_every == 0

        self._read_losses()
        if end_of_epoch:
            self._log_epoch(epoch)
            self.progress.validation_due = finished or epoch % config.validate_every == 0
        # What is due is saved before a validation, which may be long, and be killed.
        if save_due or self.stopping:
            self._save(None)
        if self.progress.validation_due and not self.stopping:
            self._validate_or_stop()
        self.clock.start()

    def _step_seconds(self) -> float | None:
        """Seconds that a step may take where NCCL ends no wait: with CUDA graphs over ranks (training/start.py).

        The first steps of a process may take longer: they compile, and are captured.
        """
        is_settled = self.progress.iteration > self.checkpoints.began + DDP_WARMUP_STEPS
        is_without_timeout = self.config.enable_cuda_graphs and comm.world_size() > 1
        return self.config.comm_timeout if is_without_timeout and is_settled else None

    def _epochs(self, iterations: int) -> int:
        """Passes over the training samples completed in so many iterations."""
        return iterations * self.config.global_batch_size // self.train_loader.num_samples

    def _read_losses(self) -> None:
        """Read what the last iterations left on the device, check the losses, and log them."""
        with self.watchdog.within(self._step_seconds()):  # here the host waits for the device
            losses, reading, stop = self.telemetry.read(self.progress.iteration, self.stop_request.made)
        self.stopping = self.stopping or stop
        done = {
            "iterations": len(losses),
            "since_start": self.clock.iterations,
            "ranks": comm.world_size(),
        }
        # Every rank has a file of its own, rank 0 all other loggers too.
        self.loggers.log(reading | done, self.progress.iteration)
        for iteration, loss in enumerate(losses, self.progress.iteration - len(losses) + 1):
            if not math.isfinite(loss):
                # The loss may be NaN because the data are: then they are named.
                samples = self.train_loader.order(self.config.seed).samples(iteration - 1)
                agreement.raise_on_all_ranks(partial(self.train_loader.check_finite, samples))
                raise self._not_finite(iteration, "training", loss)
            self.progress.epoch_loss += loss
            if iteration < self.progress.iteration:
                self.run_loggers.log({"Loss/train": loss}, iteration)
        self.progress.epoch_iterations += len(losses)
        self.run_loggers.log(reading, self.progress.iteration)
        self.bar.set_postfix(loss=f"{losses[-1]:.4f}", refresh=False)

    def _open_loggers(self, opened: ExitStack) -> None:
        if comm.is_main():
            charts = rmse_charts(self.validator.names)
            self.run_loggers.add(TensorBoard, self.folder.path, self.progress.iteration + 1, charts)
            if self.config.tracker != "none":
                self.run_loggers.add(KINDS[self.config.tracker], self.folder.path, self.config)
        self.loggers.add(MetricsFile, self.folder.path, self.progress.iteration, device_name(self.device))
        opened.callback(self.run_loggers.close)
        opened.callback(self.loggers.close)

    def _log_epoch(self, epoch: int) -> None:
        self.progress.train_loss = self.progress.epoch_loss / self.progress.epoch_iterations
        self.progress.epoch_loss = 0.0
        self.progress.epoch_iterations = 0
        seconds, samples = self.clock.lap()
        speed = samples / seconds
        log.info("Time taken for epoch %d is %.2f sec, avg %.2f samples/sec", epoch, seconds, speed)
        if self.progress.iteration < self.config.num_iters:
            samples_of_run = self.config.num_iters * self.config.global_batch_size
            epochs = math.ceil(samples_of_run / self.train_loader.num_samples)
            log.info("  Epoch %d of %d, about %s left", epoch, epochs, words_of_seconds(self._seconds_left()))
        log.info("  Avg train loss=%.6f", self.progress.train_loss)
        log.info("  Peak memory: %.3f GiB", peak_memory_bytes(self.device) / 2**30)
        self.run_loggers.log({"Loss/train_epoch": self.progress.train_loss}, self.progress.iteration)

    def _seconds_left(self):
        """Seconds until the last iteration, at the pace of this process; longer forecasts take longer."""
        now = self.progress.iteration
        begun = now - self.clock.iterations  # where this process began or resumed
        steps_done = self.config.forecast_steps(begun, now)
        steps_left = self.config.forecast_steps(now, self.config.num_iters)
        return self.clock.elapsed() / steps_done * steps_left

    def _validate_or_stop(self) -> None:
        """Score the model, and note its loss in a checkpoint, if there is one of this state or it is the best.

        Where the data were lost, or a signal came, the run stops with a checkpoint, to validate when resumed.
        """
        was_due = self.progress.validation_due
        self.progress.validation_due = True
        try:
            self._validate()
        except (ConnectionLostError, StoppedError) as error:
            is_lost = isinstance(error, ConnectionLostError)
            level = logging.ERROR if is_lost else logging.INFO
            log.log(level, "%s", error)
            self.stopping = True
            if self.checkpoints.has_this_state():
                self.checkpoints.wait()
            else:
                self._save(None)
            return
        self.progress.validation_due = False
        val_loss = self.result["val_loss"]
        # Validation changes nothing that a checkpoint holds, so its tensors are not written once more.
        if self.checkpoints.has_this_state():
            if was_due:
                self.checkpoints.score(val_loss)
        elif val_loss == self.progress.best_val_loss:
            self._save(val_loss)

    def _beat_validation(self) -> None:
        """Note a batch of the validation. Raises StoppedError, on all ranks, where one was asked to stop."""
        self.watchdog.beat()
        if self.vote(self.stop_request.made):
            raise StoppedError("  Stopped in the validation, which the resumed run makes up")

    def _validate(self) -> None:
        """Score the model."""
        started = time.perf_counter()
        with (
            span("validation"),
            self.step.autocast(),
            self.step.best_weights(),
            self.step.streams.unmoved(),
            self.step.streams.host,
        ):
            self.result = self.validator.run(self.step.parallel, self._beat_validation)
        val_loss = self.result["val_loss"]
        if not math.isfinite(val_loss):
            loader = self.validator.loader
            agreement.raise_on_all_ranks(partial(loader.check_finite, range(loader.num_samples)))
            # The data are good, so the weights are not.
            if self.checkpoints.has_this_state():
                self.checkpoints.withdraw()
            raise self._not_finite(self.progress.iteration, "validation", val_loss)
        if self.progress.best_val_loss is None or val_loss < self.progress.best_val_loss:
            self.progress.best_val_loss = val_loss
        log.info("  Avg val loss=%.6f", val_loss)
        log.info("  Total validation time: %.2f sec", time.perf_counter() - started)
        write_validation(self.run_loggers, self.result, self.validator.figures, self.progress.iteration)

    def _not_finite(self, iteration: int, kind: str, loss: float) -> NonFiniteLossError:
        good = self.checkpoints.newest_in_words()
        return NonFiniteLossError(f"iteration {iteration}: the {kind} loss is {loss}; last good checkpoint: {good}")

    def _save(self, val_loss: float | None) -> None:
        # The last checkpoint must be whole before the process ends.
        is_last = self.stopping or self.progress.iteration == self.config.num_iters
        self.checkpoints.save(val_loss, wait=is_last)

    def _summarize(self) -> dict[str, Any]:
        return {
            "config": self.config.config,
            "run": str(self.folder.path),
            "iterations": self.progress.iteration,
            "device": str(self.device),
            "world_size": comm.world_size(),
            "parameters": self.step.task.facts.parameters,
            "samples_per_sec": self.clock.steady_samples_per_sec(),
            "data_wait_fraction": self.clock.data_wait_fraction(),
            "peak_memory_bytes": max(comm.gather(peak_memory_bytes(self.device))),
            "train_loss": self.progress.train_loss,
            "best_val_loss": self.progress.best_val_loss,
            **self.result,
            "units": dict(zip(self.validator.names, self.validator.units, strict=True)),
        }
