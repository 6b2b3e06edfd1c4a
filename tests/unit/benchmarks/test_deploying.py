"""The table of benchmarks/deploying.py, and the order of what it translates."""

from collections.abc import Callable, Sequence
from types import ModuleType

BenchmarkModule = Callable[[str], ModuleType]


def test_a_line_for_each_format(benchmark_module: BenchmarkModule) -> None:
    own = {"num_bytes": 4_000_000, "seconds": [2.0, 2.0, 3.0], "bleu": 30.0, "num_equal": 100}
    made = {"export_seconds": 1.25, "export_peak_bytes": 5e8, "check": None}
    other = {"num_bytes": 1_000_000, "seconds": [1.0, 2.0, 1.0], "bleu": 29.5, "num_equal": 99, **made}
    sides = {"manyheads": own, "ctranslate2 int8": other, "web": {"num_bytes": 9_000_000, **made}}
    sides["onnx"] = {"refused": "manyheads: the format onnx cannot hold it."}
    lines = benchmark_module("deploying").table({"sides": sides, "num_sentences": 100}).splitlines()
    assert lines[2:] == [
        "| manyheads | 4.0 | 50 | 1.00 (1.00 to 1.00) | 30.00 | 100 |  |  |",
        "| ctranslate2 int8 | 1.0 | 100 | 2.00 (1.00 to 3.00) | 29.50 | 99 | 1.2 | 500 |",
        "| web | 9.0 |  |  |  |  | 1.2 | 500 |",
        "| onnx | refused: manyheads: the format onnx cannot hold it. | | | | | | |",
    ]


def test_translations_are_in_the_order_of_the_texts(benchmark_module: BenchmarkModule) -> None:
    seen: list[list[str]] = []

    def upper(texts: Sequence[str]) -> list[str]:
        seen.append(list(texts))
        return [text.upper() for text in texts]

    texts = ["a" * (50 - number) + str(number) for number in range(40)]
    assert benchmark_module("deploying").whole(upper, texts) == [text.upper() for text in texts]
    assert [len(some) for some in seen] == [32, 8]
    assert seen[0] == sorted(seen[0], key=len)
