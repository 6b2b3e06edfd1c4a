"""The honest files from which cases are made: a tiny run with its model and data, a language model, texts, pictures."""

import gzip
import io
import json
import shutil
from pathlib import Path
from typing import Any

from hostile.base import Base, make_base

__all__ = ["SAMPLES", "make_all"]

SAMPLES: dict[str, bytes] = {
    "lines.txt": b"A cat sat.\n\nThe second line, with \xc3\xa4 and \xe2\x82\xac.\r\nlast",
    "pairs.tsv": b"a cat\teine Katze\nb\tc\tmore\n\t\n",
    "pairs.jsonl": b'{"source": "a cat", "target": "eine Katze"}\n{"source": "b", "target": "c", "x": [1, null]}\n',
    "pairs.csv": b'source,target\r\n"a ""cat""","eine\nKatze"\nb,c\n',
    "pairs.tmx": (
        b'<?xml version="1.0" encoding="UTF-8"?>\n<!DOCTYPE tmx [<!ENTITY a "b">]>\n<tmx version="1.4">'
        b'<header srclang="en"/><body><tu><tuv xml:lang="en"><seg>a <ph x="1">c</ph> cat</seg></tuv>'
        b'<tuv xml:lang="de"><seg>eine &amp; Katze</seg></tuv></tu></body></tmx>\n'
    ),
    "trees.ptb": b"( (S (NP (DT The) (NN cat)) (VP (VBD sat)) (. .)) )\n(S (NP-SBJ (-NONE- *)) (VP (VB Go)))\n",
    "page.md": (
        b'# Title\n\nA *cat* and `code`, [link](http://x/y "t").\n\n- item **bold**\n- two\n'
        b"\n| a | b |\n|---|---|\n| c | d |\n"
        b"\n```py\nx\n```\n\n> quote\n\n<div>raw</div>\n\n---\n1. one\n"
    ),
    "page.html": (
        b"<!DOCTYPE html><html><head><title>T</title><style>x</style></head><body><p>A <b>cat</b> &amp; <a href='x'>dog"
        b"</a>.<br>Next</p><script>1<2</script><!-- c --><ul><li>one<li>two</ul><pre>x  y</pre></body></html>\n"
    ),
    "film.srt": (
        b"1\n00:00:01,000 --> 00:00:02,500\nHello <i>there</i>.\nSecond line\n\n2\n00:00:03,000 --> 00:00:04,000\nBye\n"
    ),
    "film.vtt": (
        b"WEBVTT\n\nNOTE x\n\n00:01.000 --> 00:02.500 align:start\n<v Ann>Hello <b>there</b>\n\n"
        b"id\n00:00:03.000 --> 00:00:04.000\nBye\n"
    ),
    "table.csv": b'name,text\nx,A cat sat.\ny,"Two, lines\nhere"\n',
    "records.jsonl": b'{"id": 1, "a": {"b": "A cat sat."}}\n{"id": 2, "a": {"b": null}}\n',
    "terms.tsv": b"cat\tKatze\n# comment\na dog\tein Hund\n",
    "settings.yaml": (
        b"seed: 1\ndata:\n  path: copy-task\n  max_tokens: 256\n  num_train_pairs: 60\nmodel:\n  d_model: 16\n"
        b"  num_heads: 2\n  attention: {kind: additive, hidden_dim: 4}\n"
        b"optimiser:\n  learning_rate: 1.0e-3\ntraining:\n  max_steps: 2\n"
        b"  freeze: [encoder.*]\n  ema_decay: 0.5\nschedule: {kind: noam, warmup_steps: 10}\nrun_dir: runs/x\n"
    ),
    "ids.u16": bytes(range(0, 64)),
    "translate.json": b'{"text": ["A cat."], "num_beams": 4, "length_penalty": 0.6, "forced_prefix_ids": [1, 2]}',
    "generate.json": b'{"prompt": "A cat", "max_new_tokens": 4, "temperature": 0.7, "stop": ["."], "top_log_probs": 2}',
    "score.json": b'{"source": ["a"], "target": ["b"], "top_log_probs": 1}',
    "completion.json": b'{"model": "m", "prompt": "A cat", "max_tokens": 4, "n": 1, "stop": "x", "stream_options": {}}',
}
"""Name -> content, by the name's ending."""


def make_all(folder: Path, run: Any) -> Base:
    """Make everything in a new folder. run: calls the program."""
    base = make_base(folder / "honest", run)
    samples = folder / "samples"
    samples.mkdir()
    for name, content in SAMPLES.items():
        (samples / name).write_bytes(content)
    (samples / "packed.txt.gz").write_bytes(gzip.compress(SAMPLES["lines.txt"]))
    _make_picture(samples / "picture.png")
    _make_language_model(folder / "honest" / "language")
    for name in ("vocab.json", "tokenizer_config.json"):
        (samples / name).write_text(json.dumps({"</s>": 0, "<unk>": 1, "a": 2, "<pad>": 3}), encoding="utf-8")
    shutil.copytree(base.data, folder / "honest" / "spare-data")
    return base


def _make_picture(path: Path) -> None:
    from PIL import Image

    buffer = io.BytesIO()
    Image.frombytes("RGB", (4, 4), bytes(range(48))).save(buffer, "PNG")
    path.write_bytes(buffer.getvalue())


def _make_language_model(folder: Path) -> None:
    """A Transformer-XL on bytes, with untrained weights."""
    from manyheads.catalogue import build_model
    from manyheads.models.pretrained import save_pretrained
    from manyheads.models.transformer_xl.config import TransformerXLConfig
    from manyheads.text.vocabulary import ByteVocabulary

    config = TransformerXLConfig(vocab_size=256, d_model=16, num_heads=2, d_ff=32, num_layers=1)
    save_pretrained(build_model(config), folder, tokenizer=ByteVocabulary(), task="text")
