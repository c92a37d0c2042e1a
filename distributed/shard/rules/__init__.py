"""The rules of ShardTensor: one for each torch function. Importing this package registers the rules of all modules."""

import importlib
import pkgutil

for module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{module.name}")
