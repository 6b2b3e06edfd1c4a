"""Kinds of oddities that behave alike: taken line by line, refused by all, too long, without a partner, empty."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from oddities.cells import Cell, prepared, refused, rows, sentences, trained, translated
from oddities.making import Make, written

from manyheads.text.words import is_blank

__all__ = [
    "COMMANDS", "CONTROL", "DE", "EN", "LIMIT", "Oddity", "bad_bytes", "none_taken", "nothing", "odd_line", "of_pairs",
    "replaced", "skipped", "taken", "text", "too_long", "unequal", "with_second",
]  # fmt: skip

COMMANDS = ("prepare", "train", "translate", "score", "evaluate")
LIMIT = 512  # tokens: the budget of the tests' model and the longest sentence of their training
EN = ["I am hungry.", "The cat sees the dog.", "She reads a book."]
DE = ["Ich habe Hunger.", "Die Katze sieht den Hund.", "Sie liest ein Buch."]
NO_FOLDER = "which is not a folder"
CONTROL = "with control characters inside (NUL, carriage return, ...), kept"
REPLACED = "lines that are not UTF-8, bad bytes replaced: "


@dataclass(frozen=True, kw_only=True)
class Oddity:
    """A line of the table.

    Args:
        name: short, for people and test ids.
        make: the files.
        cells: expected behaviour by command.
        source: the lines as they are to be read, where they are taken.
        target: see source.
        pairs: what `prepare` keeps; without it, of `source` and `target` those with two sides.
        options: of each command, besides those that all have.
        form: of the training pairs for `prepare`: `aligned` files, or `tsv` or `jsonl`, which is the source file.
        slow: left to the long check.
    """

    name: str
    make: Make
    cells: dict[str, Cell]
    source: tuple[str, ...] = ()
    target: tuple[str, ...] = ()
    pairs: tuple[tuple[str, str], ...] | None = None
    options: dict[str, tuple[str, ...]] = field(default_factory=dict)
    form: str = "aligned"
    slow: bool = False

    @property
    def id(self) -> str:
        """The name without spaces."""
        return "-".join("".join(char if char.isalnum() else " " for char in self.name).split()).lower()


def text(lines: Sequence[str]) -> bytes:
    """Lines as a file."""
    return "".join(f"{line}\n" for line in lines).encode("utf-8")


def with_second(line: str, lines: Sequence[str] = EN) -> list[str]:
    """Three sentences, the second of which is this one."""
    return [lines[0], line, lines[2]]


def taken(
    name: str,
    source: Sequence[str],
    target: Sequence[str],
    *,
    raw: bytes | None = None,
    raw_target: bytes | None = None,
    make: Make | None = None,
    notes: Sequence[str] = (),
    **changes: Cell,
) -> Oddity:
    """A text that every command takes, line by line.

    Args:
        source: the lines that are read.
        target: the lines that are read.
        raw: the file they are in, if not `text(source)`.
        raw_target: likewise.
        make: what else there is than two files.
        notes: what `prepare` counts.
        changes: cells that are others.
    """
    count = len(source)
    full = sum(not (is_blank(one) or is_blank(other)) for one, other in zip(source, target, strict=False))
    if full < count:
        notes = [f"{count - full:,} left out, because a line is empty", *notes]
    cells = {
        "prepare": prepared(full, count, notes),
        "train": trained(full, full),
        "translate": translated(source),
        "score": rows(count),
        "evaluate": sentences(count),
    }
    content = text(source) if raw is None else raw
    content_target = text(target) if raw_target is None else raw_target
    return Oddity(
        name=name,
        make=make or written(content, content_target),
        cells={**cells, **changes},
        source=tuple(source),
        target=tuple(target),
    )


def odd_line(name: str, line: str, notes: Sequence[str] = ()) -> Oddity:
    """One odd line among plain ones, on the source side and in the target's last line."""
    return taken(name, with_second(line), [DE[0], DE[1], line], notes=notes)


def none_taken(name: str, message: str, make: Make, *, train: Cell | None = None, **changes: Cell) -> Oddity:
    """A file that no command takes, for the same reason."""
    cells = dict.fromkeys(("prepare", "translate", "score", "evaluate"), refused(message))
    return Oddity(name=name, make=make, cells={**cells, "train": train or refused(NO_FOLDER), **changes})


def bad_bytes(name: str, raw: bytes, message: str) -> Oddity:
    """A source file that is refused for its bytes."""
    return none_taken(name, message, written(raw, text(DE)))


def with_options(oddity: Oddity, slow: bool = False, **options: tuple[str, ...]) -> Oddity:
    """The same, with options for some commands."""
    return replace(oddity, options=options, slow=slow)


def too_long(name: str, line: str, tokens: int, *, cut: bool, long_text: bool, slow: bool = False) -> Oddity:
    """One line far above every limit, the second of three; refused by default, or cut where that is asked for.

    Args: tokens: of the line, in the model's vocabulary, EOS included. long_text: above 10,000 characters.
    """
    source = with_second(line)
    says = f"line 2 has {tokens} tokens, EOS included, but at most {LIMIT} fit (max_tokens {LIMIT}"
    cut_notes = [f"2 has {tokens} tokens; only its first {LIMIT - 1} are used"]
    counted = "lines cut because they were too long: 1"
    if cut:
        changes = {
            "translate": translated(source, [f"line {cut_notes[0]}", counted]),
            "score": rows(3, [f"source {cut_notes[0]}", counted]),
            "evaluate": sentences(3, [f"line {cut_notes[0]}", "truncated  1 sources, 0 references"]),
        }
    else:
        changes = dict.fromkeys(("translate", "score", "evaluate"), refused(says, "--too-long truncate"))
    notes = ["1 with a line above 10,000 characters"] if long_text else []
    oddity = taken(name, source, DE, notes=notes, train=trained(2, 3, too_long=1), **changes)
    option = ("--too-long", "truncate")
    options = {"translate": option, "score": option, "evaluate": option} if cut else {}
    return with_options(oddity, slow=slow, **options)


def unequal(name: str, source: Sequence[str], target: Sequence[str], says: str) -> Oddity:
    """Counts that differ: no pair can be trusted."""
    numbers = f"odd.en has {len(source)} lines", f"odd.de has {len(target)} (lines end at"
    cells = dict.fromkeys(("prepare", "score", "evaluate"), refused(*numbers, says))
    return Oddity(
        name=name,
        make=written(text(source), text(target)),
        cells={**cells, "train": refused(NO_FOLDER), "translate": translated(source)},
        source=tuple(source),
    )


def nothing(name: str, make: Make, **changes: Cell) -> Oddity:
    """No lines at all."""
    cells = {
        "prepare": refused("No training pairs are left", "0 were read"),
        "train": refused(NO_FOLDER),
        "translate": translated([]),
        "score": rows(0),
        "evaluate": refused("has no sentences; there is nothing to evaluate"),
    }
    return Oddity(name=name, make=make, cells={**cells, **changes})


BAD_MIDDLE = text(EN[:1]) + b"The cat s\xe4es.\n" + text(EN[2:])


def skipped() -> Oddity:
    """Bad bytes under --on-bad-utf8 skip, which only those offer that can leave out a pair or empty a line."""
    source = with_second("")
    option = ("--on-bad-utf8", "skip")
    changes = {
        "prepare": prepared(2, 3, ["1 left out, because they are not UTF-8"]),
        "translate": translated(source, ["lines that are not UTF-8, skipped: 1"]),
        **dict.fromkeys(("score", "evaluate"), refused("--on-bad-utf8 is 'skip'; choose one of: fail, replace.")),
    }
    oddity = taken("bad UTF-8 in a line, --on-bad-utf8 skip", source, DE, raw=BAD_MIDDLE, **changes)
    return with_options(oddity, prepare=option, translate=option, score=option, evaluate=option)


def replaced() -> Oddity:
    """Bad bytes under --on-bad-utf8 replace."""
    source = with_second("The cat s\ufffdes.")
    option = ("--on-bad-utf8", "replace")
    changes = {
        "prepare": prepared(3, 3, ["1 lines that were not UTF-8, bad bytes replaced"]),
        "translate": translated(source, [REPLACED + "1"]),
        "score": rows(3, [REPLACED + "1"]),
        "evaluate": sentences(3, [REPLACED + "1"]),
    }
    oddity = taken("bad UTF-8 in a line, --on-bad-utf8 replace", source, DE, raw=BAD_MIDDLE, **changes)
    return with_options(oddity, prepare=option, translate=option, score=option, evaluate=option)


def of_pairs(form: str, name: str, lines: Sequence[str], cell: Cell, *pairs: tuple[str, str]) -> Oddity:
    """A TSV or JSONL file: `prepare` knows the form; for the others, which take aligned files, a line is a line."""
    train = trained(len(pairs), len(pairs)) if pairs else refused(NO_FOLDER)
    return replace(taken(name, lines, lines, prepare=cell, train=train), form=form, pairs=pairs)
