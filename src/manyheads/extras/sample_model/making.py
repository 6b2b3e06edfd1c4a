"""`python -m manyheads.extras.sample_model.making RUN [FOLDER]`: makes the sample model of a run of its preset.

The weights are rounded to bf16, which halves the file; the scores in the card are those of the rounded weights.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from manyheads.catalogue import PRESETS
from manyheads.cli.main import guarded
from manyheads.cli.process import echo
from manyheads.config.build import resolve
from manyheads.config.files import load_yaml
from manyheads.data.corpora import NOTICES, load_tatoeba
from manyheads.decoding.translator import Translator
from manyheads.errors import ConfigError, ModelFileError
from manyheads.evaluation.bleu import corpus_bleu, corpus_chrf
from manyheads.extras.sample_model.command import FOLDER
from manyheads.files.verify import read_object
from manyheads.models.pretrained import WEIGHTS, save_pretrained, table_cell, usage_example
from manyheads.tasks.translation.settings import TrainConfig
from manyheads.training.record.log import Metrics

LANGUAGES = (("en", "de"),)
_MOST_BYTES = 1 << 20
_FREE = ("run_dir", "validation", "training")
"""Settings that may differ from the preset's; of `training`, those that change no weight."""

_CARD = """---
language: [en, de]
library_name: manyheads
license: apache-2.0
pipeline_tag: translation
tags: [translation, transformer]
---
# The sample model of manyheads: English to German

A small Transformer, {parameters:,} parameters: {sizes}. It is part of the package, to try things with:

    manyheads sample-model models/en-de

```python
{example}
```

## Limits

It is good for everyday sentences of 4 to 20 words only. Names, numbers, rare words and longer sentences
often come out wrong.

## Data and licence

Trained on {notice}. Its vocabulary was learned from the same sentences. No step used any other data.

Weights and code: Apache-2.0. Whether weights are an adaptation of the text that they were trained on is not settled, so
keep this notice with them.

## Scores

| 1,000 test sentences, beam {beams} | value | signature |
|---|---|---|
| BLEU | {bleu:.2f} | `{bleu_signature}` |
| chrF | {chrf:.2f} | `{chrf_signature}` |

## How it was made

Preset `sample` (recipes/sample-model.yaml), {steps:,} steps in fp32, num_threads {threads}, seed {seed}; then rounded
to bf16. The BLEU of another training is within 0.5 on any machine. The file has this SHA-256 with {arithmetic}:

    {sha256}
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns: an exit code, as `manyheads`."""
    paths = list(sys.argv[1:] if arguments is None else arguments)
    if not 1 <= len(paths) <= 2 or paths[0].startswith("-"):
        echo("usage: python -m manyheads.extras.sample_model.making RUN [FOLDER]", file=sys.stderr)
        return 2
    return guarded(lambda: _make(Path(paths[0]), Path(paths[1]) if paths[1:] else FOLDER))


def _make(run: Path, folder: Path) -> int:
    card = make(run, folder)
    echo(card[card.index("## Scores") :])
    echo(f"{folder}: {sum(path.stat().st_size for path in folder.iterdir()):,} bytes")
    return 0


def make(run: Path, folder: Path) -> str:
    """Write the model folder of a run. Returns: its card.

    Raises: ModelFileError: there is no trained run. ConfigError: it has other settings than the preset. SaveError.
    """
    record = run / "config.yaml"
    if not record.is_file():
        raise ModelFileError(f"{run} is no run folder: it has no config.yaml; train it with the preset `sample` first.")
    config = resolve(TrainConfig, [load_yaml(record)])
    _check_settings(config, run)
    *_, last = Metrics(run / "metrics.jsonl").read() or [{"step": 0}]
    translator = Translator.from_pretrained(run, "cpu")
    translator.languages = LANGUAGES
    translator.save_pretrained(folder, dtype=torch.bfloat16)
    rounded = Translator.from_pretrained(folder, "cpu")
    model: Any = rounded.model
    pairs = load_tatoeba("test")
    references = [reference for _, reference in pairs]
    translations = rounded.translate([source for source, _ in pairs])
    bleu = corpus_bleu(translations, references, languages={"de"})
    chrf = corpus_chrf(translations, references)
    card = _CARD.format(
        parameters=sum(one.numel() for one in model.parameters()),
        sizes=model.config.describe(),
        example=usage_example("translation", LANGUAGES),
        notice=NOTICES["embedded:tatoeba-en-de"],
        beams=rounded.settings.num_beams,
        bleu=bleu.value,
        bleu_signature=table_cell(bleu.signature),
        chrf=chrf.value,
        chrf_signature=table_cell(chrf.signature),
        steps=last["step"],
        threads=config.num_threads,
        seed=config.seed,
        arithmetic=_arithmetic(run),
        sha256=hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest(),
    )
    save_pretrained(
        model,
        folder,
        tokenizer=rounded.tokenizer,
        generation=rounded.settings,
        card=card,
        task="translation",
        languages=LANGUAGES,
        dtype=torch.bfloat16,
    )
    return card


def _check_settings(config: TrainConfig, run: Path) -> None:
    """Raises: ConfigError: another model, data or arithmetic than the preset's."""
    preset, given = asdict(PRESETS["sample"]()), asdict(config)
    for settings in (preset, given):
        for side in ("source_vocab_size", "target_vocab_size"):
            settings["model"].pop(side)  # those of the data, once it has been prepared
    differing = [name for name in preset if name not in _FREE and preset[name] != given[name]]
    if differing:
        raise ConfigError(
            f"{run} is no run of the preset `sample`: it has other settings of {', '.join(differing)}."
            " Train it with recipes/sample-model.yaml."
        )


def _arithmetic(run: Path) -> str:
    """Describe what the bits of the weights depend on, from the run's record of its machine."""
    record = read_object(run / "environment.json", _MOST_BYTES)
    torch_version = record["packages"]["torch"]
    return f"torch {torch_version}, {record['machine']}, {torch.backends.cpu.get_cpu_capability()}"


if __name__ == "__main__":
    sys.exit(main())
