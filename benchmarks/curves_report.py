"""What `curves.py` prints and draws: a table of the runs, our minutes to each peer's quality, a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from harness import markdown_table

__all__ = ["LABELS", "QUALITY", "draw", "minutes_to", "report"]

LABELS = {
    "ours": "manyheads",
    "torch": "torch.nn.Transformer, Adam",
    "joeynmt": "JoeyNMT 2.3",
    "gpt2": "GPT-2 (transformers)",
    "short": "manyheads, pieces cut short",
    "exact": "our decoder (exact attention)",
}
QUALITY = {
    "translation": "validation BLEU, greedy search",
    "language": "validation bits per byte",
    "long": "validation bits per byte",
}
ORDERS = ("ours first", "peers first")


def rises(what: str) -> bool:
    """Whether a higher figure is the better one."""
    return what == "translation"


def minutes_to(looks: Sequence[Mapping[str, Any]], quality: float, rising: bool) -> tuple[float, bool] | None:
    """The minutes of training after which a run first has a quality, on the line between two looks.

    Returns: minutes, and whether they are only the most, since the first look has it already; None: it never has it.
    """
    sign = 1 if rising else -1
    before: Mapping[str, Any] | None = None
    for look in looks:
        gain = sign * (look["quality"] - quality)
        if gain >= 0:
            if before is None:
                return look["seconds"] / 60, True
            lack = sign * (quality - before["quality"])
            share = lack / (lack + gain)
            return (before["seconds"] + share * (look["seconds"] - before["seconds"])) / 60, False
        before = look
    return None


def report(results: Mapping[str, Any]) -> list[str]:
    """Lines in Markdown: all runs, then our minutes to each peer's last quality, then what was left out."""
    what, runs = results["what"], sorted(results["runs"], key=lambda run: run["round"])
    if not runs:
        return [*_left_out(results)]
    names = [name for name in LABELS if any(run["side"] == name for run in runs)]
    places = 2 if rises(what) else 3
    header = ("side", "order", "precision", "parameters", "updates", "million tokens", "tokens/s", "peak MiB")
    header = (*header, QUALITY[what], "test", *(("test, own search",) if what == "translation" else ()))
    rows = []
    for name in names:
        for run in runs:
            if run["side"] == name:
                shown = [LABELS[name], ORDERS[(run["round"] - 1) % 2], run["precision"], f"{run['parameters']:,}"]
                shown += [f"{run['updates']:,}", f"{run['tokens'] / 1e6:.2f}", f"{run['tokens_per_second']:,.0f}"]
                shown += [f"{run['peak_bytes'] / 2**20:,.0f}", f"{run['looks'][-1]['quality']:.{places}f}"]
                test = run["test"]
                shown.append(f"{test['greedy' if what == 'translation' else 'own']['quality']:.{places}f}")
                if what == "translation":
                    shown.append(f"{test['own']['quality']:.{places}f}" if "own" in test else "greedy")
                rows.append(shown)
    lines = [
        f"{results['minutes']:g} minutes of training each, {_where(results)}. Better is"
        f" {'higher' if rises(what) else 'lower'}.",
        "",
        *markdown_table(header, rows, num_left=3),
        "",
        *_looks(results, names, places),
        "",
        *_minutes(results, names, places),
    ]
    return [*lines, *_speeds(results), *_left_out(results)]


def _where(results: Mapping[str, Any]) -> str:
    machine = results["machine"]
    return (
        f"{machine['cores']} cores of {machine['cpu']} ({machine['class']}), torch {machine['torch']}, at"
        f" {machine['commit']}, {machine['date']}"
    )


def _looks(results: Mapping[str, Any], names: Sequence[str], places: int) -> list[str]:
    """A row a side and order: the quality at each look."""
    num_looks = results["looks"]
    header = ["side", "order", *(f"{results['minutes'] * (one + 1) / num_looks:.3g} min" for one in range(num_looks))]
    rows = []
    for name in names:
        for run in sorted(results["runs"], key=lambda one: one["round"]):
            if run["side"] == name:
                found = {look["number"]: f"{look['quality']:.{places}f}" for look in run["looks"]}
                cells = [found.get(one + 1, "") for one in range(num_looks)]
                rows.append([LABELS[name], ORDERS[(run["round"] - 1) % 2], *cells])
    return markdown_table(header, rows, num_left=2)


def _minutes(results: Mapping[str, Any], names: Sequence[str], places: int) -> list[str]:
    """A sentence a peer and round: when ours had what the peer has at its end."""
    what, minutes = results["what"], results["minutes"]
    ours = {run["round"]: run for run in results["runs"] if run["side"] == "ours"}
    lines = []
    for name in names:
        for run in sorted(results["runs"], key=lambda one: one["round"]):
            if run["side"] != name or name == "ours" or run["round"] not in ours:
                continue
            quality = run["looks"][-1]["quality"]
            found = minutes_to(ours[run["round"]]["looks"], quality, rises(what))
            said = f"not within {minutes:g}"
            if found is not None:
                said = f"{'at most ' if found[1] else ''}{found[0]:.2g}"
            order = ORDERS[(run["round"] - 1) % 2]
            lines.append([LABELS[name], order, f"{quality:.{places}f}", said])
    if not lines:
        return []
    header = ("peer", "order", f"its {QUALITY[what]} after {minutes:g} minutes", "minutes of manyheads to it")
    return [*markdown_table(header, lines, num_left=2), ""]


def _speeds(results: Mapping[str, Any]) -> list[str]:
    lines = []
    for name, rates in results.get("speeds", {}).items():
        faster = max(rates, key=lambda precision: rates[precision])
        told = ", ".join(f"{precision} {rate:,.0f}" for precision, rate in rates.items())
        lines.append(f"{LABELS[name]}: {told} tokens/s; {faster} is the faster. Trained in {results['precision']}.")
    return lines


def _left_out(results: Mapping[str, Any]) -> list[str]:
    return [f"Left out: {LABELS[name]}. Reason: {why}" for name, why in results.get("left_out", {}).items()]


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Quality against minutes: a line a side, the mean of its rounds, and a dot for each look of each round."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    what = results["what"]
    figure, axes = plt.subplots(figsize=(9, 5), layout="constrained")
    for name, label in LABELS.items():
        runs = [run for run in results["runs"] if run["side"] == name]
        if not runs:
            continue
        numbers = sorted({look["number"] for run in runs for look in run["looks"]})
        groups = [[look for run in runs for look in run["looks"] if look["number"] == number] for number in numbers]
        line = axes.plot(
            [mean(look["seconds"] / 60 for look in group) for group in groups],
            [mean(look["quality"] for look in group) for group in groups],
            label=f"{label} ({len(runs)} {'run' if len(runs) == 1 else 'runs'})",
        )[0]
        found = [look for group in groups for look in group]
        axes.plot(
            [look["seconds"] / 60 for look in found],
            [look["quality"] for look in found],
            linestyle="", marker="o", markersize=4, color=line.get_color(),
        )  # fmt: skip
    better = "higher" if rises(what) else "lower"
    axes.set(xlabel="training time (minutes)", ylabel=f"{QUALITY[what]} ({better} is better)", xlim=(0, None))
    axes.grid(alpha=0.3)
    figure.legend(loc="outside upper center", ncols=3)  # above the axes, so that it covers no line
    figure.savefig(path, dpi=120)
    plt.close(figure)
