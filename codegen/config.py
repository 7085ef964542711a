"""config.json (nested or flat), or the arguments of a loaded mlx-lm model, to a Spec. Raises SpecError.

Nothing is assumed: a key that changes the forward and is absent is refused by name, because mlx-lm, mlx-vlm and
transformers each assume different defaults. Every other key is known to be harmless, with its reason, or refused.
"""

import json
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import SpecError, show
from .fields import Fields
from .spec import Attention, Experts, Layer, Rope, RopeKind, Spec

MOST_BYTES = 4 * 1024 * 1024  # published configs are under 10 KB; per-module quantization maps reach a few hundred
MOST_LAYERS = 256
MOST_SIZE = 1 << 20
MOST_VOCAB = 1 << 24

NESTED = ("gemma4", "gemma4_unified")
FLAT = ("gemma4_text", "gemma4_unified_text")
LAYER_TYPES = {"sliding_attention": Attention.SLIDING, "full_attention": Attention.FULL}

REQUIRED = (
    "hidden_size",
    "num_hidden_layers",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "vocab_size",
    "layer_types",
    "rope_parameters",
    "num_kv_shared_layers",
    "hidden_size_per_layer_input",
    "use_double_wide_mlp",
    "attention_k_eq_v",
    "enable_moe_block",
    "final_logit_softcapping",
    "tie_word_embeddings",
    "hidden_activation",
)

_OTHER_TOWER = "belongs to the vision or audio tower"
_TOKENS = "a token id for the tokenizer or the generation loop"
_TRAINING = "used in training only"
_PROVENANCE = "says where the file came from"
_GENERATION = "a setting of transformers' generation loop"
# Keys that cannot change the text forward, each with the reason.
IGNORED = {
    "architectures": _PROVENANCE,
    "_name_or_path": _PROVENANCE,
    "name_or_path": _PROVENANCE,
    "transformers_version": _PROVENANCE,
    "unsloth_fixed": _PROVENANCE,
    "unsloth_version": _PROVENANCE,
    "auto_map": "names remote code, which is never run",
    "dtype": "the dtype of the stored weights, a checkpoint fact",
    "torch_dtype": "the dtype of the stored weights, a checkpoint fact",
    "quantization": "a checkpoint fact, bound at load",
    "quantization_config": "a checkpoint fact, bound at load",
    "initializer_range": _TRAINING,
    "bos_token_id": _TOKENS,
    "eos_token_id": _TOKENS,
    "pad_token_id": _TOKENS,
    "use_cache": _GENERATION,
    "return_dict": _GENERATION,
    "output_attentions": _GENERATION,
    "output_hidden_states": _GENERATION,
    "chunk_size_feed_forward": _GENERATION,
    "is_encoder_decoder": _GENERATION,
    "id2label": "for classifiers",
    "label2id": "for classifiers",
    "problem_type": "for classifiers",
    "audio_config": _OTHER_TOWER,
    "vision_config": _OTHER_TOWER,
    "vision_soft_tokens_per_image": _OTHER_TOWER,
    "audio_token_id": _TOKENS,
    "boa_token_id": _TOKENS,
    "boi_token_id": _TOKENS,
    "eoa_token_id": _TOKENS,
    "eoa_token_index": _TOKENS,
    "eoi_token_id": _TOKENS,
    "image_token_id": _TOKENS,
    "video_token_id": _TOKENS,
    "attention_dropout": _TRAINING,
    "max_position_embeddings": "RoPE is computed for any position",
    "expert_intermediate_size": "an older name of moe_intermediate_size, null where published",
    "sliding_window_pattern": "layer_types says the same, layer by layer",
    "partial_rotary_factor": "rope_parameters says it for each kind of layer",
    "global_partial_rotary_factor": "rope_parameters says it for each kind of layer",
    "rope_theta": "rope_parameters says it for each kind of layer",
}


def read_file(path: Path, expected: str = "a Gemma 4 config.json") -> dict[str, Any]:
    """The JSON object in a file."""
    config = read_json(path, expected)
    if not isinstance(config, dict):
        raise SpecError(f"{path.name}: holds {show(config)}; expected an object")
    return config


def read_json(path: Path, expected: str = "JSON") -> Any:
    """What a JSON file of a sensible size holds."""
    try:
        found = path.stat()
        # A pipe or a device may never end, or never begin.
        if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
            raise SpecError(f"{path}: is a pipe or a device; expected {expected} in a file")
        if found.st_size > MOST_BYTES:
            raise SpecError(f"{path.name}: has {found.st_size} bytes; expected at most {MOST_BYTES}")
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(f"{path}: cannot be read ({error.strerror}); expected {expected}") from None
    except RecursionError:
        raise SpecError(f"{path.name}: is nested too deeply; expected {expected}") from None
    except ValueError as error:
        raise SpecError(f"{path.name}: is not JSON ({error}); expected {expected}") from None


def read_config(config: object, where: str = "config.json") -> Spec:
    """A parsed config.json to its Spec: `gemma4` or `gemma4_unified` nested, `gemma4_text` flat."""
    outer = Fields(config, where)
    outer.require(["model_type"], "a Gemma 4 config")
    model_type = outer.word("model_type", NESTED + FLAT)
    if model_type in FLAT:
        return _read_text(Fields(config, where))
    outer.require(["text_config"], f'the text model beside model_type "{model_type}"')
    text = dict(Fields(outer.take("text_config"), where, "text_config.").values)
    if "model_type" in text:
        Fields(text, where, "text_config.").word("model_type", FLAT)
    # mlx-lm reads the outer vocab_size, transformers the inner; a file that says both must say the same.
    for key in ("vocab_size", "tie_word_embeddings"):
        if key in outer.values:
            value = outer.take(key)
            # Containers are wrong here anyway, and comparing two deep ones would exhaust the stack.
            if isinstance(value, (dict, list, tuple)) or text.setdefault(key, value) != value:
                raise SpecError(
                    f"{where}: {key} is {show(value)} outside text_config and {show(text.get(key))} inside; "
                    "expected the same"
                )
    outer.finish(IGNORED)
    return _read_text(Fields(text, where, name="text_config"))


def read_arguments(arguments: object) -> Spec:
    """The arguments of a loaded mlx-lm text model (`gemma4_text.ModelArgs`) to their Spec."""
    values = dict(vars(arguments))
    # mlx-lm's ModelArgs has no field for what its Gemma 4 code takes as given.
    values.setdefault("hidden_activation", "gelu_pytorch_tanh")
    return _read_text(Fields(values, "model.args"))


def _read_text(text: Fields) -> Spec:
    text.require(REQUIRED, "each stated, since no default is right for every Gemma 4 size")
    text.fixed("model_type", *FLAT)
    text.fixed("hidden_activation", "gelu_pytorch_tanh")
    text.fixed("attention_bias", False)
    text.fixed("rope_traditional", False)
    # Attention over image tokens may look both ways; text attention is causal in every published size.
    text.fixed("use_bidirectional_attention", None, "vision")

    hidden_size = text.integer("hidden_size", 1, MOST_SIZE)
    eps = text.number("rms_norm_eps", 0.0, 1.0)
    width_key = "hidden_size_per_layer_input"
    width = text.integer(width_key, 0, MOST_SIZE) if _set(text, width_key) else 0
    types = _layer_types(text)
    return Spec(
        hidden_size=hidden_size,
        vocab_size=text.integer("vocab_size", 1, MOST_VOCAB),
        rms_norm_eps=eps,
        final_logit_softcapping=(
            text.number("final_logit_softcapping", 0.0, 1e6) if _set(text, "final_logit_softcapping") else None
        ),
        tie_word_embeddings=text.boolean("tie_word_embeddings"),
        sliding_window=_sliding_window(text, types),
        per_layer_input_size=width,
        per_layer_vocab_size=_per_layer_vocab(text, width),
        experts=_experts(text),
        layers=_finish(text, _layers(text, types)),
    )


def _set(text: Fields, key: str) -> bool:
    text.taken.add(key)
    return text.has(key)


def _finish(text: Fields, layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
    text.finish(IGNORED)
    return layers


def _layer_types(text: Fields) -> tuple[Attention, ...]:
    count = text.integer("num_hidden_layers", 1, MOST_LAYERS)
    names = text.take("layer_types")
    if not isinstance(names, (list, tuple)) or len(names) != count:
        raise text.error("layer_types", f"a list of {count}, one for each of num_hidden_layers")
    for index, name in enumerate(names):
        if not isinstance(name, str) or name not in LAYER_TYPES:
            raise SpecError(
                f"{text.where}: layer_types[{index}] is {show(name)}; "
                'expected "sliding_attention" or "full_attention"'
            )
    return tuple(LAYER_TYPES[name] for name in names)


def _sliding_window(text: Fields, types: tuple[Attention, ...]) -> int:
    text.taken.add("sliding_window")
    if Attention.SLIDING not in types:
        return 0
    text.require(["sliding_window"], "the number of tokens that a sliding layer sees")
    return text.integer("sliding_window", 1, MOST_VOCAB)


def _per_layer_vocab(text: Fields, width: int) -> int:
    text.taken.add("vocab_size_per_layer_input")
    if not width:
        return 0
    text.require(["vocab_size_per_layer_input"], "the rows of the per-layer embedding")
    return text.integer("vocab_size_per_layer_input", 1, MOST_VOCAB)


def _experts(text: Fields) -> Experts | None:
    keys = ("num_experts", "top_k_experts", "moe_intermediate_size")
    if not text.boolean("enable_moe_block"):
        text.taken.update(keys)
        return None
    text.require(keys, "the sizes of the experts, since enable_moe_block is true")
    count = text.integer("num_experts", 1, 1 << 16)
    return Experts(
        count=count,
        top_k=text.integer("top_k_experts", 1, count),
        intermediate_size=text.integer("moe_intermediate_size", 1, MOST_SIZE),
    )


def _layers(text: Fields, types: tuple[Attention, ...]) -> tuple[Layer, ...]:
    count = len(types)
    shared = text.integer("num_kv_shared_layers", 0, count - 1) if _set(text, "num_kv_shared_layers") else 0
    owners = count - shared
    heads = text.integer("num_attention_heads", 1, 4096)
    kv_heads = {Attention.SLIDING: text.integer("num_key_value_heads", 1, 4096)}
    head_dim = {Attention.SLIDING: text.integer("head_dim", 2, 8192)}
    k_eq_v = text.boolean("attention_k_eq_v")
    head_dim[Attention.FULL], kv_heads[Attention.FULL] = _full_attention(text, types, k_eq_v)
    for kind in dict.fromkeys(types):
        if heads % kv_heads[kind]:
            raise SpecError(
                f"{text.where}: num_attention_heads is {heads}; "
                f"expected a multiple of the {kv_heads[kind]} KV heads of {kind.value} attention"
            )
        if head_dim[kind] % 2:
            raise SpecError(
                f"{text.where}: head_dim of {kind.value} attention is {head_dim[kind]}; expected an even number"
            )
    ropes = _ropes(text, types, head_dim)
    intermediate = text.integer("intermediate_size", 1, MOST_SIZE)
    widened = 2 if text.boolean("use_double_wide_mlp") else 1

    layers = []
    for index, kind in enumerate(types):
        source = index
        if index >= owners:
            candidates = [earlier for earlier in range(owners) if types[earlier] is kind]
            if not candidates:
                raise SpecError(
                    f"{text.where}: layer {index} shares KV (num_kv_shared_layers is {shared}), but no {kind.value} "
                    f"layer below {owners} owns any; expected one"
                )
            source = candidates[-1]
        layers.append(
            Layer(
                attention=kind,
                query_heads=heads,
                kv_heads=kv_heads[kind],
                head_dim=head_dim[kind],
                k_eq_v=k_eq_v and kind is Attention.FULL,
                kv_source=source,
                intermediate_size=intermediate * (widened if source != index else 1),
                rope=ropes[kind],
            )
        )
    return tuple(layers)


def _full_attention(text: Fields, types: tuple[Attention, ...], k_eq_v: bool) -> tuple[int, int]:
    """head_dim and KV heads of full-attention layers: the explicit keys, else what `per_layer_config` agrees on."""
    keys = ("global_head_dim", "num_global_key_value_heads", "per_layer_config")
    base = (text.integer("head_dim", 2, 8192), text.integer("num_key_value_heads", 1, 4096))
    text.taken.update(keys)
    if Attention.FULL not in types:
        return base
    derived = _per_layer_config(text, types, base) if text.has("per_layer_config") else None
    if derived is None:
        text.require(["global_head_dim"], "the head size of full-attention layers, or null if it is head_dim")
    if text.has("global_head_dim"):
        head_dim = text.integer("global_head_dim", 2, 8192)
    else:
        head_dim = derived[0] if derived and "global_head_dim" not in text.values else base[0]
    # mlx-lm reads the second field on K = V layers only; elsewhere it is dead, whatever it holds.
    if text.has("num_global_key_value_heads"):
        explicit = text.integer("num_global_key_value_heads", 1, 4096)
        return head_dim, explicit if k_eq_v else base[1]
    kv_heads = derived[1] if derived else base[1]
    if not k_eq_v and kv_heads != base[1]:
        raise SpecError(
            f"{text.where}: per_layer_config gives full attention {kv_heads} KV heads, but without attention_k_eq_v "
            f"mlx-lm uses num_key_value_heads; expected {base[1]}"
        )
    return head_dim, kv_heads


def _per_layer_config(text: Fields, types: tuple[Attention, ...], base: tuple[int, int]) -> tuple[int, int]:
    """The layout of newer transformers: `{"05": {"head_dim": 512, "num_key_value_heads": 1}}`, zero-padded keys."""
    table = Fields(text.take("per_layer_config"), text.where, "per_layer_config.")
    if len(table.values) > len(types):
        raise text.error("per_layer_config", f"at most one entry for each of {len(types)} layers")
    found: dict[int, tuple[int, int]] = {}
    for key in table.values:
        index = int(key) if isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) < 6 else -1
        if not 0 <= index < len(types) or index in found:
            raise SpecError(
                f"{text.where}: per_layer_config has the key {show(key)}; "
                f"expected each layer from 0 to {len(types) - 1} at most once"
            )
        entry = Fields(table.take(key), text.where, f"per_layer_config.{key}.")
        sizes = (
            entry.integer("head_dim", 2, 8192) if "head_dim" in entry.values else base[0],
            entry.integer("num_key_value_heads", 1, 4096) if "num_key_value_heads" in entry.values else base[1],
        )
        entry.finish({})
        if types[index] is Attention.SLIDING and sizes != base:
            raise SpecError(
                f"{text.where}: per_layer_config gives sliding layer {index} a head_dim of {sizes[0]} and {sizes[1]} "
                f"KV heads; expected {base[0]} and {base[1]}, since mlx-lm has one size for all sliding layers"
            )
        found[index] = sizes
    full = {index: found.get(index, base) for index, kind in enumerate(types) if kind is Attention.FULL}
    first = min(full)
    for index, sizes in full.items():
        if sizes != full[first]:
            raise SpecError(
                f"{text.where}: per_layer_config gives full-attention layer {first} a head_dim of {full[first][0]} and "
                f"{full[first][1]} KV heads, layer {index} {sizes[0]} and {sizes[1]}; expected all to agree"
            )
    return full[first]


def _ropes(text: Fields, types: tuple[Attention, ...], head_dim: Mapping[Attention, int]) -> dict[Attention, Rope]:
    table = Fields(text.take("rope_parameters"), text.where, "rope_parameters.")
    ropes = {}
    for name, kind in LAYER_TYPES.items():
        if kind not in types:
            table.taken.add(name)
            continue
        table.require([name], f"the RoPE of {kind.value} layers")
        rope = Fields(table.take(name), text.where, f"rope_parameters.{name}.")
        rope.require(["rope_type", "rope_theta"], "both stated")
        rope_kind = RopeKind(rope.word("rope_type", tuple(one.value for one in RopeKind)))
        rotated, factor = head_dim[kind], 1.0
        if rope_kind is RopeKind.PROPORTIONAL:
            rope.require(["partial_rotary_factor"], "the share of the head that turns")
            rotated = int(head_dim[kind] * rope.number("partial_rotary_factor", 0.0, 1.0))
            if rotated < 1:
                raise rope.error("partial_rotary_factor", f"at least 1/{head_dim[kind]}")
            factor = rope.number("factor", 0.0, 1e6) if rope.has("factor") else 1.0
            rope.taken.add("factor")
        else:
            # mlx-lm turns the whole head here whatever the factor says, so only the factor that agrees is accepted.
            rope.fixed("partial_rotary_factor", 1.0, 1, None)
        ropes[kind] = Rope(rope_kind, rope.number("rope_theta", 0.0, 1e12), rotated, factor)
        rope.finish({})
    # DSpark drafters mix scalars with the two objects; mlx-lm reads the objects only.
    table.finish({"rope_theta": "the objects say it", "rope_type": "the objects say it"})
    return ropes
