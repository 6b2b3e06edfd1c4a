"""Conversion between generation_config.json of `transformers` and `DecodingSettings`.

Lengths there include the start token, ours do not. Options with neutral values are ignored; an active option that our
search does not support is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from manyheads.config.build import build
from manyheads.decoding.settings import DecodingSettings, drawing_options, facts_of, unsupported
from manyheads.errors import ConfigError

_DEFAULT_MAX_LENGTH = 20  # the peer's, for a model without this option
# Options that we do not support, and their neutral value (or None).
_NEUTRAL: dict[str, Any] = {
    "num_beam_groups": 1,
    "diversity_penalty": 0.0,
    "top_h": None,
    "epsilon_cutoff": 0.0,
    "encoder_repetition_penalty": 1.0,
    "encoder_no_repeat_ngram_size": 0,
    "penalty_alpha": None,
    "guidance_scale": None,
    "exponential_decay_length_penalty": None,
    "sequence_bias": None,
    "force_words_ids": None,
    "constraints": None,
    "forced_decoder_ids": None,
    "begin_suppress_tokens": None,
    "watermarking_config": None,
    "max_time": None,
    "stop_strings": None,
}


# Options with another name or form there, and those that are no property of a model.
_OTHERWISE = {
    *("length_penalty", "length_penalty_kind", "max_new_tokens", "max_len_ratio", "max_len_offset", "min_new_tokens"),
    *("banned_ids", "forced_prefix_ids", "forced_eos", "rules"),
    *("well_formed", "keep_words", "max_tokens", "too_long", "seed"),
}


def _same_names(does_sample: bool) -> list[str]:
    """The options that have the same name and value there."""
    sampling = () if does_sample else ("do_sample", *drawing_options(DecodingSettings))
    facts = facts_of(DecodingSettings)
    return [name for name in facts if "transformers" in facts[name].engines and name not in {*_OTHERWISE, *sampling}]


@dataclass(frozen=True, kw_only=True)
class MarianIds:
    """Special ids. start: the first input of the decoder."""

    pad: int
    eos: int
    start: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> MarianIds:
        """Read them from a config that has them all.

        Raises: ConfigError: one is missing or not an id; or there are several EOS.
        """
        ids = {}
        for ours, name in (("pad", "pad_token_id"), ("eos", "eos_token_id"), ("start", "decoder_start_token_id")):
            value = config.get(name)
            if isinstance(value, list) and len(value) == 1:
                value = value[0]
            if type(value) is not int or value < 0:
                raise ConfigError(f"{name} is {config.get(name)!r}; it must be one id.")
            ids[ours] = value
        return cls(**ids)


def settings_from_peer(generation: Mapping[str, Any], ids: MarianIds) -> DecodingSettings:
    """Return our settings for the peer's generation.

    Args:
        generation: a generation_config.json; or an old config.json, which contains the same options.

    Raises: ConfigError: an option that our search does not support is active, or one is out of range.
    """
    given = {name: value for name, value in generation.items() if value is not None}
    for name, neutral in _NEUTRAL.items():
        if name in given and given[name] != neutral:
            raise ConfigError(f"{name} is {given[name]!r} in the generation options; our search has no such option.")
    options: dict[str, Any] = {
        "rules": "marian",
        "num_beams": 1,
        "length_penalty": given.get("length_penalty", 1.0),
        "length_penalty_kind": "power",
        "max_new_tokens": _max_new_tokens(given),
        "min_new_tokens": given.get("min_new_tokens", max(0, _count(given, "min_length", 0) - 1)),
        "forced_eos": _forced_eos(given, ids),
        "banned_ids": _banned(given, ids),
        "forced_prefix_ids": (_count(given, "forced_bos_token_id", 0),) if "forced_bos_token_id" in given else (),
    }
    does_sample = bool(given.get("do_sample"))
    options |= {"top_k": 50} if does_sample else {}
    options |= {name: given[name] for name in _same_names(does_sample) if name in given}
    return build(DecodingSettings, options, "the generation options")


def _count(given: Mapping[str, Any], name: str, default: int) -> int:
    value = given.get(name, default)
    if type(value) is not int:
        raise ConfigError(f"{name} is {value!r} in the generation options; it must be a whole number.")
    return value


def _max_new_tokens(given: Mapping[str, Any]) -> int:
    if "max_new_tokens" in given:
        return _count(given, "max_new_tokens", 0)
    length = _count(given, "max_length", _DEFAULT_MAX_LENGTH)
    if length < 2:
        raise ConfigError(f"max_length is {length}; it counts the start token and must be above 1.")
    return length - 1


def _forced_eos(given: Mapping[str, Any], ids: MarianIds) -> bool:
    forced = given.get("forced_eos_token_id")
    if forced is not None and forced not in (ids.eos, [ids.eos]):
        raise ConfigError(f"forced_eos_token_id is {forced!r}, but eos_token_id is {ids.eos}; only that can be forced.")
    return forced is not None


def _banned(given: Mapping[str, Any], ids: MarianIds) -> tuple[int, ...]:
    words, tokens = given.get("bad_words_ids", []), given.get("suppress_tokens", [])
    if not isinstance(words, list) or not isinstance(tokens, list):
        raise ConfigError("bad_words_ids and suppress_tokens must be lists.")
    singles = [[token] for token in tokens] + words
    odd = next((word for word in singles if not isinstance(word, list) or [type(i) for i in word] != [int]), None)
    if odd is not None:
        raise ConfigError(f"bad_words_ids or suppress_tokens holds {odd!r}; only single ids can be banned here.")
    banned = {word[0] for word in singles}
    # Our search never produces padding and the start token; see `never_produced`.
    return tuple(sorted(banned - {ids.pad, ids.start, ids.eos}))


def never_produced(given: Mapping[str, Any], ids: MarianIds) -> list[str]:
    """Return a sentence for each id that the peer may produce and our search never does: padding and the start token,
    if `bad_words_ids` and `suppress_tokens` leave them out.
    """
    words, tokens = given.get("bad_words_ids") or [], given.get("suppress_tokens") or []
    banned = [*words, *([token] for token in tokens)]
    names = {ids.start: "the start token", ids.pad: "padding"}
    return [
        f"The generation options do not ban {name} ({index}); transformers could produce it, manyheads never does."
        for index, name in names.items()
        if [index] not in banned
    ]


def generation_to_peer(settings: DecodingSettings, ids: MarianIds, max_len: int) -> tuple[dict[str, Any], list[str]]:
    """Return a generation_config.json for our settings, and a list of differences that the peer cannot express.

    Args: max_len: positions of the model; used as the limit if ours is proportional to the source.

    Raises: ConfigError: an option in use that the peer does not have.
    """
    if reason := unsupported(settings, "transformers"):
        raise ConfigError(f"the generation option {reason} is none of transformers; leave it out of the model's.")
    differs = []
    if settings.rules == "manyheads":
        differs.append("beams stop by the peer's heuristic, not by our bound")
    kind, penalty = settings.length_penalty_kind, settings.length_penalty
    if kind == "gnmt" and penalty:
        differs.append(f"the length penalty is length ** {penalty}; the peer has no gnmt")
    if not settings.max_new_tokens:
        differs.append(f"the limit is {max_len} tokens; the peer has no limit in proportion to the source")
    if settings.too_long == "truncate":
        differs.append("sources that are too long fail; in the peer the tokenizer truncates them")
    options: dict[str, Any] = {
        "pad_token_id": ids.pad,
        "eos_token_id": ids.eos,
        "decoder_start_token_id": ids.start,
        "forced_eos_token_id": ids.eos if settings.forced_eos else None,
        "bad_words_ids": [[index] for index in sorted({ids.pad, ids.start, *settings.banned_ids} - {ids.eos})],
        "length_penalty": 0.0 if kind == "none" else penalty,
        "max_length": settings.max_new_tokens + 1 if settings.max_new_tokens else max_len,
        "min_length": settings.min_new_tokens + 1 if settings.min_new_tokens else 0,
        **{name: getattr(settings, name) for name in _same_names(settings.do_sample)},
    }
    if len(settings.forced_prefix_ids) > 1:
        raise ConfigError(f"forced_prefix_ids has {len(settings.forced_prefix_ids)} ids; the peer can force one.")
    if settings.forced_prefix_ids:
        options["forced_bos_token_id"] = settings.forced_prefix_ids[0]
    return options, differs
