"""What `gpu.py` prints of its results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def lines_of(part: dict[str, Any]) -> list[str]:
    """Return the results of a part for people."""
    if "skipped" in part:
        return [f"left out: {part['skipped']}"]
    # Numbers that were compared, and times of kernels, are in the file.
    facts = {name: text for name, text in part.get("facts", {}).items() if ", plain " not in str(text)}
    lines = [f"{name}: {text}" for name, text in facts.items() if "us in " not in name]
    for name, side in part.get("sides", {}).items():
        lines.append(f"{name}: {_of_side(side)}")
    return lines + ([part["error"]] if "error" in part else [])


def _of_side(side: dict[str, Any]) -> str:
    if "error" in side:
        return str(side["error"])
    share = f", {side['share_of_products']['median']:.0%} of the products" if "share_of_products" in side else ""
    tokens = f", {side['tokens_per_second']['median']:,.0f} tokens/s" if "tokens_per_second" in side else ""
    best = side.get("of_best_peer")
    ratio = "" if best is None else f", {best['median']:.2f} times {best['peer']} ({_range(best)})"
    return f"{side['step_seconds']['median'] * 1e3:.2f} ms a step{tokens}{share}{ratio}"


def _range(numbers: Mapping[str, Any]) -> str:
    return f"{numbers['lowest']:.2f} to {numbers['highest']:.2f}"


def table(parts: Mapping[str, dict[str, Any]]) -> list[str]:
    """Return a line for each side of each part: milliseconds, tokens per second, share, ratio to the best peer."""
    rows = [("part", "side", "ms", "tokens/s", "share", "best peer")]
    notes = []
    for name, part in parts.items():
        problem = part.get("error") or part.get("skipped")
        if problem:
            notes.append(f"{name}: {problem[:200]}")
        elif not part.get("sides"):
            rows.append((name, _of_facts(part.get("facts", {})), "", "", "", ""))
        for title, side in part.get("sides", {}).items():
            if "error" in side:
                notes.append(f"{name}, {title}: {side['error'][:160]}")
                continue
            figures = [f"{side['step_seconds']['median'] * 1e3:.2f}"]
            figures.append(f"{side['tokens_per_second']['median']:,.0f}" if "tokens_per_second" in side else "")
            figures.append(f"{side['share_of_products']['median']:.0%}" if "share_of_products" in side else "")
            figures.append(f"{side['of_best_peer']['median']:.2f}" if "of_best_peer" in side else "")
            rows.append((name, title, *figures))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            one.ljust(width) if number < 2 else one.rjust(width)
            for number, (one, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines + notes


def _of_facts(facts: dict[str, Any]) -> str:
    if "tests" in facts:
        return str(facts["tests"])
    wanted = [name for name in facts if name.endswith(("kernels a step", "busy share"))]
    if wanted:
        return ", ".join(f"{name} {facts[name]}" for name in wanted)
    return f"passed, {sum(', plain ' in str(text) for text in facts.values())} results compared"
