"""The guards; every module here is imported, so that its guards register themselves."""

from stages.objectives.registry import import_modules

import_modules(__name__, __path__)
