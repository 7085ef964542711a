"""A checkpoint's tensors against its config: forms found in the wild pass, what is missing or left over is named."""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from safetensors.numpy import save_file
from toys import D6, E6, M6, SHAPES, build, config, nested

from straightline.codegen import SpecError
from straightline.codegen.checkpoint import Shape, read_tensors
from straightline.codegen.config import read_config
from straightline.codegen.driver import from_checkpoint, rendered
from straightline.codegen.tensors import check_tensors, expected_tensors, quantization_modes

SHARD = "model.safetensors"
INDEX = "model.safetensors.index.json"
AFFINE = {"bits": 4, "group_size": 32}
WHOLE = "expected exactly the text model that config.json describes"


def shapes_of(flat: dict[str, Any], quantize: Any = None) -> dict[str, Shape]:
    """What mlx-lm itself holds for this config, by canonical name."""
    parameters = tree_flatten(build(flat, quantize=quantize).parameters())
    return {name.removeprefix("model."): tuple(value.shape) for name, value in parameters}


def prefixed(shapes: dict[str, Shape], prefix: str) -> dict[str, Shape]:
    return {name if name.startswith("lm_head") else f"{prefix}{name}": shape for name, shape in shapes.items()}


def save(folder: Path, config: dict[str, Any], shapes: dict[str, Shape], shards: int = 1) -> Path:
    """A checkpoint without an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    for number in range(shards):
        part = list(shapes)[number::shards]
        name = SHARD if shards == 1 else f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        save_file({name: np.zeros(shapes[name], np.float16) for name in part}, folder / name)
    return folder


def save_index(folder: Path, names: dict[str, str]) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))


def refusal(flat: dict[str, Any], shapes: dict[str, Shape], **quantization: Any) -> str:
    modes = quantization_modes({"quantization": quantization} if quantization else {})
    with pytest.raises(SpecError) as caught:
        check_tensors(read_config(flat), shapes, modes)
    return str(caught.value)


# --- what is needed is exactly what mlx-lm holds -------------------------------------------------------------------

BASES = {"d6": D6, "m6": M6, "e6": E6, "untied": config(tie_word_embeddings=False), **SHAPES}


@pytest.mark.parametrize("flat", BASES.values(), ids=list(BASES))
def test_expected_tensors_are_those_of_the_monolith(flat: dict[str, Any]) -> None:
    expected = {name: tensor.shape for name, tensor in expected_tensors(read_config(flat)).items()}
    assert expected == shapes_of(flat)


@pytest.mark.parametrize("quantization", [AFFINE, AFFINE | {"mode": "mxfp4"}], ids=["affine", "mxfp4"])
@pytest.mark.parametrize("flat", BASES.values(), ids=list(BASES))
def test_quantized_models_pass(flat: dict[str, Any], quantization: dict[str, Any]) -> None:
    shapes = shapes_of(flat, quantization)
    assert any(name.endswith(".scales") for name in shapes)
    assert check_tensors(read_config(flat), shapes, quantization_modes({"quantization": quantization})) == ()
    assert check_tensors(read_config(flat), shapes) == (), "config.json without a quantization"


# --- forms found in the wild -------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model.", "language_model.", "model.", ""])
def test_each_prefix_passes(prefix: str) -> None:
    """B17, B24."""
    flat = config(tie_word_embeddings=False)
    assert check_tensors(read_config(flat), prefixed(shapes_of(flat), prefix)) == ()


def test_other_towers_and_stray_tensors_are_ignored() -> None:
    """B06."""
    strays = {
        "vision_embedder.x.weight": (1,),
        "model.vision_tower.encoder.layers.0.self_attn.q_proj.weight": (1,),
        "model.embed_vision.y.weight": (1,),
        "embed_audio.y.weight": (1,),
        "audio_tower.z.weight": (1,),
        "multi_modal_projector.z": (1,),
        "model.language_model.layers.0.self_attn.rotary_emb.inv_freq": (1,),
        "model.language_model.layers.0.mlp.gate_proj.input_max": (),
        "model.language_model.layers.0.mlp.gate_proj.output_min": (),
    }
    assert check_tensors(read_config(D6), prefixed(shapes_of(D6), "model.language_model.") | strays) == ()


def test_kv_tensors_of_sharing_layers_may_be_there_or_not() -> None:
    """B14, B15."""
    shapes = shapes_of(E6)
    unused = {"layers.3.self_attn.k_norm.weight": (64,)}
    for part in ("weight", "scales", "biases"):
        unused |= {f"layers.{layer}.self_attn.{kind}_proj.{part}": (9, 9) for layer in (3, 4, 5) for kind in "kv"}
    assert check_tensors(read_config(E6), shapes) == ()
    assert check_tensors(read_config(E6), shapes | unused) == ()


def test_fused_and_stacked_experts_are_the_same() -> None:
    """B23."""
    shapes = shapes_of(M6)
    fused = {}
    for name, shape in shapes.items():
        if name.endswith("switch_glu.gate_proj.weight"):
            experts, width, hidden = shape
            fused[name.replace("switch_glu.gate_proj.weight", "gate_up_proj")] = (experts, 2 * width, hidden)
        elif name.endswith("switch_glu.down_proj.weight"):
            fused[name.replace("switch_glu.down_proj.weight", "down_proj")] = shape
        elif "switch_glu" not in name:
            fused[name] = shape
    assert check_tensors(read_config(M6), fused) == check_tensors(read_config(M6), shapes) == ()

    typo = fused | {"layers.0.experts.gate_up_prj": fused["layers.0.experts.gate_up_proj"]}
    del typo["layers.0.experts.gate_up_proj"]
    assert refusal(M6, typo) == (
        "checkpoint: layers.0.experts.switch_glu.gate_proj.weight and layers.0.experts.switch_glu.up_proj.weight are "
        f"absent and layers.0.experts.gate_up_prj is left over; {WHOLE}"
    )
    odd = fused | {"layers.0.experts.gate_up_proj": (8, 127, 64)}
    assert refusal(M6, odd) == (
        "checkpoint: layers.0.experts.switch_glu.gate_proj.weight is [8, 127, 64]; "
        "expected [8, 64, 64], from config.json (and 1 more)"
    )
    both = fused | {"layers.0.experts.switch_glu.down_proj.weight": (8, 64, 64)}
    assert refusal(M6, both) == (
        "checkpoint: layers.0.experts.switch_glu.down_proj.weight is there twice, under two names; expected it once"
    )


def test_a_head_beside_a_tied_config_is_noted_and_ignored() -> None:
    """B20."""
    note = "lm_head is ignored, since tie_word_embeddings is true: logits come from the embedding"
    extra: dict[str, Shape] = {"lm_head.weight": (97, 64)}
    assert check_tensors(read_config(D6), shapes_of(D6) | extra) == (note,)
    packed: dict[str, Shape] = {"language_model.lm_head.weight": (97, 8), "language_model.lm_head.scales": (97, 2)}
    assert check_tensors(read_config(D6), shapes_of(D6) | packed) == (note,)
    untied = config(tie_word_embeddings=False)
    assert refusal(untied, shapes_of(D6)) == f"checkpoint: lm_head.weight is absent; {WHOLE}"


# --- what is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flat", "name"),
    [
        (E6, "layers.4.per_layer_input_gate.weight"),
        (D6, "layers.3.layer_scalar"),
        (D6, "layers.0.self_attn.v_proj.weight"),
        (E6, "layers.2.self_attn.k_norm.weight"),
        (M6, "layers.5.router.per_expert_scale"),
        (D6, "embed_tokens.weight"),
    ],
)
def test_a_missing_tensor_is_named(flat: dict[str, Any], name: str) -> None:
    """B16, B18."""
    shapes = shapes_of(flat)
    del shapes[name]
    assert refusal(flat, shapes) == f"checkpoint: {name} is absent; {WHOLE}"


def test_many_missing_tensors_are_counted() -> None:
    shapes = {name: shape for name, shape in shapes_of(D6).items() if "layernorm" not in name}
    assert refusal(D6, shapes) == (
        "checkpoint: layers.0.input_layernorm.weight, layers.0.post_attention_layernorm.weight, "
        "layers.0.pre_feedforward_layernorm.weight, layers.0.post_feedforward_layernorm.weight, "
        "layers.1.input_layernorm.weight, layers.1.post_attention_layernorm.weight and 18 more are absent; " + WHOLE
    )


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("model.layers.0.self_attn.v_norm.weight", "layers.0.self_attn.v_norm.weight"),
        ("layers.6.layer_scalar", "layers.6.layer_scalar"),
        ("layers.2.self_attn.v_proj.weight", "layers.2.self_attn.v_proj.weight"),
        ("layers.0.mlp.gate_proj.scales_", "layers.0.mlp.gate_proj.scales_"),
        ("layers.0.input_layernorm.scales", "layers.0.input_layernorm.scales"),
        ("a\nb\ud800", '"a\\nb\\ud800"'),
    ],
)
def test_a_left_over_tensor_is_named(name: str, shown: str) -> None:
    assert refusal(D6, shapes_of(D6) | {name: (1,)}) == f"checkpoint: {shown} is left over; {WHOLE}"


def test_a_tensor_of_another_shape_is_refused() -> None:
    shapes = shapes_of(D6) | {"layers.1.self_attn.q_proj.weight": (128, 64)}
    message = "checkpoint: layers.1.self_attn.q_proj.weight is [128, 64]; expected [256, 64], from config.json"
    assert refusal(D6, shapes) == message
    shapes["norm.weight"] = ()
    assert refusal(D6, shapes) == f"{message} (and 1 more)"


def test_a_quantized_tensor_still_has_its_rows() -> None:
    shapes = shapes_of(D6, AFFINE)
    shapes["layers.1.self_attn.q_proj.weight"] = (128, 8)
    assert refusal(D6, shapes) == (
        "checkpoint: layers.1.self_attn.q_proj.weight is [128, 8]; expected [256, 64], from config.json"
    )


def test_the_quantization_mode_says_whether_there_are_biases() -> None:
    """B28: affine needs them, MX modes have none, a module may have a mode of its own, in any spelling (B24)."""
    name = "layers.0.mlp.down_proj"
    affine, mx = shapes_of(D6, AFFINE), shapes_of(D6, AFFINE | {"mode": "mxfp4"})
    assert refusal(D6, mx, **AFFINE).startswith("checkpoint: embed_tokens.biases, layers.0.self_attn.q_proj.biases, ")
    one_affine = mx | {f"{name}.biases": affine[f"{name}.biases"]}
    assert refusal(D6, one_affine, mode="mxfp4") == f"checkpoint: {name}.biases is left over; {WHOLE}"
    for prefix in ("language_model.model.", "model.language_model.", "model."):
        modes = quantization_modes({"quantization": {"mode": "mxfp4", f"{prefix}{name}": {"bits": 8}}})
        assert check_tensors(read_config(D6), one_affine, modes) == ()


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ("4bit", 'quantization is "4bit"; expected an object'),
        ({"mode": "gguf"}, 'quantization.mode is "gguf"; expected "affine" or "mxfp4" or "mxfp8" or "nvfp4"'),
        (
            {"model.layers.0.mlp.up_proj": {"mode": 4}},
            'quantization.model.layers.0.mlp.up_proj.mode is 4; expected "affine" or "mxfp4" or "mxfp8" or "nvfp4"',
        ),
    ],
)
def test_an_unknown_quantization_is_refused(quantization: Any, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        quantization_modes({"quantization": quantization})
    assert str(caught.value) == f"config.json: {message}"


# --- folders -----------------------------------------------------------------------------------------------------


def test_every_layout_of_a_folder_gives_the_same_file(tmp_path: Path) -> None:
    """B17: one file without an index, shards, an index alone, an index with a part of its shards."""
    shapes = prefixed(shapes_of(D6), "model.language_model.")
    single = save(tmp_path / "single", nested(D6), shapes)
    shards = save(tmp_path / "shards", nested(D6), shapes, shards=3)
    text_only = save(tmp_path / "text", D6, shapes_of(D6))
    alone = save(tmp_path / "alone", nested(D6), {})
    (alone / SHARD).unlink()
    save_index(alone, dict.fromkeys(shapes, "model-00001-of-00001.safetensors"))
    partly = save(tmp_path / "partly", nested(D6), shapes, shards=2)
    names = list(shapes)
    parts = {name: f"model-0000{index % 2 + 1}-of-00002.safetensors" for index, name in enumerate(names)}
    save_index(partly, parts)
    (partly / "model-00002-of-00002.safetensors").unlink()

    files = []
    for folder in (single, shards, text_only, alone, partly):
        target, notes = from_checkpoint(folder, "my-gemma")
        assert notes == ()
        files.append(rendered([target])["my_gemma.py"])
    assert len(set(files)) == 1
    assert b"layer_scalar" in files[0]
    assert str(tmp_path).encode() not in files[0]


def test_headers_tell_the_shapes_and_an_index_beside_its_shards_adds_nothing(tmp_path: Path) -> None:
    folder = save(tmp_path, D6, {"norm.weight": (64,), "layers.0.layer_scalar": (1,)})
    save_index(folder, {"norm.weight": SHARD, "not.there": SHARD, "elsewhere": "model-2.safetensors"})
    assert read_tensors(folder) == {"norm.weight": (64,), "layers.0.layer_scalar": (1,), "elsewhere": None}


def test_wrong_weights_in_a_folder_are_refused(tmp_path: Path) -> None:
    folder = save(tmp_path, D6, shapes_of(D6) | {"layers.0.layer_scalar": (2,)})
    with pytest.raises(SpecError, match=r"^checkpoint: layers\.0\.layer_scalar is \[2\]; expected \[1\], from config"):
        from_checkpoint(folder, "my-gemma")


def no_folder(folder: Path) -> str:
    return f"{folder / 'nowhere'}: is not a folder; expected one with a config.json and safetensors files"


def no_config(folder: Path) -> str:
    (folder / "config.json").unlink()
    return f"{folder}/config.json: cannot be read (No such file or directory); expected a Gemma 4 config.json"


def no_weights(folder: Path) -> str:
    (folder / SHARD).unlink()
    return (
        f"{folder}: has neither model*.safetensors nor model.safetensors.index.json; "
        "expected the weights beside config.json"
    )


def cut_weights(folder: Path) -> str:
    (folder / SHARD).write_bytes((folder / SHARD).read_bytes()[:-100])
    return "model.safetensors: cannot be read (Error while deserializing header: incomplete metadata"


def huge_header(folder: Path) -> str:
    (folder / SHARD).write_bytes(struct.pack("<Q", 2**62) + b"{}")
    return "model.safetensors: cannot be read (Error while deserializing header: "


def empty_weights(folder: Path) -> str:
    (folder / SHARD).write_bytes(b"")
    return "model.safetensors: cannot be read ("


def weights_are_a_folder(folder: Path) -> str:
    (folder / SHARD).unlink()
    (folder / SHARD).mkdir()
    return "model.safetensors: cannot be read ("


def index_is_no_json(folder: Path) -> str:
    (folder / INDEX).write_text("{")
    return "model.safetensors.index.json: is not JSON ("


def index_without_a_map(folder: Path) -> str:
    (folder / INDEX).write_text("{}")
    return "model.safetensors.index.json: weight_map is null; expected an object of tensor names and file names"


def index_with_numbers(folder: Path) -> str:
    (folder / INDEX).write_text('{"weight_map": {"a": 1}}')
    return 'model.safetensors.index.json: weight_map has 1 for "a"; expected a file name'


def config_is_a_pipe(folder: Path) -> str:
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    return f"{folder / 'config.json'}: is a pipe or a device; expected a Gemma 4 config.json in a file"


def config_never_ends(folder: Path) -> str:
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("/dev/zero")
    return f"{folder / 'config.json'}: is a pipe or a device; expected a Gemma 4 config.json in a file"


def weights_are_a_pipe(folder: Path) -> str:
    (folder / SHARD).unlink()
    os.mkfifo(folder / SHARD)
    return "model.safetensors: is a pipe or a device; expected a safetensors file"


def two_files_disagree(folder: Path) -> str:
    name = next(iter(shapes_of(D6)))
    mx.save_safetensors(str(folder / "model-2.safetensors"), {name: mx.ones((3,))})
    return f'model.safetensors: "{name}" is [97, 64], in another file [3]; expected it once'


@pytest.mark.parametrize(
    "damage",
    [
        no_folder,
        no_config,
        no_weights,
        cut_weights,
        huge_header,
        empty_weights,
        weights_are_a_folder,
        index_is_no_json,
        index_without_a_map,
        index_with_numbers,
        config_is_a_pipe,
        config_never_ends,
        weights_are_a_pipe,
        two_files_disagree,
    ],
)
def test_a_damaged_folder_is_refused(tmp_path: Path, damage: Callable[[Path], str]) -> None:
    folder = save(tmp_path, D6, shapes_of(D6))
    message = damage(folder)
    with pytest.raises(SpecError) as caught:
        from_checkpoint(folder / "nowhere" if damage is no_folder else folder, "my-gemma")
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
