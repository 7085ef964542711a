"""B26, B29, B31, B79: experts beside the dense MLP: which are chosen, both sides of the sort, each branch alone."""

from typing import Any

import mlx.core as mx
import pytest
import toys
from comparing import BFLOAT16, EIGHT_BIT, FLOAT32, FOUR_BIT, MXFP4, Case, Recorded, Trio, assert_same, run

from straightline.runtime import HiddenTap


def router_at_8_bits(path: str, module: Any) -> Any:
    return EIGHT_BIT if path.endswith("router.proj") else FOUR_BIT


def router_plain(path: str, module: Any) -> Any:
    return False if path.endswith("router.proj") else FOUR_BIT


@pytest.mark.parametrize(
    "quantize", [None, FOUR_BIT, router_at_8_bits, router_plain], ids=lambda q: getattr(q, "__name__", str(q))
)
@pytest.mark.parametrize("top_k", [1, 2, 8])
def test_chosen_experts(quantize: Any, top_k: int) -> None:
    """B26: the experts chosen for 64 tokens, and what they return, are the monolith's, whatever the router's bits."""
    case = Case(
        toys.config(**toys.EXPERTS | {"top_k_experts": top_k}),
        quantize=quantize,
    )
    mine = [Recorded(weights.switch_glu) for weights in case.model._bound.weights.layers]
    for weights, recorded in zip(case.model._bound.weights.layers, mine, strict=True):
        weights.switch_glu = recorded
    plain = []
    for wrapper in case.plain.model.model.layers:
        plain.append(Recorded(wrapper.layer.experts.switch_glu))
        wrapper.layer.experts.switch_glu = plain[-1]
    ids = case.tokens(1, 64)
    assert_same(case.model(ids), case.plain(ids), "logits")
    for index, (found, expected) in enumerate(zip(mine, plain, strict=True)):
        ((inputs, chosen), _, output), (others, _, expected_output) = found.calls[0], expected.calls[0]
        assert chosen.shape == (1, 64, top_k)
        assert_same(chosen, others[1], f"experts chosen in layer {index}")
        assert_same(inputs, others[0], f"inputs of the experts in layer {index}")
        assert_same(output, expected_output, f"outputs of the experts in layer {index}")
        assert len(set(chosen.reshape(-1).tolist())) > 1


@pytest.mark.parametrize(
    ("dtype", "quantize"),
    [(FLOAT32, None), (FLOAT32, router_at_8_bits), (BFLOAT16, MXFP4)],
    ids=["float32", "router 8-bit", "mxfp4"],
)
@pytest.mark.parametrize("lengths", [(1, 1), (40,), (31, 1), (32, 1)], ids=str)
def test_both_sides_of_the_sort(dtype: mx.Dtype, quantize: Any, lengths: tuple[int, ...]) -> None:
    """B29: from 64 chosen rows on mlx-lm sorts by expert: 40 tokens of top 2 are past it, 31 are not, 32 just are."""
    run(Case(toys.M6, dtype=dtype, quantize=quantize), lengths)


@pytest.mark.parametrize(("count", "top_k"), [(40, 5), (128, 8), (33, 32)])
def test_many_experts(count: int, top_k: int) -> None:
    """B26: with 8 experts MLX's partition sorts nearly everything, so a wrong top-k would not show; here it does."""
    run(Case(toys.config(**toys.EXPERTS | {"num_experts": count, "top_k_experts": top_k})), (40, 3, 1))


def zero(*names: str) -> Any:
    """A change that zeroes a weight of these submodules in every layer."""

    def change(model: Any) -> None:
        for layer in model.model.layers:
            for name in names:
                down = {"dense": layer.mlp, "experts": layer.experts.switch_glu}[name].down_proj
                down.weight = mx.zeros_like(down.weight)

    return change


@pytest.mark.parametrize("length", [1, 5, 40])
def test_each_branch_alone(length: int) -> None:
    """B31: the experts alone, the dense MLP alone, neither and both equal the monolith, and all four differ."""
    logits = []
    for names in (("experts",), ("dense",), ("experts", "dense"), ()):
        case = Case(toys.M6, change=zero(*names))
        (found,) = run(case, (length,))
        logits.append(found)
    for i, found in enumerate(logits):
        for other in logits[:i]:
            assert not mx.array_equal(found, other).item()


@pytest.mark.parametrize("name", ["dense", "experts"])
def test_each_branch_reaches_every_layer(name: str) -> None:
    """B31: with the whole block's other branch zeroed, the block still moves the stream in each layer."""
    both, alone = Case(toys.M6), Case(toys.M6, change=zero(name))
    ids = both.tokens(1, 6)
    first, second = HiddenTap(both.everything), HiddenTap(both.everything)
    both.model(ids, tap=first)
    alone.model(ids, tap=second)
    assert_same(first.captured[-1], second.captured[-1], "embedding")
    for index in range(6):
        assert not mx.array_equal(first.captured[index], second.captured[index]).item(), index


@pytest.mark.parametrize("width", [32, 64, 96])
@pytest.mark.parametrize("quantize", [FOUR_BIT, MXFP4], ids=["4-bit", "mxfp4"])
def test_odd_expert_widths(width: int, quantize: Any) -> None:
    """B79: 32 and 96 kept apart from the main suite, whose sizes are multiples of 64: kernels have limits there."""
    config = toys.config(**toys.EXPERTS | {"moe_intermediate_size": width})
    run(Case(config, dtype=BFLOAT16, quantize=quantize), (9, 1))


def test_experts_of_a_batch() -> None:
    """The sort threshold counts rows of the batch: 5 prompts of 7 tokens are past it, one is not."""
    case = Case(toys.M6)
    trio = Trio(case)
    trio(case.tokens(5, 7))
    trio(case.tokens(5, 1))
