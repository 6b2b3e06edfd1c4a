"""CTranslate2 as the engine of a `Translator`: `decoding.text_ids.SearchEngine`.

The export is kept beside the model, in MODEL.ctranslate2/CHECKSUM, or in the user's cache if that folder cannot be
written. Only the newest export of a model is kept. Greedy search gives the ids of our own search (up to ties in
rounding). Beams differ: CTranslate2 stops when 2 x num_beams hypotheses have ended (num_beams with early_stopping), so
a later and better one may be missed. It always computes as with `renormalize_logits`, since the export bans padding and
the start token in the logits.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from manyheads.decoding.search_problem import BeamRules, length_limits
from manyheads.decoding.settings import DecodingSettings, unsupported
from manyheads.decoding.text_ids import Hypothesis, check_stop, cut_batches
from manyheads.errors import ConfigError, MissingExtraError, RequestError, SaveError
from manyheads.extras.exports import ExportOptions
from manyheads.extras.exports.compare import tokenizer_of
from manyheads.extras.exports.ctranslate2 import most_positions, pieces_of, runtime, write
from manyheads.extras.exports.engine import sample_sentences
from manyheads.files.commit import remove_folder, write_folder
from manyheads.files.verify import file_sha256, is_intact
from manyheads.models.pretrained import read_config

_NUM_TIMED = 16
_NAME_LEN = 16  # hexadecimal digits of a checksum
_IS_EXPORT = re.compile(rf"[0-9a-f]{{{_NAME_LEN}}}")
# A search stops when this many times num_beams hypotheses have ended; our own search without early_stopping is exact.
_PATIENCE = 2
_READ_FILES = ("config.json", "model.safetensors", "tokenizer.json", "source.spm", "target.spm", "vocab.json")


def open_for(name: str, folder: Path, runs_plainly: str, is_int8: bool) -> CTranslate2Engine | Declined:
    """See `decoding.text_ids.open_engine`."""
    try:
        if runs_plainly:
            kind = "int8" if is_int8 else "float32"
            raise RequestError(
                f"the engine ctranslate2 runs on the CPU in {kind}; this translator {runs_plainly}. Change it, or use"
                f" {_instead(is_int8)}."
            )
        return CTranslate2Engine(folder, is_automatic=name == "auto", is_int8=is_int8)
    except (ConfigError, MissingExtraError, RequestError) as error:
        if name == "auto":
            return Declined(str(error))
        raise


class Declined:
    """The engine of `auto` for a model that CTranslate2 does not run. Args: reason: a sentence."""

    def __init__(self, reason: str) -> None:
        self.choice = f"engine torch: {reason}"
        self.longest_source, self.is_int8 = 0, False

    def takes(self, settings: DecodingSettings, own_search: Any) -> bool:
        """Return False."""
        return False

    def search(self, *sources: Any, **options: Any) -> list[list[Hypothesis]]:
        """Never called."""
        raise AssertionError(self.choice)


class CTranslate2Engine:
    """A search engine; see `decoding.text_ids.SearchEngine`.

    Args:
        is_automatic: take a search only if all options are supported and a measurement shows that it is faster.
        is_int8: round the weights to 8 bits as they are loaded, and rows of their inputs in each product.
    """

    def __init__(self, folder: Path, *, is_automatic: bool, is_int8: bool = False) -> None:
        package = runtime()
        if is_int8 and "int8" not in package.get_supported_compute_types("cpu"):
            raise RequestError(
                "precision is int8, but CTranslate2 has no int8 products on this processor; use fp32, bf16 or auto."
            )
        tokenizer, config = tokenizer_of(folder, "ctranslate2"), read_config(folder)
        export = cached_export(folder)
        self._runtime = package.Translator(
            str(export),
            device="cpu",
            compute_type="int8" if is_int8 else "default",
            intra_threads=torch.get_num_threads(),
        )
        self.is_int8 = is_int8
        self._is_automatic, self._config = is_automatic, config
        self._source_pieces = pieces_of(tokenizer.source, config.source_vocab_size)
        self._target_ids = {
            piece: index for index, piece in enumerate(pieces_of(tokenizer.target, config.target_vocab_size))
        }
        self._source_eos = tokenizer.source.eos_id
        self._most = self.longest_source = most_positions(config)
        self._is_faster: bool | None = None
        self._ratio = 0.0
        self.choice = ""

    def takes(self, settings: DecodingSettings, own_search: Any) -> bool:
        """See `SearchEngine`. The first call with supported settings takes the measurement."""
        reason = unsupported(settings, "ctranslate2")
        if reason and not self._is_automatic:
            instead = _instead(self.is_int8)
            raise RequestError(f"the engine ctranslate2 cannot search with {reason}; change it, or use {instead}.")
        if reason:
            self.choice = f"engine torch: ctranslate2 cannot search with {reason}"
            return False
        if not self._is_automatic:
            self.choice = f"engine ctranslate2{' in int8' * self.is_int8}"
            return True
        if self._is_faster is None:
            self._measure(settings, own_search)
        taken = "ctranslate2" if self._is_faster else "torch"
        self.choice = f"engine {taken}: ctranslate2 took {self._ratio:.2f} times torch's time on {_NUM_TIMED} sources"
        return bool(self._is_faster)

    def search(
        self,
        sources: Sequence[list[int]],
        settings: DecodingSettings,
        *,
        stop: Callable[[], bool] | None = None,
        on_progress: Callable[[int], None] | None = None,
    ) -> list[list[Hypothesis]]:
        """See `SearchEngine`. `stop` is called before each batch.

        Raises: RequestError: a source has more tokens than the export has positions.
        """
        longest = max(map(len, sources), default=0)
        if longest > self._most:
            raise RequestError(
                f"a source has {longest} tokens, EOS included; the engine ctranslate2 takes at most {self._most}."
                f" Split the text, or use {_instead(self.is_int8)}."
            )
        limits = length_limits(torch.tensor([len(ids) for ids in sources]), settings, self._most).tolist()
        results: list[list[Hypothesis]] = [[] for _ in sources]
        num_done = 0
        for batch in cut_batches([len(ids) for ids in sources], settings.max_tokens, settings.num_beams):
            check_stop(stop)
            found = self._batch([sources[place] for place in batch], [limits[place] for place in batch], settings)
            for place, hypotheses in zip(batch, found, strict=True):
                results[place] = hypotheses
            num_done += len(batch)
            if on_progress is not None:
                on_progress(num_done)
        return results

    def _batch(self, sources: list[list[int]], limits: list[int], settings: DecodingSettings) -> list[list[Hypothesis]]:
        """Search one batch. CTranslate2 has one limit for all; sentences that pass their own are searched again."""
        largest = max(limits)
        found = self._search_within(sources, largest, settings)
        again: dict[int, list[int]] = {}
        for place, (rows, limit) in enumerate(zip(found, limits, strict=True)):
            if limit < largest and any(len(one.ids) >= limit for one in rows):
                again.setdefault(limit, []).append(place)
        for limit, places in again.items():
            shorter = self._search_within([sources[place] for place in places], limit, settings)
            for place, rows in zip(places, shorter, strict=True):
                found[place] = rows
        return found

    def _search_within(
        self, sources: list[list[int]], limit: int, settings: DecodingSettings
    ) -> list[list[Hypothesis]]:
        # CTranslate2 adds EOS to the sources. Its lengths count the EOS of a hypothesis, as ours do.
        pieces = [[self._source_pieces[index] for index in ids[:-1]] for ids in sources]
        has_penalty = settings.num_beams > 1 and settings.length_penalty_kind == "power"
        found = self._runtime.translate_batch(
            pieces,
            beam_size=settings.num_beams,
            patience=1 if settings.early_stopping else _PATIENCE,
            num_hypotheses=settings.num_return_sequences,
            length_penalty=settings.length_penalty if has_penalty else 0.0,
            max_input_length=0,
            max_decoding_length=limit,
            min_decoding_length=0,
            return_scores=True,
        )
        rules = BeamRules(settings)
        results = []
        for one in found:
            rows = []
            for hypothesis, score in zip(one.hypotheses, one.scores, strict=True):
                ended = len(hypothesis) < limit
                if settings.num_beams == 1:  # CTranslate2 gives the sum
                    score = score / rules.penalty(len(hypothesis) + ended)
                rows.append(Hypothesis([self._target_ids[piece] for piece in hypothesis], score, [], ended))
            results.append(rows)
        return results

    def _measure(self, settings: DecodingSettings, own_search: Any) -> None:
        """Time both searches once, on the same random sources."""
        sources = [[*ids, self._source_eos] for ids in sample_sentences(self._config, _NUM_TIMED)]
        sources = [ids[: self._most - 1] for ids in sources]
        timed = replace(settings, max_new_tokens=min(32, self._most - 1), too_long="truncate")
        seconds = []
        for search in (self.search, own_search):
            search(sources[:2], timed)  # the first call of a runtime is slower
            started = time.perf_counter()
            search(sources, timed)
            seconds.append(time.perf_counter() - started)
        self._ratio = seconds[0] / seconds[1]
        self._is_faster = self._ratio < 1


def _instead(is_int8: bool) -> str:
    return "precision fp32 or bf16" if is_int8 else "engine torch"


def cached_export(folder: Path) -> Path:
    """Return the folder of a model's export, which is written if there is no intact one.

    Once a new export is written, the older ones of this model are deleted. An engine that uses one of them continues,
    because it has already read the files.

    Raises: ConfigError: CTranslate2 cannot hold the model. SaveError: there is no place to write it.
    """
    digest = hashlib.sha256()
    for name in _READ_FILES:
        if (folder / name).is_file():
            digest.update(f"{name} {file_sha256(folder / name)}\n".encode())
    beside = folder.resolve()
    caches = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "manyheads" / "ctranslate2"
    model_name = hashlib.sha256(os.fsencode(beside)).hexdigest()[:_NAME_LEN]
    places = (beside.with_name(f"{beside.name}.ctranslate2"), caches / model_name)
    exports = [place / digest.hexdigest()[:_NAME_LEN] for place in places]
    for export in exports:
        if is_intact(export):
            return export
    try:
        return _make_export(folder, exports[0])
    except SaveError:  # a model that is read-only
        return _make_export(folder, exports[1])
    except ConfigError:
        with suppress(OSError):  # not empty
            places[0].rmdir()
        raise


def _make_export(folder: Path, export: Path) -> Path:
    size = (folder / "model.safetensors").stat().st_size
    write_folder(export, lambda target: _write(folder, target), needed_bytes=size)
    for old in export.parent.iterdir():
        if old != export and _IS_EXPORT.fullmatch(old.name) and old.is_dir() and not old.is_symlink():
            with suppress(OSError, SaveError):  # another process has deleted it, or we have no permission
                remove_folder(old)
    return export


def _write(folder: Path, target: Path) -> None:
    write(folder, target, ExportOptions(to="ctranslate2"))
