"""The ranks of `benchmark.py domain`: what one layout takes for a forward pass or a training step of one size."""

import signal
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from distributed.data_parallel import DataParallelOptions, data_parallel
from distributed.domain_parallel import DomainOptions, split_images
from tools.benchmarks import team
from tools.instruments.memory import SavedTensors, optimizer_states
from tools.instruments.peak import PeakMemory, is_out_of_memory
from training.losses import classification_loss
from training.model import build_model
from training.optimizer import build_optimizer
from training.speed_options import apply_speed_options
from training.step import autocast
from utils import comm
from utils.device import synchronize
from utils.errors import UsageError, reported_as_usage_error
from utils.tiles import own_window

if TYPE_CHECKING:  # it imports this module
    from tools.benchmarks.domain import Case


class OutOfMemory(UsageError):
    """A rank had not enough memory."""


class Ranks(team.Team):
    """The ranks of a Team; they build a case when it is measured, and keep nothing of it."""

    def __init__(self, case: "Case"):
        super().__init__(case.layout.world_size, [case], _serve)

    def measure(self, case: "Case", steps: int, memory: bool) -> list[dict[str, Any]]:
        """What RankCase.measure gives on every rank. Raises OutOfMemory; the ranks are of no use then."""
        for pipe in self.pipes:
            with suppress(OSError):  # of a rank that is gone, as its missing answer tells
                pipe.send((case, steps, memory))
        try:
            return self._answers()
        except UsageError:  # maybe of a rank that waited for one without memory
            if any(map(_ran_out, self.processes, self.pipes)):
                raise OutOfMemory("a rank has no memory left") from None
            raise


def _ran_out(process: SpawnProcess, pipe: Connection) -> bool:
    """Whether a rank says so, or the system has killed it."""
    try:
        while pipe.poll(0.2):
            if isinstance(pipe.recv(), OutOfMemory):
                return True
    except (EOFError, ConnectionError):
        process.join(1)
    return process.exitcode == -signal.SIGKILL


class Teams:
    """The ranks of every layout, started when they are first asked, and anew after they ran out of memory."""

    def __init__(self) -> None:
        self.running: dict[str, Ranks] = {}

    def measure(self, case: "Case", steps: int, memory: bool) -> list[dict[str, Any]] | None:
        """As Ranks.measure; None where a rank has run out of memory."""
        name = case.name
        if name not in self.running:
            self.running[name] = Ranks(case)
        try:
            return self.running[name].measure(case, steps, memory)
        except BaseException as error:
            self.running.pop(name).__exit__(type(error))  # some wait for one that has given up
            if not isinstance(error, OutOfMemory):
                raise
            return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        for ranks in self.running.values():
            ranks.__exit__(*error)


def _serve(pipe: Connection, cases: "Sequence[Case]") -> None:
    config, layout = cases[0].config, cases[0].layout
    device = comm.init(config.device, config.comm_timeout)
    if device.type == "cpu":
        torch.set_num_threads(1)
    comm.build_mesh(device, layout)
    pipe.send([])
    while (turn := pipe.recv()) is not None:
        case, steps, memory = turn
        try:
            pipe.send(RankCase(case, device).measure(steps, memory))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise OutOfMemory(str(error)) from None
        if device.type == "cuda":
            torch.cuda.empty_cache()  # teams of other layouts use the same devices
    comm.shutdown()


class RankCase:
    """A case on one rank: a classifier, and a batch of random images with random classes."""

    def __init__(self, case: "Case", device: torch.device):
        self.case, self.device, config = case, device, case.config
        if device.type == "cuda":
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1, case.memory_limit / total) if case.memory_limit else 1)
            torch.cuda.reset_peak_memory_stats()
        model, whole = build_model(config), build_model(config)
        weights = whole.initial_weights(torch.Generator().manual_seed(config.seed))
        with reported_as_usage_error(ValueError, f"layout '{case.name}'"):
            split = split_images(model, config.options(DomainOptions))
        apply_speed_options(config, device, model)
        self.parallel = data_parallel(model, config.options(DataParallelOptions), device, weights, split)
        self.parallel.module.train(case.mode == "training")
        self.optimizer = build_optimizer(config, model, device) if case.mode == "training" else None

        assert config.num_classes
        random = torch.Generator().manual_seed(config.seed + 1)
        count = case.batch * comm.get_size("dp")
        own = slice(comm.get_rank("dp") * case.batch, (comm.get_rank("dp") + 1) * case.batch)
        x = torch.randn(count, config.n_in_channels, *config.img_size, generator=random)
        self.x = x[(own, slice(None), *own_window(config.img_size, config.patch_size))].clone().to(device)
        self.classes = torch.randint(config.num_classes, (count,), generator=random)[own].to(device)

    def autocast(self) -> torch.autocast:
        """The precision of the case."""
        return autocast(self.case.config, self.device)

    @torch.no_grad()
    def forward(self) -> Tensor:
        """Logits of this rank's images, (batch, classes), without gradients."""
        with self.autocast():
            return self.parallel.module(self.x)

    def step(self, between: Callable[[], None] = lambda: None) -> None:
        """A forward pass or an optimizer step. between: called after the forward pass of the latter."""
        if not self.optimizer:
            self.forward()
            return

        def loss(prediction: Tensor, classes: Tensor) -> Tensor:
            between()
            return classification_loss(prediction, classes, comm.get_group("image"))

        self.parallel.forward_backward(self.x, self.classes, loss, 1, self.autocast, nullcontext)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def measure(self, steps: int, memory: bool) -> dict[str, float]:
        """Seconds and CPU seconds of a step of this rank; with `memory` also the bytes held, and the first loss."""
        figures: dict[str, Any] = {}
        if memory:
            loss = F.cross_entropy(self.forward().float(), self.classes)
            figures["loss"] = comm.global_mean(loss[None]).item()
            self.step()
            figures |= self.memory()
        self.step()
        if comm.world_size() > 1:
            dist.barrier()
        synchronize(self.device)
        cpu, stop = time.process_time(), self.stopwatch()
        for _ in range(steps):
            self.step()
        return figures | {"seconds": stop() / steps, "cpu_seconds": (time.process_time() - cpu) / steps}

    def stopwatch(self) -> Callable[[], float]:
        """Start to measure; call the result for the seconds until then: of the device, where it has events."""
        if self.device.type != "cuda":
            started = time.perf_counter()

            def waited() -> float:
                synchronize(self.device)
                return time.perf_counter() - started

            return waited
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()

        def stop() -> float:
            end.record()
            end.synchronize()
            return start.elapsed_time(end) / 1000

        return stop

    def memory(self) -> dict[str, float | None]:
        """peak: bytes at most held at once, parameters and input included. activations: kept for the backward pass."""
        module = self.parallel.module
        activations: list[int] = []
        saved = SavedTensors(module)

        def after_forward() -> None:
            activations.append(saved.nbytes())

        if self.device.type == "cuda":
            with saved:
                self.step(after_forward)
            peak = torch.cuda.max_memory_allocated()
        else:
            moments = optimizer_states(self.optimizer) if self.optimizer else []
            with PeakMemory([*module.parameters(), *moments, self.x], self.case.memory_limit) as live, saved:
                self.step(after_forward)
            peak = live.peak
        return {"peak": peak, "activations": activations[0] if activations else None}
