"""Make random models with the code of fairseq 0.12.2, OpenNMT-py 3.5.1 and JoeyNMT 2.3.0, and record their logits.

    PYTHONPATH=FOLDER_OF_THE_PEER python tests/parity/make_plain_transformers.py fairseq|opennmt|joeynmt

writes tests/parity/fixtures/PEER-N: a checkpoint with the contents that the peer's training saves, its other files, and
`expected.safetensors` with src, src_mask, decoder_input_ids and logits. The peers' code is unmodified; modules that
they import and that these models do not use are replaced by empty ones.
"""

import argparse
import dataclasses
import sys
import types
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import save_file
from torch import Tensor, nn

FOLDER = Path(__file__).parent / "fixtures"
SOURCE, TARGET = 11, 13
D_MODEL = 4  # the peers save tables of 5,000 positions


def main() -> None:
    """Make all models of one peer."""
    peer = sys.argv[1]
    for number, (saved, files, model, logits) in enumerate(globals()[f"make_{peer}"]()):
        folder = FOLDER / f"{peer}-{number}"
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(saved, folder / ("best.ckpt" if peer == "joeynmt" else "checkpoint_best.pt"))
        for name, content in files.items():
            (folder / name).write_text(content)
        inputs = _inputs()
        with torch.no_grad():
            inputs["logits"] = logits(model.eval(), **inputs).contiguous()
        save_file(inputs, folder / "expected.safetensors")


def _inputs() -> dict[str, Tensor]:
    torch.manual_seed(5)
    mask = torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
    source = torch.randint(4, SOURCE, (2, 6)) * mask + (1 - mask)  # padding is id 1
    return {"src": source, "src_mask": mask, "decoder_input_ids": torch.randint(4, SOURCE, (2, 5))}


def _random(model: nn.Module, seed: int) -> None:
    torch.manual_seed(seed)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)


def make_joeynmt() -> Any:
    """Of the class that `build_model` makes: pre- and post-norm, tied and not."""
    from joeynmt.model import build_model
    from joeynmt.vocabulary import Vocabulary

    symbols = types.SimpleNamespace(
        unk_token="<unk>", pad_token="<pad>", bos_token="<s>", eos_token="</s>", sep_token=None,
        unk_id=0, pad_id=1, bos_id=2, eos_id=3, lang_tags=[],
    )  # fmt: skip

    def logits(model: Any, src: Tensor, src_mask: Tensor, decoder_input_ids: Tensor) -> Tensor:
        allowed = src_mask.bool()[:, None]
        memory, _ = model.encoder(model.src_embed(src), None, allowed)
        target_mask = torch.ones(len(src), 1, decoder_input_ids.shape[1], dtype=torch.bool)
        found: Tensor = model.decoder(
            model.trg_embed(decoder_input_ids), memory, None, allowed, None, None, target_mask
        )[0]
        return found

    kinds = [("pre", True, "relu"), ("post", False, "gelu"), (None, False, "swish")]
    for seed, (norm, tied, activation) in enumerate(kinds):
        side = {
            **{"type": "transformer", "num_layers": 2, "num_heads": 2, "hidden_size": D_MODEL, "ff_size": 8},
            **{"dropout": 0.1, "embeddings": {"embedding_dim": D_MODEL, "scale": not seed % 2}},
            "activation": activation,
        }
        side |= {"layer_norm": norm} if norm else {}
        encoder, decoder = dict(side), {**side, "layer_norm": norm or "pre", "num_layers": 1, "ff_size": 6}
        if norm is None:  # the peer's encoder then has no final norm, so the decoder must not have one either
            encoder["layer_norm"] = "pre"
        config = {"tied_embeddings": tied, "tied_softmax": tied or seed == 1, "encoder": encoder, "decoder": decoder}
        words = [f"w{number}" for number in range(SOURCE - 4)]
        source = Vocabulary(words, symbols)
        target = Vocabulary(words if tied else [*words, "x", "y"], symbols)
        model = build_model({**config, "initializer": "xavier_uniform"}, source, target)
        _random(model, seed)
        optimizer = torch.optim.Adam(model.parameters())
        saved = {
            "model_state": model.state_dict(),
            "optimizer_state": optimizer.state_dict(),
            "scaler_state": None,
            "scheduler_state": None,
            "train_iter_state": torch.get_rng_state()[:8],
            "stats_state": {"steps": 3, "best_ckpt_score": 1.5},
        }
        files = {
            "config.yaml": yaml.safe_dump({"name": "made", "model": config}),
            "src_vocab.txt": "\n".join(source._itos) + "\n",
            "trg_vocab.txt": "\n".join(target._itos) + "\n",
        }
        yield saved, files, model, logits


def make_opennmt() -> Any:
    """Of the class that `build_base_model` makes: both kinds of positions, with and without biases of attention."""

    class Anything(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (), {})

    for name in ("spacy", "ahocorasick", "fasttext", "rapidfuzz", "configargparse"):
        sys.modules[name] = Anything(name)
    import pyonmttok
    from onmt.model_builder import build_base_model

    def vocabulary(size: int) -> Any:
        tokens = ["<unk>", "<blank>", "<s>", "</s>", *(f"w{number}" for number in range(size - 4))]
        return pyonmttok.build_vocab_from_tokens(tokens, special_tokens=tokens[:4])

    def logits(model: Any, src: Tensor, src_mask: Tensor, decoder_input_ids: Tensor) -> Tensor:
        lengths = src_mask.sum(1)
        memory, state, lengths = model.encoder(src[:, :, None], lengths)
        model.decoder.init_state(src[:, :, None], memory, state)
        hidden, _ = model.decoder(decoder_input_ids[:, :, None], memory, src_len=lengths)
        found: Tensor = model.generator(hidden)
        return found

    kinds = [("Interleaved", False, "relu"), ("Concat", True, "gelu"), ("Interleaved", True, "relu")]
    for seed, (positions, biases, activation) in enumerate(kinds):
        shared = seed == 2
        options = argparse.Namespace(
            model_task="seq2seq", model_type="text", encoder_type="transformer", decoder_type="transformer",
            enc_layers=2, dec_layers=1, enc_hid_size=D_MODEL, dec_hid_size=D_MODEL, heads=2, transformer_ff=8,
            src_word_vec_size=D_MODEL, tgt_word_vec_size=D_MODEL, position_encoding=True,
            position_encoding_type=f"Sinusoidal{positions}",
            pos_ffn_activation_fn=activation, add_qkvbias=biases, add_ffnbias=True,
            share_embeddings=shared, share_decoder_embeddings=shared, dropout=[0.1], attention_dropout=[0.1],
            max_relative_positions=0, relative_positions_buckets=0, num_kv=0, parallel_residual=False,
            shared_layer_norm=False, layer_norm="standard", norm_eps=1e-6, use_ckpting=[], parallel_gpu=1,
            sliding_window=0, rotary_interleave=True, rotary_theta=10000, rotary_dim=0, num_experts=0,
            num_experts_per_tok=2, self_attn_type="scaled-dot", copy_attn=False, coverage_attn=False, aan_useffn=False,
            full_context_alignment=False, alignment_layer=-3, alignment_heads=0, feat_merge="concat",
            feat_vec_exponent=0.7, feat_vec_size=-1, freeze_word_vecs_enc=False, freeze_word_vecs_dec=False,
            world_size=1, gpu_ranks=[], parallel_mode="data_parallel", generator_function="softmax", quant_layers=[],
            lora_layers=[], lora_embedding=False, input_feed=1, freeze_encoder=False, freeze_decoder=False,
            optim="adam",
        )  # fmt: skip
        source = vocabulary(SOURCE)
        vocabularies = {"src": source, "tgt": source if shared else vocabulary(TARGET), "data_task": "seq2seq"}
        model = build_base_model(options, vocabularies)
        _random(model, seed)
        state = {name: tensor for name, tensor in model.state_dict().items() if "generator" not in name}
        saved = {
            "model": state,
            "generator": model.generator.state_dict(),
            "vocab": {"src": source.ids_to_tokens, "tgt": vocabularies["tgt"].ids_to_tokens, "data_task": "seq2seq"},
            "opt": options,
            "optim": {"training_step": 3, "decay_step": 3, "optimizer": {}},
        }
        yield saved, {}, model, logits


def make_fairseq() -> Any:
    """Of the class `TransformerModel`: pre- and post-norm, learned positions, tied and not."""
    make = dataclasses._process_class  # type: ignore[attr-defined]

    def process(cls: Any, *flags: Any) -> Any:
        """fairseq 0.12 has dataclasses as defaults, which Python 3.11 takes only if they can be hashed."""
        hashes = flags[4] or (cls.__module__.startswith(("fairseq", "hydra")) and not flags[5])
        return make(cls, *flags[:4], hashes, *flags[5:])

    dataclasses._process_class = process  # type: ignore[attr-defined]
    from fairseq.data import Dictionary
    from fairseq.models.transformer import TransformerModel, base_architecture

    def dictionary(size: int) -> Any:
        found = Dictionary()
        for number in range(size - 4):
            found.add_symbol(f"w{number}", n=100 - number)
        return found

    def logits(model: Any, src: Tensor, src_mask: Tensor, decoder_input_ids: Tensor) -> Tensor:
        found: Tensor = model(src, src_mask.sum(1), decoder_input_ids)[0]
        return found

    kinds = [(False, False, "all"), (True, False, "none"), (True, True, "output")]
    for seed, (before, learned, share) in enumerate(kinds):
        options = argparse.Namespace(
            arch="transformer", source_lang="en", target_lang="de", encoder_layers=2, decoder_layers=1,
            encoder_embed_dim=D_MODEL, decoder_embed_dim=D_MODEL, encoder_ffn_embed_dim=8, decoder_ffn_embed_dim=6,
            encoder_attention_heads=2, decoder_attention_heads=2, encoder_normalize_before=before,
            decoder_normalize_before=before, encoder_learned_pos=learned, decoder_learned_pos=learned,
            share_all_embeddings=share == "all", share_decoder_input_output_embed=share == "output",
            no_scale_embedding=bool(seed == 2), activation_fn="gelu" if seed == 1 else "relu", dropout=0.1,
            max_source_positions=64, max_target_positions=64,
        )  # fmt: skip
        base_architecture(options)
        source = dictionary(SOURCE)
        task = types.SimpleNamespace(
            source_dictionary=source, target_dictionary=source if share == "all" else dictionary(TARGET)
        )
        model = TransformerModel.build_model(options, task)
        _random(model, seed)
        with torch.no_grad():
            for side in (model.encoder, model.decoder):
                side.embed_tokens.weight[1] = 0
        model.load_state_dict(model.state_dict())  # which copies the weights of encoder layers to their fused ones
        key = {"args": None, "cfg": {"model": options, "task": {"_name": "translation"}}}
        saved = {
            **(key if seed else {"args": options, "cfg": None}),
            "model": model.state_dict(),
            "optimizer_history": [{"num_updates": 3, "lr_scheduler_state": {"best": 2.5}}],
            "extra_state": {"epoch": 1, "train_iterator": {"epoch": 2, "shuffle": True}},
        }
        files = {}
        for language, words in (("en", task.source_dictionary), ("de", task.target_dictionary)):
            files[f"dict.{language}.txt"] = "".join(f"{word} 1\n" for word in words.symbols[4:])
        yield saved, files, model, logits


if __name__ == "__main__":
    main()
