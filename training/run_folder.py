"""The folder of one run, <expdir>/<config>/<run_num>: config, log, TensorBoard events, checkpoints, summary."""

import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

from utils import comm
from utils.config import check_config, differing_keys, read_named_config, write_config
from utils.errors import UsageError
from utils.files import whole_file
from utils.schema import Config


class RunFolder:
    """Opens the folder of a run, made if need be.

    Raises UsageError where it cannot be written, holds a run of other settings, or is to be begun anew although it
    holds a run.
    """

    def __init__(self, config: Config):
        self.config = config
        self.path = Path(config.expdir) / config.config / config.run_num
        self.checkpoints = self.path / "checkpoints"
        self.config_file = self.path / "config.yaml"
        self.summary_file = self.path / "summary.json"
        comm.on_main(self._open)
        if not comm.is_main():
            logging.getLogger().setLevel(logging.WARNING)

    def _open(self) -> None:
        config = self.config
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if self.config_file.exists():
                self._compare_settings()
            else:
                with whole_file(self.config_file) as part:
                    write_config(config, part)
            self._start_logging()
        except OSError as error:
            raise UsageError(f"log folder {self.path}: cannot be written: {error.strerror}") from None

    def summary(self) -> dict[str, Any] | None:
        """The summary of the finished run in this folder; None where there is none."""
        return comm.on_main(lambda: json.loads(self.summary_file.read_text()) if self.summary_file.exists() else None)

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Written by rank 0."""
        if not comm.is_main():
            return
        with whole_file(self.summary_file) as part:
            part.write_text(json.dumps(summary, indent=2) + "\n")

    def _compare_settings(self) -> None:
        if self.config.resume == "never":
            raise UsageError(
                f"{self.path} holds a run already: choose another --run_num, or continue it (--resume auto)"
            )
        name = self.config.config
        earlier = check_config(read_named_config(self.config_file, name), name, f"{self.config_file}: {name}")
        if keys := differing_keys(earlier, self.config):
            changes = ", ".join(f"{k} ({getattr(earlier, k)} there, {getattr(self.config, k)} now)" for k in keys)
            raise UsageError(f"{self.path} holds a run of other settings: {changes}; choose another --run_num")

    def _start_logging(self) -> None:
        """Log lines go to out.log and to standard output, where they leave a progress bar intact."""
        formatter = logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S")
        formatter.converter = time.localtime
        handlers = [logging.FileHandler(self.path / "out.log"), _Console()]
        root = logging.getLogger()
        for old in root.handlers[:]:
            root.removeHandler(old)
            old.close()
        for handler in handlers:
            handler.setFormatter(formatter)
            root.addHandler(handler)
        root.setLevel(logging.INFO)


class _Console(logging.Handler):
    def emit(self, record):
        tqdm.write(self.format(record), file=sys.stdout)
        sys.stdout.flush()
