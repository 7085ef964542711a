"""`load` on checkpoints as they are published: each gives the bytes of a model built from the same arrays, on the
generated path; what cannot be loaded is refused in one sentence.

Rows of CASES: B01, B02, B03, B04, B05, B06, B14, B15, B16, B17, B18, B20, B23, B24, B26, B28.
"""

import copy
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import checkpoints
import mlx.core as mx
import mlx_lm
import pytest
import toys
from checkpoints import MLX, ORIGINAL, TEXT, assert_same_model, publish
from comparing import EIGHT_BIT, FOUR_BIT, MXFP4, MXFP8, NVFP4, mixed

from straightline.runtime import StraightlineError, load

UNTIED = {"tie_word_embeddings": False}
FULL_LAYERS = [index for index, kind in enumerate(toys.BASE["layer_types"]) if kind == toys.FULL]
# 26B's sizes on full layers, which per_layer_config spells layer by layer.
WIDE = toys.config(global_head_dim=128)


@pytest.fixture(scope="module", autouse=True)
def user_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Files rendered on demand go into one folder for all tests of this module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STRAIGHTLINE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def check(folder: Path, plain: Any) -> Any:
    """The specialized model of a folder, proven equal to `plain` on the generated path."""
    model, tokenizer = load(folder, generate=True, strict=True)
    assert_same_model(model, plain)
    assert model.dispatch.counts == {"generated": 5, "monolith": 0}
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"
    return model


def refused(folder: Path, **arguments: Any) -> str:
    """The message of the refusal: one line, not a page."""
    with pytest.raises(StraightlineError) as caught:
        load(folder, **arguments)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 700
    assert message.count(str(folder)) == 1
    return message.replace(str(folder), "FOLDER")


PUBLISHED: dict[str, dict[str, Any]] = {
    "D6 bf16, original names": {"config": toys.D6, "dtype": mx.bfloat16},
    "D6 bf16, original names, four shards": {"config": toys.D6, "dtype": mx.bfloat16, "shards": 4},
    "D6 f16, MLX names": {"config": toys.D6, "naming": MLX, "dtype": mx.float16},
    "D6, text-only names, flat": {"config": toys.D6, "naming": TEXT},
    "D6, text-only names, an index beside one file": {"config": toys.D6, "naming": TEXT, "index": True},
    "D6, gemma4_unified": {"config": toys.D6, "model_type": "gemma4_unified"},
    "D6, gemma4_unified, MLX names": {"config": toys.D6, "model_type": "gemma4_unified", "naming": MLX},
    "D6, gemma4_unified_text": {"config": toys.D6, "naming": TEXT, "more": {"model_type": "gemma4_unified_text"}},
    "D6, untied": {"config": toys.config(**UNTIED)},
    "D6, untied, MLX names": {"config": toys.config(**UNTIED), "naming": MLX},
    "D6, untied, flat": {"config": toys.config(**UNTIED), "naming": TEXT},
    "D6 4-bit": {"config": toys.D6, "naming": MLX, "quantize": FOUR_BIT, "quantization": FOUR_BIT},
    "D6 mxfp4": {"config": toys.D6, "naming": MLX, "quantize": MXFP4, "quantization": MXFP4},
    "D6 mxfp8": {"config": toys.D6, "naming": MLX, "quantize": MXFP8, "quantization": MXFP8},
    "D6 nvfp4": {"config": toys.D6, "naming": TEXT, "quantize": NVFP4, "quantization": NVFP4},
    "M6": {"config": toys.M6},
    "M6, fused experts": {"config": toys.M6, "change": checkpoints.fused_experts},
    "M6, fused experts, three shards": {"config": toys.M6, "change": checkpoints.fused_experts, "shards": 3},
    "M6 mxfp4 experts": {"config": toys.M6, "naming": MLX, "quantize": MXFP4, "quantization": MXFP4},
    "E6": {"config": toys.E6},
    "E6 bf16, MLX names": {"config": toys.E6, "naming": MLX, "dtype": mx.bfloat16},
    "E6 4-bit": {"config": toys.E6, "naming": MLX, "quantize": FOUR_BIT, "quantization": FOUR_BIT},
}


@pytest.mark.parametrize("how", PUBLISHED.values(), ids=PUBLISHED)
def test_published(tmp_path: Path, how: dict[str, Any]) -> None:
    check(tmp_path, publish(tmp_path, **how))


def test_mlx_lm_loads_the_same(tmp_path: Path) -> None:
    """The reference of this file is also what mlx-lm makes of the folder."""
    publish(tmp_path, toys.E6, dtype=mx.bfloat16, shards=2)
    plain, _ = mlx_lm.load(str(tmp_path))
    check(tmp_path, plain)


@pytest.mark.parametrize("spelled", ["language_model.model.", "model.language_model.", "model.", "language_model."])
def test_overrides_in_every_spelling(tmp_path: Path, spelled: str) -> None:
    """B24, B26, B28: 8-bit, unquantized and other-mode modules in a 4-bit body, whatever prefix the keys have."""
    plain = toys.build(toys.M6, quantize=mixed)
    quantization: dict[str, Any] = dict(FOUR_BIT)
    for path, module in plain.named_modules():
        if hasattr(module, "to_quantized"):
            quantization[path.replace("model.", spelled, 1)] = False
        elif hasattr(module, "bits"):
            sizes = {"group_size": module.group_size, "bits": module.bits, "mode": module.mode}
            quantization[path.replace("model.", spelled, 1)] = sizes
    assert {value["mode"] for value in quantization.values() if isinstance(value, dict)} == {"affine", "mxfp4"}
    publish(tmp_path, toys.M6, MLX, quantize=mixed, quantization=quantization)
    model = check(tmp_path, plain)
    assert model.layers[0].router.proj.bits == 8
    assert model.layers[0].mlp.up_proj.mode == "mxfp4" and "biases" not in model.layers[0].mlp.up_proj


@pytest.mark.parametrize(
    ("config", "naming", "mode"),
    [(toys.D6, MLX, MXFP4), (toys.M6, MLX, MXFP4), (toys.D6, TEXT, MXFP8), (toys.E6, TEXT, NVFP4)],
    ids=["D6 mxfp4", "M6 mxfp4", "D6 mxfp8, flat", "E6 nvfp4, flat"],
)
def test_affine_overrides_in_another_body(tmp_path: Path, config: dict[str, Any], naming: str, mode: Any) -> None:
    """B28 in reverse: some modules affine, with biases, in a body of another mode; an override may leave `mode` out."""
    overrides = {
        "layers.1.mlp.down_proj": EIGHT_BIT,
        "layers.0.self_attn.q_proj": FOUR_BIT | {"mode": "affine"},
        "layers.2.self_attn.o_proj": False,
        "embed_tokens": EIGHT_BIT | {"mode": "affine"},
        "layers.4.router.proj": EIGHT_BIT,
        "layers.3.experts.switch_glu.up_proj": FOUR_BIT,
    }

    def choose(path: str, module: Any) -> Any:
        return next((sizes for name, sizes in overrides.items() if path.endswith(name)), mode)

    prefix = "language_model.model." if naming == MLX else "model."
    quantization = mode | {prefix + name: sizes for name, sizes in overrides.items()}
    plain = publish(tmp_path, config, naming, quantize=choose, quantization=quantization)
    model = check(tmp_path, plain)
    first, second = model.layers[0].self_attn.q_proj, model.layers[1].mlp.down_proj
    assert (first.mode, first.bits, second.mode, second.bits) == ("affine", 4, "affine", 8)
    assert "biases" in first and "biases" in second and not hasattr(model.layers[2].self_attn.o_proj, "bits")
    others = [one for layer in model.layers for one in (layer.self_attn.q_proj, layer.mlp.up_proj) if one is not first]
    assert all(one.mode == mode["mode"] and "biases" not in one for one in others) and len(others) == 11


def test_router_in_bf16_or_eight_bits(tmp_path: Path) -> None:
    """B26: the experts chosen for 64 tokens are those of the plain model."""
    chosen = []
    for bits in (None, 8):

        def choose(path: str, module: Any, bits: int | None = bits) -> Any:
            if path.endswith("router.proj"):
                return bits and {"group_size": 64, "bits": bits}
            return FOUR_BIT

        folder = tmp_path / f"{bits}"
        plain = publish(folder, toys.M6, MLX, dtype=mx.bfloat16, quantize=choose, quantization=FOUR_BIT)
        model = check(folder, plain)
        x = mx.random.normal((1, 64, 64), key=mx.random.key(3)).astype(mx.bfloat16)
        found, expected = (one.layers[0].router(x)[0] for one in (model, plain))
        assert mx.array_equal(found, expected)
        chosen.append(found)
        assert hasattr(model.layers[0].router.proj, "bits") == (bits is not None)
    assert chosen[0].shape == (1, 64, 2)


def test_shared_kv_tensors_present_or_absent(tmp_path: Path) -> None:
    """B14, B15: plain or quantized, for a quantized or a plain body: ignored, and the same file serves."""
    plain = publish(tmp_path / "absent", toys.E6)
    publish(tmp_path / "present", toys.E6, change=lambda w: checkpoints.with_shared_kv(w, toys.E6))
    quantized = {"naming": MLX, "quantize": FOUR_BIT, "quantization": FOUR_BIT}
    packed = publish(
        tmp_path / "packed", toys.E6, change=lambda w: checkpoints.with_shared_kv(w, toys.E6, FOUR_BIT), **quantized
    )
    files = {
        check(tmp_path / "absent", plain).dispatch.file,
        check(tmp_path / "present", plain).dispatch.file,
        check(tmp_path / "packed", packed).dispatch.file,
    }
    assert len(files) == 1
    tensors = mx.load(str(tmp_path / "packed" / "model.safetensors"))
    assert "language_model.model.layers.5.self_attn.k_proj.scales" in tensors


def test_nested_and_flat_are_one_architecture(tmp_path: Path) -> None:
    """B05, B06: the same numbers in four layouts have one fingerprint, so one file."""
    files = set()
    for number, (naming, model_type) in enumerate([(TEXT, ""), (ORIGINAL, "gemma4"), (MLX, "gemma4_unified")]):
        folder = tmp_path / str(number)
        plain = publish(folder, toys.D6, naming, model_type=model_type)
        files.add(check(folder, plain).dispatch.file)
    assert len(files) == 1


def per_layer_layout(config: dict[str, Any]) -> dict[str, Any]:
    """B04: as newer transformers save it."""
    changed = copy.deepcopy(config)
    sizes = {"head_dim": changed.pop("global_head_dim"), "num_key_value_heads": 1}
    del changed["num_global_key_value_heads"]
    changed["per_layer_config"] = {f"{index:02}": dict(sizes) for index in FULL_LAYERS}
    return changed


@pytest.mark.parametrize("naming", [ORIGINAL, TEXT])
def test_per_layer_config(tmp_path: Path, naming: str) -> None:
    plain = publish(tmp_path, WIDE, naming)
    rewrite(tmp_path, per_layer_layout)
    model = check(tmp_path, plain)
    assert model.layers[2].self_attn.head_dim == 128


def test_per_layer_config_that_disagrees(tmp_path: Path) -> None:
    publish(tmp_path, WIDE, TEXT)
    rewrite(tmp_path, per_layer_layout)
    rewrite(tmp_path, lambda text: text["per_layer_config"]["02"].update(head_dim=64))
    assert refused(tmp_path) == (
        "FOLDER: config.json: per_layer_config gives full-attention layer 2 a head_dim of 64 and 1 KV heads, "
        "layer 5 128 and 1; expected all to agree"
    )


def rewrite(folder: Path, change: Any) -> None:
    """Change the text part of a folder's config.json; `change` may edit it or return another."""
    config = json.loads((folder / "config.json").read_text())
    if "text_config" in config:
        config["text_config"] = change(config["text_config"]) or config["text_config"]
    else:
        config = change(config) or config
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("config", "change"),
    [
        (toys.E6, {"num_global_key_value_heads": None}),
        (toys.E6, {"num_global_key_value_heads": ...}),
        (toys.config(num_global_key_value_heads=None), {"num_global_key_value_heads": ...}),
        (toys.D6, {"num_kv_shared_layers": 0}),
        (toys.D6, {"num_kv_shared_layers": None}),
        (toys.M6, {"num_kv_shared_layers": None}),
        (toys.D6, {"hidden_size_per_layer_input": None}),
        (toys.E6, {"pad_token_id": 0, "max_position_embeddings": 4096, "dtype": "bfloat16"}),
    ],
)
def test_null_and_absent_fields(tmp_path: Path, config: dict[str, Any], change: dict[str, Any]) -> None:
    """B01, B02."""
    plain = publish(tmp_path, config)

    def apply(text: dict[str, Any]) -> None:
        text.update(change)
        for key in [key for key, value in change.items() if value is ...]:
            del text[key]

    rewrite(tmp_path, apply)
    check(tmp_path, plain)


def test_absent_keys_are_named(tmp_path: Path) -> None:
    """B03: mlx-lm would take E2B's defaults and fail on 46 tensors; the reason is the absent keys."""
    publish(tmp_path, toys.D6)
    absent = ("num_kv_shared_layers", "hidden_size_per_layer_input", "use_double_wide_mlp")
    rewrite(tmp_path, lambda text: [text.pop(key) for key in absent] and None)
    message = refused(tmp_path)
    assert message == (
        "FOLDER: config.json: num_kv_shared_layers, hidden_size_per_layer_input and use_double_wide_mlp are absent; "
        "expected each stated, since no default is right for every Gemma 4 size"
    )


@pytest.mark.parametrize("naming", [ORIGINAL, MLX, TEXT])
def test_tied_with_a_head_tensor(tmp_path: Path, naming: str) -> None:
    """B20: the embedding is the head; the tensor is ignored. mlx-lm itself refuses this."""
    plain = publish(tmp_path, toys.D6, naming, change=lambda w: w | {"lm_head.weight": mx.ones((97, 64))})
    with pytest.raises(ValueError, match=r"lm_head\.weight"):
        mlx_lm.load(str(tmp_path))
    check(tmp_path, plain)


def test_untied_head_is_the_head(tmp_path: Path) -> None:
    plain = publish(tmp_path, toys.config(**UNTIED))
    assert "lm_head.weight" in mx.load(str(tmp_path / "model.safetensors"))
    model = check(tmp_path, plain)
    ids = toys.tokens(1, 5)
    before = model(ids)
    model.language_model.lm_head.weight = model.language_model.lm_head.weight * 2
    assert not mx.array_equal(before, model(ids))


def test_layer_scalars_count(tmp_path: Path) -> None:
    """B16, B17: one file, no index: each scalar is read, and each changes the output."""
    plain = publish(tmp_path, toys.E6, index=False)
    model = check(tmp_path, plain)
    ids = toys.tokens(1, 5)
    for index, layer in enumerate(model.layers):
        before = model(ids)
        assert layer.layer_scalar.item() == plain.layers[index].layer_scalar.item() != 1.0
        layer.layer_scalar = layer.layer_scalar * 1.5
        assert not mx.array_equal(before, model(ids)), index
    assert model.dispatch.counts["monolith"] == 0


def without(*names: str) -> Any:
    return lambda weights: {name: value for name, value in weights.items() if name not in names}


def renamed(old: str, new: str) -> Any:
    return lambda weights: {name.replace(old, new): value for name, value in weights.items()}


MODEL = "expected exactly the text model that config.json describes"
FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "B16: layer_scalar is missing": (
        {"config": toys.D6, "change": without("model.layers.3.layer_scalar")},
        f"FOLDER: checkpoint: layers.3.layer_scalar is absent; {MODEL}",
    ),
    "B18: a per-layer gate is missing": (
        {"config": toys.E6, "change": without("model.layers.4.per_layer_input_gate.weight")},
        f"FOLDER: checkpoint: layers.4.per_layer_input_gate.weight is absent; {MODEL}",
    ),
    "B23: a typo in an expert's name": (
        {"config": toys.M6, "change": renamed("layers.1.experts.switch_glu.up_proj", "layers.1.experts.glu.up_proj")},
        "FOLDER: checkpoint: layers.1.experts.switch_glu.up_proj.weight is absent and "
        f"layers.1.experts.glu.up_proj.weight is left over; {MODEL}",
    ),
    "left over": (
        {"config": toys.D6, "change": lambda w: w | {"model.layers.0.self_attn.extra.weight": mx.ones((4, 4))}},
        f"FOLDER: checkpoint: layers.0.self_attn.extra.weight is left over; {MODEL}",
    ),
    "many": (
        {"config": toys.D6, "change": renamed("mlp.", "feed_forward.")},
        "FOLDER: checkpoint: layers.0.mlp.gate_proj.weight, layers.0.mlp.up_proj.weight, layers.0.mlp.down_proj.weight"
        ", layers.1.mlp.gate_proj.weight, layers.1.mlp.up_proj.weight, layers.1.mlp.down_proj.weight and 12 more are "
        "absent and layers.0.feed_forward.down_proj.weight, layers.0.feed_forward.gate_proj.weight, "
        "layers.0.feed_forward.up_proj.weight, layers.1.feed_forward.down_proj.weight, "
        "layers.1.feed_forward.gate_proj.weight, layers.1.feed_forward.up_proj.weight and 12 more are left over; "
        f"{MODEL}",
    ),
    "another shape": (
        {"config": toys.D6, "change": lambda w: w | {"model.layers.2.self_attn.q_proj.weight": mx.ones((64, 64))}},
        "FOLDER: checkpoint: layers.2.self_attn.q_proj.weight is [64, 64]; expected [256, 64], from config.json",
    ),
    "B28: an unknown mode": (
        {"config": toys.D6, "naming": MLX, "quantize": FOUR_BIT, "quantization": FOUR_BIT | {"mode": "mxfp3"}},
        'FOLDER: config.json: quantization.mode is "mxfp3"; ' 'expected "affine" or "mxfp4" or "mxfp8" or "nvfp4"',
    ),
    "another architecture": (
        {"config": toys.D6, "naming": TEXT, "more": {"model_type": "llama"}},
        'FOLDER: model_type is "llama"; expected a Gemma 4 checkpoint '
        "(gemma4, gemma4_unified, gemma4_text, gemma4_unified_text)",
    ),
}


@pytest.mark.parametrize(("how", "message"), FAULTS.values(), ids=FAULTS)
def test_faults(tmp_path: Path, how: dict[str, Any], message: str) -> None:
    publish(tmp_path, **how)
    assert refused(tmp_path) == message


def test_affine_modules_need_biases(tmp_path: Path) -> None:
    publish(
        tmp_path,
        toys.D6,
        MLX,
        quantize=FOUR_BIT,
        quantization=FOUR_BIT,
        change=without("model.layers.0.mlp.up_proj.biases"),
    )
    assert refused(tmp_path) == f"FOLDER: checkpoint: layers.0.mlp.up_proj.biases is absent; {MODEL}"


def test_one_tensor_under_two_names(tmp_path: Path) -> None:
    plain = toys.build(toys.D6)
    weights = checkpoints.weights_of(plain)
    twice = checkpoints.named(weights, ORIGINAL) | {"language_model.model.norm.weight": weights["model.norm.weight"]}
    checkpoints.write(tmp_path, toys.nested(toys.D6), twice)
    assert refused(tmp_path) == "FOLDER: checkpoint: norm.weight is there twice, under two names; expected it once"


def test_empty_folder(tmp_path: Path) -> None:
    message = refused(tmp_path)
    assert message == "FOLDER/config.json: cannot be read (No such file or directory); expected a Gemma 4 config.json"


def test_no_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(toys.D6))
    assert refused(tmp_path) == (
        "FOLDER: has neither model*.safetensors nor model.safetensors.index.json; "
        "expected the weights beside config.json"
    )


@pytest.mark.parametrize("text", ["", "{", "[1]", "nul", '{"model_type": ', "\ufeff{}", '{"model_type": ["gemma4"]}'])
def test_config_that_is_none(tmp_path: Path, text: str) -> None:
    publish(tmp_path, toys.D6)
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    assert re.match(
        r"FOLDER: (config\.json: (is not JSON|holds a list of 1; expected an object)|model_type is a list of 1)",
        refused(tmp_path),
    )


@pytest.mark.parametrize("damage", [lambda data: data[:100], lambda data: b"\xff" * 64, lambda data: data[:-10]])
def test_corrupt_safetensors(tmp_path: Path, damage: Any) -> None:
    publish(tmp_path, toys.D6)
    path = tmp_path / "model.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    assert re.fullmatch(
        r"FOLDER: model\.safetensors: cannot be read \(.*\); expected a safetensors file", refused(tmp_path)
    )


def test_a_shard_that_is_not_there(tmp_path: Path) -> None:
    publish(tmp_path, toys.D6, shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    assert refused(tmp_path) == (
        "FOLDER: model-00002-of-00003.safetensors is absent; "
        "expected every file that model.safetensors.index.json names"
    )


@pytest.mark.parametrize("shard", [5, "x" * 5000, "a\0b\n\x1b[31m", None])
def test_an_index_of_odd_names(tmp_path: Path, shard: Any) -> None:
    publish(tmp_path, toys.D6)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
    message = refused(tmp_path)
    assert message.isprintable() and len(message) < 300, message


def test_weights_that_are_a_pipe(tmp_path: Path) -> None:
    publish(tmp_path, toys.D6)
    (tmp_path / "model.safetensors").unlink()
    os.mkfifo(tmp_path / "model.safetensors")
    assert refused(tmp_path) == "FOLDER: model.safetensors: is a pipe or a device; expected a safetensors file"


def test_a_git_lfs_pointer(tmp_path: Path) -> None:
    """What `git clone` leaves without Git LFS, of the weights and of the tokenizer."""
    publish(tmp_path, toys.D6)
    for name in ("model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 1234\n")
        assert refused(tmp_path) == f"FOLDER: {name}: is a Git LFS pointer; expected the file itself: git lfs pull"


def test_packed_weights_and_no_quantization(tmp_path: Path) -> None:
    publish(tmp_path, toys.D6, MLX, quantize=FOUR_BIT)
    said = "config.json has no quantization, but embed_tokens.scales is there; expected its group_size and bits"
    assert refused(tmp_path) == f"FOLDER: {said}"


@pytest.mark.parametrize("name", ["gemma4-e4b", "gemma4-12b-optiq"])
def test_the_name_of_an_architecture(name: str) -> None:
    """As `explain` and `show` take it. Said at once, without asking the hub."""
    with pytest.raises(StraightlineError) as caught:
        load(name)
    assert str(caught.value) == (
        f"{name}: is the name of an architecture, which has no weights; expected a folder or a hub id "
        f"(or `straightline verify --random {name}`)"
    )


def test_no_such_folder() -> None:
    with pytest.raises(StraightlineError, match=r"^/no/such/folder: is no folder here and cannot be had from the hub"):
        load("/no/such/folder")


def test_no_tokenizer(tmp_path: Path) -> None:
    """Said before any weight is read."""
    publish(tmp_path, toys.D6, tokenizer=False)
    (tmp_path / "model.safetensors").write_bytes(b"12345678")
    assert refused(tmp_path) == "FOLDER: has no tokenizer; expected tokenizer.json beside config.json"


def test_a_damaged_tokenizer(tmp_path: Path) -> None:
    publish(tmp_path, toys.D6)
    (tmp_path / "tokenizer.json").write_text("{")
    assert refused(tmp_path).startswith("FOLDER: its tokenizer cannot be loaded: ")


def test_without_a_file_the_monolith_serves(tmp_path: Path) -> None:
    config = toys.config(intermediate_size=192)  # an architecture that no test renders
    plain = publish(tmp_path, config)
    model, _, read = load(tmp_path, return_config=True)
    assert_same_model(model, plain)
    assert model.dispatch.counts == {"generated": 0, "monolith": 5}
    assert re.fullmatch(
        r"no generated file has the fingerprint [0-9a-f]{16}; make one with specialize\(model, generate=True\)",
        model.dispatch.reason,
    )
    assert model.dispatch.last == ("monolith", model.dispatch.reason) and model.dispatch.file is None
    assert read["text_config"]["intermediate_size"] == 192
    with pytest.raises(StraightlineError, match=r"^strict: no generated file has the fingerprint"):
        load(tmp_path, strict=True)


def test_arguments_of_mlx_lm(tmp_path: Path) -> None:
    """lazy, model_config and tokenizer_config reach mlx-lm's loader."""
    plain = publish(tmp_path, toys.D6, more={"eos_token_id": [3, 5]})
    model, tokenizer, config = load(
        tmp_path,
        tokenizer_config={"eos_token": "a"},
        model_config={"marker": "here"},
        lazy=True,
        return_config=True,
        generate=True,
    )
    assert_same_model(model, plain)
    assert config["marker"] == "here" and {3, 5} <= tokenizer.eos_token_ids and tokenizer.eos_token == "a"
