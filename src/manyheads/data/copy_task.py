"""The copy task: the target equals the source. It is the smallest test of whether a translation model learns.

Paper: none; The Annotated Transformer (Rush 2018), "A First Example". Differs: sequences have different lengths, and
validation and test sequences never occur in training.
"""

from __future__ import annotations

import numpy as np

from manyheads.data.sampler import mix
from manyheads.errors import ConfigError
from manyheads.seeding import derive_seed

__all__ = ["NUM_SYMBOLS", "copy_pairs"]

NUM_SYMBOLS = 16
SHORTEST, LONGEST = 4, 10
NUM_TRAIN, NUM_VALID, NUM_TEST = 20_000, 200, 500
MOST_TRAIN = 10_000_000


def copy_pairs(seed: int, num_train_pairs: int = 0) -> dict[str, list[tuple[str, str]]]:
    """Return pairs of equal texts for `train`, `valid` and `test`: 4 to 10 of the words `w1` to `w16`, no text twice.

    Args:
        seed: determines the texts. Test and validation pairs do not depend on the number of training pairs.
        num_train_pairs: 0 means 20,000.

    Raises: ConfigError: num_train_pairs is above ten million.
    """
    num_train = num_train_pairs or NUM_TRAIN
    if num_train > MOST_TRAIN:
        raise ConfigError(f"data.num_train_pairs is {num_train}; it must be at most {MOST_TRAIN} for the copy task.")
    wanted = NUM_TEST + NUM_VALID + num_train
    base = np.uint64(derive_seed(seed, "copy-task"))
    known: dict[str, None] = {}  # an ordered set
    start = 0
    while len(known) < wanted:
        rows = np.arange(start, start + wanted, dtype=np.uint64)
        draws = mix(rows + base)[:, None] + np.arange(LONGEST + 1, dtype=np.uint64)
        numbers = mix(draws.astype(np.uint64))
        lengths = SHORTEST + numbers[:, 0] % np.uint64(LONGEST - SHORTEST + 1)
        symbols = 1 + numbers[:, 1:] % np.uint64(NUM_SYMBOLS)
        for length, row in zip(lengths.tolist(), symbols.tolist(), strict=True):
            known[" ".join(f"w{symbol}" for symbol in row[:length])] = None
        start += wanted
    texts = [(text, text) for text in known][:wanted]
    held_out = NUM_TEST + NUM_VALID
    return {"train": texts[held_out:], "valid": texts[NUM_TEST:held_out], "test": texts[:NUM_TEST]}
