"""A look at the data of a forecast: frames and statistics that are used, and test years that will be."""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from utils import comm
from utils.errors import UsageError
from utils.schema import Config
from weather.checks.data_check import DataCheck
from weather.checks.data_record import check_apart
from weather.checks.statistics import Paths, Statistics, check_climatology
from weather.years.dataset import FieldDataset


def check_test_years(config: Config, train: FieldDataset) -> list[str]:
    """Look at the test years, if they are there already; returns notes on what a forecast will refuse.

    Raises UsageError where the test years beside the training years, in the same folder, are of the training.
    """
    try:
        channels = max(config.n_in_channels, config.n_out_channels)
        # The test years need fewer options: nobody trains on them.
        test = FieldDataset(config.inf_data_path, channels, config.img_size, config.dt)
    except UsageError:
        return []  # training needs no test years: what is wrong with them is for the forecast to say
    with closing(test):
        try:
            test.check_step_like(train)
            return check_apart(test, train)
        except UsageError as error:
            # The path may be that of a config, which nobody has changed, to other data.
            is_of_same_data = Path(config.inf_data_path).parent == Path(config.train_data_path).parent
            if is_of_same_data:
                raise
            return [f"forecasts on inf_data_path will be refused: {error}"]


def look_at_frames(
    config: Config, datasets: Sequence[FieldDataset], statistics: Statistics, is_training: bool
) -> DataCheck:
    """Look at this rank's share of the frames, and hold the statistics against those of the first data set."""
    first = datasets[0]
    names = first.description.names
    paths = Paths(config.global_means_path, config.global_stds_path, config.time_means_path)
    if comm.is_main():  # it reads a file as large as a frame, which is the same for all ranks
        img_size = first.files[0].shape[2:]
        is_global = first.description.grid.is_global
        check_climatology(paths, statistics, names, img_size, is_global)
    looked = DataCheck(datasets, config.check_data, (comm.rank(), comm.world_size()))
    looked.run(comm.is_main())
    # A run on a few samples has other statistics than all of the years.
    is_of_training = is_training and config.limit_nsamples is None
    looked.sums.check(statistics, names, paths, first.folder, is_of_training)
    return looked
