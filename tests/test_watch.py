"""A specialized model after its modules have changed, in every way that mlx offers: as plain, and never stale.

Also copies, models that share modules, and edits that no generated file is made for.
"""

import copy
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, TimeoutError
from functools import reduce
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
import toys
from comparing import EIGHT_BIT, FOUR_BIT, assert_same, file_of
from mlx.utils import tree_flatten, tree_map, tree_unflatten
from mlx_lm.models import gemma4_text
from mlx_lm.models.rope_utils import ProportionalRoPE
from mlx_lm.utils import dequantize_model, quantize_model
from pairs import Pair, four_bit, pair, text

from straightline.codegen import generate
from straightline.runtime import HiddenTap, StraightlineError, load_generated, make_cache, specialize, watch
from straightline.runtime.bound import Bound
from straightline.runtime.watch import changes, plain_class

IDS = toys.tokens(1, 9)
CONFIGS = {"D6": toys.D6, "M6": toys.M6, "E6": toys.E6, "untied": toys.config(tie_word_embeddings=False)}


def other_weights(model: Any) -> list[tuple[str, mx.array]]:
    """The parameters of a model, drawn again."""
    fresh = []
    for number, (name, value) in enumerate(tree_flatten(model.parameters())):
        key = mx.random.key(number)
        fresh.append((name, value * mx.random.uniform(0.5, 1.5, value.shape, key=key).astype(value.dtype)))
    return fresh


def first_layer(model: Any) -> Any:
    return model.layers[0]


Change = Callable[[Any], object]
# Each is applied to both models of a pair. A plain model sees all of them, so a specialized one must.
CHANGES: dict[str, Change] = {
    "load_weights": lambda m: m.load_weights(other_weights(m)),
    "update": lambda m: m.update(tree_unflatten(other_weights(m))),
    "update of one layer": lambda m: m.layers[2].update(tree_unflatten(other_weights(m.layers[2]))),
    "apply": lambda m: m.apply(lambda array: array * 1.1),
    "set_dtype": lambda m: m.set_dtype(mx.float16),
    "norm": lambda m: setattr(first_layer(m).input_layernorm, "weight", mx.full((64,), 0.3)),
    "q_norm": lambda m: setattr(first_layer(m).self_attn.q_norm, "weight", mx.full((64,), 0.3)),
    "final norm": lambda m: setattr(text(m).model.norm, "weight", mx.full((64,), 0.3)),
    "layer_scalar": lambda m: setattr(first_layer(m), "layer_scalar", mx.array([0.7])),
    "item assignment": lambda m: first_layer(m).mlp.up_proj.__setitem__("weight", mx.ones((128, 64))),
    "in place, assigned": lambda m: _doubled(first_layer(m).mlp.up_proj),
    "a linear": lambda m: setattr(first_layer(m).mlp, "up_proj", m.layers[1].mlp.up_proj),
    "a linear with a bias": lambda m: setattr(first_layer(m).mlp.up_proj, "bias", mx.ones((128,))),
    "a layer of the same kind": lambda m: m.layers.__setitem__(0, m.layers[1]),
    "layers reversed in place": lambda m: m.layers.__setitem__(slice(0, 2), m.layers[1::-1]),
    "a new list of layers": lambda m: setattr(text(m).model, "layers", [m.layers[1], *m.layers[1:]]),
    "the embedding": lambda m: setattr(text(m).model, "embed_tokens", _embedding()),
    "quantized": lambda m: nn.quantize(m, **FOUR_BIT),
    "partly quantized": lambda m: nn.quantize(
        m, class_predicate=lambda path, one: EIGHT_BIT if "mlp" in path else False
    ),
    "the inner model": lambda m: setattr(text(m), "model", copy.deepcopy(text(m).model)),
}


def _doubled(linear: Any) -> None:
    weight = linear.weight
    weight[0] = 3.0
    linear.weight = weight


def _embedding() -> nn.Embedding:
    made = nn.Embedding(97, 64)
    made.weight = mx.random.normal((97, 64), key=mx.random.key(3))
    return made


@pytest.mark.parametrize("outer", [False, True], ids=["text", "outer"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changes(change: Change, outer: bool) -> None:
    models = pair(toys.D6, outer=outer)
    before = models.model(IDS)
    for model in (models.model, models.plain):
        change(model)
        mx.eval(model.parameters())
    models.served()
    assert not mx.array_equal(models.model(IDS), before) or "inner model" in _name(change)


def _name(change: Change) -> str:
    return next(name for name, one in CHANGES.items() if one is change)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_parameter_counts(name: str) -> None:
    """Each parameter of the model, changed alone, changes the output as it changes the plain model's."""
    models = pair(CONFIGS[name])
    before = models.plain(IDS)
    names = [one for one, _ in tree_flatten(models.plain.parameters())]
    for one in names:
        for model in (models.model, models.plain):
            model.load_weights([(one, dict(tree_flatten(model.parameters()))[one] * 1.25)], strict=False)
        found, expected = models.model(IDS), models.plain(IDS)
        assert_same(found, expected, one)
        assert not mx.array_equal(expected, before) or "experts" in one, one
        before = expected
    assert models.model.dispatch.counts == {"generated": len(names), "monolith": 0}


@pytest.mark.parametrize("name", CONFIGS)
def test_quantized_and_dequantized(name: str) -> None:
    """mlx-lm's own quantize_model and dequantize_model, one after the other, on a model that has run."""
    models = pair(CONFIGS[name])
    models.served()
    for model in (models.model, models.plain):
        quantize_model(model, {}, 32, 4)
    assert plain_class(models.model.layers[0].mlp.up_proj) is nn.QuantizedLinear
    models.served()
    for model in (models.model, models.plain):
        dequantize_model(model)
    assert plain_class(models.model.layers[0].mlp.up_proj) is nn.Linear
    models.served()


@pytest.mark.parametrize("path", ["self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj"])
def test_joined_weights_edited_in_place(path: str) -> None:
    """Assigned again, the same array object is another array: what was joined of it is joined anew."""
    models = four_bit(toys.D6)
    models.served()
    for times in (1, 2):
        for model in (models.model, models.plain):
            module = reduce(getattr, path.split("."), first_layer(model))
            scales = module.scales
            scales[0] = scales[0] * 2.0 * times
            module.scales = scales
        models.served()


def test_train_and_eval() -> None:
    models = pair(toys.D6, strict=False)
    reason = "the model is in training mode; call model.eval() for the generated path"
    for _ in range(2):
        models.model.train()
        models.plain.train()
        models.served("monolith")
        assert models.model.dispatch.last == ("monolith", reason) and models.model.dispatch.reason == reason
        models.model.eval()
        models.plain.eval()
        models.served()
        assert models.model.dispatch.reason == "" and models.model.dispatch.last == ("generated", "")


# Edits that the file is not made for: the monolith, with the reason.
EDITS: dict[str, tuple[dict[str, Any], Change, str]] = {
    "a layer of the other kind": (
        toys.D6,
        lambda m: m.layers.__setitem__(0, m.layers[2]),
        "layers.0.self_attn.v_proj is not in the model; the file reads it",
    ),
    "the same with equal slots": (
        toys.config(attention_k_eq_v=False),
        lambda m: m.layers.__setitem__(0, m.layers[2]),
        "layers.0.layer_type is 'full_attention'; the file expects 'sliding_attention'",
    ),
    "another layer_type": (
        toys.config(attention_k_eq_v=False),
        lambda m: setattr(m.layers[1], "layer_type", toys.FULL),
        "layers.1.layer_type is 'full_attention'; the file expects 'sliding_attention'",
    ),
    "a layer fewer": (toys.D6, lambda m: m.layers.pop(), "the model has 5 layers; the file expects 6"),
    "another sliding rope": (
        toys.D6,
        lambda m: setattr(m.layers[0].self_attn, "rope", nn.RoPE(64, base=500.0)),
        "layers.0.self_attn.rope.base is 500.0; the file expects 10000.0",
    ),
    "a longer full rope": (
        toys.D6,
        lambda m: setattr(m.layers[2].self_attn, "rope", ProportionalRoPE(64, 16, base=1e6, factor=2.0)),
        "layers.2.self_attn.rope._freqs are not those of the model's arguments, which the file expects",
    ),
    "a rope of another class": (
        toys.D6,
        lambda m: setattr(m.layers[2].self_attn, "rope", nn.RoPE(64)),
        "layers.2.self_attn.rope is RoPE; the file expects ProportionalRoPE",
    ),
    "attention scale": (
        toys.D6,
        lambda m: setattr(m.layers[3].self_attn, "scale", 0.5),
        "layers.3.self_attn.scale is 0.5; the file expects 1.0",
    ),
    "window": (
        toys.D6,
        lambda m: setattr(m.model, "window_size", 4),
        "model.window_size is 4; the file expects 8",
    ),
    "softcap": (
        toys.D6,
        lambda m: setattr(m, "final_logit_softcapping", 10.0),
        "final_logit_softcapping is 10.0; the file expects 30.0",
    ),
    "embedding scale": (
        toys.D6,
        lambda m: setattr(m.model, "embed_scale", 1.0),
        "model.embed_scale is 1.0; the file expects 8.0",
    ),
    "epsilon of a norm": (
        toys.D6,
        lambda m: setattr(m.layers[1].self_attn.v_norm, "eps", 1e-3),
        "layers.1.self_attn.v_norm.eps is 0.001; the file expects 1e-06",
    ),
    "epsilon of the final norm": (
        toys.D6,
        lambda m: setattr(m.model.norm, "eps", 1e-3),
        "model.norm.eps is 0.001; the file expects 1e-06",
    ),
    "epsilon of a router": (
        toys.M6,
        lambda m: setattr(m.layers[4].router, "eps", 1e-3),
        "layers.4.router.eps is 0.001; the file expects 1e-06",
    ),
    "a norm of another class": (
        toys.D6,
        lambda m: setattr(m.model, "norm", nn.LayerNorm(64)),
        "norm is mlx.nn.layers.normalization.LayerNorm; the file expects RMSNorm",
    ),
    "who shares whose KV": (
        toys.E6,
        lambda m: m.model.previous_kvs.__setitem__(3, 0),
        "model.previous_kvs is [0, 1, 2, 0, 1, 2]; the file expects [0, 1, 2, 1, 1, 2]",
    ),
    "experts a token": (
        toys.M6,
        lambda m: setattr(m.args, "top_k_experts", 3),
        "the file is made for the fingerprint X, but the model has X",
    ),
    "no per-layer gate": (
        toys.E6,
        lambda m: setattr(m.layers[2], "per_layer_input_gate", None),
        "layers.2.per_layer_input_gate is not in the model; the file reads it",
    ),
    "a parameter that no file knows": (
        toys.D6,
        lambda m: setattr(m.layers[2], "extra", mx.ones((3,))),
        "layers.2.extra is in the model, but the file does not read it",
    ),
}


@pytest.mark.parametrize(("config", "edit", "reason"), EDITS.values(), ids=EDITS)
def test_edits_go_to_the_monolith(config: dict[str, Any], edit: Change, reason: str) -> None:
    models = pair(config, strict=False)
    models.served()
    for model in (models.model, models.plain):
        edit(model)
    found, expected = models.model(IDS), models.plain(IDS)
    assert_same(found, expected, "logits")
    path, why = models.model.dispatch.last
    fingerprints = file_of(config).FINGERPRINT
    assert path == "monolith"
    assert why == reason or (why.startswith("the file is made for the fingerprint") and fingerprints in why)
    models.model.dispatch.strict = True
    with pytest.raises(StraightlineError, match=r"^strict: the generated file cannot serve this call: "):
        models.model(IDS)


class Noted:
    """A hook such as people put around a layer: not a module."""

    def __init__(self, layer: Any) -> None:
        self.layer, self.layer_type, self.calls = layer, layer.layer_type, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.layer(*args, **kwargs)


def test_hooked_layers_are_called() -> None:
    """Hooks around layers run, on the monolith; taken off again, the file serves."""
    models = pair(toys.D6, strict=False)
    layers = list(models.model.layers)
    hooks = [Noted(layer) for layer in layers]
    models.model.model.layers = hooks
    assert_same(models.model(IDS), models.plain(IDS), "logits")
    assert [hook.calls for hook in hooks] == [1] * 6
    assert models.model.dispatch.last == (
        "monolith",
        "layers.0 is test_watch.Noted; the file expects DecoderLayer",
    )
    for index, layer in enumerate(layers):
        models.model.model.layers[index] = layer
    models.served()


@pytest.mark.parametrize(("name", "quantize"), [("D6", None), ("M6", FOUR_BIT), ("E6", None)])
def test_compiled_with_state(name: str, quantize: Any) -> None:
    """mx.compile over a model in eval mode with its state as inputs: later weights reach the compiled function."""
    models = pair(CONFIGS[name], quantize=quantize)
    compiled = [
        mx.compile(lambda ids, model=model: model(ids), inputs=model.state) for model in (models.model, models.plain)
    ]
    before = compiled[0](IDS)
    assert mx.allclose(before, compiled[1](IDS), rtol=1e-4, atol=1e-4)
    for model in (models.model, models.plain):
        model.load_weights(
            [(one, value * 1.2) for one, value in tree_flatten(model.parameters()) if "norm" in one], strict=False
        )
    after = compiled[0](IDS)
    assert mx.allclose(after, compiled[1](IDS), rtol=1e-4, atol=1e-4)
    assert not mx.allclose(after, before, rtol=1e-2, atol=1e-2)
    models.served()


def test_compiled_update() -> None:
    """Arrays that a compiled function writes into the model's state, which no method of a module sees."""
    models = pair(toys.M6)
    for model in (models.model, models.plain):
        models.agree()

        def halve(model: Any = model) -> None:
            model.update(tree_map(lambda array: array * 0.5, model.trainable_parameters()))

        compiled = mx.compile(halve, inputs=model.state, outputs=model.state)
        for _ in range(2):
            compiled()
        mx.eval(model.parameters())
        if model is models.model:
            assert not mx.array_equal(model(IDS), models.plain(IDS))
            for _ in range(2):
                halve(models.plain)
            models.agree()
            break
    models.served()


@pytest.mark.parametrize("lengths", [(9,), (40,), (5, 1)])
@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_in_eval_mode(name: str, lengths: tuple[int, ...]) -> None:
    """Without model.train() the file is differentiated: the same loss, and gradients that agree."""

    def loss(model: Any) -> mx.array:
        caches = model.make_cache() if len(lengths) > 1 else None
        return mx.mean([model(toys.tokens(1, length), cache=caches) for length in lengths][-1] ** 2)

    models = pair(CONFIGS[name])
    results = []
    for model in (models.model, models.plain):
        value, gradients = nn.value_and_grad(model, loss)(model)
        results.append((value, dict(tree_flatten(gradients))))
    assert_same(results[0][0], results[1][0], "loss")
    assert list(results[0][1]) == list(results[1][1])
    for name, expected in results[1][1].items():
        assert mx.allclose(results[0][1][name], expected, rtol=1e-3, atol=1e-5), name
        assert mx.any(expected).item(), name
    models.served()


def test_changes_elsewhere_bind_nothing() -> None:
    """The count of changes is one for the process; whose they were is looked up, and these are another model's."""
    first, second = four_bit(toys.D6), four_bit(toys.E6)
    before = first.model(IDS)
    bound = first.model._bound
    assert first.model(IDS) is not None and first.model._bound is bound
    second.model.load_weights([("model.norm.weight", mx.ones((64,)))], strict=False)
    assert mx.array_equal(first.model(IDS), before)
    assert first.model._bound is bound and not bound.stale()
    for change in (
        lambda: setattr(first.model.layers[3].mlp.up_proj, "scales", first.model.layers[3].mlp.up_proj.scales * 1),
        lambda: first.model.layers.reverse() or first.model.layers.reverse(),
        lambda: setattr(first.model, "args", copy.copy(first.model.args)),
    ):
        bound = first.model._bound
        second.model.norm = second.model.model.norm  # a later change than this model's own
        change()
        second.model.norm = second.model.model.norm
        assert mx.array_equal(first.model(IDS), before)
        assert first.model._bound is not bound


def test_another_text_model_put_in_is_bound() -> None:
    """Its modules have not been changed, nor watched, and it may share the arguments of the one that it replaces."""
    models = four_bit(toys.D6, outer=True)
    mx.eval(models.model(IDS))
    other = toys.build(toys.D6, quantize=FOUR_BIT, seed=5, outer=True)
    other.language_model.args = models.model.language_model.args
    models.model.language_model = other.language_model
    assert mx.array_equal(models.model(IDS), other(IDS))
    assert models.model.dispatch.counts["monolith"] == 0


def test_another_text_model_with_the_same_first_layer_is_bound() -> None:
    """One that its user put together: its arguments and all but one layer are those of the one that it replaces."""
    models = four_bit(toys.D6, outer=True)
    models.served()
    for one in (models.model, models.plain):
        surgery = copy.copy(text(one))
        surgery.model = copy.copy(surgery.model)
        fourth = copy.deepcopy(one.layers[3])
        fourth.layer_scalar = mx.array([0.3])
        surgery.model.layers = [*one.layers[:3], fourth, *one.layers[4:]]
        one.language_model = surgery
    models.served()


def test_changes_are_counted_one_at_a_time() -> None:
    """Else another thread could find a newer count while the number of this change is not written down yet."""
    model = pair(toys.D6).model
    before, scalar = changes(), mx.array([0.3])
    with ThreadPoolExecutor(1) as pool:
        with watch.counting:
            change = pool.submit(setattr, model.layers[2], "layer_scalar", scalar)
            with pytest.raises(TimeoutError):
                change.result(0.05)
            assert changes() == before
        change.result(60)
    assert changes() == before + 1 == vars(model.layers[2])["_changed"]


def test_one_thread_binds_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with what was known before."""
    models, binds = four_bit(toys.D6), []
    made = Bound.__init__

    def counted(self: Any, text: Any, options: Any, earlier: Any = None) -> None:
        binds.append(earlier)
        made(self, text, options, earlier)

    monkeypatch.setattr(Bound, "__init__", counted)
    before = models.model(IDS)
    mx.eval(before)
    models.model.model.norm.weight = models.model.model.norm.weight * 1
    mx.eval(models.model.parameters())

    def run(_: int) -> mx.array:
        logits = models.model(IDS)
        mx.eval(logits)
        return logits

    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(run, range(4)):
            assert mx.array_equal(found, before)
    assert len(binds) == 1 and binds[0] is not None


def test_a_forward_counts_no_change() -> None:
    """Otherwise each call would bind again."""
    for config in CONFIGS.values():
        models = pair(config)
        models.model(IDS)
        models.model.monolith(IDS)
        before = changes()
        models.model(IDS)
        models.model.monolith(IDS)
        models.model(IDS, tap=HiddenTap([1]))
        assert changes() == before


def test_deepcopy() -> None:
    """A copy is specialized too, and apart: neither sees what is done to the other."""
    models = pair(toys.E6, quantize=FOUR_BIT)
    models.served()
    twin = copy.deepcopy(models.model)
    assert type(twin) is type(models.model)
    assert twin.dispatch.counts == {"generated": 0, "monolith": 0} and twin.dispatch.strict
    plain = copy.deepcopy(models.plain)
    Pair(twin, plain).served()
    twin.layers[0].layer_scalar = mx.array([0.1])
    models.served()
    assert not mx.array_equal(twin(IDS), models.model(IDS))
    models.model.layers[1].layer_scalar = mx.array([0.2])
    plain.layers[0].layer_scalar = mx.array([0.1])
    Pair(twin, plain).served()


def test_deepcopy_of_a_model_in_a_structure() -> None:
    """The copy of a model that is held twice is one model."""
    model = pair(toys.D6).model
    first, second = copy.deepcopy([model, model])
    assert first is second and first is not model
    assert mx.array_equal(first(IDS), model(IDS))


def test_copy() -> None:
    """A shallow copy shares the layers, and has a dispatch record and a head of its own."""
    models = pair(CONFIGS["untied"])
    models.served()
    twin = copy.copy(models.model)
    assert twin.dispatch.counts == {"generated": 0, "monolith": 0} and twin.dispatch.strict
    Pair(twin, models.plain).served()
    twin.layers[0].layer_scalar = models.plain.layers[0].layer_scalar = mx.array([0.1])
    models.served()
    twin.lm_head = nn.Linear(64, 97, bias=False)
    models.served()
    assert not mx.array_equal(twin(IDS), models.model(IDS))


def test_deepcopy_while_training() -> None:
    model = pair(toys.D6).model
    model.train()
    twin = copy.deepcopy(model)
    twin.eval()
    assert twin.dispatch.strict and model.training and not twin.training
    model.eval()
    assert mx.array_equal(twin(IDS), model(IDS))


@pytest.mark.parametrize("outer", [False, True])
def test_pickle(outer: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As plain mlx-lm models do; what comes out is specialized, binds anew and is apart. A user's file goes by path."""
    monkeypatch.chdir(tmp_path)
    plain = toys.build(toys.E6, quantize=FOUR_BIT, outer=outer)
    (tmp_path / "mine.py").write_text(generate(toys.E6, "mine"))
    model = specialize(toys.build(toys.E6, quantize=FOUR_BIT, outer=outer), load_generated("mine.py"), strict=True)
    with model.tapped([1]):
        model(IDS)
        model.extra = "kept"
        monkeypatch.chdir("/")
        first, second = pickle.loads(pickle.dumps([model, model]))
    assert first is second and type(first) is type(model) and first.extra == "kept"
    assert first.dispatch.counts == {"generated": 0, "monolith": 0} and first.dispatch.strict
    Pair(first, plain).served()
    assert first.dispatch.file == "straightline_file_mine"
    first.layers[0].layer_scalar = mx.array([0.1])
    Pair(model, plain).served()
    model.train()
    pickled = pickle.dumps(model)
    assert pickle.loads(pickled).training
    (tmp_path / "mine.py").unlink()
    with pytest.raises(StraightlineError, match=r"mine\.py is not a \.py file; expected one made by"):
        pickle.loads(pickled)


@pytest.mark.parametrize("protocol", [0, 1])
def test_old_protocols_cannot_pickle_arrays(protocol: int) -> None:
    """As of a plain model, in place of modules without their contents."""
    base = toys.build(toys.D6)
    model = specialize(base, file_of(toys.D6))
    for one in (toys.build(toys.D6), base, model, base.layers[0]):
        with pytest.raises(TypeError, match="cannot pickle 'array' object"):
            pickle.dumps(one, protocol)


def test_specialized_twice() -> None:
    models = pair(toys.D6)
    again = specialize(models.model, strict=True)
    assert again is not models.model and type(again) is type(models.model)
    assert again.dispatch.counts == {"generated": 0, "monolith": 0}
    Pair(again, models.plain).served()
    again.layers[0].layer_scalar = models.plain.layers[0].layer_scalar = mx.array([0.1])
    Pair(again, models.plain).served()
    models.served()  # the layers are shared


def test_the_text_model_of_an_outer_one() -> None:
    """specialize(model.language_model), beside a specialized outer model over the same modules."""
    models = pair(toys.E6, outer=True)
    inner = specialize(models.model.language_model, file_of(toys.E6), strict=True)
    Pair(inner, models.plain.language_model).served()
    models.plain.layers[0].layer_scalar = inner.layers[0].layer_scalar = mx.array([0.1])
    models.served()
    Pair(inner, models.plain.language_model).served()


def test_the_original_model_stays_as_it_is() -> None:
    """What specialize is given still is an mlx-lm model that runs mlx-lm's code; both see a change of a layer."""
    base, plain = toys.build(toys.D6), toys.build(toys.D6)
    model = specialize(base, file_of(toys.D6), strict=True)
    assert type(base) is gemma4_text.Model and isinstance(model, gemma4_text.Model)
    assert repr(base) == repr(plain) and str(model.layers[0]) == str(plain.layers[0])
    assert [name for name, _ in tree_flatten(model.parameters())] == [n for n, _ in tree_flatten(plain.parameters())]
    assert_same(base(IDS), plain(IDS), "logits")
    base.layers[3].layer_scalar = plain.layers[3].layer_scalar = mx.array([0.1])
    assert_same(base(IDS), plain(IDS), "logits")
    Pair(model, plain).served()
    for found, expected in zip(model.modules(), plain.modules(), strict=True):
        assert isinstance(found, plain_class(expected))


def test_two_models_share_modules() -> None:
    """Two specialized models over one set of layers, with dispatch records and heads of their own."""
    config = CONFIGS["untied"]
    base = toys.build(config)
    first, second = (specialize(base, file_of(config), strict=True) for _ in range(2))
    plains = toys.build(config), toys.build(config)
    second.lm_head = nn.Linear(64, 97, bias=False)
    second.lm_head.weight = plains[1].lm_head.weight = mx.random.normal((97, 64))
    for model in (first, *plains):
        model.layers[1].mlp.up_proj.weight = mx.full((128, 64), 0.02)
    Pair(first, plains[0]).served()
    Pair(second, plains[1]).served()
    assert not mx.array_equal(first(IDS), second(IDS))


def test_what_is_copied_has_no_number_of_a_change() -> None:
    """Which another process counts otherwise; and lists are plain ones."""
    model = pair(toys.D6).model
    model.layers[0] = model.layers[0]
    model.norm = model.model.norm
    model.layers[0].layer_scalar = mx.array([0.3])
    for twin in (pickle.loads(pickle.dumps(model.model)), copy.deepcopy(model.model)):
        assert type(twin.layers) is list and len(twin.layers) == 6
        assert not any("_changed" in vars(one) for one in twin.modules())
    assert "_changed" in vars(model) and "_changed" not in model.__reduce_ex__(4)[2]


def test_watched_modules_pickle() -> None:
    """As before: layers can be sent to another process, and come out as mlx-lm's own classes."""
    models = pair(toys.D6)
    for module in (models.model.layers[0], models.model.model):
        assert plain_class(module) is not type(module)
        again = pickle.loads(pickle.dumps(module))
        assert type(again) is plain_class(module)
        for (name, found), (_, expected) in zip(
            tree_flatten(again.parameters()), tree_flatten(module.parameters()), strict=True
        ):
            assert_same(found, expected, name)


@pytest.mark.usefixtures("exact_memory")
def test_dropped_arrays_are_freed() -> None:
    """Nothing keeps the weights that were replaced: not the watch, not the bound forward after its next call."""
    models = pair(toys.D6)
    model = models.model
    mx.eval(model(IDS))
    before = mx.get_active_memory()
    for seed in range(3):
        fresh = mx.random.normal((97, 64), key=mx.random.key(seed))
        model.model.embed_tokens.weight = fresh
        for layer in model.layers:
            layer.mlp.up_proj.weight = mx.random.normal((128, 64), key=mx.random.key(seed))
        mx.eval(model.parameters())
        del fresh, layer
        mx.eval(model(IDS))
    assert mx.get_active_memory() - before < 97 * 64 * 4


@pytest.mark.parametrize("module", ["gemma4_12b.py", toys])
def test_other_things_in_the_place_of_a_file(module: Any) -> None:
    with pytest.raises(StraightlineError, match=r"^module is .*; expected one of load_generated\(path\)$"):
        specialize(toys.build(toys.D6), module)
    with pytest.raises(StraightlineError, match=r"^make_cache: model is a NoneType; expected an mlx-lm Gemma 4 model$"):
        make_cache(None)


def test_other_classes_are_refused() -> None:
    with pytest.raises(StraightlineError, match=r"^model is mlx\.nn\.layers\.linear\.Linear; expected mlx_lm\.models"):
        specialize(nn.Linear(4, 4))
    with pytest.raises(StraightlineError, match=r"^model is builtins\.NoneType; expected mlx_lm\.models"):
        specialize(None)
