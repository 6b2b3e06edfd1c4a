"""Code shared by the exports of translation models: loading, refusals, and the comparison of results.

Writing of an export, and the comparison with its model.
"""

from __future__ import annotations

import importlib
import os
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from manyheads.decoding.inputs_and_results import with_end
from manyheads.decoding.search import search_all
from manyheads.decoding.settings import DecodingSettings
from manyheads.errors import ConfigError, MissingExtraError, ModelFileError
from manyheads.extras.exports import EXPORTS, Check, ExportOptions, NotComparedError
from manyheads.files.commit import write_folder
from manyheads.files.output_safety import check_spares_folders
from manyheads.files.verify import list_files
from manyheads.models.pretrained import read_config, write_notice
from manyheads.text.of_folder import load_tokenizer
from manyheads.text.pipeline import has_tokenizer

if TYPE_CHECKING:
    from manyheads.models.composites import Seq2Seq
    from manyheads.text.sides import Side, TranslationTokenizer


LIMIT = 1e-3
"""The deviation of a log-probability in float32 above which an export is wrong; rounding gives about 1e-5."""
MOST_TOKENS = 32
"""The length of the greedy outputs that are compared."""


def tokenizer_of(model: Path, name: str) -> TranslationTokenizer:
    """Return the tokenizer of a translation model.

    Raises: ConfigError: the model has no tokenizer, or is a parser. DataError: the tokenizer is damaged.
    """
    if not has_tokenizer(model):
        raise ConfigError(
            f"{model} has no tokenizer, so the ids of padding, start and end, which the format {name} needs, are"
            " unknown; save the model with its tokenizer."
        )
    tokenizer = load_tokenizer(model)
    if (kind := tokenizer.model_kind) != "translator":
        raise ConfigError(
            f"{model} is a {kind}: its grammar (well_formed) restricts each step of the search, which the format {name}"
            " cannot hold; use manyheads translate, which writes trees."
        )
    return tokenizer


def never_produced(writer: Side) -> tuple[int, ...]:
    """Return the target ids that our search never produces: padding, and the start token unless it is EOS (fairseq).

    The search (`search_problem.Constraints`) bans the same ids.
    """
    return tuple(sorted({writer.pad_id, writer.bos_id} - {writer.eos_id}))


@dataclass(frozen=True)
class Reference:
    """The model's own results for some sources.

    sources: ids with EOS. outputs: greedy ids with EOS, if it was produced within MOST_TOKENS. log_probs: for each
    output (tokens, vocab_size), with teacher forcing.
    """

    sources: list[list[int]]
    outputs: list[list[int]]
    log_probs: list[Tensor]

    def of_tokens(self, banned: tuple[int, ...]) -> list[Tensor]:
        """Return the log-probability of each output token if some ids have probability 0."""
        found = []
        for ids, rows in zip(self.outputs, self.log_probs, strict=True):
            rows = rows.clone()
            rows[:, list(banned)] = -torch.inf
            found.append(rows.log_softmax(dim=-1)[torch.arange(len(ids)), torch.tensor(ids)])
        return found


@torch.inference_mode()
def reference(module: Seq2Seq, tokenizer: TranslationTokenizer, sentences: list[list[int]]) -> Reference:
    """Translate ids of sources greedily with our own search."""
    writer = tokenizer.target
    longest = module.max_len or MOST_TOKENS + 1
    sources = [with_end(ids[: longest - 1], tokenizer.source) for ids in sentences]
    settings = DecodingSettings(num_beams=1, max_new_tokens=min(MOST_TOKENS, longest - 1))
    hypotheses = search_all(module, sources, settings, pad_id=writer.pad_id, bos_id=writer.bos_id, eos_id=writer.eos_id)
    found = [rows[0] for rows in hypotheses]
    outputs = [[*one.ids, *([writer.eos_id] if one.ended else [])] for one in found]
    log_probs = [
        module.log_probs(
            torch.tensor([source]), torch.tensor([len(source)]), torch.tensor([[writer.bos_id, *output[:-1]]])
        )[0].float()
        for source, output in zip(sources, outputs, strict=True)
    ]
    return Reference(sources, outputs, log_probs)


NUM_SENTENCES = 20


@dataclass(frozen=True, kw_only=True)
class Exported:
    """A finished export.

    num_bytes: size of all files. check: the comparison; None: there was none, and not_checked gives the reason.
    """

    num_bytes: int
    notes: list[str] = field(default_factory=list)
    check: Check | None = None
    not_checked: str = ""


def export_model(model: Path, output: Path, options: ExportOptions, *, check: bool = True) -> Exported:
    """Write a model folder in another format. The files are written and compared aside, then the folder is renamed.

    Args:
        model: a model folder of ours.
        output: the new folder.
        check: load the export in its runtime, if this is installed, and compare it with the model.

    Raises: ConfigError, ModelFileError: output exists, the format cannot hold the model, or the export deviates from
        it too much; MissingExtraError: writing needs a package. SaveError: the folder could not be written. In all
        cases nothing is left behind.
    """
    if os.path.lexists(output):
        raise ConfigError(f"{output} exists already; give another folder for --output.")
    check_spares_folders(output, is_folder=True)
    config = read_config(model)
    module = importlib.import_module(EXPORTS[options.to].module)
    done: dict[str, Any] = {"notes": [], "check": None, "not_checked": "" if check else "--no-check was given"}

    def write(folder: Path) -> None:
        done["notes"] = module.write(model, folder, options)
        write_notice(model, folder)
        if not check:
            return
        try:
            done["check"] = module.deviation(model, folder, sample_sentences(config), options)
        except (MissingExtraError, NotComparedError) as error:
            done["not_checked"] = str(error)
            return
        _refuse_deviation(done["check"], options.to)

    weights = model / "model.safetensors"
    size = weights.stat().st_size if weights.is_file() else 0
    write_folder(output, write, needed_bytes=size, replace=False)
    num_bytes = sum((output / name).stat().st_size for name in list_files(output))
    return Exported(num_bytes=num_bytes, **done)


def sample_sentences(config: Any, count: int = NUM_SENTENCES) -> list[list[int]]:
    """Return the ids of random sources (the same for the same config), 3 to 22 tokens long, without special ids."""
    names = ("source_vocab_size", "vocab_size")
    size = next(value for name in names if (value := getattr(config, name, None)) is not None)
    draw = random.Random(size)  # noqa: S311  (the same sentences each time, no secret)
    first = min(4, size - 1)
    return [[draw.randrange(first, size) for _ in range(3 + place % 20)] for place in range(count)]


def _refuse_deviation(check: Check, name: str) -> None:
    if check.limit is not None and not check.deviation <= check.limit:  # NaN is refused too
        raise ModelFileError(
            f"the {name} export was not written: its {check.what} deviate from the model's by {check.deviation:.1e},"
            f" more than {check.limit:.0e}. With --no-check it is written without a comparison."
        )
