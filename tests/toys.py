"""Tiny Gemma 4 models in the shapes of the published ones: configs, random weights, quantization. No downloads.

No parameter is left at its initial value: a dropped layer_scalar of 1.0 would be invisible.
"""

import copy
import json
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models import gemma4, gemma4_text

SLIDING, FULL = "sliding_attention", "full_attention"
BASE: dict[str, Any] = {
    "model_type": "gemma4_text",
    "attention_bias": False,
    "attention_k_eq_v": True,
    "enable_moe_block": False,
    "final_logit_softcapping": 30.0,
    "global_head_dim": 64,
    "head_dim": 64,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 64,
    "hidden_size_per_layer_input": 0,
    "intermediate_size": 128,
    "layer_types": [SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL],
    "num_attention_heads": 4,
    "num_global_key_value_heads": 1,
    "num_hidden_layers": 6,
    "num_key_value_heads": 2,
    "num_kv_shared_layers": 0,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        FULL: {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
        SLIDING: {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "sliding_window": 8,
    "tie_word_embeddings": True,
    "use_double_wide_mlp": False,
    "vocab_size": 97,
    "vocab_size_per_layer_input": 97,
}
EXPERTS = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 64}
SHARING = {
    "attention_k_eq_v": False,
    "num_global_key_value_heads": None,
    "num_kv_shared_layers": 3,
    "hidden_size_per_layer_input": 16,
    "use_double_wide_mlp": True,
}


def config(**changes: Any) -> dict[str, Any]:
    """A flat gemma4_text config: the dense base with changes."""
    return copy.deepcopy(BASE) | copy.deepcopy(changes)


D6 = config()
M6 = config(**EXPERTS)
E6 = config(**SHARING)

# The published sizes in small: the same kinds of layer in the same order, cut to two or three periods.
SHAPES: dict[str, dict[str, Any]] = {
    "12b": config(
        global_head_dim=128,
        num_attention_heads=8,
        num_key_value_heads=4,
        layer_types=([SLIDING] * 5 + [FULL]) * 2,
        num_hidden_layers=12,
    ),
    "31b": config(
        hidden_size=128,
        global_head_dim=128,
        num_attention_heads=8,
        num_key_value_heads=4,
        num_global_key_value_heads=2,
        layer_types=([SLIDING] * 5 + [FULL]) * 2,
        num_hidden_layers=12,
    ),
    "26b": config(
        **EXPERTS,
        global_head_dim=128,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_global_key_value_heads=2,
        layer_types=([SLIDING] * 5 + [FULL]) * 2,
        num_hidden_layers=12,
    ),
    "e4b": config(
        **SHARING
        | {
            "global_head_dim": 128,
            "num_kv_shared_layers": 6,
            "hidden_size_per_layer_input": 64,
            "use_double_wide_mlp": False,
            "layer_types": ([SLIDING] * 5 + [FULL]) * 3,
            "num_hidden_layers": 18,
        },
    ),
    "e2b": config(
        **SHARING
        | {
            "global_head_dim": 128,
            "num_key_value_heads": 1,
            "num_kv_shared_layers": 10,
            "hidden_size_per_layer_input": 64,
            "layer_types": ([SLIDING] * 4 + [FULL]) * 3,
            "num_hidden_layers": 15,
        },
    ),
}

# The same sizes in six layers, for whatever does not depend on how many there are.
SHORT: dict[str, dict[str, Any]] = {
    name: shape
    | {
        "layer_types": [SLIDING, SLIDING, FULL] * 2,
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 3 if shape["num_kv_shared_layers"] else 0,
    }
    for name, shape in SHAPES.items()
}


def nested(flat: dict[str, Any], model_type: str = "gemma4") -> dict[str, Any]:
    """The same numbers as published multimodal checkpoints hold them."""
    text = copy.deepcopy(flat) | {"model_type": f"{model_type}_text"}
    return {"model_type": model_type, "vocab_size": flat["vocab_size"], "text_config": text}


# Parameters of the last toys that were built: most are built more than once, and drawing them is what takes long. Kept
# as unsigned words outside of MLX, whose memory is measured.
_DRAWN: dict[Any, list[tuple[str, Any, mx.Dtype]]] = {}
_WORDS = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32}


def build(
    config: dict[str, Any], *, dtype: mx.Dtype = mx.float32, quantize: Any = None, seed: int = 0, outer: bool = False
) -> Any:
    """An mlx-lm model (the monolith) of this config with random weights.

    quantize: None, the arguments of nn.quantize, or a callable (path, module) -> arguments or False.
    """
    mx.random.seed(seed)
    if outer:
        model: Any = gemma4.Model(gemma4.ModelArgs.from_dict(nested(config)))
    else:
        model = gemma4_text.Model(gemma4_text.ModelArgs.from_dict(copy.deepcopy(config)))
    randomize(model, dtype)
    if quantize is not None:
        nn.quantize(model, class_predicate=lambda path, module: _quantization(quantize, path, module))
    recipe = tuple(quantize.items()) if isinstance(quantize, dict) else quantize
    key = (json.dumps(config, sort_keys=True), dtype, recipe, seed, outer)
    if key not in _DRAWN:
        while len(_DRAWN) >= 24:
            del _DRAWN[next(iter(_DRAWN))]
        mx.eval(model.parameters())
        _DRAWN[key] = [
            (name, np.array(value.view(_WORDS[value.itemsize])), value.dtype)
            for name, value in tree_flatten(model.parameters())
        ]
    model.update(tree_unflatten([(name, mx.array(words).view(dtype)) for name, words, dtype in _DRAWN[key]]))
    model.eval()
    mx.eval(model.parameters())
    return model


def _quantization(quantize: Any, path: str, module: Any) -> Any:
    """As mlx-lm does: what cannot be quantized, or not in groups of this size, stays as it is."""
    chosen = quantize(path, module) if callable(quantize) else dict(quantize)
    if not chosen or not hasattr(module, "to_quantized") or module.weight.shape[-1] % chosen["group_size"]:
        return False
    return chosen


def randomize(model: Any, dtype: mx.Dtype) -> None:
    fresh = []
    for name, value in tree_flatten(model.parameters()):
        if name.endswith(("norm.weight", "layernorm.weight", "_1.weight", "_2.weight", "scale", "layer_scalar")):
            drawn = mx.random.uniform(0.4, 1.6, value.shape)
        else:
            drawn = mx.random.normal(value.shape) * (value.shape[-1] ** -0.5 if value.ndim > 1 else 1.0)
        fresh.append((name, drawn.astype(dtype)))
    model.update(tree_unflatten(fresh))


def tokens(batch: int, length: int, vocab: int = 97, seed: int = 1) -> mx.array:
    return mx.random.randint(0, vocab, (batch, length), key=mx.random.key(seed))
