"""`python -m manyheads.extras.demo RUN_DIR`: shows what a run has learned. It is the second half of `make demo`.

Translates the held-out test sentences, shows ten of them, draws attention weights, and computes the scores of all. If
the model learned too little in five minutes or more, it prints the reason, and the exit code is 4.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from manyheads.catalogue import HOOKS, load
from manyheads.cli.command_line.parsing import program
from manyheads.cli.lines.output import OutputCheck
from manyheads.cli.main import guarded
from manyheads.cli.process import echo, set_up_machine
from manyheads.cli.watching.phases import showing_if_long
from manyheads.config.build import resolve
from manyheads.config.files import load_yaml
from manyheads.data.lines import phase_progress
from manyheads.errors import DataError, MissingExtraError, ModelFileError
from manyheads.tasks.translation.settings import TrainConfig

if TYPE_CHECKING:
    from manyheads.data.translation.prepared import PreparedData
    from manyheads.decoding.translator import Translator

NUM_SHOWN = 10
NUM_BEAMS = 4
LEAST_BLEU = 10.0
LEAST_MINUTES = 5.0
"""Minutes of training after which a BLEU below LEAST_BLEU is a failure."""
DID_NOT_LEARN = 4
"""Exit code."""
USAGE = """usage: python -m manyheads.extras.demo RUN_DIR
exit codes: as of manyheads --help; 4 means that the model learned too little in five minutes or more"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns: an exit code, as `manyheads`."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if len(arguments) != 1 or arguments[0].startswith("-"):
        echo(USAGE, file=sys.stderr)
        return 2
    return guarded(lambda: run(Path(arguments[0])))


def run(run_dir: Path) -> int:
    """Translate, show, draw, score.

    Returns: 0; 4 if the model learned too little in five minutes or more.
    Raises: ModelFileError, DataError: no trained run in that folder, or no test pairs in its data.
    """
    set_up_machine()
    import torch

    from manyheads.decoding.translator import Translator
    from manyheads.evaluation.bleu import corpus_bleu, corpus_chrf
    from manyheads.training.run.resume import RunFolder

    config = run_config(run_dir)
    RunFolder(run_dir).check()  # folder for pictures, and for data that must be prepared again
    data = held_out_data(run_dir, config)
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    translator = Translator.from_pretrained(run_dir)
    sources = [source for source, _ in data.test_text]
    references = [reference for _, reference in data.test_text]
    echo(f"translating {len(sources):,} held-out sentences, beam {NUM_BEAMS} ...", file=sys.stderr, flush=True)
    started = time.monotonic()
    with showing_if_long() as progress:
        on_progress = phase_progress(progress, "translating", len(sources))
        translations = translator.translate(sources, num_beams=NUM_BEAMS, on_progress=on_progress)
    seconds = time.monotonic() - started
    echo(f"  done in {seconds:.1f} s, {len(sources) / seconds:,.0f} sentences/s", file=sys.stderr)

    check = OutputCheck(
        "translations",
        learn_more="train it longer, with make demo MINUTES=20, or see how fast it trained in train.log of the run.",
        forbid="A few are usual after so short a training.",
    )
    for number, (source, translation) in enumerate(zip(sources, translations, strict=True), 1):
        check.see(number, source, translation)

    _show(sources, references, translations)
    draw_pictures(run_dir, translator, sources, references, translations)
    echo(f"\ntype next   {program()} translate {run_dir}\n")
    languages = {target for _, target in translator.languages}
    chrf, bleu = corpus_chrf(translations, references), corpus_bleu(translations, references, languages=languages)
    echo(f"{len(sources):,} sentences that the model has never seen, beam {NUM_BEAMS}:")
    echo(f"held-out chrF = {chrf.value:.2f}")
    echo(chrf.signature)
    echo(f"held-out BLEU = {bleu.value:.2f}")
    echo(bleu.signature)
    sys.stdout.flush()
    check.report()
    if bleu.value >= LEAST_BLEU:
        return 0
    failure, message = judge(run_dir, config, bleu.value)
    echo(f"manyheads: {message}", file=sys.stderr)
    return DID_NOT_LEARN if failure else 0


def judge(run_dir: Path, config: TrainConfig, bleu: float) -> tuple[bool, str]:
    """Explain why a model is bad, from the records of its run.

    Args:
        run_dir: of the run.
        config: of the run, as it was resolved.
        bleu: below LEAST_BLEU.

    Returns: whether it is a failure, which it is after LEAST_MINUTES of training; and a message.
    """
    from manyheads.cli.records import describe_folder
    from manyheads.training.run.clock import FEWEST_STEPS

    record = describe_folder(run_dir)
    steps, tokens, trained = record["step"], record["target_tokens"] or 0, record["minutes"] or 0.0
    minutes = config.training.max_minutes or trained
    failed = minutes >= LEAST_MINUTES
    threads = record.get("environment", {}).get("torch_threads", "unknown")
    rate = f", {tokens / (60 * trained):,.0f} target tokens/s" if trained else ""
    made = f"{steps:,} step{'' if steps == 1 else 's'} in {trained or minutes:.3g} minutes{rate}"
    what = f"The model {'did not learn' if failed else 'has learned little so far'}: held-out BLEU is {bleu:.2f}."
    number = f"{threads} thread{'' if threads == 1 else 's'}"
    why = f"Training made {made}, with precision {config.precision} and {number}."
    if steps < FEWEST_STEPS:
        remedy = (
            f"Below {FEWEST_STEPS} steps a model learns little. Run `manyheads doctor` to see which precision is faster"
            " here, end other programs, or train longer: make demo MINUTES=M."
        )
    elif failed:
        remedy = f"There were enough steps, so check the losses in {run_dir / 'metrics.jsonl'}, or train longer."
    else:
        remedy = f"{LEAST_MINUTES:g} minutes are usual: make demo."
    return failed, f"{what} {why} {remedy}"


def run_config(run_dir: Path) -> TrainConfig:
    """The settings that a run recorded.

    Raises: ModelFileError: there is no run in that folder. ConfigError: its settings cannot be read.
    """
    if not (run_dir / "config.yaml").is_file():
        raise ModelFileError(
            f"{run_dir} is not a run folder: it has no config.yaml. Run `manyheads train --preset demo` first."
        )
    return resolve(TrainConfig, [load_yaml(run_dir / "config.yaml")])


def held_out_data(run_dir: Path, config: TrainConfig) -> PreparedData:
    """The data that a run was trained on, with its test pairs.

    Raises: DataError: it is not there any more, or has no test pairs.
    """
    from manyheads.data.translation.prepared import open_data

    data = open_data(config.data, config.tokenizer, config.seed, run_dir / "data")
    if not data.test_text:
        raise DataError(f"the data of {run_dir} ({data.path}) has no test pairs; prepare it with some.")
    return data


def _show(sources: list[str], references: list[str], translations: list[str]) -> None:
    """Ten sentences, evenly spaced: neither the best nor the worst."""
    width = min(max(shutil.get_terminal_size((100, 24)).columns, 60), 120)
    places = sorted({index * len(sources) // NUM_SHOWN for index in range(NUM_SHOWN)})
    echo(f"\n{len(places)} of them, evenly spaced in the file, not chosen:")
    for place in places:
        echo()
        for name, text in (
            ("source", sources[place]),
            ("reference", references[place]),
            ("translation", translations[place]),
        ):
            lead = f"  {name:<11}  "
            lines = textwrap.wrap(text, width, initial_indent=lead, subsequent_indent=" " * len(lead))
            echo("\n".join(lines or [lead.rstrip()]))


def draw_pictures(
    run_dir: Path, translator: Translator, sources: list[str], references: list[str], translations: list[str]
) -> None:
    """Draw the heat map, and print the paths of the map and the learning curve; without matplotlib print how to get
    them."""
    echo("\npictures")
    curve = run_dir / "plots" / "learning-curve.png"
    if curve.is_file():
        echo(f"  how it learned     {curve}")
    place = choose_sentence(sources, references, translations)
    try:
        shown = (run_dir / "plots" / "attention", translator, sources[place], translations[place])
        [picture, _] = load(HOOKS["picture"])("attention", *shown, kinds=("png", "svg")).save()
    except MissingExtraError as error:
        echo(f"  none: {error}")
    else:
        echo(f"  where it looks     {picture}   ({sources[place]})")


def choose_sentence(sources: list[str], references: list[str], translations: list[str]) -> int:
    """Return the index of a good example: a sentence of medium length whose translation is largely correct."""
    from manyheads.evaluation.bleu import corpus_chrf

    def merit(place: int) -> tuple[bool, float]:
        fits = 6 <= len(sources[place].split()) <= 10 and bool(translations[place].strip())
        return fits, corpus_chrf([translations[place]], [references[place]]).value if fits else 0.0

    return max(range(len(sources)), key=merit)


if __name__ == "__main__":
    sys.exit(main())
