"""The folder of one run, <expdir>/<config>/<run_num>: config, log, TensorBoard events, checkpoints, summary."""

import logging
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

from training.run.owner import FILE, RunOwner, owner_of, this_process
from utils import agreement, comm
from utils.config import check_config, differing_keys, read_named_config, write_config
from utils.errors import UsageError
from utils.files import read_json, whole_file
from utils.schema import Config


class RunFolder:
    """Opens the folder of a run, made if need be.

    config: its run_num is that of the folder, also where `auto` was asked for.
    Raises OSError where the folder cannot be written; UsageError where it holds a run of other settings, and where
    another run trains in it.
    """

    def __init__(self, config: Config):
        runs = Path(config.expdir) / config.config
        # Rank 0 chooses the number for all.
        if config.run_num == "auto":
            number = agreement.on_main(lambda: next_run_num(runs))
            config = config.model_copy(update={"run_num": number})
        self.config = config
        self.path = runs / config.run_num
        self.checkpoints = self.path / "checkpoints"
        self.config_file = self.path / "config.yaml"
        self.summary_file = self.path / "summary.json"
        self._owner: RunOwner | None = None  # on rank 0
        # One rank opens the folder, and every rank raises what it raises.
        agreement.on_main(self._open)
        if not comm.is_main():
            logging.getLogger().setLevel(logging.WARNING)

    def _open(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        # Two runs in one folder would write over each other's files.
        self._owner = RunOwner(self.path)
        name = self.config.config
        if self.config_file.exists():
            settings = read_named_config(self.config_file, name)
            self._compare_settings(check_config(settings, name, f"{self.config_file}: {name}"))
        else:
            with whole_file(self.config_file) as part:
                write_config(self.config, part)
        self._start_logging()

    def close(self) -> None:
        """Let other runs have the folder."""
        if self._owner:
            self._owner.release()

    def summary(self) -> dict[str, Any] | None:
        """The summary of the finished run in this folder; None where there is none."""
        return agreement.on_main(lambda: read_json(self.summary_file) if self.summary_file.exists() else None)

    def _compare_settings(self, earlier: Config) -> None:
        keys = differing_keys(earlier, self.config)
        if keys:
            changes = self._changes(earlier, keys)
            # The weights of another training can go on, those of another model cannot.
            has_other_model = differing_keys(earlier, self.config, "model")
            keeps_weights = not has_other_model and self.checkpoints.is_dir()
            start = f", and --init_from {self.path} to begin with its weights" if keeps_weights else ""
            raise UsageError(f"{self.path} holds a run of other settings: {changes}; choose another --run_num{start}")
        # A run that goes on may do so in another layout. A finished one would only repeat its result.
        if not self.summary_file.exists():
            return
        keys = differing_keys(earlier, self.config, "layout", "speed")
        if keys:
            raise UsageError(
                f"{self.path} is a finished run, made with other options: {self._changes(earlier, keys)}; to measure "
                "these, choose another --run_num (auto: the next free number)"
            )

    def _changes(self, earlier: Config, keys: list[str]) -> str:
        changes = []
        for key in keys:
            there = getattr(earlier, key)
            now = getattr(self.config, key)
            changes.append(f"{key} ({there} there, {now} now)")
        return ", ".join(changes)

    def _start_logging(self) -> None:
        """Log lines go to out.log and to standard output, where they leave a progress bar intact."""
        logging.basicConfig(
            level=logging.INFO,
            format="%(asctime)s %(message)s",
            datefmt="%Y-%m-%d %H:%M:%S",
            force=True,
            handlers=[_LogFile(self.path / "out.log"), _Console()],
        )


def read_summary(path: Path, **kinds: type) -> dict[str, Any]:
    """The summary of a finished run. kinds: of what the caller needs of it. Raises UsageError for anything else."""
    summary = read_json(path)
    kinds["world_size"] = int
    is_summary = isinstance(summary, dict)
    if is_summary:
        is_summary = all(isinstance(summary.get(key), kind) for key, kind in kinds.items())
    if not is_summary:
        raise UsageError(f"{path}: is not the summary of a run: move it away, and the same command writes it anew")
    return summary


def next_run_num(runs: Path) -> str:
    """Make the folder of the next free number in the folder of all runs of a config; returns the number, as 07.

    A job that its scheduler or torchrun starts again gets the folder that it had.
    """
    runs.mkdir(parents=True, exist_ok=True)
    me = this_process()
    # A job that is started again goes on in its own folder.
    is_restarted = me.job and any(me.restarts)
    if is_restarted:
        for file in runs.glob(f"*/{FILE}"):
            owner = owner_of(file.read_text(errors="replace"))
            if owner and owner.job == me.job:
                return file.parent.name
    names = [folder.name for folder in runs.iterdir()]
    taken = [int(name) for name in names if name.isdecimal()]
    number = max(taken, default=-1) + 1
    try:
        # mkdir fails where another job has taken the number meanwhile.
        (runs / f"{number:02d}").mkdir()
    except FileExistsError:  # another job was faster
        return next_run_num(runs)
    return f"{number:02d}"


class _Console(logging.Handler):
    def emit(self, record):
        try:
            tqdm.write(self.format(record), file=sys.stdout)
            sys.stdout.flush()
        except (OSError, ValueError, AttributeError):  # closed, full or never there: out.log has the line
            logging.getLogger().removeHandler(self)


class _LogFile(logging.FileHandler):
    def handleError(self, record):
        """A full disk: the console has the line, and the next one may find room."""
