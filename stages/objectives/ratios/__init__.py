"""The policy ratios and their surrogates, one file each (algorithms, section 2).

Never imports torch.
"""

from stages.objectives.registry import import_modules

import_modules(__name__, __path__)
