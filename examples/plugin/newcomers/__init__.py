"""A plug-in: two architectures, an attention score, a task, an export format and a logger, from outside the package."""

from __future__ import annotations

from manyheads.catalogue import Architecture, Task

BAG = Architecture(
    "translation", f"{__name__}.bag_config:BagConfig", f"{__name__}.bag_config:PRESETS", f"{__name__}.bag:build"
)
RECURRENT = Architecture(
    "language-modelling",
    f"{__name__}.recurrent_config:RecurrentConfig",
    f"{__name__}.recurrent_config:PRESETS",
    f"{__name__}.recurrent:build",
)
COUNTING = Task(
    "bytes",
    (f"{__name__}.counting", "manyheads.tasks.language_modelling"),
    "language-modelling",
    prepared_as="counting",
    run=f"{__name__}.counting.settings:CountingConfig",
)

MANYHEADS = {
    "architecture.bag": BAG,
    "architecture.recurrent": RECURRENT,
    "score.cosine": f"{__name__}.cosine:CosineAttentionConfig",
    "task.counting": COUNTING,
    "format.numpy": f"{__name__}.numpy_format:NUMPY",
    "logger.lines": f"{__name__}.lines:LinesLogger",
}
