"""The copy task: the target equals the source. It is the smallest test of whether a translation model learns.

Paper: none; The Annotated Transformer (Rush 2018), "A First Example". Differs: sequences have different lengths, and
validation and test sequences never occur in training.
"""

from __future__ import annotations

import numpy as np

from manyheads.data.sampler import mix
from manyheads.data.settings import CopyTaskSettings
from manyheads.errors import ConfigError
from manyheads.seeding import derive_seed

NUM_TRAIN, NUM_VALID, NUM_TEST = 20_000, 200, 500
MOST_TRAIN = 10_000_000


def copy_pairs(
    seed: int, num_train_pairs: int = 0, settings: CopyTaskSettings | None = None
) -> dict[str, list[tuple[str, str]]]:
    """Return pairs of equal texts for `train`, `valid` and `test`: sequences of the words `w1`, `w2` ...; none twice.

    Args:
        seed: determines the texts. Test and validation pairs do not depend on the number of training pairs.
        num_train_pairs: 0 means 20,000.
        settings: number of words, and lengths; None: the defaults.

    Raises: ConfigError: num_train_pairs is above ten million, or there are too few different texts.
    """
    task = settings or CopyTaskSettings()
    num_train = num_train_pairs or NUM_TRAIN
    if num_train > MOST_TRAIN:
        raise ConfigError(f"data.num_train_pairs is {num_train}; it must be at most {MOST_TRAIN} for the copy task.")
    wanted = NUM_TEST + NUM_VALID + num_train
    if 2 * wanted > task.num_texts:  # random texts are drawn until enough of them are new
        raise ConfigError(
            f"data.copy_task has {task.num_texts:,} different texts (num_symbols {task.num_symbols}, shortest"
            f" {task.shortest}, longest {task.longest}), but {2 * wanted:,} are needed for {num_train:,} training"
            f" pairs, {NUM_VALID} and {NUM_TEST} others; raise num_symbols or longest, or lower data.num_train_pairs."
        )
    base = np.uint64(derive_seed(seed, "copy-task"))
    known: dict[str, None] = {}  # an ordered set
    start = 0
    while len(known) < wanted:
        rows = np.arange(start, start + wanted, dtype=np.uint64)
        draws = mix(rows + base)[:, None] + np.arange(task.longest + 1, dtype=np.uint64)
        numbers = mix(draws.astype(np.uint64))
        lengths = task.shortest + numbers[:, 0] % np.uint64(task.longest - task.shortest + 1)
        symbols = 1 + numbers[:, 1:] % np.uint64(task.num_symbols)
        for length, row in zip(lengths.tolist(), symbols.tolist(), strict=True):
            known[" ".join(f"w{symbol}" for symbol in row[:length])] = None
        start += wanted
    texts = [(text, text) for text in known][:wanted]
    held_out = NUM_TEST + NUM_VALID
    return {"train": texts[held_out:], "valid": texts[NUM_TEST:held_out], "test": texts[:NUM_TEST]}
