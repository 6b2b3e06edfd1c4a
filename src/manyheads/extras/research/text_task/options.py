"""Options of `manyheads evaluate` for language models: those of the task, and the experiments of this extra.

Several models, hash rounds, effective context length, dynamic evaluation.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from manyheads.config.checks import ABOVE_ZERO, FRACTION, at_least, check
from manyheads.config.options import CommandPage, argument, option, refuse_given
from manyheads.errors import ConfigError
from manyheads.extras.research.comparing import check_comparison
from manyheads.tasks.language_modelling import options as task
from manyheads.tasks.language_modelling.options import PREPARE, SCORE

__all__ = ["EVALUATE", "PREPARE", "SCORE", "EvaluateOptions"]

MOST_HASHES = 1000


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(task.EvaluateOptions):
    """Options of `manyheads evaluate` for a language model."""

    others: tuple[str, ...] = argument(
        "Other models of the same vocabulary, to be compared with the first one on the same text.",
        default=(),
        metavar="MODEL ...",
        after="model",
    )
    page: str | None = option("Of several models: write the comparison as one HTML page.", default=None, metavar="FILE")
    differences: int = option("Of several models: show the N passages that differ most.", default=10, metavar="N")
    num_hashes: tuple[str, ...] = option(
        "For a Reformer: hash rounds, or full for exact attention; several values give a table.",
        default=(),
        metavar="N|full ...",
        default_is="the model's",
        after="max_tokens",
    )
    recl: bool = option(
        "With --beside: the relative effective context length of all models (Dai et al. 2019, appendix C).",
        default=False,
    )
    recl_step: int = option("With --recl: difference between two context lengths, in tokens.", default=100, metavar="N")
    recl_longest: int | None = option(
        "With --recl: the longest context, in tokens.",
        metavar="N",
        default_is="1,000, or less if a model or the text is shorter",
    )
    recl_hardest: tuple[float, ...] = option(
        "With --recl: share of the tokens that count, the hardest ones. Each share gives a column.",
        default=(0.1, 0.5, 1.0),
        metavar="R ...",
    )
    dynamic: Literal["rms", "sgd"] | None = option(
        "Adapt the weights to the text while it is read (Krause et al. 2018). rms divides gradients by their usual "
        "size; sgd does not. The scores are not comparable with static ones. The model's files are not changed.",
        default=None,
    )
    dynamic_rate: float | None = option(
        "With --dynamic: the learning rate.", metavar="R", default_is="rms: 0.00001 per token of a segment"
    )
    dynamic_decay: float | None = option(
        "With --dynamic: the fraction by which weights return to the trained ones after each segment.",
        metavar="R",
        default_is="0.0004 per token of a segment",
    )
    dynamic_epsilon: float = option(
        "With --dynamic rms: added to the usual size of a gradient.", default=2e-5, metavar="R"
    )
    dynamic_statistics: str | None = option(
        "With --dynamic rms: text from which the usual size of gradients is measured.",
        metavar="FILE",
        default_is="the data's training text",
    )
    dynamic_tokens: int | None = option(
        "With --dynamic rms: read only the first N tokens of that text.", metavar="N", default_is="all"
    )
    beside: tuple[str, ...] = option(
        "With --num-hashes or --recl: other models for the same data. Each gives a row of the table.",
        default=(),
        metavar="MODEL ...",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dry_run and self.num_hashes:
            raise ConfigError("--dry-run does not measure hash rounds; leave out --num-hashes or --dry-run.")
        if self.num_hashes and len(self.memory_len) > 1:
            raise ConfigError("--num-hashes and several --memory-len make two tables; give one of them.")
        if self.beside and not (self.num_hashes or self.recl):
            raise ConfigError(
                "--beside compares models by hash rounds or context; give --num-hashes or --recl with it."
            )
        self._check_recl()
        self._check_dynamic()
        self._check_ensemble()
        for_one_model = {
            "--beside": self.beside,
            "--num-hashes": self.num_hashes,
            "--recl": self.recl,
            "--dynamic": self.dynamic,
            "--dry-run": self.dry_run,
            "--ensemble": self.models.ensemble,
            "--memory-len with several values": len(self.memory_len) > 1,
        }
        check_comparison(self, for_one_model)
        for text in self.num_hashes:
            if text != "full" and not (text.isdecimal() and 0 < int(text) <= MOST_HASHES):
                raise ConfigError(f"--num-hashes is {text!r}; give numbers from 1 to {MOST_HASHES}, or full.")

    def _check_recl(self) -> None:
        if not self.recl:
            names = ("recl_step", "recl_longest", "recl_hardest")
            given = {f"--{name.replace('_', '-')}": getattr(self, name) != getattr(type(self), name) for name in names}
            refuse_given(given, "{} cannot be used without --recl; give it as well.")
            return
        if not self.beside:
            raise ConfigError("--recl compares two models or more; name the others by --beside MODEL ...")
        names_given = [Path(name) for name in (self.model, *self.beside)]
        if twice := [str(name) for place, name in enumerate(names_given) if name in names_given[:place]]:
            raise ConfigError(f"--recl compares different models, but {twice[0]} is named twice; name each model once.")
        clashes = {
            "--num-hashes": self.num_hashes,
            "--memory-len": self.memory_len,
            "--segment-len": self.segment_len,
            "--ext-len": self.ext_len,
            "--same-length": self.same_length,
            "--lanes": self.lanes,
            "--documents": self.documents,
            "--dry-run": self.dry_run,
        }
        refuse_given(clashes, "--recl sets the context of the models itself; leave out {}.")
        check(self, "--", at_least(1), "recl_step")
        if self.recl_longest is not None and self.recl_longest < 2 * self.recl_step:
            raise ConfigError(
                f"--recl-longest is {self.recl_longest:,}, less than two steps of {self.recl_step:,}; raise it, or"
                " lower --recl-step."
            )
        for share in self.recl_hardest:
            if not 0 < share <= 1:
                raise ConfigError(f"--recl-hardest holds {share:g}; shares are above 0 and at most 1.")

    def _check_ensemble(self) -> None:
        if not self.models.ensemble:
            return
        clashes = {"--num-hashes": self.num_hashes, "--recl": self.recl, "--dynamic": self.dynamic}
        if found := [name for name, value in clashes.items() if value]:
            raise ConfigError(f"{' and '.join(found)} is for one model, but --ensemble averages several; leave it out.")

    def _check_dynamic(self) -> None:
        statistics = {
            "--dynamic-epsilon": self.dynamic_epsilon != type(self).dynamic_epsilon,
            "--dynamic-statistics": self.dynamic_statistics is not None,
            "--dynamic-tokens": self.dynamic_tokens is not None,
        }
        if self.dynamic is None:
            rule = {
                "--dynamic-rate": self.dynamic_rate is not None,
                "--dynamic-decay": self.dynamic_decay is not None,
            }
            refuse_given({**rule, **statistics}, "{} cannot be used without --dynamic; give --dynamic rms.")
            return
        clashes = {"--num-hashes": self.num_hashes, "--recl": self.recl, "--dry-run": self.dry_run}
        refuse_given(clashes, "--dynamic changes weights while it reads; leave out {}.")
        if self.dynamic == "sgd":
            refuse_given(statistics, "--dynamic sgd uses no statistics; leave out {}, or take rms.")
            if self.dynamic_rate is None:
                raise ConfigError("--dynamic sgd has no usual learning rate; give --dynamic-rate, such as 0.1.")
        check(self, "--", ABOVE_ZERO, "dynamic_epsilon")
        check(self, "--", at_least(0), "dynamic_rate")
        check(self, "--", FRACTION, "dynamic_decay")
        check(self, "--", at_least(1), "dynamic_tokens")


EVALUATE = CommandPage(
    EvaluateOptions,
    task.EVALUATE.description.replace(
        "--ensemble evaluates",
        """Several models are compared on the same text: perplexities with a paired bootstrap over its documents or
passages against the first model, and the passages that differ most; --page writes them as a page.
--ensemble evaluates""",
    ),
    (
        *task.EVALUATE.examples[:3],
        "manyheads evaluate runs/xl-demo runs/lm-demo --text other.txt --page compared.html",
        "manyheads evaluate runs/xl-demo --recl --beside runs/lm-demo",
        "manyheads evaluate runs/xl-demo --dynamic rms",
        *task.EVALUATE.examples[3:],
    ),
)
