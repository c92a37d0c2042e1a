"""The completion marker of a checkpoint: what it is of, and which files with which content belong to it."""

import hashlib
import json
import math
from pathlib import Path
from typing import Any, TypeGuard

from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt, ValidationError

from training.checkpoint_files import SUFFIX, FileSchema, describe
from utils.config import check_config
from utils.errors import UsageError, first_line
from utils.schema import Config

MARKER = "complete.json"
Marker = dict[str, Any]  # of MARKER


class CheckpointError(Exception):
    """A checkpoint folder that is half written or damaged."""


class MarkerSchema(BaseModel):
    """What a marker holds, as others may have written it."""

    model_config = ConfigDict(extra="forbid", strict=True)
    sha256: str
    iteration: NonNegativeInt
    val_loss: float | None
    world_size: PositiveInt
    config: dict[str, Any] | None
    trainer: dict[str, Any]
    files: dict[str, FileSchema]


def read_marker(folder: Path) -> Marker:
    """The marker of a checkpoint. Raises CheckpointError where it is missing or damaged."""
    try:
        marker = json.loads((folder / MARKER).read_bytes())
        MarkerSchema.model_validate(marker)
        if marker.pop("sha256") != digest(marker):
            raise ValueError("it is damaged (SHA-256 differs)")
        return marker
    except FileNotFoundError:
        raise CheckpointError(f"checkpoint {folder}: was not written to its end") from None
    except ValidationError as error:
        wrong = error.errors()[0]
        place = ".".join(map(str, wrong["loc"]))
        raise CheckpointError(f"checkpoint {folder}: {MARKER} cannot be used: {place}: {wrong['msg']}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"checkpoint {folder}: {MARKER} cannot be read: {first_line(error)}") from None


def is_score(loss: float | None) -> TypeGuard[float]:
    """Whether a marker's val_loss can be compared."""
    return loss is not None and math.isfinite(loss)


def config_of(marker: Marker, where: str) -> Config:
    """The Config that a checkpoint was trained with. Raises UsageError, beginning with `where`, for none."""
    settings = dict(marker["config"] or {})
    return check_config(settings, str(settings.pop("config", "")), where)


def verify(folder: Path) -> Marker:
    """The marker of a checkpoint all of whose files are as they were written; raises CheckpointError otherwise.

    Raises UsageError for tensors that the marker does not list: a reader would take them for the checkpoint's own.
    """
    marker = read_marker(folder)
    for name, written in marker["files"].items():
        try:
            if Path(name).name != name or describe(folder / name) != written:
                raise CheckpointError(f"checkpoint {folder}: {name} is damaged (size or SHA-256 differs)")
        except FileNotFoundError:
            raise CheckpointError(f"checkpoint {folder}: {name} is missing") from None
        except OSError as error:
            raise CheckpointError(f"checkpoint {folder}: {name} cannot be read: {error.strerror}") from None
    for path in folder.glob(f"*{SUFFIX}"):
        if path.name not in marker["files"]:
            raise UsageError(f"checkpoint {folder}: {path.name} is not one of its files ({MARKER}): take it away")
    return marker


def digest(marker: Marker) -> str:
    """The SHA-256 of a marker, which stands in it."""
    return hashlib.sha256(json.dumps(marker).encode()).hexdigest()
