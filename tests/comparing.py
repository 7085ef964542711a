"""Bit comparison of a generated forward with mlx-lm's, and the models, hooks and schedules that the tests share.

Three forwards of the same weights: the generated file, `model.monolith` of the specialized model, and a second
mlx-lm model of the same seed that straightline never sees, tapped by the hooks below. All must give the same bytes.
"""

import json
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from typing import Any

import mlx.core as mx
import toys
from mlx_lm.models.cache import BatchKVCache, BatchRotatingKVCache

from straightline.codegen import generate
from straightline.runtime import HiddenTap, specialize

FLOAT32, FLOAT16, BFLOAT16 = mx.float32, mx.float16, mx.bfloat16
FOUR_BIT = {"group_size": 32, "bits": 4}
EIGHT_BIT = {"group_size": 64, "bits": 8}
MXFP4 = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
MXFP8 = {"group_size": 32, "bits": 8, "mode": "mxfp8"}
NVFP4 = {"group_size": 16, "bits": 4, "mode": "nvfp4"}


def mixed(path: str, module: Any) -> Any:
    """A mix as in published checkpoints: 4-bit body, 8-bit router, embedding and first down projection, bf16 gates."""
    if path.endswith(("router.proj", "embed_tokens", "layers.0.mlp.down_proj")):
        return EIGHT_BIT
    if path.endswith(("per_layer_input_gate", "layers.1.self_attn.o_proj", "layers.2.self_attn.k_proj")):
        return False
    return MXFP4 if path.endswith("up_proj") else FOUR_BIT


QUANTIZATIONS: dict[str, Any] = {
    "plain": None,
    "4-bit": FOUR_BIT,
    "8-bit": EIGHT_BIT,
    "mixed": mixed,
    "mxfp4": MXFP4,
    "mxfp8": MXFP8,
    "nvfp4": NVFP4,
}
DTYPES = {"float32": FLOAT32, "float16": FLOAT16, "bfloat16": BFLOAT16}

# Lengths of the calls of one run at window 8.
SCHEDULES: dict[str, tuple[int, ...]] = {
    "one pass": (20,),
    "chunks 7 9 4": (7, 9, 4),
    "chunks 8 8 4": (8, 8, 4),
    "chunk over the window": (3, 12, 1, 1),
    "steps through three windows": (1,) * 25,
    "prompt then steps": (6,) + (1,) * 12,
    "blocks up to the window": (2, 3, 4, 5),
    "blocks past the window": (9, 1, 6, 7, 8, 2),
}


def same_bits(found: mx.array, expected: mx.array) -> bool:
    return found.shape == expected.shape and found.dtype == expected.dtype and _bytes(found) == _bytes(expected)


def _bytes(array: mx.array) -> bytes:
    return bytes(memoryview(mx.contiguous(array.reshape(-1)).view(mx.uint8)))


def assert_same(found: Any, expected: Any, what: str) -> None:
    """Same dtype, shape and bytes of two arrays or containers of arrays; anything else by ==. No tolerance."""
    assert type(found) is type(expected), f"{what}: {type(found).__name__}, expected {type(expected).__name__}"
    if isinstance(expected, mx.array):
        assert found.dtype == expected.dtype, f"{what}: {found.dtype}, expected {expected.dtype}"
        assert found.shape == expected.shape, f"{what}: {found.shape}, expected {expected.shape}"
        if not same_bits(found, expected):
            different = (found != expected).sum().item()
            raise AssertionError(f"{what}: bits differ ({different} of {expected.size} values are not ==)")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), f"{what}: {len(found)} entries, expected {len(expected)}"
        for index, pair in enumerate(zip(found, expected, strict=True)):
            assert_same(*pair, f"{what}[{index}]")
    elif isinstance(expected, dict):
        assert list(found) == list(expected), f"{what}: keys {list(found)}, expected {list(expected)}"
        for key, value in expected.items():
            assert_same(found[key], value, f"{what}[{key}]")
    else:
        assert found == expected, f"{what}: {found!r}, expected {expected!r}"


def assert_same_caches(found: Sequence[Any], expected: Sequence[Any], what: str = "cache") -> None:
    """Every attribute of every mlx-lm cache: keys, values, offsets, ring positions, paddings."""
    assert len(found) == len(expected)
    for index, (mine, other) in enumerate(zip(found, expected, strict=True)):
        assert isinstance(mine, type(other)), f"{what} {index}: {type(mine).__name__}"
        assert_same({key: getattr(mine, key) for key in vars(other)}, dict(vars(other)), f"{what} {index}")


def assert_close(found: mx.array, expected: mx.array, what: str) -> None:
    """For float32 runs of *different* schedules only: matmuls of another shape round differently, in mlx-lm too."""
    assert found.dtype == expected.dtype == FLOAT32, what
    assert found.shape == expected.shape, what
    assert mx.allclose(found, expected, rtol=1e-3, atol=1e-4).item(), f"{what}: {mx.abs(found - expected).max().item()}"


def file_of(config: dict[str, Any]) -> types.ModuleType:
    """The generated file of a config, as a module."""
    return _file_of(json.dumps(config, sort_keys=True))


@lru_cache(maxsize=256)
def text_of(config: str) -> str:
    return generate(json.loads(config), "toy")


@lru_cache(maxsize=256)
def _file_of(config: str) -> types.ModuleType:
    module = types.ModuleType("toy")
    exec(compile(text_of(config), "toy.py", "exec"), module.__dict__)
    return module


def source_of(config: dict[str, Any]) -> str:
    """The text of the generated file of a config."""
    return text_of(json.dumps(config, sort_keys=True))


class Recorded:
    """Stands in for a function of mx.fast or a module: keeps the arguments and the result of every call."""

    def __init__(self, function: Callable[..., mx.array]) -> None:
        self.function = function
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any], mx.array]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
        result = self.function(*args, **kwargs)
        self.calls.append((args, kwargs, result))
        return result

    def take(self) -> list[tuple[tuple[Any, ...], dict[str, Any], mx.array]]:
        """The calls since the last take."""
        calls, self.calls = self.calls, []
        return calls


class Hooked:
    """A plain mlx-lm model whose layers and final norm note what they return. Knows nothing of straightline."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.rows: dict[int, mx.array] = {}
        inner = getattr(model, "language_model", model).model
        self.sentinel = len(inner.layers)
        inner.layers = [_Layer(index, layer, self.rows) for index, layer in enumerate(inner.layers)]
        inner.norm = _Norm(self.sentinel, inner.norm, self.rows)

    def __call__(self, ids: mx.array, cache: Any = None, **kwargs: Any) -> mx.array:
        self.rows.clear()
        logits: mx.array = self.model(ids, cache=cache, **kwargs)
        return logits


class _Layer:
    def __init__(self, index: int, layer: Any, rows: dict[int, mx.array]) -> None:
        self.index, self.layer, self.rows, self.layer_type = index, layer, rows, layer.layer_type

    def __call__(self, x: mx.array, *args: Any, **kwargs: Any) -> Any:
        if self.index == 0:
            self.rows[-1] = x
        result = self.layer(x, *args, **kwargs)
        self.rows[self.index] = result[0]
        return result


class _Norm:
    def __init__(self, index: int, norm: Any, rows: dict[int, mx.array]) -> None:
        self.index, self.norm, self.rows = index, norm, rows

    def __call__(self, x: mx.array) -> mx.array:
        self.rows[self.index] = self.norm(x)
        return self.rows[self.index]


@dataclass
class Case:
    """A config with its weights: the specialized model, and a plain mlx-lm model of the same seed under hooks."""

    config: dict[str, Any]
    dtype: mx.Dtype = FLOAT32
    quantize: Any = None
    seed: int = 0
    outer: bool = False
    change: Callable[[Any], None] | None = None
    model: Any = field(init=False)
    plain: Hooked = field(init=False)

    def __post_init__(self) -> None:
        self.model = specialize(self._build(), file_of(self.config), strict=True)
        self.plain = Hooked(self._build())

    def _build(self) -> Any:
        model = toys.build(self.config, dtype=self.dtype, quantize=self.quantize, seed=self.seed, outer=self.outer)
        if self.change is not None:
            self.change(model.language_model if self.outer else model)
        return model

    @property
    def layers(self) -> int:
        return int(self.config["num_hidden_layers"])

    @property
    def everything(self) -> range:
        """Every tap index."""
        return range(-1, self.layers + 1)

    def tokens(self, batch: int, length: int, seed: int = 1) -> mx.array:
        return toys.tokens(batch, length, self.config["vocab_size"], seed)

    def batch_caches(self, left_padding: list[int]) -> list[Any]:
        """mlx-lm's batch caches, one for each layer that owns keys and values."""
        owners = self.config["layer_types"][: self.layers - (self.config["num_kv_shared_layers"] or 0)]
        window = self.config["sliding_window"]
        return [
            BatchKVCache(left_padding) if kind == toys.FULL else BatchRotatingKVCache(window, left_padding)
            for kind in owners
        ]


class Trio:
    """One run in three: each call goes to the generated file, the monolith and the plain model, with a cache each.

    caches: makes a list for each; by default each model makes its own.
    """

    def __init__(self, case: Case, caches: Callable[[], Any] | None = None) -> None:
        self.case = case
        self.generated, self.monolith = ((caches or case.model.make_cache)() for _ in range(2))
        self.plain = (caches or case.plain.model.make_cache)()

    @property
    def caches(self) -> tuple[Any, Any, Any]:
        return self.generated, self.monolith, self.plain

    def each(self, change: Callable[[Any], Any]) -> None:
        """The same change to every cache of the three lists."""
        for caches in self.caches:
            for cache in caches:
                change(cache)

    def __call__(self, ids: mx.array, taps: Iterable[int] | None = None, position: int | None = None) -> mx.array:
        """The generated file's logits, after every comparison."""
        case, model = self.case, self.case.model
        taps = list(case.everything if taps is None else taps)
        first, second = HiddenTap(taps, position), HiddenTap(taps, position)
        before = model.dispatch.counts["generated"]
        logits = model(ids, cache=self.generated, tap=first)
        assert model.dispatch.counts == {"generated": before + 1, "monolith": 0}
        assert model.dispatch.last == ("generated", "")
        monolith = model.monolith(ids, cache=self.monolith, tap=second)
        plain = case.plain(ids, cache=self.plain)
        rows = {index: _row(case.plain.rows[index], position) for index in taps}
        mx.eval(logits, monolith, plain, rows, first.captured, second.captured)
        assert_same(monolith, plain, "monolith's logits")
        assert_same(logits, plain, "logits")
        assert set(first.captured) == set(second.captured) == set(taps)
        for index in taps:
            assert_same(second.captured[index], rows[index], f"monolith's tap {index}")
            assert_same(first.captured[index], rows[index], f"tap {index}")
        if self.plain is not None:
            assert_same_caches(self.monolith, self.plain, "monolith's cache")
            assert_same_caches(self.generated, self.plain)
        return logits


def _row(value: mx.array, position: int | None) -> mx.array:
    return value if position is None else mx.take(value, mx.array([position % value.shape[1]]), axis=1)


def run(case: Case, lengths: Sequence[int], batch: int = 1, cached: bool = True) -> list[mx.array]:
    """Compares a whole schedule; the logits of each call."""
    trio = Trio(case, None if cached else lambda: None)
    ids = case.tokens(batch, sum(lengths))
    logits = []
    for length in lengths:
        logits.append(trio(ids[:, :length]))
        ids = ids[:, length:]
    assert all(mx.isfinite(one).all().item() for one in logits)
    assert mx.std(logits[-1].astype(FLOAT32)).item() > 0.01
    return logits


def pairwise(levels: dict[str, Sequence[Any]], allowed: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
    """Few rows in which every allowed pair of levels of two factors occurs: each row takes the most new pairs."""
    rows = [row for row in (dict(zip(levels, one, strict=True)) for one in product(*levels.values())) if allowed(row)]
    pairs = {id(row): pairs_of(row) for row in rows}
    open_pairs = set().union(*pairs.values())
    chosen = []
    while open_pairs:
        best = max(rows, key=lambda row: len(pairs[id(row)] & open_pairs))
        chosen.append(best)
        open_pairs -= pairs[id(best)]
    return chosen


def pairs_of(row: dict[str, Any]) -> set[tuple[Any, ...]]:
    items = list(row.items())
    return {(*items[i], *items[j]) for i in range(len(items)) for j in range(i)}
