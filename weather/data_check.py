"""Look at the frames before training: are they weather, and do the statistics belong to them?

`sample` looks at some rows of some frames of every year, for at most SAMPLE_SECONDS; `all` at every point of every
frame that a sample takes. Ranks share the frames.
"""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
from tqdm import tqdm

from utils.errors import UsageError
from weather.channels import channel_key
from weather.dataset import FieldDataset
from weather.statistics import FrameSums
from weather.time_axis import TimeAxis, show
from weather.value_check import Problem, ValueCheck

# The last reads may take a little longer.
SAMPLE_SECONDS = 1.3
# Of a larger frame a part of the rows is read.
SAMPLE_BYTES = 2e6
# Reads in flight: a parallel file system answers each of them late.
THREADS = 8
# Places in a year, by what they tell: a job that was stopped leaves its last frames empty, one of several writers that
# died a stretch in between.
PLACES = (1, 0, 1 / 2, 1 / 4, 3 / 4, 1 / 8, 3 / 8, 5 / 8, 7 / 8, 1 / 16, 5 / 16, 9 / 16, 13 / 16)


@dataclass(frozen=True)
class Look:
    """One frame to be looked at: which data set, which of its files, which frame in it."""

    dataset: int
    file: int
    frame: int


class CheckedDataset:
    """A data set, and how its frames are looked at.

    rows: the numbers of the rows to look at, increasing.
    """

    def __init__(self, dataset: FieldDataset, looks_at_all: bool):
        self.dataset = dataset
        description = dataset.description
        height, self.width = (len(axis) for axis in description.grid)
        self.rows = np.arange(height) if looks_at_all else sampled_rows(dataset)
        keys = [channel_key(name) for name in description.names]
        self.check = ValueCheck(keys, units=description.units)

    def read(self, look: Look) -> np.ndarray:
        """The rows of a frame, (C, R, W)."""
        file = self.dataset.files[look.file]
        circles = file.read_rows(look.frame, self.dataset.channels, self.rows)
        return circles[:, :, : self.width]

    def check_field(self, look: Look, field: np.ndarray) -> None:
        """Raise UsageError where the rows of a frame, as read, are no weather."""
        problem = self.check.find(field[None])
        if problem is None:
            return
        dataset = self.dataset
        in_image = replace(problem, row=int(self.rows[problem.row]))
        name = dataset.description.names[problem.channel]
        message = describe_problem(dataset.paths[look.file], dataset.axes[look.file], look.frame, name, in_image)
        raise UsageError(message)


class DataCheck:
    """Looks at the frames of some data sets, and keeps sums of those of the first one.

    mode: "sample" or "all". part: (rank, ranks), of which each looks at its share.
    Attributes: looked_at, the number of frames; seconds, how long it took; sums, of the first data set, a FrameSums.
    """

    def __init__(self, datasets: Sequence[FieldDataset], mode: str, part: tuple[int, int] = (0, 1)):
        self.mode, self.looks_at_all = mode, mode == "all"
        self.checked = [CheckedDataset(dataset, self.looks_at_all) for dataset in datasets]
        everything = all_looks(datasets) if self.looks_at_all else sampled_looks(datasets)
        rank, ranks = part
        self.looks = everything[rank::ranks]
        self.sums = FrameSums(sampled_rows(datasets[0]))
        self.looked_at, self.seconds = 0, 0.0

    def describe(self) -> str:
        """What was looked at, and what it cost."""
        frames = f"{self.looked_at} frames"
        if self.is_cut_short:
            frames = f"{self.looked_at} of {len(self.looks)} chosen frames"
        years = sum(len(checked.dataset.paths) for checked in self.checked)
        return f"--check_data {self.mode}: looked at {frames} of {years} years in {self.seconds:.2f} s"

    @property
    def is_cut_short(self) -> bool:
        """Tell whether the time was up before all chosen frames were looked at."""
        return self.looked_at < len(self.looks)

    def run(self, shows_progress: bool = False) -> None:
        """Look at the frames. Raises UsageError for the first that is no weather: file, frame, date, channel, value."""
        began = time.perf_counter()
        # None shows a bar on a terminal only.
        hidden = None if shows_progress and self.looks_at_all else True
        with (
            ThreadPoolExecutor(THREADS) as threads,
            tqdm(total=len(self.looks), unit="frame", disable=hidden, leave=False) as progress,
        ):
            for batch in _batches(self.looks):
                is_late = time.perf_counter() - began > SAMPLE_SECONDS
                if is_late and self.looked_at and not self.looks_at_all:
                    break
                fields = threads.map(self._read, batch)
                for look, field in zip(batch, fields, strict=True):
                    self._check(look, field)
                    progress.update()
        self.seconds = time.perf_counter() - began

    def _read(self, look: Look) -> np.ndarray:
        return self.checked[look.dataset].read(look)

    def _check(self, look: Look, field: np.ndarray) -> None:
        self.checked[look.dataset].check_field(look, field)
        self.looked_at += 1
        if look.dataset == 0:
            self.sums.add(field[:, self.sums.rows] if self.looks_at_all else field)


def sampled_looks(datasets: Sequence[FieldDataset]) -> list[Look]:
    """Some frames of every year: first one frame of each, then a second one of each, and so on."""
    used = [dataset.used_frames() for dataset in datasets]
    looks: dict[Look, None] = {}  # a set that keeps its order
    for place in PLACES:
        for number, lengths in enumerate(used):
            for file, frames in enumerate(lengths):
                if frames:
                    frame = round(place * (frames - 1))
                    looks[Look(number, file, frame)] = None
    return list(looks)


def all_looks(datasets: Sequence[FieldDataset]) -> list[Look]:
    """Every frame of every year, in the order in which they are stored."""
    looks = []
    for number, dataset in enumerate(datasets):
        for file, frames in enumerate(dataset.used_frames()):
            looks += [Look(number, file, frame) for frame in range(frames)]
    return looks


def sampled_rows(dataset: FieldDataset) -> np.ndarray:
    """Numbers of the rows to look at: evenly spread over the image, mirrored at its middle, all of a small one."""
    height = len(dataset.description.grid.latitude)
    width = dataset.files[0].shape[3]
    row_bytes = 4 * dataset.channels * width
    affordable = max(4, int(SAMPLE_BYTES // row_bytes))
    count = min(height, affordable)
    middle = (height - 1) / 2
    northern = np.linspace(0, middle, (count + 1) // 2).astype(int)
    southern = height - 1 - northern
    return np.union1d(northern, southern)


def _batches(looks: list[Look]) -> Iterator[list[Look]]:
    """As many at a time as there are threads, so that the clock is looked at in between."""
    for first in range(0, len(looks), THREADS):
        yield looks[first : first + THREADS]


def describe_problem(path: object, axis: TimeAxis | None, frame: int, name: str, problem: Problem) -> str:
    """The message: file, frame, date, channel, place, value and what it looks like. name: of the channel."""
    date = f" ({show(axis.dates[frame])})" if axis is not None else ""
    channel = f"channel {problem.channel} ({name})"
    place = f"row {problem.row}, column {problem.column}"
    more = ""
    is_unwritten = "written" in problem.text
    if problem.others > 1 and not is_unwritten:
        more = f"; {problem.others} more channels are out of range: are they in the order of their names?"
    return f"{path}: frame {frame}{date}: {channel} {problem.text} ({place}){more}"
