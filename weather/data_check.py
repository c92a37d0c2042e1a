"""Look at the frames before training: are they weather, and do the statistics belong to them?

`sample` looks at some rows of some frames of every year, for at most SAMPLE_SECONDS; `all` at every point of every
frame that a sample takes. Ranks share the frames.
"""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from tqdm import tqdm

from utils.errors import UsageError
from weather.channels import channel_key
from weather.dataset import FieldDataset
from weather.statistics import FrameSums
from weather.time_axis import TimeAxis, show
from weather.value_check import Problem, ValueCheck
from weather.year_data import YearFile

SAMPLE_SECONDS = 1.3  # the last reads may take a little longer
SAMPLE_BYTES = 2e6  # of a frame: of a larger one, a part of its rows
THREADS = 8  # reads in flight: a parallel file system answers each of them late
# Places in a year, by what they tell: a job that was stopped leaves its last frames empty, one of several writers that
# died a stretch in between.
PLACES = (1, 0, 1 / 2, 1 / 4, 3 / 4, 1 / 8, 3 / 8, 5 / 8, 7 / 8, 1 / 16, 5 / 16, 9 / 16, 13 / 16)


@dataclass(frozen=True)
class Look:
    """One frame to be looked at."""

    dataset: FieldDataset
    number: int  # of the file
    frame: int

    @property
    def file(self) -> YearFile:
        """The open year."""
        return self.dataset.files[self.number]


def sampled_looks(datasets: Sequence[FieldDataset]) -> list[Look]:
    """Some frames of every year: first one frame of each, then a second one of each, and so on."""
    looks: dict[tuple[int, int, int], Look] = {}
    for place in PLACES:
        for which, dataset in enumerate(datasets):
            for number, frames in enumerate(dataset.used_frames()):
                frame = round(place * (frames - 1))
                if frames and (which, number, frame) not in looks:
                    looks[which, number, frame] = Look(dataset, number, frame)
    return list(looks.values())


def all_looks(datasets: Sequence[FieldDataset]) -> list[Look]:
    """Every frame of every year, in the order in which they are stored."""
    looks = []
    for dataset in datasets:
        for number, frames in enumerate(dataset.used_frames()):
            looks += [Look(dataset, number, frame) for frame in range(frames)]
    return looks


def sampled_rows(dataset: FieldDataset) -> np.ndarray:
    """Numbers of the rows to look at: evenly spread over the image, mirrored at its middle, all of a small one."""
    height = len(dataset.description.grid.latitude)
    width = dataset.files[0].shape[3]
    row_bytes = 4 * dataset.channels * width
    count = min(height, max(4, int(SAMPLE_BYTES // row_bytes)))
    northern = np.linspace(0, (height - 1) / 2, (count + 1) // 2).astype(int)
    return np.unique(np.concatenate([northern, height - 1 - northern]))


class DataCheck:
    """Looks at the frames of some data sets, and keeps sums of those of the first one.

    mode: "sample" or "all". part: (rank, ranks), of which each looks at its share.
    Attributes: looked_at, the number of frames; seconds, how long it took; sums, of the first data set, a FrameSums.
    """

    def __init__(self, datasets: Sequence[FieldDataset], mode: str, part: tuple[int, int] = (0, 1)):
        self.datasets, self.mode = datasets, mode
        everything = all_looks(datasets) if mode == "all" else sampled_looks(datasets)
        rank, ranks = part
        self.looks = everything[rank::ranks]
        self.checks = {id(dataset): _value_check(dataset) for dataset in datasets}
        self.rows = {id(dataset): self._rows_of(dataset) for dataset in datasets}
        self.sums = FrameSums(sampled_rows(datasets[0]))
        self.looked_at, self.seconds = 0, 0.0

    def describe(self) -> str:
        """What was looked at, and what it cost."""
        frames = (
            f"{self.looked_at} of {len(self.looks)} chosen frames" if self.is_cut_short else f"{self.looked_at} frames"
        )
        years = sum(len(dataset.files) for dataset in self.datasets)
        return f"--check_data {self.mode}: looked at {frames} of {years} years in {self.seconds:.2f} s"

    @property
    def is_cut_short(self) -> bool:
        """Tell whether the time was up before all chosen frames were looked at."""
        return self.looked_at < len(self.looks)

    def run(self, shows_progress: bool = False) -> None:
        """Look at the frames. Raises UsageError for the first that is no weather: file, frame, date, channel, value."""
        began = time.perf_counter()
        hidden = None if shows_progress and self.mode == "all" else True
        with (
            ThreadPoolExecutor(THREADS) as threads,
            tqdm(total=len(self.looks), unit="frame", disable=hidden, leave=False) as progress,
        ):
            for batch in _batches(self.looks):
                is_late = time.perf_counter() - began > SAMPLE_SECONDS
                if self.mode == "sample" and is_late and self.looked_at:
                    break
                fields = threads.map(self._read, batch)
                for look, field in zip(batch, fields, strict=True):
                    self._check(look, field)
                    progress.update()
        self.seconds = time.perf_counter() - began

    def _rows_of(self, dataset: FieldDataset) -> np.ndarray:
        if self.mode == "all":
            return np.arange(len(dataset.description.grid.latitude))
        return sampled_rows(dataset)

    def _read(self, look: Look) -> np.ndarray:
        """Some rows of a frame, (C, R, W)."""
        return look.file.read_rows(look.frame, look.dataset.channels, self.rows[id(look.dataset)])

    def _check(self, look: Look, field: np.ndarray) -> None:
        problem = self.checks[id(look.dataset)].find(field[None])
        if problem is not None:
            dataset = look.dataset
            in_image = replace(problem, row=int(self.rows[id(dataset)][problem.row]))
            name = dataset.description.names[problem.channel]
            axis = dataset.axes[look.number]
            raise UsageError(describe_problem(look.file.path, axis, look.frame, problem.channel, name, in_image))
        self.looked_at += 1
        is_of_first = look.dataset is self.datasets[0]
        if is_of_first:
            of_sums = field if self.mode == "sample" else field[:, self.sums.rows]
            self.sums.add(of_sums)


def _value_check(dataset: FieldDataset) -> ValueCheck:
    description = dataset.description
    return ValueCheck([channel_key(name) for name in description.names], units=description.units)


def _batches(looks: list[Look]) -> Iterator[list[Look]]:
    """As many at a time as there are threads: so the clock is looked at in between."""
    for first in range(0, len(looks), THREADS):
        yield looks[first : first + THREADS]


def describe_problem(path: Path, axis: TimeAxis | None, frame: int, channel: int, name: str, problem: Problem) -> str:
    """The message: file, frame, date, channel, place, value and what it looks like."""
    date = f" ({show(axis.dates[frame])})" if axis is not None else ""
    place = f"row {problem.row}, column {problem.column}"
    more = ""
    if problem.others > 1 and "written" not in problem.text:
        more = f"; {problem.others} more channels are out of range: are they in the order of their names?"
    return f"{path}: frame {frame}{date}: channel {channel} ({name}) {problem.text} ({place}){more}"
