"""runtime/benchmark on toys: cells, bytes by formula, rounds that take turns, departures, tables and charts."""

import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
import toys
from comparing import file_of
from mlx.utils import tree_flatten

from straightline.codegen.kv import uniform_kv_config
from straightline.runtime.arrays import same_bits
from straightline.runtime.benchmark import generation, race
from straightline.runtime.benchmark.calls import Blocks, Parts, Prompt, ids
from straightline.runtime.benchmark.cells import Cell, grid, suite, suite_taps
from straightline.runtime.benchmark.chart import chart
from straightline.runtime.benchmark.generation import Generation
from straightline.runtime.benchmark.measures import Graph, Spread, alive, bandwidth, count_primitives, graph_of, spread
from straightline.runtime.benchmark.models import Pair, Wish, pair_of
from straightline.runtime.benchmark.race import Bench, Plan
from straightline.runtime.benchmark.report import head, lines
from straightline.runtime.benchmark.rows import Row
from straightline.runtime.benchmark.sides import Side, fill, sides, with_own_arrays
from straightline.runtime.benchmark.traffic import kv_read, weights_read
from straightline.runtime.kv import make_cache
from straightline.runtime.verification.control import spoil
from straightline.runtime.verification.proof import render_reduced
from straightline.runtime.verification.random_model import build

PLAIN = Wish(None, None, False, "exact")
SHORT = Plan(steps=3, tokens=2, rounds=8, seconds=0.01)
CELLS = [
    Cell(12, loop=True),
    Cell(12),
    Cell(12, 1, 4),
    Cell(12, 3, 1, 0, (0, 5, 6)),
    Cell(5, 1, 3, 0, (-1, 2)),
    Cell(0, 2, 1, 19, (6,)),
]


def toy_pair(config: dict[str, Any], bits: str = "4", kv_config: list[dict[str, int]] | None = None) -> Pair:
    model, oracle = build(config, mx.float32, bits=bits)
    file = render_reduced(config, kv_config) if kv_config else file_of(config)
    return pair_of(model, oracle, file, kv_config, PLAIN, {})


def bench(pair: Pair, plan: Plan = SHORT, forward: bool = False, tier: str = "exact") -> Bench:
    return Bench(pair, plan, sides(pair, forward), tier, bandwidth=1e9)


@pytest.fixture(scope="module")
def dense() -> Pair:
    return toy_pair(toys.D6)


@pytest.fixture
def one_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peak that nobody compares is measured once."""
    monkeypatch.setattr(race, "PEAKS", 1)


# Cells


def test_a_grid_is_every_combination_and_prompts_come_last() -> None:
    cells = grid((512, 4096), (1, 4), (1, 2), (2048,), (5,), True)
    assert [cell.name for cell in cells] == [
        "context 512, tapped",
        "context 512, width 2, tapped",
        "context 512, batch 4, tapped",
        "context 512, batch 4, width 2, tapped",
        "context 4096, tapped",
        "context 4096, width 2, tapped",
        "context 4096, batch 4, tapped",
        "context 4096, batch 4, width 2, tapped",
        "context 512, loop",
        "context 4096, loop",
        "prefill 2048, tapped",
        "prefill 2048, batch 4, tapped",
    ]
    assert [cell.tokens for cell in cells[-5:]] == [8, 1, 1, 2048, 8192]


def test_the_suite_is_that_of_issue_5() -> None:
    cells = suite(suite_taps(48))
    assert suite_taps(48) == (6, 24, 48)
    for width in (2, 4, 8, 16):
        assert {bool(cell.taps) for cell in cells if cell.width == width} == {True, False}
    assert {cell.batch for cell in cells} == {1, 4, 16}
    assert {cell.context for cell in cells if not cell.prefill and cell.tokens == 1 and not cell.loop} == {
        512,
        4096,
        32768,
    }
    assert {cell.prefill for cell in cells} == {0, 2048, 8192}


def test_ids_differ_from_row_to_row_and_stay_in_the_vocabulary() -> None:
    found: Any = ids(3, 40, 97).tolist()
    assert len({tuple(row) for row in found}) == 3
    assert all(0 <= token < 97 for row in found for token in row)


# Bytes


def test_weights_read_of_a_dense_model(dense: Pair) -> None:
    """All of them, and one row of the embedding for each token, which the logits read whole."""
    text = dense.oracle.get("language_model", dense.oracle)
    everything = sum(array.nbytes for _, array in tree_flatten(text.parameters()))
    embedding = sum(array.nbytes for array in text["model"]["embed_tokens"].values())
    assert weights_read(dense.oracle, 1) == everything + sum(
        array.nbytes // array.shape[0] for array in text["model"]["embed_tokens"].values()
    )
    assert embedding > 0 and weights_read(dense.oracle, 4) > weights_read(dense.oracle, 1)


def test_weights_read_of_experts_are_the_chosen_ones() -> None:
    """Two of eight for one token; four tokens may choose all of them, and eight tokens no more."""
    oracle = toy_pair(toys.M6).oracle
    text = oracle.get("language_model", oracle)
    experts = [array for name, array in tree_flatten(text.parameters()) if ".switch_glu." in name]
    rows = [array.nbytes // array.shape[0] for array in text["model"]["embed_tokens"].values()]
    one, two, four, eight = (weights_read(oracle, tokens) for tokens in (1, 2, 4, 8))
    assert two - one == sum(rows) + sum(array.nbytes // 8 * 2 for array in experts)
    assert eight - four == 4 * sum(rows)


def test_per_layer_embeddings_are_read_by_the_row() -> None:
    oracle = toy_pair(toys.E6).oracle
    text = oracle.get("language_model", oracle)
    table = text["model"]["embed_tokens_per_layer"]
    everything = sum(array.nbytes for _, array in tree_flatten(text.parameters()))
    assert weights_read(oracle, 1) < everything - 0.9 * sum(array.nbytes for array in table.values())


def test_kv_read_by_hand(dense: Pair) -> None:
    """D6: four sliding layers of 2 heads of 64 in a window of 8, two full ones of 1 head of 64; float32."""
    assert kv_read(dense.oracle, dense.spec, Cell(5)) == 2 * 4 * 64 * (4 * 2 * 6 + 2 * 1 * 6)
    assert kv_read(dense.oracle, dense.spec, Cell(99)) == 2 * 4 * 64 * (4 * 2 * 8 + 2 * 1 * 100)
    assert kv_read(dense.oracle, dense.spec, Cell(99, 3, 2)) == 3 * 2 * 4 * 64 * (4 * 2 * 9 + 2 * 1 * 101)


def test_kv_read_counts_layers_that_read_anothers() -> None:
    pair = toy_pair(toys.E6)
    shared = replace(pair.spec, layers=pair.spec.layers[:3])
    assert kv_read(pair.oracle, pair.spec, Cell(99)) == 2 * kv_read(pair.oracle, shared, Cell(99))


def test_quantized_kv_are_read_packed() -> None:
    """64 numbers of 4 bits, a scale and a bias of 4 bytes: 40 bytes in place of 256."""
    kv_config = uniform_kv_config(toy_pair(toys.D6).spec, 4)
    pair = toy_pair(toys.D6, kv_config=kv_config)
    assert kv_read(pair.oracle, pair.spec, Cell(5)) == 2 * 40 * (4 * 2 * 6 + 2 * 1 * 6)


# Models


def test_mixed_weights_are_mixed() -> None:
    oracle = toy_pair(toys.D6, "mixed").oracle
    layers = oracle.layers
    bits = {layer.mlp.down_proj.bits for layer in layers}, {layer.mlp.up_proj.bits for layer in layers}
    assert bits == ({4, 8}, {4})
    assert {layer.mlp.up_proj.bits for layer in toy_pair(toys.D6, "8").oracle.layers} == {8}


def test_weights_are_held_once(dense: Pair) -> None:
    mine, theirs = (dict(tree_flatten(one.parameters())) for one in (dense.model, dense.oracle))
    assert set(mine) == set(theirs)
    assert all(mine[name] is theirs[name] for name in mine)


# Caches


def test_copies_are_equal_and_apart(dense: Pair) -> None:
    side = sides(dense)[0]
    caches = side.caches()
    fill(side, ids(1, 11, 97), caches)
    caches[0].keys[..., 0, 0] = -0.0
    before = [mx.array(cache.keys) for cache in caches]
    copies = with_own_arrays(caches)
    assert all(same_bits(copy.keys, keys) for copy, keys in zip(copies, before, strict=True))
    side.call(ids(1, 1, 97), copies, None)
    mx.eval([cache.state for cache in copies])
    assert [cache.offset for cache in caches] == [11] * 6 and copies[0].offset == 12
    assert all(same_bits(cache.keys, keys) for cache, keys in zip(caches, before, strict=True))


def test_parts_of_quantized_caches_are_copied() -> None:
    pair = toy_pair(toys.E6, kv_config=uniform_kv_config(toy_pair(toys.E6).spec, 8))
    caches = make_cache(pair.oracle, pair.kv_config)
    fill(sides(pair)[1], ids(1, 11, 97), caches)
    for cache, copy in zip(caches, with_own_arrays(caches), strict=True):
        for part, twin in zip(cache.parts, copy.parts, strict=True):
            assert part.keys is not twin.keys and same_bits(part.keys, twin.keys)


# Races


@pytest.mark.usefixtures("one_peak")
@pytest.mark.parametrize("name", ["D6", "M6", "E6"])
def test_every_kind_of_cell_is_equal(name: str) -> None:
    found = bench(toy_pair(getattr(toys, name)), forward=True)
    for cell in CELLS:
        rows = found.rows(cell)
        forward = [] if cell.loop else ["forward"]
        assert [row.side for row in rows] == ["mlx-lm", *forward, "straightline"], rows[0].problem
        for row in rows:
            assert (row.departs, row.problem, row.rounds) == ("", "", 3)
            assert row.ratio is not None and row.ratio.low <= row.ratio.median <= row.ratio.high
            assert row.rate is not None and row.best is not None and row.rate.median <= row.best
            assert row.peak is not None and row.peak > 0
            assert (row.primitives is None) == (row.parts is None) == bool(cell.prefill or cell.loop)
            assert row.primitives is None or 0 < (row.launching or 0) < row.primitives
            assert (row.share is None) == bool(cell.prefill)
        assert rows[0].ratio == (1.0, 1.0, 1.0)
        assert rows[0].compared == (1 if cell.prefill else 3)


@pytest.mark.usefixtures("one_peak")
@pytest.mark.parametrize("name", ["D6", "E6"])
def test_quantized_kv_are_equal(name: str) -> None:
    kv_config = uniform_kv_config(toy_pair(getattr(toys, name)).spec, 4)
    found = bench(toy_pair(getattr(toys, name), kv_config=kv_config))
    for cell in CELLS[1:]:
        assert [(row.departs, row.problem) for row in found.rows(cell)] == [("", "")] * 2


@pytest.mark.usefixtures("one_peak")
def test_what_departs_has_no_ratio_unless_the_tier_says_so() -> None:
    pair = toy_pair(toys.D6)
    spoil(pair.model)
    for cell, where in ((Cell(12), "step 0: logits"), (Cell(12, 1, 2, 0, (2, 5)), "step 0: tap 5")):
        first, second = bench(pair).rows(cell)
        assert (first.departs, second.departs) == ("", where)
        assert second.ratio is None and second.best_over_best is None and not second.by_choice
        _, chosen = bench(pair, tier="fast").rows(cell)
        assert chosen.ratio is not None and chosen.by_choice
    _, prompt = bench(pair).rows(Cell(0, 1, 1, 19))
    assert prompt.departs == "step 0: logits"
    _, loop = bench(pair).rows(Cell(12, loop=True))
    assert loop.departs == "step 0: log-probabilities" and loop.ratio is None


@pytest.mark.usefixtures("one_peak")
def test_taps_are_compared(dense: Pair) -> None:
    """A tap that shows other rows than mlx-lm's departs, logits equal or not."""
    found = bench(dense)
    right = found.sides[1].call

    def wrong(tokens: mx.array, caches: list[Any], tap: Any) -> mx.array:
        logits = right(tokens, caches, tap)
        if tap is not None:
            tap.captured[2] = tap.captured[2] + 1
        return logits

    found.sides[1] = replace(found.sides[1], call=wrong)
    assert found.rows(Cell(12, 1, 1, 0, (2, 5)))[1].departs == "step 0: tap 2"


@pytest.mark.usefixtures("one_peak")
def test_a_cell_that_fails_says_which_side_and_the_next_one_runs(dense: Pair) -> None:
    found = bench(dense)
    right = found.sides[1].call

    def failing(tokens: mx.array, caches: list[Any], tap: Any) -> mx.array:
        if tokens.shape[1] == 4:
            raise RuntimeError("[metal::malloc] no memory left.\nmore")
        return right(tokens, caches, tap)

    found.sides[1] = replace(found.sides[1], call=failing)
    (row,) = found.rows(Cell(12, 1, 4))
    assert (row.side, row.problem) == ("straightline", "[metal::malloc] no memory left.")
    assert [row.problem for row in found.rows(Cell(12))] == ["", ""]
    (row,) = bench(dense).rows(Cell(12, 1, 1, 0, (99,)))
    assert row.problem == "HiddenTap: layers has 99; expected -1 to 6 (6 is after the final norm)"


@pytest.mark.usefixtures("one_peak")
def test_the_order_changes_with_every_round(monkeypatch: pytest.MonkeyPatch, dense: Pair) -> None:
    order: list[tuple[str, int]] = []

    def timed(calls: Any, side: Side, steps: int) -> float:
        order.append((side.name, steps))
        return 0.1

    monkeypatch.setattr(race, "_timed", timed)
    found = bench(dense, Plan(steps=3, tokens=2, rounds=3, seconds=None), forward=True)
    found.rows(Cell(12))
    one, two, three = "mlx-lm", "forward", "straightline"
    assert [name for name, _ in order[3:]] == [one, two, three, two, three, one, three, one, two]
    assert {steps for _, steps in order[3:]} == {2}


@pytest.mark.usefixtures("one_peak")
def test_the_control_is_mlx_lm_once_more(dense: Pair) -> None:
    rows = Bench(dense, SHORT, sides(dense, control=True), "exact", 1e9).rows(Cell(12))
    assert [row.side for row in rows] == ["mlx-lm", "mlx-lm again", "straightline"]
    assert rows[0].primitives == rows[1].primitives and rows[1].departs == ""


@pytest.mark.usefixtures("one_peak")
def test_the_overlapped_loop_is_a_side_of_loops_only(dense: Pair) -> None:
    found = Bench(dense, SHORT, sides(dense, overlapped=True), "exact", 1e9)
    assert [(row.side, row.departs) for row in found.rows(Cell(12, loop=True))] == [
        ("mlx-lm", ""),
        ("straightline", ""),
        ("overlapped", ""),
    ]
    assert [row.side for row in found.rows(Cell(12))] == ["mlx-lm", "straightline"]


@pytest.mark.usefixtures("one_peak")
def test_a_budget_makes_rounds_short_and_ends_them(monkeypatch: pytest.MonkeyPatch, dense: Pair) -> None:
    now = [0.0]
    rounds: list[int] = []

    def timed(calls: Any, side: Side, steps: int) -> float:
        now[0] += 0.01 * steps
        rounds.append(steps)
        return 0.01

    monkeypatch.setattr(race, "_timed", timed)
    monkeypatch.setattr(race.time, "perf_counter", lambda: now[0])
    found = Bench(dense, Plan(3, 40, 8, 4.0), sides(dense), "exact", 1e9)
    rows = found.rows(Cell(12))
    assert rounds[:2] == [1, 1] and set(rounds[2:]) == {9}  # 3 seconds in 16 rounds of two sides
    assert rows[0].rounds == 17
    rounds.clear()
    found = Bench(dense, Plan(3, 40, 8, 0.01), sides(dense), "exact", 1e9)
    assert found.rows(Cell(12))[0].rounds == 3 and set(rounds) == {1}


def test_peaks_are_those_of_a_side_alone(dense: Pair) -> None:
    """What the other side's caches hold is not counted: as many bytes as with that side's caches only."""
    found = bench(dense)
    cell = Cell(300, 4)
    rows = found.rows(cell)
    for side, row in zip(found.sides, rows, strict=True):
        caches = side.caches()
        found._let_go()
        fill(side, ids(4, 300, 97), caches)
        before = alive()
        kept = sum(cache.nbytes for cache in caches)
        alone = Blocks(cell, 97, {side.name: caches}).peak(side) - kept
        assert row.peak is not None and before > kept > 100_000
        assert abs(row.peak - alone) < 0.01 * alone
        del caches


def test_a_prompt_is_read_in_chunks_and_a_last_token(dense: Pair) -> None:
    widths: list[int] = []
    side = sides(dense)[0]

    def call(tokens: mx.array, caches: list[Any], tap: Any) -> mx.array:
        widths.append(tokens.shape[1])
        return mx.zeros((1, tokens.shape[1], 3))

    Prompt(Cell(0, 1, 1, 4100), 97).seconds(replace(side, call=call, caches=list), 1)
    assert widths == [2048, 2048, 3, 1]


def test_a_loop_is_timed_in_its_stride(monkeypatch: pytest.MonkeyPatch, dense: Pair) -> None:
    """Whole blocks of eight, from where straightline's loop reads eight at once."""
    side = sides(dense)[0]
    now, asked = [0.0], []

    def loop(prompt: mx.array, count: int) -> Iterator[tuple[int, mx.array]]:
        asked.append((prompt.size, count))
        for token in range(count):
            now[0] += 5.0 if token < 7 else 0.5
            yield token, mx.zeros((3,))

    monkeypatch.setattr(generation.time, "perf_counter", lambda: now[0])
    calls = Generation(Cell(12, loop=True), 97)
    assert [calls.seconds(replace(side, loop=loop), steps) for steps in (1, 23)] == [0.5, 0.5]
    assert asked == [(12, 7 + 8), (12, 7 + 16)]


# Numbers


def test_spreads() -> None:
    assert spread([3.0]) == Spread(3.0, 3.0, 3.0)
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]) == Spread(2.0, 3.0, 4.0)


def test_primitives_of_a_graph() -> None:
    one = mx.array([1.0, 2.0])
    mx.eval(one)
    assert count_primitives([one + one]) == 1
    assert count_primitives([mx.exp(one) * one, mx.exp(one)]) == 3


def test_views_launch_nothing() -> None:
    """The same names on every backend; the counts are those of MLX's own operations as they stand in the graph."""
    x, row = mx.arange(32.0).reshape(4, 8), mx.ones((2, 8))
    mx.eval(x, row)
    views = {
        "Reshape": x.reshape(8, 4),
        "Flatten": mx.flatten(x),
        "Unflatten": mx.unflatten(x, 0, (2, 2)),
        "Transpose": x.T,
        "Slice": x[1:3],
        "ExpandDims": x[None],
        "Broadcast": mx.broadcast_to(x, (3, 4, 8)),
        "StopGradient": mx.stop_gradient(x),
        "View uint32": x.view(mx.uint32),
        "Split": mx.split(x, 2, axis=1)[0],
        "Depends": mx.depends(x, row),
    }
    assert {name: graph_of([array]) for name, array in views.items()} == dict.fromkeys(views, Graph(1, 0))
    assert graph_of([mx.as_strided(x, (2, 2), (1, 1))]) == Graph(2, 0)  # Flatten, AsStrided
    assert graph_of([x.reshape(8, 4).T @ x.reshape(8, 4)]) == Graph(4, 1)  # twice Reshape, Transpose, Matmul
    assert graph_of([mx.contiguous(x.T), x.astype(mx.bfloat16)]) == Graph(3, 2)
    assert graph_of([mx.slice_update(x, row, mx.array([0, 0]), [0, 1])]) == Graph(1, 1)
    assert graph_of([mx.concatenate([x, x])]) == Graph(1, 1)


def test_a_compiled_function_is_one_primitive() -> None:
    x = mx.ones((4, 8))
    mx.eval(x)
    assert graph_of([mx.compile(lambda a, b: mx.exp((a + b) * b))(x, x)]) == Graph(1, 1)


def test_bytes_are_compared_and_not_numbers() -> None:
    nothing = mx.array([float("nan"), 0.0])
    assert same_bits(nothing, mx.array([float("nan"), 0.0]))
    assert not same_bits(nothing, mx.array([float("nan"), -0.0]))
    assert not same_bits(nothing, nothing.astype(mx.float16)) and not same_bits(nothing, nothing[None])


def test_bandwidth_is_that_of_a_memory() -> None:
    rate, how = bandwidth()
    assert 1e8 < rate < 1e14
    assert how in ("copy of 256 MiB", "maximum of 256 MiB")


# Tables and charts

EQUAL = Row(
    Cell(512, 1, 4),
    "straightline",
    compared=64,
    ratio=Spread(1.8, 2.0, 2.1),
    best_over_best=1.95,
    rate=Spread(190.0, 200.0, 210.0),
    best=212.0,
    rounds=8,
    primitives=956,
    launching=700,
    parts=Parts(0.001, 0.002, 0.003),
    bytes_read=4_000_000_000,
    share=0.25,
    peak=5_512_300_000,
)
BASE = replace(EQUAL, side="mlx-lm", ratio=Spread(1.0, 1.0, 1.0))
DEPARTED = replace(EQUAL, departs="step 3: tap 17", ratio=None, best_over_best=None)
CHOSEN = replace(EQUAL, departs="step 3: logits", by_choice=True)
FAILED = Row(Cell(0, 1, 1, 2048), "mlx-lm", problem="[malloc] no memory")


def test_a_table_has_the_ratio_first() -> None:
    assert [line.split()[:4] for line in head()] == [
        ["cell", "side", "ratio", "ratio"],
        ["median", "quartiles", "best/best", "median"],
    ]
    first, second = lines([BASE, EQUAL])
    assert first.split()[:6] == ["context", "512,", "width", "4", "mlx-lm", "x1.00"]
    assert " ".join(second.split()) == (
        "straightline x2.00 1.80-2.10 x1.95 200.0 212.0 1.00 2.00 3.00 956 700 4 GB 25% 5.512 GB 64"
    )


def test_a_table_says_what_has_no_ratio() -> None:
    assert lines([BASE, DEPARTED])[1].split("  ")[-1] == "departs from mlx-lm at step 3: tap 17"
    assert lines([BASE, CHOSEN])[1].endswith("5.512 GB  not bit-equal by choice, from step 3: logits")
    assert lines([FAILED]) == [f"{'prefill 2048':<30}  mlx-lm: cannot be run: [malloc] no memory"]


def test_a_chart_has_a_bar_a_cell_with_whiskers_at_the_quartiles() -> None:
    text = chart("toy <4>", "a device", [BASE, EQUAL, BASE, DEPARTED, FAILED])
    root = ET.fromstring(text)
    space = "{http://www.w3.org/2000/svg}"
    bars = root.findall(f"{space}rect")[1:]
    assert [bar.get("width") for bar in bars] == ["384.0"]  # 2.0 on an axis of 480 up to 2.5
    words = [node.text for node in root.findall(f"{space}text")]
    assert {"x2.00", "context 512, width 4", "mlx-lm"} <= set(words)
    assert "no ratio: departs at step 3: tap 17" in words and "no ratio: cannot be run" in words
    whisker = next(node for node in root.findall(f"{space}path") if (node.get("d") or "").startswith("M645.6"))
    assert (whisker.get("d") or "").startswith("M645.6 104.5H703.2")  # 1.8 to 2.1


def test_a_chart_says_which_bars_are_not_equal() -> None:
    text = chart("toy", "a device", [BASE, CHOSEN])
    assert "x2.00, bits differ" in text


def test_rows_for_a_program_are_plain() -> None:
    found = EQUAL.plain()
    assert found["name"] == "context 512, width 4" and found["cell"]["width"] == 4
    assert found["ratio"] == {"low": 1.8, "median": 2.0, "high": 2.1}
    assert found["parts"] == {"build": 1.0, "dispatch": 2.0, "wait": 3.0}
