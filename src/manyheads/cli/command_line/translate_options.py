"""The options of `manyheads translate`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from manyheads.catalogue import HOOKS, load
from manyheads.config.checks import at_least, check
from manyheads.config.options import CommandPage, Shared, argument, group, option, refuse_given
from manyheads.data.lines import OnBadUtf8
from manyheads.decoding.engines import EngineName, engine_named
from manyheads.decoding.options import DecodingOptions, RerankingOptions, TranslationDeviceOptions
from manyheads.decoding.settings import load_settings, overridden
from manyheads.errors import ConfigError
from manyheads.tasks.table import task_of_folder


@dataclass(frozen=True, kw_only=True)
class TranslateOptions:
    """Options of `manyheads translate`."""

    model: str = Shared.model()
    input: str = argument("A text file, plain or gzip; - is standard input.", default="-", metavar="INPUT")
    output: str = Shared.output("the translations")
    num_return_sequences: int | None = option(
        "Write the N best translations of each line, as tab-separated values.",
        metavar="N",
        default_is="the best one, as plain text",
        aliases=("--nbest",),
    )
    json: bool = Shared.json(
        "Write one JSON object per line, with the source, and score, tokens and log-probabilities of each translation."
    )
    target_lang: str | None = option(
        "Target language, for a model that translates into several.", default=None, metavar="TAG"
    )
    ids: bool = option(
        "Read and write ids instead of text, with spaces between them, exactly as the model does: a source has its own "
        "marks of beginning and end.",
        default=False,
    )
    linearised: bool = option(
        "For parsers: write the text that the model generated, not the tree made from it.", default=False
    )
    on_bad_utf8: OnBadUtf8 = Shared.on_bad_utf8("the output has an empty line")
    engine: EngineName | None = option(
        "Search engine: torch; ctranslate2 (needs the extra ct2; stores an export beside the model); or auto, which "
        "measures both and uses ctranslate2 if it is faster and supports all options.",
        default_is="torch; for --precision int8 ctranslate2",
    )
    lines_at_once: int | None = option(
        "Maximum number of lines that are translated together; fewer if a pipe contains fewer at the moment.",
        metavar="N",
        default_is="256, on CUDA 4096",
    )
    verbose: bool = option("Print settings and speed on standard error.", default=False, aliases=("-v",))
    document: Any = group(load(HOOKS["documents"]))
    models: RerankingOptions = group(RerankingOptions)
    run_on: TranslationDeviceOptions = group(TranslationDeviceOptions)
    decoding: DecodingOptions = group(DecodingOptions)

    def __post_init__(self) -> None:
        check(self, "--", at_least(1), "lines_at_once", "num_return_sequences")
        if self.ids:
            others = {
                "--terms": self.document.terms,
                "--target-lang": self.target_lang,
                "--rerank": self.models.rerank,
                "--ensemble": self.models.ensemble,
                "--shortlist": self.run_on.shortlist,
                "--engine": self.engine not in (None, "torch"),
                "--precision int8": self.run_on.precision == "int8",
            }
            refuse_given(others, "--ids gives a model its ids alone; leave out {}.")
        if self.document.terms is not None:
            given = {
                "--nbest": self.num_return_sequences,
                "--json": self.json,
                "--do-sample": self.decoding.do_sample,
                "--rerank": self.models.rerank,
            }
            refuse_given(given, "--terms gives one translation a line by beam search; leave out {}.")
        engine = engine_named(self.engine, self.run_on.precision)
        if engine == "torch":
            return
        by = "--precision int8" if self.run_on.precision == "int8" else f"--engine {engine}"
        if self.models.ensemble:
            raise ConfigError(
                f"{by} searches one model, but {1 + len(self.models.ensemble)} are named; leave out"
                f" {by.partition(' ')[0]} or --ensemble."
            )
        if self.json:
            other = "--precision fp32" if self.run_on.precision == "int8" else "--engine torch"
            raise ConfigError(f"--json gives token log-probabilities, which {by} may not have; use {other}.")

    def check_target(self) -> None:
        """Compare --target-lang with the tags of a local model, before it is loaded.

        Raises: ConfigError: see `text.sides.check_target`. DataError: the tokenizer is damaged.
        """
        from manyheads.text.of_folder import has_tokenizer, load_tokenizer
        from manyheads.text.sides import check_target

        folder = self._folder()
        if folder is not None and has_tokenizer(folder):
            found = load_tokenizer(folder)
            needed = found.needs_language and not self.ids
            check_target(found.target_languages, self.target_lang, self.model, "--target-lang", is_needed=needed)

    def _folder(self) -> Path | None:
        """The folder of a local translation model; None: it is another model, or on the hub."""
        if task_of_folder(self.model) not in ("translation", "parsing"):
            return None
        return next(
            (path for path in (Path(self.model) / "model", Path(self.model)) if (path / "config.json").is_file()), None
        )

    def check_search(self) -> None:
        """Check the search's options against those of a local model, before it is loaded.

        Raises: ConfigError: an option is out of range, or two contradict each other. ModelFileError: the model's own
            options cannot be read.
        """
        folder = self._folder()
        if folder is not None:
            given = replace(self.decoding, forced_prefix=None).overrides(None)
            if given.get("do_sample") and "num_beams" not in given:
                given["num_beams"] = 1
            given["num_return_sequences"] = self.num_return_sequences or 1
            settings = overridden(load_settings(folder), given)
            if "seed" in given and not settings.do_sample:
                raise ConfigError("--seed is for sampling; give --do-sample with it, or leave it out.")

    def identity(self) -> dict[str, Any]:
        """Return the options that change the translations; see `sharded_lines`."""
        return {
            **self.models.identity(),
            "compiled": self.run_on.compile,
            "shortlist": self.run_on.shortlist,
            "engine": self.engine or "torch",
            **({"ids": True} if self.ids else {}),
        }

    def check_for_document(self) -> None:
        """Raises: ConfigError: an option was given that applies to lines only."""
        given = {
            "--num-return-sequences": self.num_return_sequences is not None,
            "--json": self.json,
            "--linearised": self.linearised,
            "--ids": self.ids,
            "--on-bad-utf8": self.on_bad_utf8 != "fail",
            "--do-sample": self.decoding.do_sample,
        }
        refuse_given(given, f"{{}} is for lines; {self.input} is translated as a document. Give --format lines.")


PAGE = CommandPage(
    TranslateOptions,
    """Translate text: one line in, one line out, in order; an empty line gives an empty line.
Without INPUT, standard input is read; in a terminal there is a prompt, and Ctrl-D ends it.
With --nbest N each input line gives up to N lines of three columns: line number (from 1), score, translation.
A parser writes the tree of each sentence over exactly its words, which must be separated by spaces. A model of several
languages needs --target-lang. --terms FILE forces terminology. --ensemble averages several models for each token;
--rerank ranks the translations of a beam with a model of the reverse direction.
In a document (Markdown, HTML, subtitles, CSV, JSONL; see --format) everything but the text stays as it is.""",
    (
        'echo "I am hungry." | manyheads translate runs/demo',
        "manyheads translate runs/demo input.en --output output.de --beam 8 --verbose",
        "manyheads translate runs/demo input.en --nbest 4",
        "manyheads translate runs/a input.en --ensemble runs/b runs/c --rerank runs/back",
        "manyheads translate runs/demo page.md --output page.de.md",
    ),
)
