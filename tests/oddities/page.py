"""The page `docs/text-oddities.md`, from the table. `python tests/oddities/page.py` writes it anew."""

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

This page lists how each command handles malformed or unusual text. It is generated from the table that the tests run
(`tests/oddities/table.py`; run `python tests/oddities/page.py` to generate it again), so it describes tested behaviour.

## The rules

- **A line ends at `\\n` only.** A `\\r` directly before the `\\n` is dropped. U+2028, U+0085, form feeds and other
  `\\r` are ordinary characters. The last line does not need a `\\n`.
- **Each input line gives one output line, in the same order.** `translate` writes an empty line for a line that is
  empty or contains only white space, and `score` writes one row for every pair. `translate` reads a file in blocks
  (`--lines-at-once`). When it reads from a pipe, it translates the lines it has as soon as the pipe is silent for a
  tenth of a second.
- **Text is UTF-8.** Invalid bytes are an error that names the file, the line and the byte offset. With
  `--on-bad-utf8 replace` they become U+FFFD. With `--on-bad-utf8 skip`, `prepare` leaves out the pair and `translate`
  writes an empty line. Both commands count these lines. A byte order mark at the start of a file is dropped. UTF-16,
  UTF-32 and compressed formats other than gzip are refused by name.
- **gzip is recognised by its first bytes**, not by the name of the file.
- **Two parallel files must have the same number of lines.** Otherwise the error gives both numbers and the first pair
  that looks wrong.
- **Every line that is left out is counted.** `prepare` counts the pairs that it leaves out and the pairs that are
  unusual. `train` counts the pairs that are longer than `data.max_source_len` or `data.max_target_len`
  (`data.too_long`: drop, truncate or fail). The other commands refuse a line that is too long; with
  `--too-long truncate` they cut it and say so.
- **Text is only text.** Text that looks like a special token, an option or a path has no special meaning. Letters are
  normalised to NFC before the model reads them.
- **Text for language models** (`prepare --task lm`) follows the same rules and is tested with the same files. The text
  consists of the lines that `translate` would read, with their line breaks and including empty lines, but without
  skipped lines. With `--level bytes` none of these rules apply: the bytes of a file stay unchanged, including invalid
  UTF-8 and byte order marks. gzip is decompressed, and other compressed files are refused.
- **A refused file** ends the command with exit code 2 and at most ten lines on standard error. `translate` may already
  have written earlier blocks.

## The table

`train` uses the folder that `prepare` wrote. Where `prepare` refuses the file, `train --data.path` names the odd file
itself. The model in the table accepts {LIMIT} tokens. The odd file is the source and has three lines unless its name
says otherwise. Quoted words appear in the message or in the result. The words after a colon in the first column say
what happens to the odd text. Files without read permission are tested as a user without privileges.
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
