"""The rules that most models need, one for each torch function. Importing this package registers them all.

They give others what a rule is made of (Window, Normal, unshard_dims), and may import distributed.shard.core alone.
"""

import importlib
import pkgutil

for module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{module.name}")
