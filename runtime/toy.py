"""A tiny random Gemma 4 with a tokenizer of single letters: for the examples, and to try a call without a checkpoint.

Its text is noise; its shapes, caches and taps are those of a real model.
"""

from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models import gemma4_text
from mlx_lm.tokenizer_utils import TokenizerWrapper

from .model import specialize

SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>")
LETTERS = ["\n", *map(chr, range(0x20, 0x7F)), *map(chr, range(0xC0, 0x160))]
VOCABULARY = len(SPECIAL) + len(LETTERS)


def toy_config() -> dict[str, Any]:
    """A config.json in the shape of E4B: sliding and full layers, shared KV, per-layer inputs."""
    sliding, full = "sliding_attention", "full_attention"
    return {
        "model_type": "gemma4_text",
        "attention_k_eq_v": False,
        "enable_moe_block": False,
        "final_logit_softcapping": 30.0,
        "global_head_dim": 64,
        "head_dim": 32,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 64,
        "hidden_size_per_layer_input": 16,
        "intermediate_size": 128,
        "layer_types": [sliding, sliding, full, sliding, sliding, full, sliding, full],
        "num_attention_heads": 4,
        "num_global_key_value_heads": None,
        "num_hidden_layers": 8,
        "num_key_value_heads": 2,
        "num_kv_shared_layers": 2,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            full: {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
            sliding: {"rope_theta": 10000.0, "rope_type": "default"},
        },
        "sliding_window": 16,
        "tie_word_embeddings": True,
        "use_double_wide_mlp": False,
        "vocab_size": VOCABULARY,
        "vocab_size_per_layer_input": VOCABULARY,
        "eos_token_id": SPECIAL.index("<eos>"),
    }


def toy_tokenizer() -> Any:
    """One token a character, after the special ones. Every token can be printed."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    wrap: Any = PreTrainedTokenizerFast
    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *LETTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    names = {f"{token.strip('<>')}_token": token for token in SPECIAL}
    return wrap(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **names)


def toy(seed: int = 0, *, generate: bool = True) -> tuple[Any, Any]:
    """A specialized model and its tokenizer, as `load` gives them. generate: as `specialize`'s."""
    model: Any = gemma4_text.Model(gemma4_text.ModelArgs.from_dict(toy_config()))
    key = mx.random.key(seed)
    weights = []
    for name, value in tree_flatten(model.parameters()):
        key, draw = mx.random.split(key)
        if value.ndim == 1:
            drawn = mx.random.uniform(0.5, 1.5, value.shape, key=draw)
        else:
            drawn = mx.random.normal(value.shape, scale=value.shape[-1] ** -0.5, key=draw)
        weights.append((name, drawn))
    model.update(tree_unflatten(weights))
    model.eval()
    mx.eval(model.parameters())
    tokenizer = TokenizerWrapper(toy_tokenizer(), eos_token_ids=[SPECIAL.index("<eos>")])
    return specialize(model, generate=generate), tokenizer
