"""Data loaders alone: the plain design, ours, DALI; and the first two on Zarr stores, with and without compression.

All take turns in every round, and a ratio is taken within a round, so that the ups and downs of the machine cancel.
"""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pandas import DataFrame
from torch import Tensor

from tools.benchmarks.cases import in_turns
from tools.instruments.clock import timed
from tools.planner.search import sample_bytes
from tools.tables import format_tables, installed, machine
from training.tasks import build_task
from training.tasks.forecast import statistics_of
from utils.config import load_config
from utils.device import select_device
from utils.errors import UsageError
from utils.sample_order import ChannelStatistics
from utils.schema import Config
from weather.sources.hdf5 import make_hdf5, open_hdf5
from weather.years.dataset import FieldDataset

# {name: how the chunks of a Zarr store are compressed}; zstd is what zarr takes by itself.
STORES: dict[str, Any] = {
    "Zarr": None,
    "Zarr, blosc": {"name": "blosc", "configuration": {"cname": "lz4", "clevel": 5, "shuffle": "shuffle"}},
    "Zarr, zstd": "auto",
}
LEAD_IN = 4  # untimed batches: rings and queues reach their steady state


def run(
    words: list[str],
    workers: int,
    frames: int,
    batches: int,
    rounds: int,
) -> dict[str, Any]:
    """Measure and print a table; returns the figures, as JSON has them.

    words: options of the config. workers: of each loader. frames: of the training data, copied into one file. batches:
    timed in a turn.
    """
    config = load_config(words)
    device = select_device(config.device)
    loaders = _loaders(batches, device)
    measures = {name: measure for name, (measure, _) in loaders.items()}
    with tempfile.TemporaryDirectory() as folder:
        _write_frames(config, Path(folder), frames)
        turns: list[dict[str, float]] = [{} for _ in range(rounds)]  # {loader: samples/s} of each round
        for number, name, measure in in_turns(measures, rounds):
            _, stored = loaders[name]
            data = str(Path(folder) / stored)
            # A task builds the loader of validation too, which needs a folder that exists.
            own = {"train_data_path": data, "valid_data_path": data, "num_data_workers": workers}
            turns[number][name] = measure(config.model_copy(update=own))

    # Ratios are taken within a round.
    speeds = DataFrame(turns)
    size = sample_bytes(config)
    medians = speeds.median()  # (loaders,) samples/s
    ratios = speeds.div(speeds["plain"], axis=0).median()
    # The plain design on the same store shows what of a ratio is the store's, and what is the reader's.
    same_store = speeds.copy()
    for name in speeds.columns:
        _, stored = loaders[name]
        plain = "plain" if stored == "hdf5" else f"plain, {stored}"
        same_store[name] = speeds[name] / speeds[plain]
    results: list[dict[str, Any]] = DataFrame(
        {
            "loader": speeds.columns,
            "samples_per_sec": medians,
            "bytes_per_sec": medians * size,
            "ratio_to_plain": ratios,
            "ratio_to_plain_on_store": same_store.median(),
        }
    ).to_dict("records")

    rows = [result | {"giga": result["bytes_per_sec"] / 1e9} for result in results]
    print(format_tables("data", rows))
    print(
        f"{workers} workers, batch {config.global_batch_size}, a sample is {size / 1e6:.1f} MB; GB/s as if all "
        "of it were read"
    )
    if not installed("nvidia.dali"):
        print("DALI: not installed (requirements/dali.txt)")
    if not installed("zarr"):
        print("Zarr: not installed (requirements/era5.txt)")
    return {"config": config.config, "machine": machine(device), "workers": workers, "loaders": results}


def _loaders(
    batches: int,
    device: torch.device,
) -> dict[str, tuple[Callable[[Config], float], str]]:
    """{name: (what measures it, how its data are stored)} of all loaders that this machine has."""
    plain = partial(_plain, batches)
    ours = partial(_ours, batches, "pytorch", device)
    loaders: dict[str, tuple[Callable[[Config], float], str]] = {
        "plain": (plain, "hdf5"),
        "ours": (ours, "hdf5"),
    }
    # Optional libraries add loaders, and a missing one is no error.
    if installed("nvidia.dali"):
        loaders["DALI"] = partial(_ours, batches, "dali", device), "hdf5"
    if installed("zarr"):
        for name in STORES:
            loaders[f"plain, {name}"] = plain, name
            loaders[f"ours, {name}"] = ours, name
    return loaders


def _write_frames(config: Config, folder: Path, frames: int) -> None:
    """Copy the first frames of the training data, which then are in the page cache.

    Into a year file of HDF5 and, where zarr is installed, into the stores of STORES, of one chunk a frame. Raises
    UsageError where they are fewer than a batch.
    """
    # Inputs and targets come from the same frames, which therefore have the channels of both.
    channels = max(config.n_in_channels, config.n_out_channels)
    height, width = config.img_size
    year = FieldDataset(config.train_data_path, channels, config.img_size).files[0]
    fields = year.frames(0, frames)[:, :channels, :height, :width]
    samples = len(fields) - 1  # a sample is two frames
    batch = config.global_batch_size
    if samples < batch:
        raise UsageError(
            f"{len(fields)} frames make {samples} samples, fewer than a batch of {batch}: take --frames {batch + 1} or "
            f"more of a first year that has them, or --local_batch_size {max(1, samples)}"
        )
    (folder / "hdf5").mkdir()
    with make_hdf5(folder / "hdf5/1979.h5", fields.nbytes) as file:
        file.create_dataset("fields", data=fields)
    if installed("zarr"):
        import zarr  # an optional library

        for name, compressors in STORES.items():
            group = zarr.open_group(folder / name / "1979.zarr", mode="w", zarr_format=3)
            group.create_array("fields", data=fields, chunks=(1, *fields.shape[1:]), compressors=compressors)


def _ours(count: int, kind: str, device: torch.device, config: Config) -> float:
    """Samples per second of our loader. kind: a value of data_loader_config."""
    own = config.model_copy(update={"data_loader_config": kind})
    loader, valid = build_task(own).build_loaders(device)
    valid.close()
    with closing(loader), closing(loader.train(config.seed, 0, LEAD_IN + count)) as batches:
        return _timed(batches, count, loader.batch_size, device)


def _plain(count: int, config: Config) -> float:
    """Samples per second of the plain design."""
    (path,) = Path(config.train_data_path).iterdir()
    batch = config.global_batch_size
    dataset = PlainDataset(path, statistics_of(config))
    loader = torch.utils.data.DataLoader(
        dataset,
        batch,
        shuffle=True,
        drop_last=True,
        num_workers=config.num_data_workers,
    )
    # Every epoch starts the workers anew, as the plain design does.
    return _timed(chain.from_iterable(repeat(loader)), count, batch, torch.device("cpu"))


class PlainDataset(torch.utils.data.Dataset):
    """The plain design, as in most tutorials: the yardstick for ours.

    It reads twice for each sample, into new arrays, and normalises in numpy. The reading process opens the file, with
    h5py or with the library of Zarr.
    """

    def __init__(self, path: Path, statistics: ChannelStatistics):
        self.path = path
        self.statistics = statistics
        self.fields: Any = None  # an h5py.Dataset or a zarr.Array, once it is open
        self.samples = _open_fields(path).shape[0] - 1  # a sample is two frames

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, i: int) -> tuple[Tensor, ...]:
        # Each worker opens the file for itself, since processes must not share a handle of HDF5.
        if self.fields is None:
            self.fields = _open_fields(self.path)
        return self._normalised(self.fields[i]), self._normalised(self.fields[i + 1])

    def _normalised(self, frame: np.ndarray) -> Tensor:
        frame -= self.statistics.means  # indexing has made a new array
        frame /= self.statistics.stds
        return torch.from_numpy(frame)


def _open_fields(path: Path) -> Any:
    """The array of a year, to be indexed by time."""
    if path.suffix == ".h5":
        return open_hdf5(path)["fields"]
    import zarr  # an optional library

    return zarr.open_array(path / "fields", mode="r")


def _timed(
    batches: Iterator[Any],
    count: int,
    batch_size: int,
    device: torch.device,
) -> float:
    def take(number: int) -> None:
        for _ in range(number):
            next(batches)

    take(LEAD_IN)
    return count * batch_size / timed(device, take, count)[0]
