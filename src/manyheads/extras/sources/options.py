"""Options of `manyheads prepare` for data by name."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from manyheads.config.options import option
from manyheads.errors import ConfigError

if TYPE_CHECKING:
    from manyheads.data.preparing import InOrder
    from manyheads.extras.sources.names import Wanted


MOST_PROCESSES = 256


@dataclass(frozen=True, kw_only=True)
class SourceOptions:
    """Data by name."""

    train: tuple[str, ...] = option(
        "Training data: url:ADDRESS (or url:SOURCE,TARGET), hf:owner/name[config], opus: or mtdata: and a corpus, a"
        " folder, file or pattern at an address such as s3://bucket/part-*.jsonl.zst, a folder or file of this disk, or"
        " a name such as multi30k-en-de; several are read one after the other.",
        default=(),
        metavar="SOURCE ...",
        name="from",
    )
    valid: tuple[str, ...] = option(
        "Validation data, also sacrebleu:wmt13/en-de.", default=(), metavar="SOURCE ...", name="valid-from"
    )
    test: tuple[str, ...] = option(
        "Test data, also sacrebleu:wmt14/en-de.", default=(), metavar="SOURCE ...", name="test-from"
    )
    accept_terms: tuple[str, ...] = option(
        "Accept the terms of the data of this name; they are recorded with the prepared data.",
        default=(),
        metavar="NAME ...",
    )
    dry_run: bool = option("Only print what would be fetched.", default=False)
    update: bool = option(
        "Fetch again, and record the files in sources.lock although they have changed.", default=False
    )
    most_bytes: int = option("Refuse a larger file.", default=64 * 2**30, metavar="N")
    processes: int = option(
        "Parse shards of --from and encode with N processes; the prepared data is the same for any number.",
        default=1,
        metavar="N",
    )

    def __post_init__(self) -> None:
        if self.most_bytes < 1:
            raise ConfigError(f"--most-bytes is {self.most_bytes}; it must be at least 1.")
        if not 1 <= self.processes <= MOST_PROCESSES:
            raise ConfigError(f"--processes is {self.processes}; it must be from 1 to {MOST_PROCESSES}.")
        if not self.is_given and (self.accept_terms or self.dry_run or self.update):
            raise ConfigError("--accept-terms, --dry-run and --update go with --from, --valid-from or --test-from.")

    @property
    def is_given(self) -> bool:
        return bool(self.train or self.valid or self.test)

    @property
    def in_order(self) -> InOrder:
        """Does the work of encoding in that number of processes."""
        from manyheads.extras.sources.shards import in_order

        return partial(in_order, processes=self.processes)

    def wanted(self) -> dict[str, list[Wanted]]:
        """Return the sources of each split. Raises: ConfigError: one is unknown, or its terms were not accepted."""
        from manyheads.extras.sources.names import check_terms, wanted_of

        given = (
            ("train", self.train, "--from"),
            ("valid", self.valid, "--valid-from"),
            ("test", self.test, "--test-from"),
        )
        found = {split: wanted_of(texts, split, name) for split, texts, name in given if texts}
        if not self.dry_run:
            check_terms([one for each in found.values() for one in each], self.accept_terms)
        return found
