"""Modules with names and attributes of the original Transformer-XL, to be pickled whole. They compute nothing."""

import sys
import types
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

CLASSES = {
    "mem_transformer": [
        *("AdaptiveEmbedding", "MemTransformerLM", "PositionalEmbedding", "PositionwiseFF"),
        *("DecoderLayer", "MultiHeadAttn", "RelLearnableDecoderLayer", "RelLearnableMultiHeadAttn"),
        *("RelPartialLearnableDecoderLayer", "RelPartialLearnableMultiHeadAttn"),
    ],
    "utils.proj_adaptive_softmax": ["ProjectedAdaptiveLogSoftmax"],
}
_LAYERS = {0: "RelPartialLearnable", 1: "RelLearnable", 2: "", 3: ""}


class Official:
    """Makes modules while a test runs; the classes vanish after it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.classes: dict[str, type[nn.Module]] = {}
        for path, names in CLASSES.items():
            module = types.ModuleType(path)
            for name in names:
                self.classes[name] = type(name, (nn.Module,), {"__module__": path, "__qualname__": name})
                setattr(module, name, self.classes[name])
            monkeypatch.setitem(sys.modules, path, module)
        monkeypatch.setitem(sys.modules, "utils", types.ModuleType("utils"))

    def make(self, name: str, **attributes: Any) -> nn.Module:
        made = self.classes[name]()
        for key, value in attributes.items():
            setattr(made, key, value)
        return made

    def model(self, options: Mapping[str, Any], state_dict: Mapping[str, Tensor]) -> nn.Module:
        """A MemTransformerLM with these weights; names of the same tensor become one parameter."""
        o = dict(options)
        cutoffs = [*o["cutoffs"], o["n_token"]]
        own = ("n_token", "n_layer", "n_head", "d_model", "d_head", "d_embed", "attn_type", "tgt_len", "mem_len")
        root = self.make(
            "MemTransformerLM",
            **{name: o[name] for name in (*own, "ext_len", "same_length", "clamp_len")},
            max_klen=o["tgt_len"] + o["ext_len"] + o["mem_len"],
            sample_softmax=-1,
        )
        root.word_emb = self.make("AdaptiveEmbedding", n_token=o["n_token"], cutoffs=cutoffs, div_val=o["div_val"])
        root.word_emb.emb_layers, root.word_emb.emb_projs = nn.ModuleList(), nn.ParameterList()
        root.drop = nn.Dropout(o["dropout"])
        kind = _LAYERS[o["attn_type"]]
        root.layers = nn.ModuleList()
        for _ in range(o["n_layer"]):
            attention = self.make(f"{kind}MultiHeadAttn", n_head=o["n_head"], pre_lnorm=o["pre_lnorm"], scale=0.5)
            attention.dropatt = nn.Dropout(o["dropatt"])
            feed_forward = self.make("PositionwiseFF", d_inner=o["d_inner"], pre_lnorm=o["pre_lnorm"])
            root.layers.append(self.make(f"{kind}DecoderLayer", dec_attn=attention, pos_ff=feed_forward))
        root.crit = self.make("ProjectedAdaptiveLogSoftmax", cutoffs=cutoffs, div_val=o["div_val"], keep_order=False)
        root.crit.out_layers, root.crit.out_projs = nn.ModuleList(), nn.ParameterList()
        if o["attn_type"] in (0, 2):
            root.pos_emb = self.make("PositionalEmbedding", demb=o["d_model"])
            root.pos_emb.register_buffer("inv_freq", torch.ones(o["d_model"] // 2))
        parameters: list[nn.Parameter] = []
        for name, tensor in state_dict.items():
            same = next((p for p in parameters if p.shape == tensor.shape and torch.equal(p, tensor)), None)
            parameter = nn.Parameter(tensor.clone()) if same is None else same
            parameters.append(parameter)
            *path, last = name.split(".")
            place = root
            for part in path:
                if part not in place._modules and not isinstance(place, nn.ParameterList):
                    place.add_module(part, nn.Identity() if part != "CoreNet" else nn.Sequential())
                place = place._modules[part]
            place.register_parameter(last, parameter)
        return root
