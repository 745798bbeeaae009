"""Policy losses, one a file. Importing this registers all that lie in the folder."""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__, f"{__name__}."):
    importlib.import_module(_module.name)
