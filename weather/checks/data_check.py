"""Look at the frames before training: are they weather, and do the statistics belong to them?

`sample` looks at some rows of some frames of every year, for at most SAMPLE_SECONDS; `all` at every point of every
frame that a sample takes. Ranks share the frames.
"""

import math
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import xarray
from tqdm import tqdm

from utils.choices import choose
from utils.errors import UsageError
from weather.checks.statistics import ANYWAY, FrameSums
from weather.fields.attributes import find_stated_range, read_missing_values
from weather.fields.channels import channel_key
from weather.fields.time_axis import TimeAxis, show
from weather.fields.value_check import Problem, ValueCheck
from weather.years.dataset import FieldDataset
from weather.years.year_data import DATASET, Description, YearFile

# The last reads may take a little longer.
SAMPLE_SECONDS = 1.3
# Of a larger frame a part of the rows is read.
SAMPLE_BYTES = 2e6
# Reads in flight: a parallel file system answers each of them late.
THREADS = 8
# Of frames held in memory at a time: chunks that hold several frames are then decoded once.
BLOCK_BYTES = 64e6
# Frames of the first data set that are held against the statistics.
SUMMED_FRAMES = 40
# So many equal frames among those of a year are no coincidence.
REPEATED = 3
# Places in a year, by what they tell: a job that was stopped leaves its last frames empty, one of several writers that
# died a stretch in between.
PLACES = (
    1,
    0,
    1 / 2,
    1 / 4,
    3 / 4,
    1 / 8,
    3 / 8,
    5 / 8,
    7 / 8,
    1 / 16,
    5 / 16,
    9 / 16,
    13 / 16,
)


@dataclass(frozen=True)
class Look:
    """Frames to be looked at: which data set, which of its files, the first frame in it, how many."""

    dataset: int
    file: int
    frame: int
    count: int = 1


class CheckedDataset:
    """A data set, and how its frames are looked at.

    rows: the numbers of the rows to look at, increasing.
    """

    def __init__(self, dataset: FieldDataset, looks_at_all: bool):
        self.dataset = dataset
        description = dataset.description
        height = len(description.grid.latitude)
        self.width = len(description.grid.longitude)
        self.rows = np.arange(height) if looks_at_all else sampled_rows(dataset)
        self.checks = [build_value_check(file, description) for file in dataset.files]
        self.hashes: dict[tuple[int, int], list[int]] = {}  # {(file, hash of what was read): frames}

    def read(self, look: Look) -> np.ndarray:
        """The rows of some frames, (T, C, R, W)."""
        file = self.dataset.files[look.file]
        channels = self.dataset.channels
        if look.count == 1:
            circles = file.read_rows(look.frame, channels, self.rows)[None]
        else:
            height = len(self.rows)  # all of them
            width = file.shape[3]
            circles = np.empty((look.count, channels, height, width), np.float32)
            file.read(look.frame, circles, slice(0, height), slice(0, width))
        return circles[..., : self.width]

    def check_fields(self, look: Look, fields: np.ndarray) -> None:
        """Raise UsageError where frames, as read, are no weather."""
        problem = self.checks[look.file].find(fields)
        if problem is None:
            return
        dataset = self.dataset
        in_image = replace(problem, row=int(self.rows[problem.row]))
        name = dataset.description.names[problem.channel]
        frame = look.frame + problem.frame
        path = dataset.paths[look.file]
        axis = dataset.axes[look.file]
        raise UsageError(describe_problem(path, axis, frame, name, in_image))

    def check_repeated(self, look: Look, fields: np.ndarray) -> None:
        """Raise UsageError where the same frame was seen in several places of a year: something went on writing it."""
        content = look.file, hash(fields.tobytes())
        seen = self.hashes.setdefault(content, [])
        seen.append(look.frame)
        if len(seen) >= REPEATED:
            frames = ", ".join(map(str, sorted(seen)))
            raise UsageError(
                f"{self.dataset.paths[look.file]}: frames {frames} are the same in every channel: was one frame "
                f"written again and again?; {ANYWAY}"
            )


class DataCheck:
    """Looks at the frames of some data sets, and keeps sums of those of the first one.

    mode: "sample" or "all". part: (rank, ranks), of which each looks at its share. Rank 0 also looks at frames from
    all years of the first data set, for the sums: the shares of others may be of one season.
    Attributes: looked_at, the number of frames; seconds, how long it took; sums, of the first data set, a FrameSums.
    """

    def __init__(
        self,
        datasets: Sequence[FieldDataset],
        mode: str,
        part: tuple[int, int] = (0, 1),
    ):
        self.mode = mode
        self.looks_at_all = choose("check_data", mode, {"sample": False, "all": True})
        self.checked = [CheckedDataset(dataset, self.looks_at_all) for dataset in datasets]
        sampled = sampled_looks(datasets)
        everything = all_looks(datasets) if self.looks_at_all else sampled
        rank, ranks = part
        own = everything[rank::ranks]
        self.summed: set[Look] = set()
        if rank == 0:
            of_first = [look for look in sampled if look.dataset == 0]
            self.summed = set(of_first[:SUMMED_FRAMES])
            own = [*of_first[:SUMMED_FRAMES], *own]
        self.looks = list(dict.fromkeys(own))
        self.sums = FrameSums(sampled_rows(datasets[0]))
        self.looked_at = 0
        self.seconds = 0.0

    def describe(self) -> str:
        """What was looked at, and what it cost."""
        frames = f"{self.looked_at} frames"
        if self.is_cut_short:
            frames = f"{self.looked_at} of {self.chosen} chosen frames"
        years = sum(len(checked.dataset.paths) for checked in self.checked)
        return f"--check_data {self.mode}: looked at {frames} of {years} years in {self.seconds:.2f} s"

    @property
    def chosen(self) -> int:
        """The number of frames to be looked at."""
        return sum(look.count for look in self.looks)

    @property
    def is_cut_short(self) -> bool:
        """Tell whether the time was up before all chosen frames were looked at."""
        return self.looked_at < self.chosen

    def run(self, shows_progress: bool = False) -> None:
        """Look at the frames. Raises UsageError for the first that is no weather: file, frame, date, channel, value."""
        began = time.perf_counter()
        # None shows a bar on a terminal only.
        hidden = None if shows_progress and self.looks_at_all else True
        with (
            ThreadPoolExecutor(THREADS) as threads,
            tqdm(total=self.chosen, unit="frame", disable=hidden, leave=False) as progress,
        ):
            for batch in self._batches():
                is_late = time.perf_counter() - began > SAMPLE_SECONDS
                if is_late and self.looked_at and not self.looks_at_all:
                    break
                fields = threads.map(self._read, batch)
                for look, read in zip(batch, fields, strict=True):
                    self._check(look, read)
                    progress.update(look.count)
        self.seconds = time.perf_counter() - began

    def _batches(self) -> Iterator[list[Look]]:
        """As many looks at a time as there are threads; one where a look may cost the reading of much more."""
        files = [file for checked in self.checked for file in checked.dataset.files]
        read_parts = all(file.reads_parts for file in files)
        is_cheap = read_parts and not self.looks_at_all
        size = THREADS if is_cheap else 1
        for first in range(0, len(self.looks), size):
            yield self.looks[first : first + size]

    def _read(self, look: Look) -> np.ndarray:
        return self.checked[look.dataset].read(look)

    def _check(self, look: Look, fields: np.ndarray) -> None:
        checked = self.checked[look.dataset]
        checked.check_fields(look, fields)
        if not self.looks_at_all:
            checked.check_repeated(look, fields)
        self.looked_at += look.count
        if look in self.summed:
            field = fields[0]
            is_sampled = field.shape[1] == len(self.sums.rows)
            self.sums.add(field if is_sampled else field[:, self.sums.rows])


def build_value_check(file: YearFile, description: Description) -> ValueCheck:
    """The check of a file's frames. It knows the channels, and what the file itself says of missing values."""
    # Frames that are converted when they are read have no such array.
    nothing = xarray.Variable((), np.float32(0))
    fields = file.arrays.get(DATASET, nothing)
    return ValueCheck(
        [channel_key(name) for name in description.names],
        units=description.units,
        missing_values=read_missing_values(fields.attrs),
        stated_range=find_stated_range(fields.attrs, fields.dtype),
    )


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
    """Every frame of every year, in the order in which they are stored, as many at a time as fit in memory."""
    looks = []
    for number, dataset in enumerate(datasets):
        for file, frames in enumerate(dataset.used_frames()):
            image = dataset.files[file].shape[2:]
            for first, count in blocks(frames, dataset.channels, *image):
                looks.append(Look(number, file, first, count))
    return looks


def blocks(frames: int, *image: int) -> Iterator[tuple[int, int]]:
    """(first frame, number of frames) of parts of fields that fit in memory. image: shape of a frame, (C, H, W)."""
    frame_bytes = 4 * math.prod(image)
    count = max(1, int(BLOCK_BYTES // frame_bytes))
    for first in range(0, frames, count):
        yield first, min(count, frames - first)


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


def describe_problem(
    path: object,
    axis: TimeAxis | None,
    frame: int,
    name: str,
    problem: Problem,
) -> str:
    """The message: file, frame, date, channel, place, value and what it looks like. name: of the channel."""
    date = f" ({show(axis.dates[frame])})" if axis is not None else ""
    channel = f"channel {problem.channel} ({name})"
    place = f"row {problem.row}, column {problem.column}"
    more = ""
    is_unwritten = "written" in problem.text
    if problem.others > 1 and not is_unwritten:
        more = f"; {problem.others} more channels are out of range: are they in the order of their names?"
    return f"{path}: frame {frame}{date}: {channel} {problem.text} ({place}){more}; {ANYWAY}"
