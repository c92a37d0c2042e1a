"""The config of a trained run, for a layout that may differ from the run's."""

from collections.abc import Collection, Sequence
from pathlib import Path

from training.tasks import forecast, task_of
from utils.config import check_config, differing_keys, load_config, read_mappings, read_named_config
from utils.errors import UsageError
from utils.schema import Config, keys_that_affect


def run_config(folder: Path | str, words: Sequence[str], world_size: int, splits: Collection[str]) -> Config:
    """The Config of the run in a folder, overridden by the words of a command line.

    splits: the keys by which this program can split a model; the layout of the run itself does not matter. The local
    batch size is 1 unless the words set it. Raises UsageError if the folder holds no run of a forecasting model, or if
    the words contradict its weights.
    """
    file = Path(folder) / "config.yaml"
    if not file.is_file():
        raise UsageError(f"{folder}: no run there (it has no config.yaml); give the folder of one, like logs/quick/00")
    name = next(iter(read_mappings(file, "configs")), "")
    trained = check_config(read_named_config(file, name), name, f"{file}: {name}")
    if not isinstance(task_of(trained), forecast.Trained):
        raise UsageError(f"{folder}: is a run of task {trained.task}, which forecasts nothing")
    # Layout and regularisation of the training do not matter here: the defaults take their place.
    preset = {key: Config.model_fields[key].default for key in keys_that_affect("layout", "training")}
    preset |= {"local_batch_size": 1}
    words = [f"--yaml_config={file}", f"--config={name}", *words]
    config = load_config(words, world_size=world_size, splits=splits, preset=preset)
    for key in differing_keys(trained, config, "model"):
        raise UsageError(f"{folder}: was trained with {key} {getattr(trained, key)}, not {getattr(config, key)}")
    return config.model_copy(update={"noddp": True})  # no gradients: nothing to average
