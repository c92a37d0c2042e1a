"""Tasks that a model can be trained for. Each other module here is a task: its file name is what --task calls it."""

import importlib
import pkgutil

from training.tasks.task import Task
from utils.errors import UsageError, nearest
from utils.schema import Config

COMMON = ("task", "waves")  # modules that tasks share


def build_task(config: Config) -> Task:
    """The task of a config. Raises UsageError for an unknown one, and for settings or a model that do not fit it."""
    task = task_of(config)
    task.check_model()
    return task


def task_of(config: Config) -> Task:
    """The task of a config without a look at the model: class <Name>Task of training/tasks/<name>.py."""
    known = [module.name for module in pkgutil.iter_modules(__path__) if module.name not in COMMON]
    if config.task not in known:
        raise UsageError(f"task '{config.task}'{nearest(config.task, known)}: there are {', '.join(known)}")
    # Only the task that is asked for is imported.
    module = importlib.import_module(f"{__name__}.{config.task}")
    words = config.task.split("_")
    class_name = "".join([word.capitalize() for word in words]) + "Task"
    task_class = getattr(module, class_name)
    return task_class(config)
