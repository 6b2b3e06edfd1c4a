"""The page `docs/text-oddities.md`, from the table. `python tests/oddities/page.py` writes it anew."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "tests"))

from oddities import table  # noqa: E402
from oddities.kinds import COMMANDS, LIMIT, Oddity  # noqa: E402

__all__ = ["PAGE", "render"]

PAGE = ROOT / "docs" / "text-oddities.md"

HEAD = f"""# Text oddities

What each command makes of text that is not as it should be. This page is written from the table that the tests run
(`tests/oddities/table.py`; `python tests/oddities/page.py` writes it anew), so what stands here is what happens.

## The rules

- **Lines end at `\\n` and nowhere else.** A `\\r` before it goes with it. U+2028, U+0085, form feeds and lone `\\r` are
  characters of a line. A last line needs no `\\n`.
- **Lines in = lines out, in order.** `translate` gives an empty line for a line that is empty or white space alone, and
  `score` a row for every pair. A file is translated in blocks (`--lines-at-once`); from a pipe, what is there is
  translated as soon as the pipe pauses for a tenth of a second.
- **Text is UTF-8.** Bytes that are not are refused with file, line and byte offset, or with `--on-bad-utf8 replace`
  become U+FFFD, or with `skip` (`prepare`, `translate`) the pair is left out, the line empty; both are counted. A byte
  order mark at the beginning of a file is dropped. UTF-16, UTF-32 and packed formats other than gzip are named and
  refused.
- **gzip is known by its first bytes**, whatever the file is called.
- **Two files must have equally many lines**; otherwise both counts are told, and the first pair that looks wrong.
- **Nothing is left out in silence.** `prepare` counts pairs that it leaves out or that are unusual; `train` those that
  are too long for `data.max_source_len` and `data.max_target_len` (`data.too_long`: drop, truncate, fail); the others
  refuse a line that does not fit, or with `--too-long truncate` cut it, and say so.
- **Text is text**: what looks like a special token, an option or a path is not one. Letters are made NFC before the
  model sees them.
- **Texts for language models** (`prepare --task lm`) are read by the same rules, and tried with the same files: the
  lines that `translate` reads are the text, each with its line break, the empty ones too; a line that is skipped is
  not. With `--level bytes` there are no rules: a file comes back bit for bit, bad UTF-8, marks and all; gzip is
  unpacked, and other packed files are refused.
- **A refusal** is exit code 2 and at most ten lines on standard error. `translate` may have given earlier blocks by
  then.

## The table

“train” trains from the folder that `prepare` made; where `prepare` refuses, `train --data.path` is pointed at the odd
file itself. The model of the table has room for {LIMIT} tokens. The odd file is the source and has three lines if
nothing else is said; what is quoted stands in the message or the result. Behind a name stands what becomes of the
oddity. A file that may not be read is tried as a user without privileges.
"""


def render() -> str:
    """The whole page."""
    parts = [HEAD]
    for title, oddities in table.SECTIONS.items():
        parts += [f"\n### {title}\n", "| oddity | " + " | ".join(COMMANDS) + " |", "|---" * (len(COMMANDS) + 1) + "|"]
        parts += [_row(oddity) for oddity in oddities]
    return "\n".join(parts) + "\n"


def _row(oddity: Oddity) -> str:
    first, *rest = (oddity.cells[command].told() for command in COMMANDS)
    rest = ["as `prepare`" if oddity.cells["prepare"].code and told == first else told for told in rest]
    return f"| {oddity.name} | " + " | ".join([first, *rest]) + " |"


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
