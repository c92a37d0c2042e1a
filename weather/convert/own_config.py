"""The config of a user's own data: what train.py has to know of them, beside the sizes of a small model."""

from collections.abc import Sequence
from pathlib import Path

from utils.config import read_named_config
from utils.files import whole_file
from utils.yaml_files import yaml
from weather.fields.grid import Grid

NAME = "own"
BASE = "quick"  # of config/ViT.yaml, whose model and optimizer these data begin with
FORECAST = {"train_data_path": "train", "valid_data_path": "valid", "inf_data_path": "test"}
STATISTICS = {"global_means_path": "global_means", "global_stds_path": "global_stds", "time_means_path": "time_means"}


def write_own_config(out: Path, grid: Grid, channels: Sequence[str]) -> None:
    """Write OUT/config.yaml, unless it is there, and print the command that trains with it."""
    settings = read_named_config("config/ViT.yaml", BASE)
    patch = settings["patch_size"]
    # Rows and columns that do not fill a patch are left out, at the south and the east.
    points = [len(axis) for axis in grid]
    img_size = [max(patch, size // patch * patch) for size in points]
    settings |= {"img_size": img_size, "n_in_channels": len(channels), "n_out_channels": len(channels)}
    settings |= {key: str(out / split) for key, split in FORECAST.items()}
    settings |= {key: str(out / "stats" / f"{name}.npy") for key, name in STATISTICS.items()}
    path = out / "config.yaml"
    if not path.exists():
        with whole_file(path) as part, open(part, "w") as file:
            file.write(f"# Made by weather.prepare_data: {', '.join(channels)}. Change what you like.\n")
            yaml().dump({NAME: settings}, file)
    if img_size != points:
        print(f"img_size {img_size}: patches of {patch} x {patch} points do not fill {points}")
    print(f"train with: python train.py --yaml_config {path} --config {NAME}")
