"""A training run: the step, the tasks, optimizer, validation, checkpoints and the folder of a run."""

import utils  # noqa: F401  # sets how threads wait, before torch is loaded
