"""The tensors of a checkpoint against those that a Spec needs: none missing, none left over, each of its shape. Pure.

Understands the names and forms found in the wild: four prefixes, quantized modules, fused and stacked experts, other
towers beside the text model, and K/V of layers that share another's.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .checkpoint import Shape, Tensors
from .errors import SpecError, listing, show
from .fields import Fields
from .spec import Layer, Spec

PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.")
# What mlx-lm's sanitize drops, by the same rules.
OTHER_TOWERS = (
    "vision_tower",
    "multi_modal_projector",
    "audio_tower",
    "embed_audio",
    "embed_vision",
    "vision_embedder",
)
STRAYS = ("self_attn.rotary_emb", "input_max", "input_min", "output_max", "output_min")
SHARED_KEYS = re.compile(r"layers\.([0-9]{1,4})\.self_attn\.(k_proj|v_proj|k_norm)\.")
MODES = ("affine", "mxfp4", "mxfp8", "nvfp4")

Modes = Callable[[str], str | None]


@dataclass(frozen=True)
class Tensor:
    """A tensor of the text model. A quantizable one may be packed, with scales beside it."""

    shape: Shape
    quantizable: bool


def check_tensors(spec: Spec, tensors: Tensors, modes: Modes = lambda module: None) -> tuple[str, ...]:
    """Refuse tensors that are missing, left over or of another shape. Returns notes on those that are ignored."""
    found = _text_tensors(spec, tensors)
    absent: list[str] = []
    wrong: list[str] = []
    used: set[str] = set()
    for name, tensor in expected_tensors(spec).items():
        if name not in found:
            absent.append(name)
            continue
        used.add(name)
        shape, wanted = found[name], tensor.shape
        module = name.removesuffix(".weight")
        if tensor.quantizable and f"{module}.scales" in found:
            used |= {f"{module}.scales", f"{module}.global_scale"}
            mode = modes(module)
            if mode in ("affine", None):
                used.add(f"{module}.biases")
            if mode == "affine" and f"{module}.biases" not in found:
                absent.append(f"{module}.biases")
            # Packed: the last dimension depends on the bits.
            shape, wanted = shape and shape[:-1], wanted[:-1]
        if shape is not None and shape != wanted:
            wrong.append(f"{name} is {list(found[name] or ())}; expected {list(tensor.shape)}, from config.json")
    left = [name for name in found if name not in used]
    notes = []
    if spec.tie_word_embeddings and any(_is_head(name) for name in left):
        notes.append("lm_head is ignored, since tie_word_embeddings is true: logits come from the embedding")
        left = [name for name in left if not _is_head(name)]
    _refuse(absent, left, wrong)
    return tuple(notes)


def _refuse(absent: list[str], left: list[str], wrong: list[str]) -> None:
    faults = []
    if absent:
        faults.append(f"{listing(absent)} {'is' if len(absent) == 1 else 'are'} absent")
    if left:
        faults.append(f"{listing([_plain(name) for name in left])} {'is' if len(left) == 1 else 'are'} left over")
    if faults:
        raise SpecError(
            f"checkpoint: {' and '.join(faults)}; expected exactly the text model that config.json describes"
        )
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise SpecError(f"checkpoint: {wrong[0]}{more}")


def _is_head(name: str) -> bool:
    return name.startswith("lm_head.")


def _plain(name: str) -> str:
    return name if re.fullmatch(r"[\w.-]+", name, re.ASCII) else show(name, 60)


def canonical(name: str) -> str:
    """A tensor or module name without the prefix that says which program saved it."""
    for prefix in PREFIXES:
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name


def _text_tensors(spec: Spec, tensors: Tensors) -> dict[str, Shape | None]:
    """Canonical name to shape, of the text model alone, experts in their stacked form."""
    readers = {index for index, layer in enumerate(spec.layers) if layer.kv_source != index}
    found: dict[str, Shape | None] = {}
    for original, shape in tensors.items():
        if original.removeprefix("model.").startswith(OTHER_TOWERS) or any(stray in original for stray in STRAYS):
            continue
        name = canonical(original)
        shared = SHARED_KEYS.match(name)
        if shared and int(shared[1]) in readers:
            continue
        for stacked, part in _stacked(name, shape):
            if stacked in found:
                raise SpecError(f"checkpoint: {_plain(stacked)} is there twice, under two names; expected it once")
            found[stacked] = part
    return found


def _stacked(name: str, shape: Shape | None) -> tuple[tuple[str, Shape | None], ...]:
    if name.endswith(".experts.gate_up_proj"):
        base = f"{name.removesuffix('.gate_up_proj')}.switch_glu"
        # An odd number of rows is no pair of gate and up: left whole, its shape is refused.
        if shape and len(shape) == 3 and shape[1] % 2 == 0:
            shape = (shape[0], shape[1] // 2, shape[2])
        return ((f"{base}.gate_proj.weight", shape), (f"{base}.up_proj.weight", shape))
    if name.endswith(".experts.down_proj"):
        return ((f"{name.removesuffix('.down_proj')}.switch_glu.down_proj.weight", shape),)
    return ((name, shape),)


def expected_tensors(spec: Spec) -> dict[str, Tensor]:
    """Every tensor of the text model, by canonical name."""
    expected = {"embed_tokens.weight": Tensor((spec.vocab_size, spec.hidden_size), True)}
    if spec.per_layer_input_size:
        width = spec.per_layer_input_size
        every = len(spec.layers) * width
        expected["embed_tokens_per_layer.weight"] = Tensor((spec.per_layer_vocab_size, every), True)
        expected["per_layer_model_projection.weight"] = Tensor((every, spec.hidden_size), True)
        expected["per_layer_projection_norm.weight"] = Tensor((width,), False)
    for index, layer in enumerate(spec.layers):
        owns_kv = layer.kv_source == index
        expected |= {f"layers.{index}.{name}": tensor for name, tensor in _layer(spec, layer, owns_kv).items()}
    expected["norm.weight"] = Tensor((spec.hidden_size,), False)
    if not spec.tie_word_embeddings:
        expected["lm_head.weight"] = Tensor((spec.vocab_size, spec.hidden_size), True)
    return expected


def _layer(spec: Spec, layer: Layer, owns_kv: bool) -> dict[str, Tensor]:
    hidden, queries, keys = spec.hidden_size, layer.query_heads * layer.head_dim, layer.kv_heads * layer.head_dim
    linear: dict[str, Shape] = {"self_attn.q_proj": (queries, hidden), "self_attn.o_proj": (hidden, queries)}
    norms = {"self_attn.q_norm": layer.head_dim}
    if owns_kv:
        linear["self_attn.k_proj"] = (keys, hidden)
        norms["self_attn.k_norm"] = layer.head_dim
        if not layer.k_eq_v:
            linear["self_attn.v_proj"] = (keys, hidden)
    norms |= dict.fromkeys(("input_layernorm", "post_attention_layernorm"), hidden)
    norms |= dict.fromkeys(("pre_feedforward_layernorm", "post_feedforward_layernorm"), hidden)
    linear |= dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), (layer.intermediate_size, hidden))
    linear["mlp.down_proj"] = (hidden, layer.intermediate_size)
    bare: dict[str, Shape] = {"layer_scalar": (1,)}
    if spec.experts:
        count, width = spec.experts.count, spec.experts.intermediate_size
        linear["router.proj"] = (count, hidden)
        linear |= dict.fromkeys(("experts.switch_glu.gate_proj", "experts.switch_glu.up_proj"), (count, width, hidden))
        linear["experts.switch_glu.down_proj"] = (count, hidden, width)
        norms |= dict.fromkeys(("post_feedforward_layernorm_1", "post_feedforward_layernorm_2"), hidden)
        norms["pre_feedforward_layernorm_2"] = hidden
        bare |= {"router.scale": (hidden,), "router.per_expert_scale": (count,)}
    if spec.per_layer_input_size:
        linear["per_layer_input_gate"] = (spec.per_layer_input_size, hidden)
        linear["per_layer_projection"] = (hidden, spec.per_layer_input_size)
        norms["post_per_layer_input_norm"] = hidden
    return {
        **{f"{name}.weight": Tensor(shape, True) for name, shape in linear.items()},
        **{f"{name}.weight": Tensor((size,), False) for name, size in norms.items()},
        **{name: Tensor(shape, False) for name, shape in bare.items()},
    }


def quantization_modes(config: Mapping[str, Any]) -> Modes:
    """Which quantization mode each module (canonical name) has, as config.json says it; None if it does not say."""
    if config.get("quantization") is None:
        return lambda module: None
    table = Fields(config["quantization"], "config.json", "quantization.")
    default = _mode(table)
    overrides = {
        canonical(name): _mode(Fields(value, "config.json", f"quantization.{_plain(name)}."))
        for name, value in table.values.items()
        if isinstance(value, dict)
    }
    return lambda module: overrides.get(module, default)


def _mode(table: Fields) -> str:
    return table.word("mode", MODES) if "mode" in table.values else MODES[0]
