"""An mlx-lm Gemma 4 model with random quantized weights, whatever its size: nothing large is ever held in floats.

mlx-lm's model and its quantization are built lazily and give names, shapes and settings; every array is then replaced.
"""

import copy
import math
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.convert import mixed_quant_predicate_builder
from mlx_lm.models import gemma4, gemma4_text

GROUP_SIZE = 64
BITS = "4"  # the router 8, by mlx-lm's own quant_predicate
MIXED = "mixed"  # 4 bits, and 8 where mlx-lm's mixed recipes give more than the least


def build(config: dict[str, Any], dtype: mx.Dtype, seed: int = 7, bits: str = BITS) -> tuple[Any, Any]:
    """Two models of a config.json (nested or flat) over the same arrays, no parameter of them at its initial value.

    One is for straightline; the other is mlx-lm's alone. bits: a number, or "mixed".
    """
    model, oracle = skeleton(config, bits), skeleton(config, bits)
    mx.random.seed(seed)
    for name, module in model.named_modules():
        old = {key: value for key, value in module.items() if isinstance(value, mx.array) and not key.startswith("_")}
        if "scales" in old:
            new = quantized(module)
        else:
            new = {key: plain(f"{name}.{key}", value.shape) for key, value in old.items()}
        if set(new) != set(old):
            raise AssertionError(f"{name}: {sorted(old)} are its parameters, {sorted(new)} were drawn")
        for key, value in new.items():
            module[key] = value if value.dtype == mx.uint32 else value.astype(dtype)
        mx.eval([module[key] for key in new])
    oracle.update(model.parameters())
    return model, oracle


def skeleton(config: dict[str, Any], bits: str = BITS) -> Any:
    """mlx-lm's model, quantized, all arrays lazy."""
    module = gemma4 if "text_config" in config else gemma4_text
    model: Any = module.Model(module.ModelArgs.from_dict(copy.deepcopy(config)))
    own, mixed = model.quant_predicate, mixed_quant_predicate_builder("mixed_4_6", model)

    def chosen(path: str, one: Any) -> Any:
        if not hasattr(one, "to_quantized") or one.weight.shape[-1] % GROUP_SIZE:
            return False
        more = bits == MIXED and mixed(path, one)["bits"] > 4
        return {"group_size": GROUP_SIZE, "bits": 8} if more else own(path, one)

    nn.quantize(model, GROUP_SIZE, 4 if bits == MIXED else int(bits), class_predicate=chosen)
    model.eval()
    return model


def quantized(module: Any) -> dict[str, mx.array]:
    """Any packed codes; scales and biases such that the weights have mean 0 and variance 1 / inputs."""
    top = 2**module.bits - 1
    inputs = module.weight.shape[-1] * 32 // module.bits
    step = 1 / (math.sqrt(inputs) * math.sqrt(((top + 1) ** 2 - 1) / 12))
    scales = step * mx.random.uniform(0.5, 1.4, module.scales.shape)
    biases = scales * (mx.random.uniform(-0.6, 0.6, module.scales.shape) - top / 2)
    return {
        "weight": words(module.weight.shape),
        "scales": scales,
        "biases": biases,
    }


def words(shape: tuple[int, ...]) -> mx.array:
    """Random 32-bit words: split keys are just that. (randint draws floats, 24 bits each and twice the memory.)"""
    key = mx.random.randint(0, 1 << 16, (2,), dtype=mx.uint32)
    return mx.random.split(key, num=math.prod(shape) // 2).reshape(shape)


def plain(name: str, shape: tuple[int, ...]) -> mx.array:
    """Norms, scales and scalars; and what is too narrow to quantize, in toys."""
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        drawn = mx.random.uniform(0.1, 0.6, shape)  # attention then looks at several tokens, not at one
    elif name.endswith("layer_scalar"):
        drawn = mx.random.uniform(0.5, 0.9, shape)
    elif len(shape) == 1:
        drawn = mx.random.uniform(0.4, 1.6, shape)
    else:
        drawn = mx.random.normal(shape) * shape[-1] ** -0.5
    return drawn


def size_in_gb(model: Any) -> float:
    return float(sum(value.nbytes for _, value in tree_flatten(model.parameters()))) / 1e9
