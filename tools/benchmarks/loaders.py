"""Data loaders alone: every loader x workers x format on disk, compared with the plain design and plain reading.

All take turns in every round, and a ratio is taken within a round, so that the ups and downs of the machine cancel.
"""

import importlib
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
import xarray
from pandas import DataFrame
from torch import Tensor

from tools.tables import installed, machine, print_tables
from training.tasks import build_task
from utils.data_loader import DataLoader
from utils.device import select_device, synchronize
from utils.schema import Config
from weather.dataset import FieldDataset, Statistics

LEAD_IN = 4  # untimed batches: rings and queues reach their steady state
TURN_SECONDS = 2  # at most: a busy machine, or large batches, would make a table of minutes


def run(
    config: Config, workers: Sequence[int] = (0, 1, 2), frames: int = 24, batches: int = 12, rounds: int = 3
) -> dict[str, Any]:
    """Measure and print a table; returns the figures, as JSON has them.

    workers: numbers of data workers to try, besides 0, which all are compared with. frames: of the training data,
    copied into each format. batches: timed in a turn, fewer where they take longer than TURN_SECONDS.
    """
    device = select_device(config.device)
    with tempfile.TemporaryDirectory() as folder:
        layouts = _write_layouts(config, Path(folder), frames)
        cases = _cases(config, layouts, sorted({0, *workers}), device)
        turns = [{name: measure(batches) for name, measure in cases.items()} for _ in range(rounds)]
    speeds, sample_bytes = DataFrame(turns), _sample_bytes(config)
    medians = speeds.median()
    results: list[dict[str, Any]] = DataFrame({
        "loader": speeds.columns, "samples_per_sec": medians, "bytes_per_sec": medians * sample_bytes,
        "ratio_to_plain": speeds.div(speeds[PLAIN], axis=0).median(),
        "ratio_to_cat": speeds.div(speeds[CAT], axis=0).median(),
    }).to_dict("records")  # fmt: skip
    print_tables("data", [r | {"giga": r["bytes_per_sec"] / 1e9} for r in results])
    print(f"batch {config.global_batch_size}, a sample is {sample_bytes / 1e6:.1f} MB; GB/s as if all of it were read")
    for name, needs, file in (("DALI", "nvidia.dali", "dali"), ("Zarr", "zarr", "era5")):
        if not installed(needs):
            print(f"{name}: not installed (requirements-{file}.txt)")
    return {"config": config.config, "machine": machine(device), "loaders": results}


CAT, PLAIN = "cat file > /dev/null", "plain design, 0 workers"


def _write_layouts(config: Config, folder: Path, frames: int) -> dict[str, Path]:
    """The first frames of the training data, in each format: {name: folder}. They stay in the page cache."""
    channels, (height, width) = max(config.n_in_channels, config.n_out_channels), config.img_size
    fields = FieldDataset(config.train_data_path, channels, config.img_size).files[0].fields[:frames, :channels]
    fields, frame = fields[..., :height, :width], (1, channels, height, width)
    for name, chunks in {"HDF5": None, "HDF5, chunk a channel": (1, 1, height, width)}.items():
        (folder / name).mkdir()
        with h5py.File(folder / name / "1979.h5", "w") as file:
            file.create_dataset("fields", data=fields, chunks=chunks)
    (folder / "NetCDF").mkdir()
    array = xarray.DataArray(fields, dims=("time", "channel", "latitude", "longitude"), name="fields")
    array.to_netcdf(folder / "NetCDF" / "1979.nc", engine="h5netcdf")
    for version, codec in ((2, None), (3, None), (3, "auto")) if installed("zarr") else ():
        name = f"Zarr {version}, {'compressed' if codec else 'plain'}"
        group = importlib.import_module("zarr").open_group(folder / name / "1979.zarr", mode="w", zarr_format=version)
        group.create_array("fields", data=fields, chunks=frame, compressors=codec)
    return {path.name: path for path in sorted(folder.iterdir())}


def _cases(
    config: Config, layouts: Mapping[str, Path], workers: Sequence[int], device: torch.device
) -> dict[str, Callable[[int], float]]:
    """{name: function(batches) -> samples per second}."""
    contiguous, most = layouts["HDF5"], max(workers)

    def options(folder: Path, kind: str, n: int) -> Config:
        own = {"train_data_path": str(folder), "valid_data_path": str(folder)}  # the same points
        return config.model_copy(update=own | {"data_loader_config": kind, "num_data_workers": n})

    cases: dict[str, Callable[[int], float]] = {CAT: lambda _: _cat(config, contiguous)}
    for n in workers:
        cases[f"plain design, {n} workers"] = partial(_plain, options(contiguous, "pytorch", n))
    dali = {"dali": "DALI"} if installed("nvidia.dali") else {}
    for kind, title in ({"pytorch": "native"} | dali).items():
        for layout, folder in layouts.items():
            for n in workers:
                cases[f"{title}, {layout}, {n} workers"] = partial(_ours, options(folder, kind, n), device)
    best = options(contiguous, "pytorch", most)
    cases[f"native, as for a GPU, {most} workers"] = partial(_ours, best, device, raw=True)
    cases[f"native, 1/4 of the rows, {most} workers"] = partial(_ours, best, device, rows=config.img_size[0] // 4)
    return cases


def _ours(config: Config, device: torch.device, count: int, raw: bool = False, rows: int | None = None) -> float:
    """Samples per second of our loader. raw: leave the values as they are on disk, as the host does for a GPU.

    rows: read so many rows of each image.
    """
    loader, valid = build_task(config).build_loaders(device)
    valid.close()
    if rows:
        channels = max(config.n_in_channels, config.n_out_channels)
        dataset = FieldDataset(config.train_data_path, channels, config.img_size, config.dt, rows=slice(0, rows))
        whole, sizes = loader, (loader.n_in, loader.n_out, loader.batch_size)
        loader = DataLoader(dataset, whole.statistics, *sizes, device, config.num_data_workers)
        whole.close()
    if raw:
        assert isinstance(loader, DataLoader)
        loader.normalise_on_read = False
    with closing(loader), closing(loader.train(config.seed, 0, LEAD_IN + count)) as batches:
        return _timed(batches, count, loader.batch_size, device)


def _plain(config: Config, count: int) -> float:
    """Samples per second of the plain design."""
    train, valid = build_task(config.model_copy(update={"num_data_workers": 0})).build_loaders(select_device("cpu"))
    loader = plain_loader(train.dataset, train.statistics, config.global_batch_size, config.num_data_workers)
    with closing(train), closing(valid):
        return _timed(chain.from_iterable(repeat(loader)), count, config.global_batch_size, train.device)


class PlainDataset(torch.utils.data.Dataset):
    """The plain design, as in most tutorials: the yardstick for ours.

    It reads twice for each sample, into new arrays, and normalises in numpy. The reading process opens the files.
    """

    def __init__(self, paths: Sequence[Path], means: np.ndarray, stds: np.ndarray):
        self.paths, self.means, self.stds = paths, means, stds
        self.files: list[h5py.Dataset] | None = None
        self.index: list[tuple[int, int]] = []  # file, frame
        for number, path in enumerate(paths):
            with h5py.File(path, "r", locking=False) as file:
                self.index += [(number, t) for t in range(file["fields"].shape[0] - 1)]

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, i: int) -> tuple[Tensor, ...]:
        if self.files is None:
            self.files = [h5py.File(path, "r", locking=False)["fields"] for path in self.paths]
        number, t = self.index[i]
        return tuple(torch.from_numpy(self._normalised(self.files[number][t + step])) for step in (0, 1))

    def _normalised(self, frame: np.ndarray) -> np.ndarray:
        frame -= self.means
        frame /= self.stds
        return np.ascontiguousarray(frame)


def plain_loader(
    dataset: FieldDataset, statistics: Statistics, batch_size: int, num_workers: int
) -> torch.utils.data.DataLoader[tuple[Tensor, ...]]:
    """The DataLoader of torch over the files of a FieldDataset, default collation, shuffled."""
    plain = PlainDataset([file.path for file in dataset.files], statistics.means, statistics.stds)
    return torch.utils.data.DataLoader(plain, batch_size, shuffle=True, drop_last=True, num_workers=num_workers)


def _timed(batches: Iterator[Any], count: int, batch_size: int, device: torch.device) -> float:
    _take(batches, LEAD_IN)
    synchronize(device)
    started = time.perf_counter()
    done = _take(batches, count)
    synchronize(device)
    return done * batch_size / (time.perf_counter() - started)


def _take(batches: Iterator[Any], count: int) -> int:
    """Take so many batches, or those of TURN_SECONDS; returns how many."""
    started, done = time.perf_counter(), 0
    while done < count and time.perf_counter() - started < TURN_SECONDS:
        next(batches)
        done += 1
    return done


def _cat(config: Config, folder: Path) -> float:
    """Samples per second if reading were all: the bytes of a sample are those of two frames."""
    file = folder / "1979.h5"
    started = time.perf_counter()
    subprocess.run(["cat", file], stdout=subprocess.DEVNULL, check=True)
    return file.stat().st_size / _sample_bytes(config) / (time.perf_counter() - started)


def _sample_bytes(config: Config) -> int:
    """Of two frames, in float32."""
    return 2 * 4 * max(config.n_in_channels, config.n_out_channels) * config.img_size[0] * config.img_size[1]
