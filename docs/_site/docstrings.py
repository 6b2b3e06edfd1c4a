"""Our docstrings, as griffe's reader of Google's style takes them: sections apart, its unknown ones as paragraphs."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

_SECTION = re.compile(r"^(Paper|Args|Shape|Returns|Raises|Cost|State dict|Symbols|Differs): *(.*)$")


class Docstrings(Extension):
    """A blank line before each section; `Paper: ...` and other sections of one line as paragraphs with a bold word."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None and not obj.is_alias:
            obj.docstring.value = apart(obj.docstring.value)


def apart(text: str) -> str:
    lines: list[str] = []
    within = False
    for line in text.split("\n"):
        found = _SECTION.match(line)
        if found is not None and found[2]:
            lines += ["", f"**{found[1]}:** {found[2]}"]
            within = True
            continue
        if found is not None:
            lines += ["", line]
        else:
            # What is indented below goes on with the paragraph.
            lines.append(line.strip() if within and line.startswith("    ") else line)
        within = within and found is None and bool(line.strip())
    return "\n".join(lines)
