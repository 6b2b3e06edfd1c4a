"""The table of text oddities: what each of five commands makes of each. The page and the tests both come from it."""

import bz2
import gzip
import json
import lzma
import os
import random

from oddities.cells import prepared, refused
from oddities.kinds import (
    CONTROL,
    DE,
    EN,
    Oddity,
    bad_bytes,
    none_taken,
    nothing,
    odd_line,
    of_pairs,
    replaced,
    skipped,
    taken,
    text,
    too_long,
    unequal,
    with_second,
)
from oddities.making import at, closed_stdin, fifo, link, link_to_itself, stdin, unreadable, written

__all__ = ["LATER", "ODDITIES", "SECTIONS"]

PLAIN, PLAIN_DE = text(EN), text(DE)
PACKED = gzip.compress(PLAIN, mtime=0)
TSV = ["\t".join(pair) for pair in zip(EN, DE, strict=True)]
JSONL = [json.dumps({"source": en, "target": de}) for en, de in zip(EN, DE, strict=True)]


def bytes_of_text() -> list[Oddity]:
    """Encodings."""
    return [
        taken("plain text", EN, DE),
        bad_bytes("bad UTF-8 at the start", b"\xe4" + PLAIN, "odd.en: line 1 is not UTF-8: byte 0xe4 at byte offset 0"),
        bad_bytes(
            "bad UTF-8 in a line",
            b"one\ntw\xff\nthree\n",
            "odd.en: line 2 is not UTF-8: byte 0xff at byte offset 6 (invalid start byte). Save the file as UTF-8",
        ),
        bad_bytes(
            "a character cut off at the end",
            b"one\ntwo\nthre\xc3",
            "odd.en: line 3 is not UTF-8: byte 0xc3 at byte offset 12 (unexpected end of data)",
        ),
        replaced(),
        skipped(),
        bad_bytes("an overlong encoding", b"one\ntwo\n\xc0\xaf\n", "line 3 is not UTF-8: byte 0xc0 at byte offset 8"),
        bad_bytes(
            "a surrogate encoded", b"one\ntwo\n\xed\xa0\x80\n", "line 3 is not UTF-8: byte 0xed at byte offset 8"
        ),
        bad_bytes("above U+10FFFF", b"one\ntwo\n\xf4\x90\x80\x80\n", "line 3 is not UTF-8: byte 0xf4 at byte offset 8"),
        bad_bytes(
            "a file in Windows-1252 or Latin-1",
            "Grüße\naus\nKöln\n".encode("cp1252"),
            "line 1 is not UTF-8: byte 0xfc at byte offset 2 (invalid start byte). Save the file as UTF-8",
        ),
        taken("a byte order mark at the start: dropped", EN, DE, raw=b"\xef\xbb\xbf" + PLAIN),
        odd_line("a byte order mark in the middle: kept", "\ufeffThe cat."),
        nothing("a byte order mark alone: an empty file", written(b"\xef\xbb\xbf", b"\xef\xbb\xbf")),
        bad_bytes(
            "UTF-16 with its mark", "one\ntwo\n".encode("utf-16"), "byte order mark of UTF-16; convert it: iconv"
        ),
        bad_bytes("UTF-16 without a mark", "one line\n".encode("utf-16-le"), "looks like UTF-16 without a byte order"),
        bad_bytes(
            "UTF-32 with its mark", "one\ntwo\n".encode("utf-32"), "byte order mark of UTF-32; convert it: iconv"
        ),
        odd_line("NUL inside: kept", "a\0b", [f"2 {CONTROL}"]),
        odd_line("U+FFFF, U+10FFFF, private use", "a\uffffb\U0010ffffc\ue000d"),
    ]


def line_ends() -> list[Oddity]:
    """What ends a line and what does not."""
    crlf = PLAIN.replace(b"\n", b"\r\n")
    old_mac = EN[0] + "\r" + EN[1] + "\r" + EN[2] + "\r"
    return [
        taken("CRLF line ends: `\\r` dropped", EN, DE, raw=crlf, raw_target=PLAIN_DE.replace(b"\n", b"\r\n")),
        taken("CRLF on one side alone", EN, DE, raw=crlf),
        odd_line("a lone CR inside: kept", "The cat\rsees the dog.", [f"2 {CONTROL}"]),
        taken(
            "CR line ends (old Mac): one line",
            [old_mac.removesuffix("\r")],
            DE[:1],
            raw=old_mac.encode(),
            notes=[f"1 {CONTROL}"],
        ),
        odd_line("U+2028 and U+2029: no line ends", "The cat\u2028sees\u2029the dog."),
        odd_line("U+0085: no line end", "The cat\x85sees the dog."),
        odd_line("VT, FF and separators: no line ends", "a\x0bb\x0cc\x1cd\x1de\x1ef", [f"2 {CONTROL}"]),
        taken("no line feed at the end", EN, DE, raw=PLAIN.removesuffix(b"\n")),
        taken("empty lines in the middle", with_second(""), with_second("", DE)),
        taken("empty lines at the end", [*EN, "", ""], [*DE, "", ""]),
        taken("an empty source line", with_second(""), DE),
        taken("an empty target line", EN, with_second("", DE)),
        taken("lines of white space alone", with_second(" \t\u00a0\u2003"), DE),
        taken(
            "all lines empty",
            ["", "", ""],
            ["", "", ""],
            prepare=refused("No training pairs are left", "3 were read and 3 of them have an empty side"),
            train=refused("which is not a folder"),
        ),
        nothing("an empty file", written(b"", b"")),
        unequal("one line more", [*EN, "more"], DE, "No single pair looks wrong"),
        unequal("one line fewer", EN, [DE[0], "", *DE[1:]], "Line 2 looks suspicious first: 'The cat sees the dog.'"),
        unequal("far more lines", EN * 40, DE, "No single pair looks wrong"),
    ]


def characters() -> list[Oddity]:
    """Unusual but sound text."""
    return [
        odd_line("zero-width characters", "cat\u200b\u200ddog\u00ad\u2060"),
        odd_line("a line of zero-width space alone: text", "\u200b"),
        odd_line("a hundred combining marks", "a" + "\u0301\u0323" * 50),
        odd_line("right-to-left text and marks", "\u202eabc\u202c שלום \u200fمرحبا\u200e"),
        odd_line("emoji and astral characters", "👩‍👩‍👧‍👦 🏳️‍🌈 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𓀀"),
        odd_line("decomposed letters (NFD): made NFC", "u\u0308ber e\u0301 \u1112\u1161\u11ab"),
        odd_line("tabs inside: kept", "The cat\tsees\t\tthe dog."),
        odd_line("300 spaces", "The cat" + " " * 300 + "sees the dog."),
        odd_line("spaces at both ends", "  \u3000The cat \u00a0"),
        odd_line("characters never seen in training: spelled in bytes", "日本語のテキスト ሰላም ᚠᚢᚦ"),
        odd_line("a word 150 times", "the " * 149 + "the"),
        odd_line("text like special tokens: text", "<pad> <s> </s> <unk> <0x41> ▁ [CLS] <|endoftext|>"),
        odd_line("text like options and paths: text", "--help -v ../../etc/passwd ~ $HOME `rm` %s {0} \\n"),
        odd_line("text like markup", "&lt;b&gt; <b>bold</b> \\textbf{x} [red]x[/red] \x1b[31mred", [f"2 {CONTROL}"]),
    ]


def long_lines() -> list[Oddity]:
    """Lines above every limit."""
    # Letters that the sentences have not, so that the model spells them in bytes; in no order that could be learned,
    # and with apostrophes, because 200 letters without a break are copied.
    word = "".join("".join(random.Random(part).choices("fjpqvwx", k=99)) + "'" for part in range(15))
    words, megabytes = "fjx " * 99_999 + "fjx", word * 6667
    zeros = gzip.compress(b"a\n" + b"0" * (65 * 2**20), mtime=0)
    return [
        too_long("a word of 1,500 letters", word, 1502, cut=False, long_text=False),
        too_long("a word of 1,500 letters, --too-long truncate", word, 1502, cut=True, long_text=False),
        too_long("a line of 100,000 words", words, 400_001, cut=False, long_text=True, slow=True),
        too_long("a line of 100,000 words, --too-long truncate", words, 400_001, cut=True, long_text=True, slow=True),
        too_long("a line of 10 MB", megabytes, 10_000_502, cut=False, long_text=True, slow=True),
        too_long("a line of 10 MB, --too-long truncate", megabytes, 10_000_502, cut=True, long_text=True, slow=True),
        none_taken(
            "a line of 65 MiB", "odd.en: line 2, at byte 2, is longer than 67108864 bytes", written(zeros, PLAIN_DE)
        ),
    ]


def packed() -> list[Oddity]:
    """Packed files, known by their first bytes and not by their names."""
    damaged = "odd.en begins like a gzip file but is cut off or damaged "
    cut_off = none_taken("gzip cut off", f"{damaged}after line 3: ", written(PACKED[:-4], PLAIN_DE))
    garbage = none_taken("gzip with garbage behind it", f"{damaged}after line 3: ", written(PACKED + b"xx", PLAIN_DE))
    members = b"".join(gzip.compress(text([line]), mtime=0) for line in EN)
    return [
        taken("gzip named .txt", EN, DE, make=written(PACKED, PLAIN_DE, ("odd.txt", "odd.de"))),
        taken("plain text named .gz", EN, DE, make=written(PLAIN, PLAIN_DE, ("odd.gz", "odd.de.gz"))),
        taken("gzip of several members", EN, DE, raw=members),
        nothing("gzip of nothing", written(gzip.compress(b"", mtime=0), b"")),
        cut_off,
        garbage,
        none_taken("a gzip header alone", f"{damaged}at its beginning: ", written(b"\x1f\x8b\x08\0", PLAIN_DE)),
        bad_bytes("an xz file", lzma.compress(PLAIN), "odd.en is an xz file; unpack it: xz -dc"),
        bad_bytes("a bzip2 file", bz2.compress(PLAIN), "odd.en is a bzip2 file; unpack it: bzip2 -dc"),
        bad_bytes("a zip file", b"PK\x03\x04\x14\0", "odd.en is a zip file; unpack it: unzip -p"),
        bad_bytes(
            "a picture (PNG)", b"\x89PNG\r\n\x1a\n\0\0", "odd.en: line 1 is not UTF-8: byte 0x89 at byte offset 0"
        ),
    ]


def places() -> list[Oddity]:
    """What is behind a path."""
    missing = refused("there is no such folder")
    return [
        none_taken(
            "a directory", "is a directory; a text file was expected", at("{}", "{}"), train=refused("manifest")
        ),
        none_taken("a missing file", "odd.en: No such file or directory", at("{}/odd.en", "{}/odd.de"), train=missing),
        none_taken("a file that may not be read", "odd.en: Permission denied", unreadable(PLAIN, PLAIN_DE)),
        none_taken("a loop of symbolic links", "Too many levels of symbolic links", link_to_itself, train=missing),
        none_taken(
            "a name of 300 characters", "File name too long", at("{}/" + "x" * 300, "{}/odd.de"), train=refused("")
        ),
        nothing("/dev/null", at(os.devnull, os.devnull)),
        taken("a symbolic link", EN, DE, make=link(PLAIN, PLAIN_DE)),
        taken("a named pipe (FIFO)", EN, DE, make=fifo(PLAIN, PLAIN_DE)),
        taken("gzip through a named pipe", EN, DE, make=fifo(PACKED, PLAIN_DE)),
        taken("standard input", EN, DE, make=stdin(PLAIN, PLAIN_DE)),
        none_taken("standard input is closed", "Standard input is closed", closed_stdin(PLAIN_DE), train=missing),
        taken("a name with spaces and a line feed", EN, DE, make=written(PLAIN, PLAIN_DE, ("a b\nc.en", "ä ö.de"))),
        taken("a name that is not UTF-8", EN, DE, make=written(PLAIN, PLAIN_DE, ("a\udcff.en", "a\udcff.de"))),
    ]


def forms() -> list[Oddity]:
    """TSV and JSONL; only `prepare` knows these forms."""
    pairs = list(zip(EN, DE, strict=True))
    tabs, keys = [TSV[0], f"{TSV[1]}\tCC-BY\t2", TSV[2]], [JSONL[0], '{"source": "a"}']
    breaks = [JSONL[0], json.dumps({"source": "The cat\nsees.", "target": DE[1]}), JSONL[2]]
    half = ['{"source": "\\ud800", "target": "a"}', JSONL[1]]
    columns = prepared(3, 3, ["1 lines with more than two columns, the others left out"])
    spaces = prepared(3, 3, ["1 with line breaks inside, replaced by spaces"])
    no_tab, no_key = refused("odd.en: line 2 has no tab: 'no tab'"), refused("line 2 has no key 'target'")
    return [
        of_pairs("tsv", "TSV with more columns", tabs, columns, *pairs),
        of_pairs("tsv", "TSV without a tab", [TSV[0], "no tab"], no_tab),
        of_pairs("tsv", "TSV with an empty column", [TSV[0], "\ta"], prepared(1, 2, ["1 left out, because"]), pairs[0]),
        of_pairs("jsonl", "JSONL with a line break", breaks, spaces, pairs[0], ("The cat sees.", DE[1]), pairs[2]),
        of_pairs("jsonl", "JSONL without a key", keys, no_key),
        of_pairs("jsonl", "JSONL with half a surrogate pair", half, refused("line 1 holds half a surrogate pair")),
    ]


SECTIONS = {
    "Encodings": bytes_of_text(),
    "Line ends, empty lines, counts": line_ends(),
    "Unusual characters": characters(),
    "Long lines": long_lines(),
    "Packed files": packed(),
    "Files and places": places(),
    "TSV and JSONL (`prepare`; for the others a line is a line)": forms(),
}
ODDITIES = [oddity for oddities in SECTIONS.values() for oddity in oddities]
# Left to the long check: each has a neighbour that goes the same way.
LATER = {
    "U+FFFF, U+10FFFF, private use",
    "CRLF on one side alone",
    "empty lines at the end",
    "zero-width characters",
    "right-to-left text and marks",
    "tabs inside: kept",
    "300 spaces",
    "spaces at both ends",
    "characters never seen in training: spelled in bytes",
    "text like options and paths: text",
    "text like markup",
    "plain text named .gz",
    "gzip of several members",
    "a symbolic link",
    "TSV with an empty column",
}
