"""Rules that few models need: Fourier transforms, sampling, NATTEN, recurrent layers, losses, derivatives, formulas.

Importing this package registers them all. Nothing imports from here; they may import core and ops.
"""

import importlib
import pkgutil

for module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{module.name}")
