"""Models for `transformers`, as its own classes: nothing but AutoModel and AutoTokenizer is needed to run them.

A post-norm Transformer becomes a MarianMTModel, a pre-norm one with a joint vocabulary a
PegasusForConditionalGeneration, a Reformer a ReformerModelWithLMHead (or ReformerForMaskedLM), a decoder a
GPT2LMHeadModel. The command `convert` reads the folder again, with equal weights. Other formats whose layout is that of
a peer, of `extras.peers.FORMATS`, are written as `manyheads convert --to` writes them.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from manyheads.extras.exports import Check, ExportOptions, NotComparedError, check_architecture
from manyheads.extras.exports.engine import LIMIT, MOST_TOKENS, never_produced, reference, tokenizer_of
from manyheads.extras.peers.convert import write_peer
from manyheads.installation import needing_extra
from manyheads.models.pretrained import load, read_config


def write(model: Path, target: Path, options: ExportOptions) -> list[str]:
    """See `extras.exports`. A format other than `transformers` is the peer of this name."""
    check_architecture(options.to, read_config(model).architecture)
    peer = _peer_of(model) if options.to == "transformers" else options.to
    notes = write_peer(model, target, peer).notes
    if peer == "transformers/Reformer" and _has_output_bias(target):
        notes.append(
            "transformers 5 leaves out the bias of a Reformer's output, which version 4 adds; after from_pretrained,"
            " `model.lm_head.decoder.bias = model.lm_head.bias` adds it in both."
        )
    return notes


def _has_output_bias(target: Path) -> bool:
    with safe_open(target / "model.safetensors", "pt") as weights:
        return bool(weights.get_tensor("lm_head.bias").any())


def _peer_of(model: Path) -> str:
    """Return the name of the class in `peers.FORMATS`. Raises: ConfigError: transformers has none."""
    config = read_config(model)
    if config.architecture == "reformer":
        return "transformers/Reformer"
    if config.architecture == "decoder":
        return "transformers/GPT2"
    tokenizer_of(model, "transformers")
    return "transformers/Pegasus" if config.norm_position == "pre" else "transformers/Marian"


def deviation(model: Path, target: Path, sentences: list[list[int]], options: ExportOptions) -> Check:
    """See `extras.exports`. The log-probabilities of the model's greedy outputs are compared.

    Raises: NotComparedError: of another format; the parity tests compare the peers' numbers.
    """
    if options.to != "transformers":
        raise NotComparedError(f"the code of {options.to} is not a runtime that manyheads can call")
    package = _runtime()
    language_models = {"reformer": _compare_reformers, "decoder": _compare_decoders}
    compared = language_models.get(read_config(model).architecture, _compare)
    logs = package.utils.logging
    verbosity, is_enabled = logs.get_verbosity(), logs.is_progress_bar_enabled()
    logs.set_verbosity_error()
    logs.disable_progress_bar()
    try:
        return compared(package, model, target, sentences)
    finally:
        logs.set_verbosity(verbosity)
        if is_enabled:
            logs.enable_progress_bar()


def _runtime() -> Any:
    with needing_extra("transformers is not installed", "hf"):
        return importlib.import_module("transformers")


def _compare(package: Any, model: Path, target: Path, sentences: list[list[int]]) -> Check:
    module, tokenizer = load(model), tokenizer_of(model, "transformers")
    ours = reference(module, tokenizer, sentences)
    writer = tokenizer.target
    peer = package.AutoModelForSeq2SeqLM.from_pretrained(target, local_files_only=True).eval()
    # The model's own settings would be merged with those of a call.
    peer.generation_config = package.GenerationConfig(
        pad_token_id=writer.pad_id,
        eos_token_id=writer.eos_id,
        decoder_start_token_id=writer.bos_id,
        bad_words_ids=[[index] for index in never_produced(writer)],
        max_new_tokens=min(MOST_TOKENS, (module.max_len or MOST_TOKENS + 1) - 1),
    )
    largest, num_equal = 0.0, 0
    with torch.inference_mode():
        for source, output, rows in zip(ours.sources, ours.outputs, ours.log_probs, strict=True):
            ids = torch.tensor([source])
            start = torch.tensor([[writer.bos_id, *output[:-1]]])
            logits = peer(input_ids=ids, decoder_input_ids=start).logits[0]
            largest = max(largest, float((logits.log_softmax(dim=-1) - rows).abs().max()))
            num_equal += peer.generate(input_ids=ids)[0].tolist()[1:] == output
    return Check(
        what="log-probabilities",
        deviation=largest,
        limit=LIMIT,
        num_sentences=len(sentences),
        num_equal=num_equal,
    )


def _compare_decoders(package: Any, model: Path, target: Path, sentences: list[list[int]]) -> Check:
    module: Any = load(model)
    peer = package.GPT2LMHeadModel.from_pretrained(target, local_files_only=True).eval()
    largest = 0.0
    with torch.inference_mode():
        for ids in sentences:
            tokens = torch.tensor([ids[: module.max_len]])
            logits = peer(input_ids=tokens).logits.log_softmax(dim=-1)
            largest = max(largest, float((logits - module.log_probs(tokens)).abs().max()))
    return Check(what="log-probabilities", deviation=largest, limit=LIMIT, num_sentences=0, num_equal=0)


def _compare_reformers(package: Any, model: Path, target: Path, sentences: list[list[int]]) -> Check:
    """Compare texts that both sides compute alike: up to the chunk length, or of any length if both hash alike."""
    module: Any = load(model)
    config = module.config
    peer_class = package.ReformerModelWithLMHead if config.causal else package.ReformerForMaskedLM
    # Parts of a feed-forward layer refuse lengths that are no multiple of theirs, and change no number.
    peer = peer_class.from_pretrained(target, local_files_only=True, chunk_size_feed_forward=0).eval()
    peer.lm_head.decoder.bias = peer.lm_head.bias  # version 5 leaves it out
    hashes_alike = config.shared_rotations and not (config.causal and config.num_hashes > 1)
    is_alike = config.pad_to_chunks and (hashes_alike or "lsh" not in config.kinds)
    longest = config.longest_input if is_alike else min(config.chunk_len, config.local_chunk_len)
    largest = 0.0
    with torch.inference_mode():
        for ids in sentences:
            tokens = torch.tensor([ids[:longest]])
            logits = peer(input_ids=tokens).logits[0]
            hidden = module.body(tokens, None)[0]
            rows = module.head.logits(hidden)[0]
            rows = rows.log_softmax(dim=-1)
            largest = max(largest, float((logits.log_softmax(dim=-1) - rows).abs().max()))
    return Check(what="log-probabilities", deviation=largest, limit=LIMIT, num_sentences=0, num_equal=0)
