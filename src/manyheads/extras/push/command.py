"""`manyheads push MODEL owner/name`: uploads a model folder to the Hugging Face hub."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from manyheads.cli.command_line.parsing import command
from manyheads.cli.process import echo
from manyheads.config.options import CommandPage, argument, option


@dataclass(frozen=True, kw_only=True)
class PushOptions:
    """Options of `manyheads push`."""

    model: str = argument("A model folder or a run folder.", metavar="MODEL")
    name: str = argument("The repository, owner/name; it is created if it does not exist.", metavar="NAME")
    revision: str | None = option(
        "The branch to write to; it is created if it does not exist.", metavar="NAME", default_is="main"
    )
    private: bool = option("Create the repository as a private one.", default=False)
    license: str | None = option("The licence, as the hub names it: mit, apache-2.0.", default=None, metavar="ID")
    dataset: tuple[str, ...] = option("Names of the training data.", default=(), metavar="NAME ...")
    evaluation: str | None = option(
        "The output of `evaluate --json`; its scores and signatures are written into the card.",
        default=None,
        metavar="FILE",
    )
    dry_run: bool = option("Print the list of files and the card, but upload nothing.", default=False)


PAGE = CommandPage(
    PushOptions,
    """Upload a model to the Hugging Face hub in one commit: the files in its manifest that are needed to load the
model, and a card with licence, languages, data and scores. Every file is first compared with the manifest.
The token comes from `hf auth login` or HF_TOKEN.""",
    (
        "manyheads push runs/demo owner/demo-en-de --license mit --dry-run",
        "manyheads push runs/demo owner/demo-en-de --license mit --dataset tatoeba --evaluation figures.json",
    ),
)


@command(PAGE, "push")
def run(options: PushOptions) -> int:
    """Push a model. Returns: the exit code."""
    from manyheads.extras.push.upload import CardFacts, make_upload, read_evaluation, send, terms_of_data

    facts = CardFacts(
        licence=options.license,
        datasets=options.dataset,
        terms=terms_of_data(options.model),
        evaluation=read_evaluation(options.evaluation),
    )
    upload = make_upload(options.model, options.name, facts)
    for file in upload.left_out:
        echo(f"manyheads: {file} is left out; no model is read from such a file.", file=sys.stderr)
    if options.dry_run:
        echo(upload.describe(options.revision))
        return 0
    echo(f"pushed {len(upload.files)} files: {send(upload, revision=options.revision, private=options.private)}")
    return 0
