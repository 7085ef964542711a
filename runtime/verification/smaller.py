"""Published configs made smaller, for machines without the memory or the time of the full size. Pure."""

import copy
from typing import Any

from ..errors import StraightlineError

WINDOW = 8
VOCABULARY = 128


def cut(config: dict[str, Any], layers: int | None, vocab: int | None, window: int | None) -> dict[str, Any]:
    """Fewer layers (sliding and full by turns), tokens and window, all else at full width."""
    config = copy.deepcopy(config)
    text = config["text_config"]
    if layers is not None:
        sharing = text["num_kv_shared_layers"] * layers // text["num_hidden_layers"]
        if layers - sharing < 2:
            raise StraightlineError(
                f"{layers} layers are too few: one layer of each kind must own its keys and values; "
                f"expected {_fewest(text)} or more"
            )
        kinds = ["sliding_attention", "full_attention"] * layers
        text |= {"layer_types": kinds[:layers], "num_hidden_layers": layers, "num_kv_shared_layers": sharing}
    if vocab is not None:
        text |= {"vocab_size": vocab, "vocab_size_per_layer_input": vocab}
        config["vocab_size"] = vocab
    if window is not None:
        text["sliding_window"] = window
    return config


def _fewest(text: dict[str, Any]) -> int:
    shared, count = text["num_kv_shared_layers"], text["num_hidden_layers"]
    return next(layers for layers in range(2, count + 1) if layers - shared * layers // count >= 2)


def reduced(config: dict[str, Any]) -> dict[str, Any]:
    """Toy widths, vocabulary, window and experts; the layers, their kinds, sharing and head ratios as published."""
    config = cut(config, None, VOCABULARY, WINDOW)
    text = config["text_config"]
    queries = text["num_attention_heads"]
    ratio = queries // text["num_key_value_heads"]
    kv_heads = 1 if text["num_key_value_heads"] == 1 else 2
    text |= {
        "hidden_size": 64,
        "intermediate_size": 64,
        "head_dim": 64,
        "global_head_dim": 128,
        "num_attention_heads": kv_heads * ratio,
        "num_key_value_heads": kv_heads,
    }
    if text.get("num_global_key_value_heads"):
        text["num_global_key_value_heads"] = 1
    if text["hidden_size_per_layer_input"]:
        text["hidden_size_per_layer_input"] = 64
    if text["enable_moe_block"]:
        text |= {"num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 64}
    return config
