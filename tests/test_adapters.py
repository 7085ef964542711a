"""LoRA and DoRA on a specialized model, put in before or after, on any module, and taken out again: never stale.

Each answer is compared with a plain mlx-lm model under the same adapter, byte for byte, and is served by the
generated file. Rows of CASES: B74.
"""

import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import checkpoints
import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest
import toys
from checkpoints import MLX, ORIGINAL, TEXT, publish
from comparing import FOUR_BIT, assert_same, file_of
from mlx.utils import tree_flatten
from mlx_lm import fuse
from mlx_lm.tuner.utils import linear_to_lora_layers, load_adapters, remove_lora_layers
from pairs import Pair, four_bit, pair

from straightline.runtime import StraightlineError, load, specialize

UNTIED = toys.config(tie_word_embeddings=False)
SIZES = {"rank": 4, "scale": 2.0, "dropout": 0.0}

# Every module that an adapter can name: in a layer, or around the layers.
TARGETS: dict[str, tuple[dict[str, Any], str]] = {
    "q_proj": (toys.D6, "self_attn.q_proj"),
    "k_proj of K = V layers": (toys.D6, "self_attn.k_proj"),
    "v_proj": (toys.D6, "self_attn.v_proj"),
    "o_proj": (toys.D6, "self_attn.o_proj"),
    "gate_proj": (toys.D6, "mlp.gate_proj"),
    "up_proj": (toys.D6, "mlp.up_proj"),
    "down_proj": (toys.D6, "mlp.down_proj"),
    "embed_tokens, tied": (toys.D6, "model.embed_tokens"),
    "embed_tokens, untied": (UNTIED, "model.embed_tokens"),
    "lm_head": (UNTIED, "lm_head"),
    "k_proj of source layers": (toys.E6, "self_attn.k_proj"),
    "per_layer_input_gate": (toys.E6, "per_layer_input_gate"),
    "per_layer_projection": (toys.E6, "per_layer_projection"),
    "per_layer_model_projection": (toys.E6, "model.per_layer_model_projection"),
    "embed_tokens_per_layer": (toys.E6, "model.embed_tokens_per_layer"),
    "router.proj": (toys.M6, "router.proj"),
    "experts' gate": (toys.M6, "experts.switch_glu.gate_proj"),
    "experts' up": (toys.M6, "experts.switch_glu.up_proj"),
    "experts' down": (toys.M6, "experts.switch_glu.down_proj"),
}


def adapt(model: Any, *keys: str, dora: bool = False, layers: int = 6) -> int:
    """Adapters on these modules, none of their arrays left at zero; how many arrays there are."""
    linear_to_lora_layers(model, layers, {**SIZES, "keys": list(keys)}, use_dora=dora)
    return fill(model)


def fill(model: Any) -> int:
    """Every adapter array at random, the same in every model that names it alike."""
    fresh = []
    for name, value in tree_flatten(model.parameters()):
        if name.endswith((".lora_a", ".lora_b")):
            key = mx.random.key(zlib.crc32(name.removeprefix("language_model.").encode()))
            fresh.append((name, mx.random.normal(value.shape, key=key) * 0.3))
    model.load_weights(fresh, strict=False)
    return len(fresh)


def changed(model: Any, before: mx.array) -> bool:
    return not mx.array_equal(model(toys.tokens(1, 9)), before).item()


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("quantize", [None, FOUR_BIT], ids=["plain", "4-bit"])
@pytest.mark.parametrize(("config", "key"), TARGETS.values(), ids=TARGETS)
def test_lora(config: dict[str, Any], key: str, quantize: Any, when: str) -> None:
    if when == "after":
        models = pair(config, quantize=quantize)
        before = models.model(toys.tokens(1, 9))
        count = adapt(models.model, key)
    else:
        models = pair(config, quantize=quantize)
        before = models.model(toys.tokens(1, 9))
        base = toys.build(config, quantize=quantize)
        count = adapt(base, key)
        models = Pair(specialize(base, file_of(config), strict=True), models.plain)
    assert count == adapt(models.plain, key) > 0
    assert changed(models.model, before)
    models.served()


@pytest.mark.parametrize("quantize", [None, FOUR_BIT], ids=["plain", "4-bit"])
@pytest.mark.parametrize("key", ["self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj"])
def test_dora(key: str, quantize: Any) -> None:
    models = pair(toys.D6, quantize=quantize)
    before = models.model(toys.tokens(1, 9))
    assert adapt(models.model, key, dora=True) == adapt(models.plain, key, dora=True) == 12
    assert changed(models.model, before)
    models.served()


def test_dora_on_the_embedding() -> None:
    models = pair(toys.D6)
    for model in (models.model, models.plain):
        assert adapt(model, "model.embed_tokens", dora=True) == 2
    models.served()


def test_default_keys() -> None:
    """Without keys mlx-lm adapts every linear of the last layers."""
    for config in (toys.D6, toys.E6, toys.M6):
        models = pair(config)
        for model in (models.model, models.plain):
            linear_to_lora_layers(model, 4, dict(SIZES))
            assert fill(model) > 40
        models.served()


def test_removed_again() -> None:
    """Adapted, removed, adapted elsewhere, removed: each time as plain."""
    models = pair(toys.E6, quantize=FOUR_BIT)
    before = models.model(toys.tokens(1, 9))
    for key in ("self_attn.q_proj", "per_layer_projection"):
        for model in (models.model, models.plain):
            adapt(model, key)
        models.served()
        assert changed(models.model, before)
        for model in (models.model, models.plain):
            remove_lora_layers(model)
        models.served()
        assert not changed(models.model, before)


def test_new_adapter_weights() -> None:
    """The arrays of an adapter that is in place: reloaded, scaled, one assigned."""
    models = four_bit(toys.D6)
    for model in (models.model, models.plain):
        adapt(model, "self_attn.q_proj", "mlp.up_proj")
    models.served()
    for change in (
        lambda model: model.load_weights([("model.layers.1.mlp.up_proj.lora_b", mx.ones((4, 128)))], strict=False),
        lambda model: setattr(model.layers[0].self_attn.q_proj, "scale", 7.0),
        lambda model: setattr(model.layers[0].self_attn.q_proj, "lora_a", mx.ones((64, 4))),
        lambda model: setattr(model.layers[2].mlp.up_proj, "linear", model.layers[3].mlp.up_proj.linear),
    ):
        before = models.model(toys.tokens(1, 9))
        for model in (models.model, models.plain):
            change(model)
        assert changed(models.model, before)
        models.served()


def save_adapter(folder: Path, model: Any, keys: list[str], kind: str = "lora", extra: Any = None) -> Path:
    """The folder that mlx_lm.lora writes."""
    folder.mkdir()
    settings = {"fine_tune_type": kind, "num_layers": 6, "lora_parameters": {**SIZES, "keys": keys}}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    leaves = (".lora_a", ".lora_b", ".m")
    tensors = {name: value for name, value in tree_flatten(model.parameters()) if name.endswith(leaves)}
    mx.save_safetensors(str(folder / "adapters.safetensors"), tensors | (extra or {}))
    return folder


@pytest.fixture(scope="module", autouse=True)
def user_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STRAIGHTLINE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


EVERY_KEY = ["self_attn.q_proj", "per_layer_input_gate", "per_layer_projection"]


@pytest.mark.parametrize("naming", [ORIGINAL, MLX, TEXT])
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_adapter_folder(tmp_path: Path, naming: str, kind: str) -> None:
    """B74: load(adapter_path=...), and load_adapters on a specialized model: every tensor of the file is applied."""
    publish(tmp_path / "model", toys.E6, naming)
    prefix = "" if naming == TEXT else "language_model."
    keys = [*EVERY_KEY, f"{prefix}model.per_layer_model_projection"]
    plain, _ = mlx_lm.load(str(tmp_path / "model"))
    count = adapt(plain, *keys, dora=kind == "dora")
    assert count == 2 * (3 * 6 + 1)
    adapter = save_adapter(tmp_path / "adapter", plain, keys, kind)
    loaded, _ = load(tmp_path / "model", adapter_path=str(adapter), generate=True, strict=True)
    after, _ = load(tmp_path / "model", generate=True, strict=True)
    load_adapters(after, str(adapter))
    after.eval()
    for model in (loaded, after):
        Pair(model, plain).served()
        applied = dict(tree_flatten(model.parameters()))
        for name, value in mx.load(str(adapter / "adapters.safetensors")).items():
            assert_same(applied[name], value, name)


def refused(tmp_path: Path, adapter: Path) -> str:
    with pytest.raises(StraightlineError) as caught:
        load(tmp_path / "model", adapter_path=str(adapter), generate=True)
    assert "\n" not in str(caught.value)
    return str(caught.value).replace(str(adapter), "ADAPTER")


def test_adapter_that_does_not_fit(tmp_path: Path) -> None:
    """B74: a tensor that cannot be applied is refused by name: k_proj of a layer that shares another's, say."""
    plain = publish(tmp_path / "model", toys.E6, TEXT)
    adapt(plain, "self_attn.k_proj")
    name = "model.layers.4.self_attn.k_proj.lora_a"
    adapter = save_adapter(tmp_path / "sharer", plain, ["self_attn.k_proj"], extra={name: mx.ones((64, 4))})
    assert refused(tmp_path, adapter) == (
        f"ADAPTER: the adapter does not fit: Adapter at ADAPTER contains incompatible tensors: {name}: "
        "not an adapter parameter in the model"
    )
    assert refused(tmp_path, tmp_path / "none") == (
        "ADAPTER: has no adapter_config.json; expected a folder of adapters as mlx_lm.lora saves them"
    )
    (tmp_path / "empty").mkdir()
    assert "adapter_config.json" in refused(tmp_path, tmp_path / "empty")


def test_fuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """mlx_lm.fuse over a specialized model writes the files that it writes over a plain one."""
    keys = ["self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj"]
    publish(tmp_path / "model", toys.D6, MLX, quantize=FOUR_BIT, quantization=FOUR_BIT)
    plain, _ = mlx_lm.load(str(tmp_path / "model"))
    adapt(plain, *keys)
    adapter = save_adapter(tmp_path / "adapter", plain, keys)
    for name, loader in (("plain", mlx_lm.load), ("ours", lambda *a, **k: load(*a, generate=True, **k))):
        monkeypatch.setattr(fuse, "load", loader)
        arguments = ["fuse", "--model", str(tmp_path / "model"), "--adapter-path", str(adapter)]
        monkeypatch.setattr("sys.argv", [*arguments, "--save-path", str(tmp_path / name)])
        fuse.main()
    written = [mx.load(str(tmp_path / name / "model.safetensors")) for name in ("ours", "plain")]
    assert_same(dict(sorted(written[0].items())), dict(sorted(written[1].items())), "fused")
    fused, _ = mlx_lm.load(str(tmp_path / "plain"))
    model, _ = load(tmp_path / "ours", generate=True, strict=True)
    checkpoints.assert_same_model(model, fused)
    assert not mx.array_equal(fused(toys.tokens(1, 4)), toys.build(toys.D6, quantize=FOUR_BIT)(toys.tokens(1, 4)))


def test_fused_in_place() -> None:
    """What mlx_lm.fuse does to a model, on one that has run already."""
    models = pair(toys.M6, quantize=FOUR_BIT)
    for model in (models.model, models.plain):
        adapt(model, "self_attn.q_proj", "experts.switch_glu.up_proj", "router.proj")
    models.served()
    for model in (models.model, models.plain):
        fused = [(name, one.fuse()) for name, one in model.named_modules() if hasattr(one, "fuse")]
        assert len(fused) == 18
        model.update_modules(nn.utils.tree_unflatten(fused))
    models.served()


@pytest.mark.parametrize("quantize", [None, FOUR_BIT], ids=["plain", "4-bit"])
def test_gradients(quantize: Any) -> None:
    """Training runs the monolith, says so, and gives plain mlx-lm's gradients; afterwards the file serves again."""
    models = pair(toys.D6, quantize=quantize, strict=False)
    ids = toys.tokens(2, 9)
    results = []
    for model in (models.model, models.plain):
        model.freeze()
        adapt(model, "self_attn.q_proj", "mlp.down_proj")
        model.train()

        def loss(model: Any, ids: mx.array) -> mx.array:
            return nn.losses.cross_entropy(model(ids[:, :-1]), ids[:, 1:]).mean()

        value, gradients = nn.value_and_grad(model, loss)(model, ids)
        results.append((value, dict(tree_flatten(gradients))))
    assert_same(*results, "loss and gradients")
    assert len(results[0][1]) == 24 and all(mx.any(one).item() for one in results[0][1].values())
    reason = "the model is in training mode; call model.eval() for the generated path"
    assert models.model.dispatch.last == ("monolith", reason)
    assert models.model.dispatch.counts == {"generated": 0, "monolith": 1}
    for model in (models.model, models.plain):
        model.eval()
    models.served()


def test_training_loop() -> None:
    """mlx-lm's own compiled step, which swaps arrays without a word: the trained adapter is served."""
    import mlx.optimizers as optimizers
    from mlx_lm.tuner.trainer import default_loss

    models = pair(toys.E6, strict=False)
    before = models.model(toys.tokens(1, 9))
    batch = toys.tokens(2, 9)
    lengths = mx.array([[0, 8], [0, 8]])
    for model in (models.model, models.plain):
        model.freeze()
        adapt(model, "self_attn.q_proj", "per_layer_projection")
        model.train()
        optimizer = optimizers.SGD(learning_rate=0.1)
        step_loss = nn.value_and_grad(model, default_loss)
        state = [model.state, optimizer.state, mx.random.state]

        def step(batch: mx.array, model: Any = model, optimizer: Any = optimizer, loss: Any = step_loss) -> Any:
            (value, _), gradients = loss(model, batch, lengths)
            optimizer.update(model, gradients)
            return value

        compiled = mx.compile(step, inputs=state, outputs=state)
        for _ in range(3):
            compiled(batch)
            mx.eval(state)
        model.eval()
    assert changed(models.model, before)
    models.served()
