"""config.json to Spec: what is understood, and that everything else ends in one SpecError sentence, at once."""

import copy
import json
import math
import re
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import D6, E6, EXPERTS, FULL, M6, SHAPES, SLIDING, build, config, nested

from straightline.codegen import SpecError, generate
from straightline.codegen.config import MOST_BYTES, read_arguments, read_config, read_file
from straightline.codegen.plan import make_plan
from straightline.codegen.render import render
from straightline.codegen.show import layer_table
from straightline.codegen.target import SPECS, checkpoint_target, target_names
from straightline.codegen.verify import verify

NAN = float("nan")
UNKNOWN = "unknown to straightline; expected a Gemma 4 config (if this key cannot change the text forward, remove it "
ROPE = D6["rope_parameters"]


def without(base: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in base.items() if key not in keys}


def rope(kind: str, **changes: Any) -> dict[str, Any]:
    return config(rope_parameters=ROPE | {kind: ROPE[kind] | changes})


def deep(levels: int = 100_000) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


# --- each bad input to its exact message -------------------------------------------------------------------------

MODEL_TYPES = '"gemma4" or "gemma4_unified" or "gemma4_text" or "gemma4_unified_text"'
BAKED = {"layer_idx": 2, "bits": 8, "group_size": 64}
REFUSED: list[tuple[Any, str]] = [
    ([], "holds a list of 0; expected an object"),
    (None, "holds null; expected an object"),
    ({}, "model_type is absent; expected a Gemma 4 config"),
    ({"model_type": "llama"}, f'model_type is "llama"; expected {MODEL_TYPES}'),
    ({"model_type": 5}, f"model_type is 5; expected {MODEL_TYPES}"),
    ({"model_type": "gemma4"}, 'text_config is absent; expected the text model beside model_type "gemma4"'),
    ({"model_type": "gemma4", "text_config": [1]}, "text_config is a list of 1; expected an object"),
    (
        {"model_type": "gemma4", "text_config": {"model_type": "llama"}},
        'text_config.model_type is "llama"; expected "gemma4_text" or "gemma4_unified_text"',
    ),
    (nested(D6) | {"vocab_size": 98}, "vocab_size is 98 outside text_config and 97 inside; expected the same"),
    (
        {**nested(D6), "text_config": nested(D6)["text_config"] | {"surprise": 1}},
        f'text_config has "surprise", {UNKNOWN}from the file)',
    ),
    (nested(D6) | {"surprise": 1}, f'the top level has "surprise", {UNKNOWN}from the file)'),
    (
        without(D6, "num_kv_shared_layers", "hidden_size_per_layer_input", "use_double_wide_mlp"),
        "num_kv_shared_layers, hidden_size_per_layer_input and use_double_wide_mlp are absent; "
        "expected each stated, since no default is right for every Gemma 4 size",
    ),
    (
        without(D6, "global_head_dim"),
        "global_head_dim is absent; expected the head size of full-attention layers, or null if it is head_dim",
    ),
    (
        without(D6, "sliding_window"),
        "sliding_window is absent; expected the number of tokens that a sliding layer sees",
    ),
    (config(hidden_size="48"), 'hidden_size is "48"; expected an integer from 1 to 1048576'),
    (config(hidden_size=True), "hidden_size is true; expected an integer from 1 to 1048576"),
    (config(hidden_size=2**80), "hidden_size is 1208925819614629174706176; expected an integer from 1 to 1048576"),
    (config(hidden_size=10**5000), "hidden_size is an integer of 16610 bits; expected an integer from 1 to 1048576"),
    (config(hidden_size=-1), "hidden_size is -1; expected an integer from 1 to 1048576"),
    (config(hidden_size=64.0), "hidden_size is 64.0; expected an integer from 1 to 1048576"),
    (config(hidden_size=None), "hidden_size is null; expected an integer from 1 to 1048576"),
    (config(hidden_size={"a": 1}), "hidden_size is an object; expected an integer from 1 to 1048576"),
    (config(num_attention_heads=0), "num_attention_heads is 0; expected an integer from 1 to 4096"),
    (
        config(num_attention_heads=3),
        "num_attention_heads is 3; expected a multiple of the 2 KV heads of sliding attention",
    ),
    (config(head_dim=63), "head_dim of sliding attention is 63; expected an even number"),
    (config(num_hidden_layers=0), "num_hidden_layers is 0; expected an integer from 1 to 256"),
    (config(num_hidden_layers=10**6), "num_hidden_layers is 1000000; expected an integer from 1 to 256"),
    (
        config(num_hidden_layers=5),
        "layer_types is a list of 6; expected a list of 5, one for each of num_hidden_layers",
    ),
    (
        config(layer_types=SLIDING),
        'layer_types is "sliding_attention"; expected a list of 6, one for each of num_hidden_layers',
    ),
    (
        config(layer_types=[SLIDING] * 5 + ["chunked"]),
        'layer_types[5] is "chunked"; expected "sliding_attention" or "full_attention"',
    ),
    (
        config(layer_types=["'); import os #"] * 6),
        'layer_types[0] is "\'); import os #"; expected "sliding_attention" or "full_attention"',
    ),
    (config(rms_norm_eps=NAN), "rms_norm_eps is NaN; expected a number above 0 and at most 1"),
    (config(rms_norm_eps=0), "rms_norm_eps is 0; expected a number above 0 and at most 1"),
    (config(rms_norm_eps=-1e-6), "rms_norm_eps is -1e-06; expected a number above 0 and at most 1"),
    (config(rms_norm_eps="1e-6"), 'rms_norm_eps is "1e-6"; expected a number above 0 and at most 1'),
    (
        config(final_logit_softcapping=1e308),
        "final_logit_softcapping is 1e+308; expected a number above 0 and at most 1e+06",
    ),
    (
        config(final_logit_softcapping=math.inf),
        "final_logit_softcapping is Infinity; expected a number above 0 and at most 1e+06",
    ),
    (config(rope_parameters=None), "rope_parameters is null; expected an object"),
    (
        config(rope_parameters={SLIDING: ROPE[SLIDING]}),
        "rope_parameters.full_attention is absent; expected the RoPE of full layers",
    ),
    (
        rope(FULL, rope_type="yarn"),
        'rope_parameters.full_attention.rope_type is "yarn"; expected "default" or "proportional"',
    ),
    (
        rope(FULL, partial_rotary_factor=1.5),
        "rope_parameters.full_attention.partial_rotary_factor is 1.5; expected a number above 0 and at most 1",
    ),
    (
        rope(FULL, partial_rotary_factor=0.001),
        "rope_parameters.full_attention.partial_rotary_factor is 0.001; expected at least 1/64",
    ),
    (
        rope(SLIDING, partial_rotary_factor=0.5),
        "rope_parameters.sliding_attention.partial_rotary_factor is 0.5; expected 1.0 or 1 or null",
    ),
    (
        rope(SLIDING, rope_theta=NAN),
        "rope_parameters.sliding_attention.rope_theta is NaN; expected a number above 0 and at most 1e+12",
    ),
    (rope(SLIDING, surprise=1), f'rope_parameters.sliding_attention has "surprise", {UNKNOWN}from the file)'),
    (config(num_kv_shared_layers=6), "num_kv_shared_layers is 6; expected an integer from 0 to 5"),
    (config(num_kv_shared_layers=-1), "num_kv_shared_layers is -1; expected an integer from 0 to 5"),
    (
        config(num_kv_shared_layers=4),
        "layer 2 shares KV (num_kv_shared_layers is 4), but no full layer below 2 owns any; expected one",
    ),
    (
        config(hidden_activation="__import__('os').system('x')"),
        "hidden_activation is \"__import__('os').system('x')\"; expected \"gelu_pytorch_tanh\"",
    ),
    (config(attention_bias=True), "attention_bias is true; expected false"),
    (config(use_bidirectional_attention="all"), 'use_bidirectional_attention is "all"; expected null or "vision"'),
    (config(tie_word_embeddings=1), "tie_word_embeddings is 1; expected true or false"),
    (
        config(enable_moe_block=True),
        "num_experts, top_k_experts and moe_intermediate_size are absent; "
        "expected the sizes of the experts, since enable_moe_block is true",
    ),
    (config(**EXPERTS | {"top_k_experts": 9}), "top_k_experts is 9; expected an integer from 1 to 8"),
    (config(**EXPERTS | {"num_experts": None}), "num_experts is null; expected an integer from 1 to 65536"),
    (config(surprise=1), f'the top level has "surprise", {UNKNOWN}from the file)'),
    (
        config(**{"a\n\x00\ud800": 1, "b": 2}),
        'the top level has "a\\n\\u0000\\ud800" and "b", unknown to straightline; expected a Gemma 4 config '
        "(if these keys cannot change the text forward, remove them from the file)",
    ),
    (
        config(per_layer_config={"06": {}}),
        'per_layer_config has the key "06"; expected each layer from 0 to 5 at most once',
    ),
    (
        config(per_layer_config={"2": {}, "02": {}}),
        'per_layer_config has the key "02"; expected each layer from 0 to 5 at most once',
    ),
    (
        config(per_layer_config={"00": {"head_dim": 32}}),
        "per_layer_config gives sliding layer 0 a head_dim of 32 and 2 KV heads; expected 64 and 2, "
        "since mlx-lm has one size for all sliding layers",
    ),
]


@pytest.mark.parametrize(("bad", "message"), REFUSED, ids=[message[:50] for _, message in REFUSED])
def test_a_bad_config_is_refused_in_one_sentence(bad: Any, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        generate(bad, "toy")
    assert str(caught.value) == f"config.json: {message}"


@pytest.mark.parametrize("name", ["", "A", "a" * 65, "a--b", "a\n", "a b", "-a", "a-", "1a", "../a", "a;b", "ａ", None])
def test_a_bad_name_is_refused(name: Any) -> None:
    with pytest.raises(SpecError, match=r"^name is .*; expected lower-case letters and digits in words joined by -$"):
        generate(D6, name)


def test_quantized_caches_are_baked_in() -> None:
    """B43: the bits are in the text and in the fingerprint."""
    plain, quantized = (generate(D6, "toy", kv_config=entries) for entries in ([], [BAKED]))
    assert "quantized_attention(q, k, v, scale=1.0, mask=mask, group_size=64, bits=8)" in quantized
    assert '(("full", None, 8, 64),) * 1' in quantized
    assert plain == generate(D6, "toy") == generate(D6, "toy", kv_config=[BAKED | {"bits": 0}])
    fingerprints = {re.search('FINGERPRINT = "(.*)"', source)[1] for source in (plain, quantized)}  # type: ignore[index]
    assert len(fingerprints) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_idx": 6}, "[0].layer_idx is 6; expected an integer from 0 to 5"),
        ({"bits": 5}, "[0].bits is 5; expected 0, 2, 3, 4, 6 or 8"),
        ({"group_size": 48}, "[0].group_size is 48; expected 32, 64 or 128"),
        ({"group_size": 128}, "[0].group_size is 128; expected a divisor of the 64 numbers of a head in layer 2"),
    ],
)
def test_a_bad_kv_config_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        generate(D6, "toy", kv_config=[BAKED | change])
    assert str(caught.value) == f"kv_config.json: {message}"


# --- what is there in the wild -----------------------------------------------------------------------------------


@pytest.mark.parametrize("flat", [D6, M6, E6, *SHAPES.values()], ids=["d6", "m6", "e6", *SHAPES])
def test_nested_and_flat_configs_and_loaded_models_are_one_spec(flat: dict[str, Any]) -> None:
    """B05, B06."""
    layouts = (flat, nested(flat), nested(flat, "gemma4_unified"))
    assert len({generate(layout, "toy") for layout in layouts}) == 1
    specs = {read_config(layout) for layout in layouts}
    specs |= {read_arguments(build(flat).args), read_arguments(build(flat, outer=True).language_model.args)}
    assert len(specs) == 1


def test_the_committed_targets_read_in_every_layout() -> None:
    for name in target_names():
        published = read_file(SPECS / f"{name.replace('-', '_')}.config.json")
        flat = published["text_config"]
        assert read_config(flat).fingerprint == read_config(published).fingerprint


def test_global_kv_heads_null_or_absent_means_those_of_sliding_layers() -> None:
    """B01."""
    key = "num_global_key_value_heads"
    assert generate(E6 | {key: None}, "toy") == generate(without(E6, key), "toy")
    assert generate(D6 | {key: None}, "toy") == generate(without(D6, key), "toy") == generate(D6 | {key: 2}, "toy")
    assert generate(E6 | {key: 1}, "toy") == generate(E6, "toy"), "read where K = V only"
    assert "None, None" not in generate(D6 | {key: None}, "toy")


@pytest.mark.parametrize("base", [D6, M6], ids=["d6", "m6"])
def test_no_shared_layers(base: dict[str, Any]) -> None:
    """B02, B08: 0 and null are the same, each layer owns a cache, and the wide MLP has nowhere to apply."""
    key = "num_kv_shared_layers"
    spec = read_config(base | {key: 0})
    assert spec.owners == tuple(range(6)) and spec.sources == ()
    assert read_config(base | {key: None}) == spec
    assert read_config(base | {"use_double_wide_mlp": True}) == spec
    with pytest.raises(SpecError, match=r"^config.json: num_kv_shared_layers is absent; "):
        read_config(without(base, key))


def test_shared_layers_read_the_last_source_of_their_kind_and_are_wide() -> None:
    """B08."""
    spec = read_config(E6)
    assert [layer.kv_source for layer in spec.layers] == [0, 1, 2, 1, 1, 2]
    assert [layer.intermediate_size for layer in spec.layers] == [128, 128, 128, 256, 256, 256]
    narrow = read_config(E6 | {"use_double_wide_mlp": False})
    assert {layer.intermediate_size for layer in narrow.layers} == {128}


def test_per_layer_config_of_newer_transformers() -> None:
    """B04: derived where all full layers agree, refused where not; explicit keys win."""
    bare = without(D6, "global_head_dim", "num_global_key_value_heads")
    entry = {"head_dim": 128, "num_key_value_heads": 1}
    agreed = bare | {"per_layer_config": {"02": entry, "05": entry}}
    assert read_config(agreed) == read_config(D6 | {"global_head_dim": 128, "num_global_key_value_heads": 1})
    explicit = agreed | {"global_head_dim": 32, "num_global_key_value_heads": 4}
    assert read_config(explicit).layers[2].head_dim == 32
    assert read_config(explicit).layers[2].kv_heads == 4
    with pytest.raises(SpecError) as caught:
        read_config(bare | {"per_layer_config": {"02": entry, "05": entry | {"head_dim": 256}}})
    assert str(caught.value) == (
        "config.json: per_layer_config gives full-attention layer 2 a head_dim of 128 and 1 KV heads, "
        "layer 5 256 and 1; expected all to agree"
    )


def test_quantization_is_no_part_of_the_architecture() -> None:
    """B24, B28: the three spellings, and any mode, give the same file."""
    plain = generate(nested(D6), "toy")
    for prefix in ("language_model.model.", "model.language_model.", "model."):
        override = {f"{prefix}layers.0.mlp.down_proj": {"bits": 8, "group_size": 64}}
        for mode in ({}, {"mode": "mxfp4"}):
            quantization = {"bits": 4, "group_size": 32, **mode, **override}
            assert generate(nested(D6) | {"quantization": quantization}, "toy") == plain


# --- hostile configs ---------------------------------------------------------------------------------------------


@cache
def junk() -> dict[str, Any]:
    return {f"k{number}": number for number in range(800_000)}  # 10 MB as JSON


HOSTILE: dict[str, Callable[[], dict[str, Any]]] = {
    "deep": lambda: D6 | {"surprise": deep()},
    "deep number": lambda: D6 | {"hidden_size": deep()},
    "deep list": lambda: D6 | {"layer_types": deep()},
    "deep word": lambda: D6 | {"hidden_activation": deep()},
    "deep fixed": lambda: D6 | {"use_bidirectional_attention": deep()},
    "deep twice": lambda: {
        "model_type": "gemma4",
        "vocab_size": deep(),
        "text_config": D6 | {"model_type": "gemma4_text", "vocab_size": deep()},
    },
    "junk": lambda: D6 | junk(),
    "junk outside": lambda: nested(D6) | junk(),
    "junk inside": lambda: {"model_type": "gemma4", "text_config": D6 | junk()},
    "junk rope": lambda: D6 | {"rope_parameters": junk() | ROPE},
    "junk layers": lambda: D6 | {"per_layer_config": junk()},
    "long key": lambda: {"x" * 10**7: 1} | D6,
    "long word": lambda: D6 | {"layer_types": ["x" * 10**7] * 6},
    "many layers": lambda: D6 | {"layer_types": [SLIDING] * 10**6},
    "surrogates": lambda: D6 | {"layer_types": ["\ud800\x00\n"] * 6},
}


@pytest.mark.parametrize("make", HOSTILE.values(), ids=list(HOSTILE))
def test_a_hostile_config_is_refused_at_once(make: Callable[[], dict[str, Any]]) -> None:
    bad = make()
    started = time.process_time()
    with pytest.raises(SpecError) as caught:
        generate(bad, "toy")
    assert time.process_time() - started < 1.0
    message = str(caught.value)
    assert len(message) < 600 and message.isprintable() and message.isascii()


def test_hostile_files_are_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    wanted = "expected a Gemma 4 config.json"
    files = {
        b"[" * 100_000 + b"]" * 100_000: f"config.json: is nested too deeply; {wanted}",
        b'{"a": ' * 100_000: f"config.json: is nested too deeply; {wanted}",
        json.dumps(junk()).encode(): f"config.json: has .* bytes; expected at most {MOST_BYTES}",
        b"\xff\xfe": rf"config.json: is not JSON \(.*\); {wanted}",
        b"": rf"config.json: is not JSON \(Expecting value.*\); {wanted}",
        b'{"a": ' + b"1" * 5000 + b"}": rf"config.json: is not JSON \(.*\); {wanted}",
        b"[1]": "config.json: holds a list of 1; expected an object",
    }
    for data, message in files.items():
        path.write_bytes(data)
        started = time.process_time()
        with pytest.raises(SpecError, match=f"^{message}$"):
            read_file(path)
        assert time.process_time() - started < 1.0


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with pytest.raises(SpecError) as caught:
        read_file(path)
    message = f"{path}: cannot be read (No such file or directory); expected a Gemma 4 config.json"
    assert str(caught.value) == message


PUBLISHED = {name: read_file(SPECS / f"{name.replace('-', '_')}.config.json") for name in target_names()}


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if isinstance(value, dict) and value:
        return [leaf for key in value for leaf in leaves(value[key], (*path, key))]
    if isinstance(value, list) and value:
        return [leaf for index in range(len(value)) for leaf in leaves(value[index], (*path, index))]
    return [path]


LEAVES = {name: leaves({"text_config": published["text_config"]}) for name, published in PUBLISHED.items()}
JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-4, 64)
    | st.sampled_from([2**31, 2**80, 1e308, -0.0, 1e-320, NAN, math.inf, "48", "__import__('os')", "\ud800\n\x00"])
    | st.floats()
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=120, deadline=None, database=None)
@given(data=st.data())
def test_any_leaf_set_to_any_json_value_is_refused_or_renders_a_file_that_verifies(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(target_names()))
    mutated: Any = copy.deepcopy(PUBLISHED[name])
    *path, last = data.draw(st.sampled_from(LEAVES[name]))
    holder = mutated
    for step in path:
        holder = holder[step]
    holder[last] = data.draw(JSON_VALUES)
    try:
        plan = make_plan(checkpoint_target(mutated, "toy"))
    except SpecError as error:
        assert str(error).isprintable() and len(str(error)) < 600
        return
    compile(verify(render(plan), plan), "toy.py", "exec")


# --- the layer table ---------------------------------------------------------------------------------------------

E6_TABLE = """\
toy: 6 layers (4 sliding, 2 full), 3 share the KV of layers 1-2, no experts.
hidden 64, vocabulary 97, eps 1e-06, softcap 30.0, tied head, per-layer inputs 16 wide; fingerprint FINGERPRINT

tap  kind            mask          window  heads x KV x dim  MLP  K/V
 -1  embedding
  0  sliding         sliding_mask  8       4 x 2 x 64        128  cache 0
  1  sliding_source  sliding_mask  8       4 x 2 x 64        128  cache 1
  2  full_source     full_mask     all     4 x 2 x 64        128  cache 2
  3  sliding_reader  sliding_mask  8       4 x 2 x 64        256  of layer 1
  4  sliding_reader  sliding_mask  8       4 x 2 x 64        256  of layer 1
  5  full_reader     full_mask     all     4 x 2 x 64        256  of layer 2
  6  final norm
"""


def test_the_layer_table() -> None:
    target = checkpoint_target(E6, "toy")
    assert layer_table(target) == E6_TABLE.replace("FINGERPRINT", target.spec.fingerprint)
