"""Corpus BLEU and chrF with sacreBLEU, always with the signature of the settings; the choice of its tokenizer; and
hints about texts whose form changes their scores.

The tokenizer depends on the target language and the script of the references. A script without spaces has to be cut,
because a sentence would otherwise be one token, and BLEU would be 0 for equal texts. sacreBLEU cuts Chinese, Japanese
and Korean by rules or dictionaries of their own (Post 2018, arXiv:1804.08771); for other scripts without spaces each
character is a token, which needs no further package.

Texts are compared in Unicode's composed form (NFC): the same letters may be stored in two ways, which look alike.
"""

from __future__ import annotations

import re
import unicodedata
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.tokenizers.tokenizer_spm import SPM_MODELS
from sacrebleu.utils import SACREBLEU_DIR

from manyheads.errors import ConfigError, DataError, MissingExtraError
from manyheads.evaluation.reading import BleuTokenizer

_TOKENISED = re.compile(
    r"(?<=\S) [.,](?= |$)|(?<=\S) (?:'(?:s|re|ve|ll|d|m)|n't)(?= |$)|&(?:apos|quot|#91|#93|#124);|@-@"
)
"""Signs that tokenizers have moved away from their word, or escaped as Moses does. Some languages have spaces before
other signs, such as French."""
_PLAIN = re.compile(r"\w[.,](?= |$)|\w\w'(?:s|re|ve|ll|d|m|t)\b")
_MOST_TEXTS = 10_000
"""Texts of each side that are looked at, evenly spaced."""
_FORMS = {
    "quotation marks “ ” „ « »": (re.compile("[“”„«»]"), re.compile('"')),
    "apostrophes ’": (re.compile("[‘’]"), re.compile("'")),
    "full-width signs such as ， ！": (re.compile("[\uff01-\uff5e\uffe5]"), re.compile(r"[!-/:-@]")),
    "ellipses …": (re.compile("…"), re.compile(r"\.\.\.")),
    "no-break spaces": (re.compile("[\u00a0\u202f]"), re.compile(r"(?<=\S) (?=[:;!?»%])|(?<=«) ")),
    "ideographic spaces": (re.compile("\u3000"), re.compile(r"(?<=\S) (?=\S)")),
}
"""Form of a sign -> itself, and the plain form."""
_CLEARLY = 0.8
"""Share of one form on one side, where the other side has as large a share of the other form."""
_LEAST = 5
"""Signs of a form; fewer may be chance."""


def text_hints(
    hypotheses: Sequence[str], all_references: Sequence[Sequence[str]], tokenize: str, option: str = "--tokenize"
) -> list[str]:
    """Return a sentence for each thing in the texts that a person should know about their scores.

    Args:
        hypotheses: translations.
        all_references: one or several references for each.
        tokenize: BLEU's tokenizer; `none` expects tokenised text.
        option: which chooses it.
    """
    references = [text for one in all_references for text in one]
    sides = {"translations": hypotheses, "references": references}
    hints = []
    if counts := {name: count for name, one in sides.items() if (count := _count_not_composed(one))}:
        shown = " and ".join(f"{count:,} of the {name}" for name, count in counts.items())
        hints.append(
            f"{shown} {'are' if sum(counts.values()) > 1 else 'is'} not in Unicode's composed form (NFC); scores"
            " compare all texts in NFC, which other tools may not do."
        )
    some = {name: one[:: 1 + len(one) // _MOST_TEXTS] for name, one in sides.items()}
    if tokenize != "none" and (names := [name for name, one in some.items() if _is_tokenised(one)]):
        hints.append(
            f"The {' and the '.join(names)} look tokenised (such as `Hello , world .`), which changes BLEU; score"
            f" detokenised text, or give {option} none if both sides are tokenised alike."
        )
    for form, patterns in _FORMS.items():
        shares = {name: _share(one, *patterns) for name, one in some.items()}
        for one, other in (("translations", "references"), ("references", "translations")):
            if (shares[one] or 0) >= _CLEARLY and (share := shares[other]) is not None and share <= 1 - _CLEARLY:
                hints.append(f"The {one} have {form}, the {other} plain ones; scores count them as different.")
    return hints


def _count_not_composed(texts: Sequence[str]) -> int:
    return sum(not unicodedata.is_normalized("NFC", text) for text in texts)


def _is_tokenised(texts: Sequence[str]) -> bool:
    """Return whether most signs that tokenizers move stand alone."""
    alone = sum(len(_TOKENISED.findall(text)) for text in texts)
    return alone > sum(len(_PLAIN.findall(text)) for text in texts)


def _share(texts: Sequence[str], form: re.Pattern[str], plain: re.Pattern[str]) -> float | None:
    """Return the share of a form among the signs of both forms; None: there are few of them."""
    found, others = (sum(len(one.findall(text)) for text in texts) for one in (form, plain))
    return found / (found + others) if found + others >= _LEAST else None


AUTO, *TOKENIZERS = get_args(BleuTokenizer)
"""Those from `ja-mecab` on need more than sacreBLEU alone; `spm` is an older name of `flores101`."""
_WORDS, _CHARACTERS = "13a", "char"

_OF_LANGUAGES = {
    "zh": "zh zho chi cmn yue wuu gan hsn hak nan cdo cjy cpx czh czo mnp lzh",
    "ja-mecab": "ja jpn ojp ryu",
    "ko-mecab": "ko kor",
    "char": "th tha nod tts sou lo lao km khm my mya bur shn mnw blk rki ksw pwo kht bo bod tib dz dzo adx khg khb tdd"
    " blt ii iii",
}
_BY_LANGUAGE = {code: name for name, codes in _OF_LANGUAGES.items() for code in codes.split()}
_OF_SCRIPTS = {
    "zh": "hans hant hani hanb bopo",
    "ja-mecab": "jpan hira kana hrkt",
    "ko-mecab": "kore hang",
    "char": "thai laoo khmr mymr tibt java bali lana tale talu tavt cham bugi batk yiii",
}
_BY_SCRIPT = {code: name for name, codes in _OF_SCRIPTS.items() for code in codes.split()}

_HAN = "\u3005-\u3007\u3100-\u312f\u31a0-\u31bf\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U000323af"
_KANA = "\u3041-\u3096\u30a1-\u30fa\u30fc\u31f0-\u31ff\uff66-\uff9d"
_HANGUL = "\u1100-\u11ff\u3131-\u318e\ua960-\ua97c\uac00-\ud7fb"
# Thai, Lao, Tibetan; Myanmar; Khmer; Tai Le, New Tai Lue; Buginese, Tai Tham; Balinese; Batak; Yi; Javanese and others.
_OTHERS = (
    "\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u1950-\u19df\u1a00-\u1aaf\u1b00-\u1b7f\u1bc0-\u1bff\ua000-\ua4cf"
    "\ua980-\uaadf"
)
_UNITS = re.compile(f"([{_HAN}])|([{_KANA}])|([{_HANGUL}]+)|([{_OTHERS}])|([^\\W\\d_{_HAN}{_KANA}{_HANGUL}{_OTHERS}]+)")
"""References that are looked at, evenly spaced."""
_LEAST_KANA = 0.1
"""Of Chinese characters and kana together: a smaller share, such as of names, does not make a text Japanese."""
_CLEAR = 0.7
"""Share of the most frequent kind below which a text is mixed."""
_SHOWN = {
    "zh": "Chinese characters",
    "ja-mecab": "Japanese script",
    "ko-mecab": "Korean script",
    "char": "a script without spaces",
    "13a": "a script with spaces",
}


@dataclass(frozen=True)
class TokenizerChoice:
    """BLEU's tokenizer.

    Args:
        name: one of TOKENIZERS.
        why: what decided.
        warning: a sentence where the choice is doubtful, or not the usual one because something is missing.
    """

    name: str
    why: str
    warning: str = ""


def choose_tokenizer(
    asked: str, languages: Collection[str], references: Sequence[str], option: str = "--tokenize"
) -> TokenizerChoice:
    """Choose BLEU's tokenizer.

    Args:
        asked: one of TOKENIZERS, or `auto`.
        languages: of the references, as far as they are recorded.
        references: their script decides where no language is recorded, or another one than they are written in.
        option: for messages: which chooses a tokenizer.

    Raises: ConfigError, MissingExtraError: see `check_tokenizer`, which judges `asked` alone.
    """
    if asked != AUTO:
        check_tokenizer(asked)
        return TokenizerChoice("flores101" if asked == "spm" else asked, "as asked for")
    recorded = {_of_language(one) for one in languages}
    found, share = _of_script(references)
    if len(recorded) > 1:
        name = "zh" if recorded == {_WORDS, "zh"} else _CHARACTERS
        choice = TokenizerChoice(
            name,
            f"for references in several languages ({', '.join(languages)})",
            f"The references are in several languages ({', '.join(languages)}), so BLEU's tokenizer is {name} for all;"
            f" {option} chooses another.",
        )
    elif recorded and (found is None or _cuts(next(iter(recorded)), found)):
        choice = TokenizerChoice(recorded.pop(), f"for the language {', '.join(languages)}")
    else:
        choice = _by_script(found or _WORDS, share, languages, option)
    try:
        check_tokenizer(choice.name)
    except MissingExtraError as error:
        return instead_of(choice.name, error, choice.why, choice.warning)
    return choice


def instead_of(name: str, error: MissingExtraError, why: str = "as asked for", warning: str = "") -> TokenizerChoice:
    """Return the choice where a tokenizer cannot be used: each character is a token."""
    told = f"{error} BLEU is computed with the tokenizer {_CHARACTERS} meanwhile."
    return TokenizerChoice(_CHARACTERS, f"instead of {name}, {why}", f"{warning} {told}".strip())


def _by_script(name: str, share: float, languages: Collection[str], option: str) -> TokenizerChoice:
    why, warning = f"for {_SHOWN[name]}", ""
    if languages:
        warning = f"The target language is {', '.join(languages)}, but most of the references are in {_SHOWN[name]}"
    elif share < _CLEAR:
        warning = f"The references are in several scripts, {share:.0%} of them in {_SHOWN[name]}"
    return TokenizerChoice(
        name, why, warning and f"{warning}, so BLEU's tokenizer is {name}; {option} chooses another."
    )


def check_tokenizer(name: str) -> None:
    """Check that a tokenizer can be used here. Nothing is downloaded.

    Raises: ConfigError: it is unknown. MissingExtraError: a package or a file that it needs is missing.
    """
    if name not in TOKENIZERS:
        raise ConfigError(f"BLEU tokenizer {name!r} is unknown; use one of {', '.join(TOKENIZERS)}.")
    if name in SPM_MODELS:
        file = Path(SACREBLEU_DIR) / "models" / Path(SPM_MODELS[name]["url"]).name
        if not file.is_file():
            raise MissingExtraError(
                f"BLEU's tokenizer {name} needs a file that sacreBLEU downloads from {SPM_MODELS[name]['url']}; save it"
                f" as {file}, or use another tokenizer, such as char."
            )
    try:
        BLEU(tokenize=name)
    except (ImportError, RuntimeError, AssertionError) as error:
        package = {"ja-mecab": "sacrebleu[ja]", "ko-mecab": "sacrebleu[ko]"}.get(name, "sentencepiece")
        raise MissingExtraError(
            f"BLEU's tokenizer {name} needs a package that is not installed, or not as sacreBLEU expects it:"
            f" pip install '{package}'."
        ) from error


def _of_language(tag: str) -> str:
    """Return the tokenizer of a language. tag: of BCP 47, or as other toolkits write it, such as `zho_Hant`."""
    first, *rest = re.split("[-_]", tag.lower())
    script = next((part for part in rest if len(part) == 4 and part.isalpha()), None)
    return _BY_LANGUAGE.get(first, _WORDS) if script is None else _BY_SCRIPT.get(script, _WORDS)


def _of_script(texts: Sequence[str]) -> tuple[str | None, float]:
    """Return the tokenizer of the most frequent script, and its share; None: the texts have no letters.

    A letter of a script without spaces counts as much as a word of another one.
    """
    counts: Counter[int | None] = Counter()
    for text in texts[:: 1 + len(texts) // _MOST_TEXTS]:
        counts.update(unit.lastindex for unit in _UNITS.finditer(text))
    han, kana, hangul, others, words = (counts[number] for number in range(1, 6))
    is_japanese = kana > _LEAST_KANA * (han + kana)
    kinds = {
        "zh": 0 if is_japanese else han + kana,
        "ja-mecab": han + kana if is_japanese else 0,
        "ko-mecab": hangul,
        "char": others,
        _WORDS: words,
    }
    most = max(kinds, key=kinds.__getitem__)
    return (most, kinds[most] / counts.total()) if counts.total() else (None, 1.0)


def _cuts(recorded: str, found: str) -> bool:
    """Return whether the tokenizer of a language fits the script of a text; Japanese may have no kana."""
    return recorded == found or (recorded, found) == ("ja-mecab", "zh")


_BLOCK = 1000
"""Sentences that are counted at once."""
_CODE_POINTS = 0x110000
"""Unicode's code points."""


class FastCHRF(CHRF):
    """chrF: statistics and scores are exactly those of sacreBLEU. With n-grams of words (chrF++) it counts them too."""

    def _extract_corpus_statistics(self, hypotheses: Sequence[str], references: Any) -> Any:
        """Return for each sentence and order the n-grams of hypothesis and reference, and those of both.

        Of several references, a sentence counts the first one with the highest score.
        """
        if self.word_order:
            return super()._extract_corpus_statistics(hypotheses, references)
        self.num_refs = len(references)
        found: list[list[int]] = []
        for first in range(0, len(hypotheses), _BLOCK):
            some, *others = (
                ["".join(self._preprocess_segment(text).split()) for text in one[first : first + _BLOCK]]
                for one in (hypotheses, *references)
            )
            each = [_counts(some, one, self.char_order).tolist() for one in others]
            found += (
                each[0] if len(each) == 1 else [max(row, key=self._compute_f_score) for row in zip(*each, strict=True)]
            )
        return found


def _counts(hypotheses: Sequence[str], references: Sequence[str], orders: int) -> NDArray[np.int64]:
    """Count the character n-grams of each pair of texts without white space. (pairs, 3 x orders)"""
    size, texts = len(hypotheses), [*hypotheses, *references]
    lengths = np.array([len(text) for text in texts])
    codes = np.frombuffer("".join(texts).encode("utf-32-le", "surrogatepass"), dtype=np.uint32).astype(np.int64)
    text_of = np.repeat(np.arange(2 * size), lengths)
    left = np.repeat(np.cumsum(lengths), lengths) - np.arange(len(codes))  # characters up to the end of the text
    pair_of, is_reference = text_of % size, text_of >= size
    counts = np.zeros((size, orders, 3), dtype=np.int64)
    ids = pair_of  # of the n-gram that begins at each character; equal n-grams of a pair have equal ids
    for order in range(orders):
        begins = np.flatnonzero(left > order)
        grams, inverse = np.unique(ids[begins] * _CODE_POINTS + codes[begins + order], return_inverse=True)
        pairs, of_reference = pair_of[begins], is_reference[begins]
        own, others = (np.bincount(inverse[mask], minlength=len(grams)) for mask in (~of_reference, of_reference))
        pair_of_gram = np.zeros(len(grams), dtype=np.int64)
        pair_of_gram[inverse] = pairs
        both = np.minimum(own, others)
        for place, number in enumerate((own, others, both)):
            counts[:, order, place] = np.bincount(pair_of_gram, weights=number, minlength=size)
        ids = np.zeros(len(codes), dtype=np.int64)
        ids[begins] = inverse
    counts[counts[:, :, 1] == 0, 0] = 0  # n-grams of an order that the reference lacks do not count
    return counts.reshape(size, 3 * orders)


"""Sentences whose statistics are in memory at once."""
_ORDER = 4


@dataclass(frozen=True, slots=True)
class Score:
    """A corpus score.

    Args:
        value: from 0 to 100.
        signature: sacreBLEU's signature; two scores are comparable only if their signatures agree.
        ref_len: length of the references, in BLEU's tokens or chrF's characters without white space; of several
            references for a sentence BLEU counts the closest one, chrF the first.
        hyp_len: the same for the hypotheses.
    """

    value: float
    signature: str
    ref_len: int
    hyp_len: int

    def __str__(self) -> str:
        return f"{self.value:.2f}"


def corpus_bleu(
    hypotheses: Sequence[str],
    references: Sequence[str],
    *more_references: Sequence[str],
    tokenize: str = AUTO,
    languages: Collection[str] = (),
    lowercase: bool = False,
    on_progress: Callable[[int], None] | None = None,
) -> Score:
    """Return corpus BLEU.

    Paper: Papineni et al. 2002; Post 2018, arXiv:1804.08771.

    Args:
        hypotheses: detokenised text (tokenised, if `tokenize` is `none`).
        references: the same number of texts.
        more_references: further ones for each sentence; each n-gram may match any of them.
        tokenize: one of `tokenizers.TOKENIZERS`; `auto` is chosen by `languages` or else by the references' script.
        languages: of the references, as in BCP 47.
        lowercase: ignore case.
        on_progress: called with the number of sentences that are scored so far.

    Raises: DataError: counts differ, or there is nothing to score. ConfigError, MissingExtraError: the tokenizer is
        unknown, or something that it needs is missing; `auto` then warns, and each character is a token.
    """
    all_references = (references, *more_references)
    _check_counts(hypotheses, all_references)
    choice = choose_tokenizer(tokenize, languages, references, "tokenize")
    if choice.warning:
        warnings.warn(choice.warning, stacklevel=2)
    metric = bleu_metric(all_references, choice.name, lowercase)
    result = _summed(metric, hypotheses, all_references, on_progress)
    return Score(float(result.score), str(metric.get_signature()), int(result.ref_len), int(result.sys_len))


def bleu_metric(all_references: Sequence[Sequence[str]], tokenize: str, lowercase: bool) -> BLEU:
    """Return sacreBLEU's metric.

    References without a single 4-gram would give 0 to equal texts, too; then BLEU counts the n-grams that there are
    (`eff:yes` in the signature), which changes no other score.
    """
    metric = BLEU(tokenize=tokenize, lowercase=lowercase, force=True)  # force: no advice on stderr about tokenised text
    texts = (composed(text) for one in all_references for text in one)
    has_longest = any(len(metric.tokenizer(text.rstrip()).split()) >= _ORDER for text in texts)
    return metric if has_longest else BLEU(tokenize=tokenize, lowercase=lowercase, force=True, effective_order=True)


def corpus_chrf(
    hypotheses: Sequence[str],
    references: Sequence[str],
    *more_references: Sequence[str],
    lowercase: bool = False,
    word_order: int = 0,
    on_progress: Callable[[int], None] | None = None,
) -> Score:
    """Return corpus chrF (character 6-grams, beta 2); word_order 2 is chrF++.

    Paper: Popović 2015, 2017.

    Args: see `corpus_bleu`; of several references, each sentence counts the one that gives the highest score.

    Raises: DataError: counts differ, or there is nothing to score. ConfigError: word_order is negative.
    """
    all_references = (references, *more_references)
    _check_counts(hypotheses, all_references)
    if word_order < 0:
        raise ConfigError(f"word_order is {word_order}; it must be at least 0 (2 is chrF++).")
    metric = FastCHRF(lowercase=lowercase, word_order=word_order)
    result = _summed(metric, hypotheses, all_references, on_progress)
    ref_len, hyp_len = (sum(len("".join(composed(text).split())) for text in side) for side in (references, hypotheses))
    return Score(float(result.score), str(metric.get_signature()), ref_len, hyp_len)


def _summed(
    metric: BLEU | FastCHRF,
    hypotheses: Sequence[str],
    all_references: Sequence[Sequence[str]],
    on_progress: Callable[[int], None] | None,
) -> Any:
    """Return `metric.corpus_score`, exactly, without keeping the statistics of all sentences."""
    sums: Any = 0
    for first in range(0, len(hypotheses), _BLOCK):
        some, *references = (
            [composed(text) for text in one[first : first + _BLOCK]] for one in (hypotheses, *all_references)
        )
        sums += np.sum(metric._extract_corpus_statistics(some, references), axis=0)
        if on_progress is not None:
            on_progress(first + len(some))
    return metric._compute_score_from_stats(sums.tolist())


def composed(text: str) -> str:
    """Return a text in NFC."""
    return text if unicodedata.is_normalized("NFC", text) else unicodedata.normalize("NFC", text)


def _check_counts(hypotheses: Sequence[str], all_references: Sequence[Sequence[str]]) -> None:
    for references in all_references:
        if isinstance(hypotheses, str) or isinstance(references, str):
            raise DataError("a corpus is a list of sentences, not one string.")
        if len(hypotheses) != len(references):
            raise DataError(
                f"there are {len(hypotheses)} hypotheses but {len(references)} references; the numbers must be equal."
            )
    if not hypotheses:
        raise DataError("there are no sentences to score; give at least one.")
