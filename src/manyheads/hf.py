"""`import manyheads.hf` makes the models of this package known to transformers; the module is `manyheads.extras.hf`."""

import sys
from typing import TYPE_CHECKING

from manyheads.catalogue import HOOKS, load

if TYPE_CHECKING:
    from manyheads.extras.hf import from_folder as from_folder
    from manyheads.extras.hf import register as register
    from manyheads.extras.hf import tokenizer_from_folder as tokenizer_from_folder

sys.modules[__name__] = load(HOOKS["hf"])()
