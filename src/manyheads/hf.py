"""`import manyheads.hf` makes the models of this package known to transformers; the module is `manyheads.extras.hf`."""

import sys
from typing import TYPE_CHECKING

from manyheads.catalogue import HOOKS, load

if TYPE_CHECKING:
    from manyheads.extras.hf import from_folder as from_folder
    from manyheads.extras.hf import register as register
    from manyheads.extras.hf import tokenizer_from_folder as tokenizer_from_folder
    from manyheads.extras.hf.loading import ManyHeadsConfig as ManyHeadsConfig
    from manyheads.extras.hf.model import StateCache as StateCache
    from manyheads.extras.hf.models import ManyHeadsForCausalLM as ManyHeadsForCausalLM
    from manyheads.extras.hf.models import ManyHeadsForSeq2SeqLM as ManyHeadsForSeq2SeqLM
    from manyheads.extras.hf.tokenizer import ManyHeadsTokenizer as ManyHeadsTokenizer

sys.modules[__name__] = load(HOOKS["hf"])()
