"""Mutations of files that respect their structure: what comes out is still nearly such a file.

Random bytes are refused by the first check of a reader. So JSON stays JSON, a safetensors file keeps its length field,
gzip stays packed. A quarter of the mutations is of bytes, whatever the kind.

Every mutation draws from a `random.Random`, so a seed repeats it; hypothesis hands one that it can shrink.
"""

import gzip
import json
import struct
import zlib
from collections.abc import Callable
from random import Random
from typing import Any

__all__ = ["KINDS", "mutate", "random_json"]

ODD_NUMBERS = (0, -1, 1, 2, 7, 255, 2**16, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**64, -(2**63), 10**30, 0.5, -0.0)
ODD_FLOATS = (1e-320, 1e308, float("inf"), float("-inf"), float("nan"))
ODD_TEXTS = (
    "",
    " ",
    "\0",
    "\n",
    "\x1b[31m",
    "\u202e",
    "\ud800",
    "\ufeff",
    "\u2028",
    "..",
    "/etc/passwd",
    "../../x",
    "null",
    "true",
    "nan",
    "a" * 5000,
    "é" * 300,
    "e" + "\u0301" * 300,
    "𝔘𝔫𝔦",
    "[" * 300,
    "{}",
    "!!python/object",
    "%s%n",
    "-1",
    "1e999",
    "０",
    "I\u0307",
)


def random_json(random: Random, depth: int = 3) -> Any:
    """Draw a value of any JSON type, nested at most so deep."""
    kind = random.randrange(8 if depth else 6)
    if kind < 2:
        return random.choice(ODD_NUMBERS)
    if kind == 2:
        return random.choice(ODD_FLOATS)
    if kind == 3:
        return random.choice((True, False, None))
    if kind < 6:
        return random.choice(ODD_TEXTS)
    size = random.randrange(4)
    if kind == 6:
        return [random_json(random, depth - 1) for _ in range(size)]
    return {random.choice(ODD_TEXTS): random_json(random, depth - 1) for _ in range(size)}


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner: list[tuple[Any, ...]] = []
    if isinstance(value, dict):
        inner = [place for key, one in value.items() for place in _places(one, (*path, key))]
    if isinstance(value, list):
        inner = [place for key, one in enumerate(value[:50]) for place in _places(one, (*path, key))]
    return [path, *inner]


def _change_value(random: Random, value: Any) -> Any:
    """Change one place of nested data: replace, remove, duplicate, rename, swap or wrap it."""
    path = random.choice(_places(value))
    if not path:
        return random.choice((random_json(random), [value], value, value, value))
    holder = value
    for key in path[:-1]:
        holder = holder[key]
    key, old = path[-1], holder[path[-1]]
    action = random.randrange(8)
    if action == 0 and isinstance(holder, dict):
        del holder[key]
    elif action == 1 and isinstance(holder, dict):
        holder[random.choice((*ODD_TEXTS, f"{key}x", str(key).upper()))] = holder.pop(key)
    elif action == 1:
        holder.insert(key, random.choice((old, random_json(random))))
    elif action == 2:
        holder[key] = _near(random, old)
    elif action == 3:
        holder[key] = random.choice(([old], {"x": old}, str(old), [old] * 3))
    elif action == 4:
        others = [place for place in _places(value) if place]
        other: Any = value
        for step in random.choice(others):
            other = other[step]
        holder[key] = json.loads(json.dumps(other))
    else:
        holder[key] = random_json(random)
    return value


def _near(random: Random, old: Any) -> Any:
    """A value of the same type, beside the old one."""
    if isinstance(old, bool):
        return not old
    if isinstance(old, int):
        return random.choice((old + 1, old - 1, -old, old * 1000, old << 40, float(old)))
    if isinstance(old, float):
        return random.choice((-old, old * 1e300, old / 1e300, *ODD_FLOATS))
    if isinstance(old, str):
        return random.choice((old[:-1], old * 2, old + random.choice(ODD_TEXTS), old.upper(), old[::-1]))
    return random_json(random)


def _json(random: Random, content: bytes) -> bytes:
    value = json.loads(content)
    for _ in range(random.choice((1, 1, 1, 2, 3, 8))):
        value = _change_value(random, value)
    return json.dumps(value, ensure_ascii=random.random() < 0.8, indent=random.choice((None, 1))).encode(
        "utf-8", "surrogatepass"
    )


def _jsonl(random: Random, content: bytes) -> bytes:
    lines = content.split(b"\n")
    place = random.randrange(len(lines))
    try:
        lines[place] = _json(random, lines[place]).replace(b"\n", b" ")
    except ValueError:
        lines.insert(place, json.dumps(random_json(random)).encode())
    return _shuffled(random, lines)


def _shuffled(random: Random, lines: list[bytes]) -> bytes:
    action, place = random.randrange(8), random.randrange(len(lines))
    if action == 0:
        del lines[place]
    elif action == 1:
        lines.insert(place, lines[random.randrange(len(lines))])
    elif action == 2:
        random.shuffle(lines)
    return b"\n".join(lines)


_TAGS = ("timestamp", "bool", "int", "float", "binary", "set", "omap", "null", "seq", "map", "pairs", "merge", "str")


def _yaml(random: Random, content: bytes) -> bytes:
    lines = content.decode("utf-8").split("\n")
    place = random.randrange(len(lines))
    line = lines[place]
    name, colon, value = line.partition(": ")
    action = random.randrange(9)
    if action == 0:
        lines[place] = f"{name}{colon}!!{random.choice(_TAGS)} {value}"
    elif action == 1:
        lines[place] = f"{name}{colon}!!{random.choice(_TAGS)} {random.choice(ODD_TEXTS)[:50]}"
    elif action == 2:
        lines[place] = f"{name}{colon}{json.dumps(random_json(random))}"
    elif action == 3:
        lines[place] = f"{name}{colon}&a {value}"
        lines.insert(random.randrange(len(lines)), "extra: *a")
    elif action == 4:
        lines[place] = line.replace(" ", random.choice(("", "  ", "\t", "\u00a0")), 1)
    elif action == 5:
        lines[place] = (
            f"{name}: {random.choice(('~', '.inf', '.nan', '0x10', '1_000', '1:30', 'yes', '2001-13-01', '<<'))}"
        )
    elif action == 6:
        lines.insert(place, line)
    elif action == 7:
        lines[place] = f"{name}x{colon}{value}"
    else:
        lines[place] = f"{name}{colon}{random.choice(ODD_NUMBERS)}"
    return "\n".join(lines).encode("utf-8", "surrogatepass")


def _text(random: Random, content: bytes) -> bytes:
    """Lines, words and odd characters."""
    pieces = [text.encode("utf-8", "surrogatepass") for text in ODD_TEXTS]
    pieces += [b"\xff", b"\xc3", b"\r", b"\r\n", b"\x85", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\t", b"|||", b'"']
    pieces += [
        b"(",
        b")",
        b"<",
        b">",
        b"&lt;",
        b"&#0;",
        b"<!--",
        b"-->",
        b"```",
        b"`",
        b"*",
        b"_",
        b"[](",
        b"00:00",
        b"|",
        b",",
    ]
    content = bytearray(content)
    for _ in range(random.choice((1, 1, 2, 3, 8))):
        place = random.randrange(len(content) + 1)
        action = random.randrange(4)
        if action < 2:
            content[place:place] = random.choice(pieces) * random.choice((1, 1, 1, 2, 40))
        elif action == 2:
            del content[place : place + random.choice((1, 1, 5, 50))]
        else:
            other = random.randrange(len(content) + 1)
            content[place:place] = content[other : other + random.choice((1, 10, 100))]
    lines = bytes(content).split(b"\n")
    return _shuffled(random, lines)


def _bytes(random: Random, content: bytes) -> bytes:
    """Bits, zeroes, cuts, copies, and numbers of two to eight bytes."""
    changed = bytearray(content)
    for _ in range(random.choice((1, 1, 2, 4))):
        place, action = random.randrange(len(changed) + 1), random.randrange(6)
        if action == 0 and place < len(changed):
            changed[place] ^= 1 << random.randrange(8)
        elif action == 1:
            del changed[place:]
        elif action == 2:
            changed[place : place + 64] = bytes(len(changed[place : place + 64]))
        elif action == 3:
            changed[place:place] = random.randbytes(random.choice((1, 4, 64)))
        elif action == 4:
            number = random.choice((0, 1, 2**31 - 1, 2**32 - 1, 2**63 - 1, 2**64 - 1, len(changed)))
            packed = struct.pack(random.choice((">Q", "<Q")), number)[: random.choice((2, 4, 8))]
            changed[place : place + len(packed)] = packed
        else:
            other = random.randrange(len(changed) + 1)
            changed[place:place] = changed[other : other + 32]
    return bytes(changed)


def _safetensors(random: Random, content: bytes) -> bytes:
    """The header as JSON, with a right length in front; sometimes a wrong one."""
    size = int.from_bytes(content[:8], "little")
    header = _json(random, content[8 : 8 + size])
    length = len(header) if random.random() < 0.9 else random.choice((0, 1, len(header) + 1, 2**40, 2**63))
    return struct.pack("<Q", length) + header + content[8 + size :]


def _gzip(random: Random, content: bytes) -> bytes:
    """The text inside, in one member or several, whole or damaged."""
    inner = _text(random, gzip.decompress(content))
    cut = random.randrange(len(inner) + 1)
    packed = gzip.compress(inner[:cut], 1) + random.choice((b"", gzip.compress(inner[cut:], 1)))
    return random.choice((packed, packed, _bytes(random, packed), packed + b"tail"))


def _png(random: Random, content: bytes) -> bytes:
    """A chunk: its size, type or content, with a right checksum."""
    chunks, place = [], 8
    while place + 12 <= len(content):
        size = int.from_bytes(content[place : place + 4], "big")
        chunks.append((content[place + 4 : place + 8], content[place + 8 : place + 8 + size]))
        place += 12 + size
    which = random.randrange(len(chunks))
    kind, body = chunks[which]
    action = random.randrange(5)
    if action == 0:
        chunks[which] = kind, _bytes(random, body)
    elif action == 1:
        chunks[which] = random.choice((b"tEXt", b"iTXt", b"zTXt", b"PLTE", b"tRNS", b"acTL", b"IDAT", b"iCCP")), body
    elif action == 2:
        del chunks[which]
    elif action == 3:
        chunks.insert(which, (random.choice((b"tEXt", b"zTXt", b"iTXt")), b"a\0\0" + zlib.compress(bytes(10**6))))
    else:
        numbers = struct.pack(">II", random.choice((0, 1, 4, 65535, 2**31 - 1)), random.choice((0, 4, 2**31 - 1)))
        chunks[0] = chunks[0][0], numbers + chunks[0][1][8:]
    packed = [
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in chunks
    ]
    return content[:8] + b"".join(packed)


KINDS: dict[str, Callable[[Random, bytes], bytes]] = {
    "json": _json,
    "jsonl": _jsonl,
    "yaml": _yaml,
    "text": _text,
    "bytes": _bytes,
    "safetensors": _safetensors,
    "gzip": _gzip,
    "png": _png,
}


def mutate(kind: str, content: bytes, random: Random) -> bytes:
    """Return another file like this one. kind: one of KINDS."""
    try:
        return (_bytes if random.random() < 0.25 else KINDS[kind])(random, content)
    except (ValueError, IndexError, RecursionError, zlib.error, EOFError, OSError):
        return _bytes(random, content)  # it had been changed so much that it is of that kind no more
