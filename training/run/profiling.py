"""Profiling: Nsight Systems, and torch.profiler for a window of steps."""

import json
import logging
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

from utils import comm
from utils.choices import choose
from utils.device import synchronize
from utils.errors import UsageError
from utils.launch import read_launch
from utils.rank_failure import recorded_collectives
from utils.schema import Config

log = logging.getLogger(__name__)

TABLE_ROWS = 25
ONE_TRACE = "trace.json.gz"
TRACE = "trace-rank{}.json.gz"
UNDER_NSYS = "TRAINING_UNDER_NSYS"  # set for the process that nsys starts


def restart_under_nsys() -> None:
    """With ENABLE_PROFILING=1, start this command again inside Nsight Systems; does not return then.

    The report is PROFILE_OUTPUT (default `profile`), with the rank in its name where there are several processes. Only
    the window between cudaProfilerStart and cudaProfilerStop is recorded. Raises UsageError where nsys is missing.
    """
    if os.environ.get("ENABLE_PROFILING") != "1" or UNDER_NSYS in os.environ:
        return
    nsys = shutil.which("nsys")
    if nsys is None:
        raise UsageError(
            "ENABLE_PROFILING=1 needs Nsight Systems, and no `nsys` is on the PATH: load its module or install it, "
            "or use --profile torch"
        )
    output = os.environ.get("PROFILE_OUTPUT", "profile")
    launch = read_launch()
    # Ranks would write over each other's report.
    if launch.world_size > 1:
        output += f"-rank{launch.rank}"
    command = [
        nsys, "profile", "--output", output, "--force-overwrite", "true", "--trace", "cuda,nvtx",
        "--capture-range", "cudaProfilerApi", "--capture-range-end", "stop",
    ]  # fmt: skip
    # The new process must not start nsys again.
    os.environ[UNDER_NSYS] = "1"
    os.execv(nsys, [*command, sys.executable, *sys.orig_argv[1:]])


def build_profiler(config: Config, device: torch.device, folder: Path) -> "Profiler | None":
    """The profiler of a run: Nsight Systems where nsys started the process, else that of --profile, into a folder."""
    if UNDER_NSYS in os.environ:
        if device.type != "cuda":
            raise UsageError(f"ENABLE_PROFILING=1 records a GPU, this run is on {device}: use --profile torch")
        return Profiler(config, torch.cuda.profiler)
    records = choose("profile", config.profile, {"none": False, "torch": comm.is_main(), "ranks": True})
    if records:
        name = TRACE.format(comm.rank()) if config.profile == "ranks" else ONE_TRACE
        return Profiler(config, TorchRecorder(device, folder, name))
    return None


class Profiler:
    """Starts and stops a recorder around the steps [profile_start, profile_start + profile_steps) of this process."""

    def __init__(self, config: Config, recorder: Any):
        self.first = config.profile_start
        self.steps = config.profile_steps
        self.recorder = recorder
        self.count = 0
        self.recording = False

    def check(self, steps_left: int) -> None:
        """Raises UsageError where the window ends after the steps that are left in this run."""
        if self.first + self.steps > steps_left:
            raise UsageError(
                f"profile window: steps {self.first} to {self.first + self.steps - 1} of this process, but only "
                f"{steps_left} are left to num_iters: lower --profile_start or --profile_steps"
            )

    def step(self) -> None:
        """Call before every step."""
        if self.count == self.first:
            self.recorder.start()
            self.recording = True
        elif self.count == self.first + self.steps:
            self.close()
        self.count += 1

    def close(self) -> None:
        """Call after the last step, also of a run that ends within the window."""
        if self.recording:
            self.recorder.stop()
            self.recording = False


class TorchRecorder:
    """torch.profiler around a window of steps.

    A trace for Perfetto or TensorBoard, and by rank 0 a table of the top operations, and on a GPU a snapshot of the
    memory allocator with the stack of every allocation. The trace also names the process group of each collective.
    """

    def __init__(self, device: torch.device, folder: Path, name: str):
        self.device = device
        self.folder = folder
        self.name = name

    def start(self) -> None:
        """Begin to record."""
        # The activities of the device, beside those of the host.
        gpu = torch.profiler.supported_activities() if self.device.type != "cpu" else ()
        activities = {torch.profiler.ProfilerActivity.CPU, *gpu}
        # Rank 0 alone records the allocator: the stacks of all allocations are large.
        if self.device.type == "cuda" and comm.is_main():
            torch.cuda.memory._record_memory_history()
        self.profile = torch.profiler.profile(
            activities=activities, record_shapes=True, profile_memory=True, acc_events=True
        )
        self.profile.start()

    def stop(self) -> None:
        """Stop, and write what was recorded into the folder."""
        # Kernels of the window may still be running.
        synchronize(self.device)
        self.profile.add_metadata_json("collectives", json.dumps(recorded_collectives()))
        self.profile.stop()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.profile.export_chrome_trace(str(self.folder / self.name))
        if not comm.is_main():
            return
        order = "self_device_time_total" if self.device.type != "cpu" else "self_cpu_time_total"
        table = self.profile.key_averages().table(sort_by=order, row_limit=TABLE_ROWS)
        (self.folder / "operations.txt").write_text(table)
        if self.device.type == "cuda":
            torch.cuda.memory._dump_snapshot(str(self.folder / "memory.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)
        log.info("Profile written to %s: %s, operations.txt\n%s", self.folder, self.name, table)
