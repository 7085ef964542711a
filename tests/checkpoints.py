"""Checkpoint folders as they are published, in small: config.json, safetensors in the namings found in the wild, a
tokenizer. Written from a toy model, which is then the reference for what `load` makes of the folder.
"""

import copy
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import toys
from comparing import assert_same
from mlx.utils import tree_flatten

from straightline.runtime import load
from straightline.runtime.toy import toy_tokenizer

Weights = dict[str, mx.array]

ORIGINAL, MLX, TEXT = "original", "mlx", "text"
NAMINGS: dict[str, Callable[[str], str]] = {
    # transformers' own: everything of the text model below model.language_model, the head outside
    ORIGINAL: lambda name: name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name,
    # what mlx-lm's save_model writes for the outer model
    MLX: lambda name: f"language_model.{name}",
    # a text-only save
    TEXT: lambda name: name,
}


def weights_of(model: Any) -> Weights:
    """The arrays of a toy under the names of gemma4_text.Model."""
    return {name.removeprefix("language_model."): value for name, value in tree_flatten(model.parameters())}


def named(weights: Weights, naming: str) -> Weights:
    return {NAMINGS[naming](name): value for name, value in weights.items()}


def fused_experts(weights: Weights) -> Weights:
    """Experts as transformers stores them: gate and up in one tensor, no `.weight`."""
    fused = {}
    for name, value in weights.items():
        base, _, last = name.partition(".switch_glu.")
        if last == "gate_proj.weight":
            up = weights[f"{base}.switch_glu.up_proj.weight"]
            fused[f"{base}.gate_up_proj"] = mx.concatenate([value, up], axis=-2)
        elif last == "down_proj.weight":
            fused[f"{base}.down_proj"] = value
        elif last != "up_proj.weight":
            fused[name] = value
    return fused


def with_shared_kv(weights: Weights, config: dict[str, Any], quantize: dict[str, Any] | None = None) -> Weights:
    """K/V tensors for the layers that share another's too, as some published checkpoints carry them."""
    more = dict(weights)
    first = config["num_hidden_layers"] - config["num_kv_shared_layers"]
    for layer in range(first, config["num_hidden_layers"]):
        where = f"model.layers.{layer}.self_attn"
        head_dim = weights[f"{where}.q_norm.weight"].shape[0]
        rows = config["num_key_value_heads"] * head_dim
        for name in ("k_proj", "v_proj"):
            drawn = mx.random.normal((rows, config["hidden_size"]), key=mx.random.key(layer))
            if quantize is None:
                more[f"{where}.{name}.weight"] = drawn
            else:
                parts = mx.quantize(drawn, **quantize)
                more |= {
                    f"{where}.{name}.{part}": v for part, v in zip(("weight", "scales", "biases"), parts, strict=True)
                }
        more[f"{where}.k_norm.weight"] = mx.random.normal((head_dim,))
    return more


def towers(dtype: mx.Dtype = mx.bfloat16) -> Weights:
    """Tensors of the vision and audio sides, under the names that published checkpoints use."""
    names = (
        "model.vision_tower.encoder.layers.0.self_attn.q_proj.linear.weight",
        "model.vision_embedder.x.weight",
        "model.embed_vision.embedding_projection.weight",
        "model.audio_tower.layers.0.feed_forward1.ffw_layer_1.linear.weight",
        "model.embed_audio.y.weight",
        "vision_tower.layers.1.norm.weight",
        "multi_modal_projector.weight",
    )
    return {name: mx.ones((4, 4), dtype) for name in names}


def write(
    folder: Path,
    config: dict[str, Any],
    weights: Weights,
    *,
    shards: int = 1,
    index: bool | None = None,
    tokenizer: bool = True,
) -> Path:
    """A checkpoint folder. index: whether there is an index file; by default if there are several shards."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    names = sorted(weights)
    weight_map = {}
    for number in range(shards):
        shard = f"model-{number + 1:05}-of-{shards:05}.safetensors" if shards > 1 else "model.safetensors"
        part = names[number::shards]
        mx.save_safetensors(str(folder / shard), {name: weights[name] for name in part}, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, shard)
    if index if index is not None else shards > 1:
        text = json.dumps({"metadata": {}, "weight_map": weight_map})
        (folder / "model.safetensors.index.json").write_text(text)
    if tokenizer:
        toy_tokenizer().save_pretrained(folder)
    return folder


def publish(
    folder: Path,
    config: dict[str, Any],
    naming: str = ORIGINAL,
    *,
    model_type: str = "gemma4",
    dtype: mx.Dtype = mx.float32,
    quantize: Any = None,
    quantization: dict[str, Any] | None = None,
    change: Callable[[Weights], Weights] = lambda weights: weights,
    more: dict[str, Any] | None = None,
    **how: Any,
) -> Any:
    """Write the toy of a flat config, and return that toy: a plain mlx-lm text model with the same arrays.

    change: applied to the weights before they are named. more: keys for the top of config.json.
    """
    plain = toys.build(config, dtype=dtype, quantize=quantize)
    published = copy.deepcopy(config) if naming == TEXT else toys.nested(config, model_type)
    published |= more or {}
    if quantization is not None:
        published["quantization"] = published["quantization_config"] = quantization
    weights = named(change(weights_of(plain)), naming)
    if naming == ORIGINAL:
        weights |= towers()
    write(folder, published, weights, **how)
    return plain


@contextmanager
def with_files(root: Path, **configs: dict[str, Any]) -> Iterator[None]:
    """Folders of these names in `root`, their files in a user's cache there, as after load(folder, generate=True)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STRAIGHTLINE_CACHE", str(root / "cache"))
        for name, config in configs.items():
            publish(root / name, config)
            load(root / name, generate=True)
        yield


def assert_same_model(found: Any, plain: Any, vocab: int = 97) -> None:
    """A specialized model gives the bytes of a plain one: a prompt over the window, steps, and no cache."""
    caches = found.make_cache(), plain.make_cache()
    for number, (model, plain_logits) in enumerate(_runs(found, plain, caches, vocab)):
        mx.eval(model, plain_logits)
        assert_same(model, plain_logits, f"logits of call {number}")


def _runs(found: Any, plain: Any, caches: tuple[Any, Any], vocab: int) -> Iterator[tuple[mx.array, mx.array]]:
    for number, length in enumerate((12, 1, 1, 5)):
        ids = toys.tokens(1, length, vocab, seed=number)
        yield found(ids, cache=caches[0]), plain(ids, cache=caches[1])
    ids = toys.tokens(2, 64, vocab, seed=9)  # 128 rows: past the 64 from where experts are sorted
    yield found(ids), plain(ids)
