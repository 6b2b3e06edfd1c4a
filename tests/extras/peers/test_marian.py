"""Marian's weights and options: what may be left out, what must agree, and the way back."""

from typing import Any, get_args

import pytest
import torch
from marian_models import SIZES, random_state
from torch import Tensor

from manyheads.catalogue import build_model
from manyheads.decoding.settings import DecodingSettings
from manyheads.errors import ConfigError, ModelFileError, RequestError
from manyheads.extras.peers import PEERS
from manyheads.extras.peers.marian import ACTIVATIONS, Marian, Pegasus
from manyheads.extras.peers.marian_generation import MarianIds, generation_to_peer, never_produced, settings_from_peer
from manyheads.models.size_checks import Activation
from manyheads.models.transformer.config import TransformerConfig
from manyheads.nn.positions import sinusoidal_table

IDS = MarianIds(pad=18, eos=0, start=18)
OPTIONS: dict[str, Any] = {**SIZES, "vocab_size": 19, "pad_token_id": 18, "decoder_start_token_id": 18}
TABLES = ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight")
to_peer = Marian.to_peer
SHARED = "model.shared.weight"
SOURCE = torch.tensor([[3, 4, 5, 0], [6, 7, 0, 18]])
LENGTHS = torch.tensor([4, 3])
TARGET = torch.tensor([[18, 3, 4], [18, 5, 6]])


def build(options: dict[str, Any], state_dict: dict[str, Tensor]) -> Any:
    return Marian.from_peer({"model": options}, state_dict).module


def said(model: Any) -> Tensor:
    with torch.no_grad():
        result: Tensor = model.log_probs(SOURCE, LENGTHS, TARGET)
    return result


@pytest.fixture
def state() -> dict[str, Tensor]:
    return random_state(OPTIONS)


def test_tied_matrices_under_any_of_their_names(state: dict[str, Tensor]) -> None:
    expected = said(build(OPTIONS, state))
    table = state.pop(SHARED)
    for names in ((TABLES[0],), (TABLES[1],), (TABLES[2],), (SHARED, *TABLES)):
        assert torch.equal(said(build(OPTIONS, {**state, **dict.fromkeys(names, table)})), expected)
    with pytest.raises(ModelFileError, match=r"model\.shared\.weight is missing"):
        build(OPTIONS, state)
    with pytest.raises(ModelFileError, match=r"lm_head\.weight differ"):
        build(OPTIONS, {**state, SHARED: table, "lm_head.weight": table + 1})


@pytest.mark.parametrize(
    ("options", "given", "tie"),
    [
        ({"share_encoder_decoder_embeddings": False}, (0, 1), "decoder"),
        ({"share_encoder_decoder_embeddings": False}, (0, 2), "decoder"),
        ({"tie_word_embeddings": False}, (0, 1, 2), "none"),
        ({"tie_word_embeddings": False, "share_encoder_decoder_embeddings": False}, (0, 1, 2), "none"),
    ],
)
def test_which_tables_are_one(state, options, given, tie):
    del state[SHARED]
    tables = {TABLES[i]: torch.randn(19, 16, generator=torch.Generator().manual_seed(i)) for i in given}
    model = build({**OPTIONS, **options}, {**state, **tables})
    assert model.config.tie_embeddings == tie
    assert torch.equal(model.body.source_embedding.weight, tables[TABLES[0]])
    assert torch.equal(model.body.target_embedding.weight, tables[TABLES[given[1]]])
    assert torch.equal(model.head.weight, tables[TABLES[given[-1]]])


def test_embeddings_shared_but_not_with_the_output(state: dict[str, Tensor]) -> None:
    state["lm_head.weight"] = torch.randn(19, 16)
    model = build({**OPTIONS, "tie_word_embeddings": False}, state)
    assert model.config.tie_embeddings == "embeddings"
    assert model.body.source_embedding.weight is model.body.target_embedding.weight
    described, weights = to_peer(model)
    assert weights.keys() >= {SHARED, *TABLES}  # peers since version 5 want each by its name
    assert torch.equal(said(build({**OPTIONS, **described["model"]}, weights)), said(model))


def test_vocabularies_of_unlike_sizes(state: dict[str, Tensor]) -> None:
    del state[SHARED]
    state["final_logits_bias"] = torch.randn(1, 23)
    tables = {TABLES[0]: torch.randn(19, 16), TABLES[1]: torch.randn(23, 16)}
    options = {**OPTIONS, "share_encoder_decoder_embeddings": False, "decoder_vocab_size": 23}
    model = build(options, {**state, **tables})
    assert said(model).shape[-1] == 23
    assert to_peer(model)[0]["model"]["decoder_vocab_size"] == 23


@pytest.mark.parametrize("tie", ["all", "decoder", "none"])
def test_there_and_back(tie: Any) -> None:
    """Any model of ours that the peer can hold: the same numbers come back, from every name that was written."""
    torch.manual_seed(4)
    config = TransformerConfig(
        source_vocab_size=19, target_vocab_size=19, d_model=16, num_heads=4, num_decoder_heads=2, d_ff=20,
        decoder_d_ff=12, num_encoder_layers=1, num_decoder_layers=2, activation="gelu_tanh",
        positions="sinusoidal_halves", max_len=33, scale_embedding=False, tie_embeddings=tie, head_bias=tie != "none",
        dropout=0.3, attention_dropout=0.2, feed_forward_dropout=0.1,
    )  # fmt: skip
    model = build_model(config).eval()
    described, weights = to_peer(model)
    again = build({**OPTIONS, **described["model"]}, weights)
    assert torch.equal(said(again), said(model))
    second, weights_again = to_peer(again)
    assert second == described
    assert weights.keys() == weights_again.keys()
    assert all(torch.equal(weights[name], weights_again[name]) for name in weights)
    assert (again.config.dropout, again.config.attention_dropout, again.config.feed_forward_dropout) == (0.3, 0.2, 0.1)


def test_positions_of_the_formula_are_computed_and_others_are_kept(state: dict[str, Tensor]) -> None:
    names = ("model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight")
    formula = sinusoidal_table(torch.arange(40.0), 16, "halves")
    plain = build(OPTIONS, state)
    with_formula = build(OPTIONS, {**state, names[0]: formula.half(), names[1]: formula})
    assert with_formula.config.positions == "sinusoidal_halves"
    assert torch.equal(said(with_formula), said(plain))
    other = sinusoidal_table(torch.arange(40.0), 16)
    kept = build(OPTIONS, {**state, names[0]: formula, names[1]: other})
    assert kept.config.positions == "learned"
    assert not torch.allclose(said(kept), said(plain))
    assert torch.equal(kept.body.source_positions.weight, formula)
    _, weights = to_peer(kept)
    assert torch.equal(weights[names[1]], other)
    with pytest.raises(ModelFileError, match="embed_positions"):
        build(OPTIONS, {**state, names[0]: formula[:, :8]})


def test_a_missing_logits_bias_is_zero(state: dict[str, Tensor]) -> None:
    del state["final_logits_bias"]
    assert not build(OPTIONS, state).head.bias.any()


def test_half_precision_weights_stay_what_they_are(state: dict[str, Tensor]) -> None:
    low = {name: tensor.half() for name, tensor in state.items()}
    model = build(OPTIONS, low)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float16}
    assert torch.equal(model.head.bias, low["final_logits_bias"].flatten())


def test_activations_of_the_peer_are_ours() -> None:
    assert set(ACTIVATIONS.values()) == set(get_args(Activation))
    for peer, ours in ACTIVATIONS.items():
        model = build({**OPTIONS, "activation_function": peer}, random_state(OPTIONS))
        assert model.config.activation == ours
        assert ACTIVATIONS[to_peer(model)[0]["model"]["activation_function"]] == ours


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"normalize_before": True}, "normalize_before"),
        ({"add_final_layer_norm": True}, "add_final_layer_norm"),
        ({"activation_function": "gelu_10"}, "gelu_10"),
        ({"model_type": "bart"}, "bart"),
        ({"encoder_attention_heads": 3}, "num_heads"),
        ({"d_model": "16"}, "d_model"),
        ({"dropout": "much"}, "dropout"),
        ({"scale_embedding": 1}, "scale_embedding"),
        ({"vocab_size": None}, "vocab_size"),
        ({"encoder_layers": -1}, "encoder_layers"),
    ],
)
def test_options_that_cannot_be_honoured(state: dict[str, Tensor], change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        build({**OPTIONS, **change}, state)


def test_a_published_pegasus_says_what_its_class_does() -> None:
    """google/pegasus-xsum has these options, which ask for what every Pegasus is: pre-norm, a norm after each stack."""
    options = {"model_type": "pegasus", "normalize_before": True, "add_final_layer_norm": True}
    assert Pegasus.read({"model": options})["model_type"] == "pegasus"
    with pytest.raises(ConfigError, match="normalize_embedding is set in Pegasus's config"):
        Pegasus.read({"model": {**options, "normalize_embedding": True}})


def test_weights_that_do_not_fit(state: dict[str, Tensor]) -> None:
    with pytest.raises(ModelFileError, match="stray is unknown"):
        build(OPTIONS, {**state, "stray": torch.zeros(1)})
    with pytest.raises(ModelFileError, match="has shape"):
        build({**OPTIONS, "encoder_ffn_dim": 21}, state)
    for change in ({"vocab_size": 2**24}, {"decoder_layers": 1024}, {"encoder_ffn_dim": 2**24}):
        with pytest.raises(ModelFileError, match="do not belong together"):
            build({**OPTIONS, **change}, state)
    for change in ({"vocab_size": 10**12}, {"decoder_layers": 10**12}, {"encoder_ffn_dim": 10**12}):
        with pytest.raises(ConfigError, match=r"it must be from [01] to"):
            build({**OPTIONS, **change}, state)
    with pytest.raises(ModelFileError, match="int64"):
        build(OPTIONS, {**state, SHARED: torch.ones(19, 16, dtype=torch.int64)})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"positions": "sinusoidal"}, "sinusoidal_halves"),
        ({"norm_position": "pre"}, "norm_position"),
        ({"final_norm": True}, "final_norm"),
        ({"bias": False}, "bias"),
        ({"norm": "unbiased"}, "norm"),
    ],
)
def test_models_that_the_peer_cannot_hold(change: dict[str, Any], named: str) -> None:
    options: dict[str, Any] = {"positions": "sinusoidal_halves", **change}
    config = TransformerConfig(source_vocab_size=5, target_vocab_size=5, d_model=8, num_heads=2, d_ff=8, **options)
    with pytest.raises(ConfigError, match=named):
        to_peer(build_model(config))


def test_other_peers_refuse_unlike_stacks() -> None:
    config = TransformerConfig(
        source_vocab_size=5, target_vocab_size=5, d_model=8, num_heads=2, d_ff=8, num_decoder_heads=4, final_norm=True
    )
    with pytest.raises(ConfigError, match="num_decoder_heads"):
        PEERS["torch/Transformer"].to_peer(build_model(config).body)


def test_masks_of_the_wrapper(state: dict[str, Tensor]) -> None:
    """Padding anywhere in the source for the logits; on the right alone to translate."""
    wrapper: Any = PEERS["transformers/Marian"].from_peer({"model": OPTIONS}, state)
    target = torch.tensor([[18, 3]])
    plain = wrapper.run({"in.src": torch.tensor([[3, 4, 0]]), "in.decoder_input_ids": target})
    inputs = {"in.src": torch.tensor([[3, 4, 0, 18]]), "in.src_mask": torch.tensor([[1, 1, 1, 0]])}
    padded = wrapper.run({**inputs, "in.decoder_input_ids": target})
    torch.testing.assert_close(padded["out.logits"], plain["out.logits"], atol=1e-5, rtol=1e-5)
    labels = wrapper.run({**inputs, "in.labels": torch.tensor([[3, -100]])})
    torch.testing.assert_close(labels["out.logits"], padded["out.logits"], atol=1e-5, rtol=1e-5)
    wrapper.config = {**wrapper.config, "max_length": 4}
    with pytest.raises(RequestError, match="right"):
        wrapper.run({**inputs, "in.src_mask": torch.tensor([[0, 1, 1, 1]]), "in.decoder_input_ids": target})
    with pytest.raises(RequestError, match=r"in\.colour"):
        wrapper.run({**inputs, "in.colour": target})


def test_generation_options_become_settings() -> None:
    plain = settings_from_peer({}, IDS)
    assert plain == DecodingSettings(
        rules="marian", num_beams=1, length_penalty=1.0, length_penalty_kind="power", max_new_tokens=19
    )
    opus = {
        "bad_words_ids": [[18]], "bos_token_id": 0, "decoder_start_token_id": 18, "eos_token_id": 0,
        "forced_eos_token_id": 0, "max_length": 512, "num_beams": 6, "pad_token_id": 18, "renormalize_logits": True,
        "transformers_version": "4.32.0.dev0",
    }  # fmt: skip
    found = settings_from_peer(opus, IDS)
    assert (found.num_beams, found.max_new_tokens, found.forced_eos, found.renormalize_logits) == (6, 511, True, True)
    assert found.banned_ids == ()
    more = settings_from_peer(
        {
            "max_new_tokens": 7, "max_length": 3, "min_length": 3, "suppress_tokens": [5], "bad_words_ids": [[18], [4]],
            "forced_bos_token_id": 9, "no_repeat_ngram_size": 2, "early_stopping": "never", "length_penalty": -1,
            "num_beams": 2, "num_return_sequences": 2, "temperature": 0.5, "top_k": 3,
        },
        IDS,
    )  # fmt: skip
    assert (more.max_new_tokens, more.min_new_tokens, more.banned_ids, more.forced_prefix_ids) == (7, 2, (4, 5), (9,))
    assert (more.early_stopping, more.length_penalty, more.temperature, more.top_k) == ("never", -1.0, 1.0, 0)
    drawn = settings_from_peer({"do_sample": True, "temperature": 0.5}, IDS)
    assert (drawn.do_sample, drawn.temperature, drawn.top_k) == (True, 0.5, 50)
    for settings in (plain, found, more, drawn):
        described, differs = generation_to_peer(settings, IDS, 512)
        assert differs == []
        assert settings_from_peer(described, IDS) == settings


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_beam_groups": 2}, "num_beam_groups"),
        ({"forced_eos_token_id": 3}, "forced_eos_token_id"),
        ({"bad_words_ids": [[3, 4]]}, r"\[3, 4\]"),
        ({"max_length": 1}, "max_length"),
        ({"do_sample": True, "num_beams": 2}, "num_beams"),
        ({"penalty_alpha": 0.6}, "penalty_alpha"),
        ({"num_beams": "four"}, "num_beams"),
        ({"max_length": 5.5}, "max_length"),
        ({"min_length": [1]}, "min_length"),
        ({"length_penalty": "high"}, "length_penalty"),
        ({"suppress_tokens": ["a"]}, "suppress_tokens"),
        ({"bad_words_ids": {"a": 1}}, "bad_words_ids"),
        ({"bad_words_ids": [3]}, "bad_words_ids"),
        ({"forced_bos_token_id": [3]}, "forced_bos_token_id"),
    ],
)
def test_generation_options_that_we_do_not_have(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        settings_from_peer(options, IDS)


def test_what_the_peer_cannot_generate_is_said() -> None:
    described, differs = generation_to_peer(DecodingSettings(too_long="truncate"), IDS, 512)
    assert described["max_length"] == 512
    assert [word in "; ".join(differs) for word in ("heuristic", "gnmt", "in proportion", "truncates")] == [True] * 4
    assert generation_to_peer(DecodingSettings(length_penalty_kind="none"), IDS, 9)[0]["length_penalty"] == 0
    with pytest.raises(ConfigError, match="forced_prefix_ids"):
        generation_to_peer(DecodingSettings(forced_prefix_ids=(3, 4)), IDS, 9)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"bad_words_ids": [[9], [3]]}, []),
        ({"bad_words_ids": [[9]], "suppress_tokens": [3]}, []),
        ({"bad_words_ids": [[9]]}, ["the start token (3)"]),
        ({}, ["the start token (3)", "padding (9)"]),
    ],
)
def test_ids_that_only_the_peer_can_produce_are_named(options: dict[str, Any], named: list[str]) -> None:
    found = never_produced(options, MarianIds(pad=9, eos=0, start=3))
    assert [name for note in found for name in named if name in note] == named
    assert len(found) == len(named)


def test_padding_that_is_the_start_token_is_named_once() -> None:
    assert len(never_produced({}, MarianIds(pad=9, eos=0, start=9))) == 1


def test_a_base_model_has_no_head(state: dict[str, Tensor]) -> None:
    base = {
        name.removeprefix("model."): x
        for name, x in state.items()
        if name not in ("final_logits_bias", "lm_head.weight")
    }
    with pytest.raises(ModelFileError, match="have no language-model head"):
        build(OPTIONS, base)


def test_special_ids_must_be_ids() -> None:
    assert MarianIds.of({"pad_token_id": 3, "eos_token_id": [0], "decoder_start_token_id": 3}) == MarianIds(
        pad=3, eos=0, start=3
    )
    for bad in (None, [1, 2], "0", -1, True):
        with pytest.raises(ConfigError, match="eos_token_id"):
            MarianIds.of({"pad_token_id": 3, "eos_token_id": bad, "decoder_start_token_id": 3})
