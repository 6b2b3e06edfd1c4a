"""Marian models as transformers would save them, made here: SentencePiece models from a little text, random weights."""

import io
import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

ENGLISH = (
    "Two young men are outside near many bushes.",
    "A man in a blue shirt is standing on a ladder cleaning a window.",
    "Several men in hard hats are operating a giant pulley system.",
    "A little girl climbing into a wooden playhouse; she isn't alone!",
    "The green tea is too hot, isn't it?",
    "One, two, three: where is the next station, please?",
)
GERMAN = (
    "Zwei junge Männer sind im Freien in der Nähe vieler Büsche.",
    "Ein Mann in einem blauen Hemd steht auf einer Leiter und putzt ein Fenster.",
    "Mehrere Männer mit Schutzhelmen bedienen ein Antriebsradsystem.",
    "Ein kleines Mädchen klettert in ein Spielhaus aus Holz; es ist nicht allein!",
    "Der grüne Tee ist zu heiß, nicht wahr?",
    "Eins, zwei, drei: wo ist bitte der nächste Bahnhof?",
)
CODES = (">>deu<<", ">>fra<<")
SIZES: dict[str, Any] = {
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 20,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 40,
    "activation_function": "silu",
    "scale_embedding": True,
    "eos_token_id": 0,
    "forced_eos_token_id": 0,
}


@lru_cache(maxsize=4)
def train_spm(lines: Sequence[str]) -> bytes:
    """A SentencePiece model of these lines."""
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, vocab_size=90, hard_vocab_limit=False, minloglevel=2
    )
    return model.getvalue()


def pieces_of(model: bytes) -> list[str]:
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    return [processor.id_to_piece(index) for index in range(processor.get_piece_size())]


def joint_vocab(*models: bytes, left_out: Sequence[str] = ()) -> dict[str, int]:
    """OPUS-MT's order: EOS 0, unknown 1, pieces, language codes, padding last."""
    vocab = {"</s>": 0, "<unk>": 1}
    for piece in [piece for model in models for piece in pieces_of(model)] + list(CODES):
        if piece not in vocab and piece not in ("<s>", *left_out):
            vocab[piece] = len(vocab)
    vocab["<pad>"] = len(vocab)
    return vocab


def tokenizer_files(left_out: Sequence[str] = ()) -> dict[str, bytes]:
    source, target = train_spm(ENGLISH), train_spm(GERMAN)
    vocab = json.dumps(joint_vocab(source, target, left_out=left_out)).encode()
    return {"source.spm": source, "target.spm": target, "vocab.json": vocab}


def random_state(options: dict[str, Any], seed: int = 1) -> dict[str, Any]:
    """Random weights under the peer's names, each tied matrix once."""
    import torch

    torch.manual_seed(seed)
    width, size = options["d_model"], options["vocab_size"]
    state = {"model.shared.weight": torch.randn(size, width) * width**-0.5, "final_logits_bias": torch.randn(1, size)}

    def linear(name: str, rows: int, columns: int) -> None:
        state[f"model.{name}.weight"] = torch.randn(rows, columns) * columns**-0.5
        state[f"model.{name}.bias"] = torch.randn(rows) * 0.1

    def norm(name: str) -> None:
        state[f"model.{name}.weight"] = 1 + torch.randn(width) * 0.1
        state[f"model.{name}.bias"] = torch.randn(width) * 0.1

    for side in ("encoder", "decoder"):
        attentions = ("self_attn", "encoder_attn") if side == "decoder" else ("self_attn",)
        for layer in range(options[f"{side}_layers"]):
            start = f"{side}.layers.{layer}"
            for attention in attentions:
                for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
                    linear(f"{start}.{attention}.{part}", width, width)
                norm(f"{start}.{attention}_layer_norm")
            linear(f"{start}.fc1", options[f"{side}_ffn_dim"], width)
            linear(f"{start}.fc2", width, options[f"{side}_ffn_dim"])
            norm(f"{start}.final_layer_norm")
    return state


def write_peer_folder(folder: Path, *, generation: dict[str, Any] | None = None, seed: int = 1, **changes: Any) -> Path:
    """A folder as `MarianMTModel.save_pretrained` and `MarianTokenizer.save_pretrained` leave it."""
    from safetensors.torch import save_file

    files = tokenizer_files()
    size = len(json.loads(files["vocab.json"]))
    ids = {"pad_token_id": size - 1, "decoder_start_token_id": size - 1}
    options = {**SIZES, "vocab_size": size, **ids, **changes}
    folder.mkdir(parents=True)
    config = {"model_type": "marian", "architectures": ["MarianMTModel"], "encoder_layerdrop": 0.0, **options}
    said = {
        "bad_words_ids": [[size - 1]],
        "decoder_start_token_id": size - 1,
        "eos_token_id": 0,
        "pad_token_id": size - 1,
        "forced_eos_token_id": 0,
        "max_length": 14,
        "num_beams": 3,
        **(generation or {}),
    }
    tokenizer = {
        "source_lang": "en",
        "target_lang": "de",
        "tokenizer_class": "MarianTokenizer",
        "model_max_length": 512,
    }
    for name, values in (
        ("config.json", config),
        ("generation_config.json", said),
        ("tokenizer_config.json", tokenizer),
    ):
        (folder / name).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    for name, content in files.items():
        (folder / name).write_bytes(content)
    save_file(random_state(options, seed), folder / "model.safetensors", metadata={"format": "pt"})
    return folder
