"""B59: drafts verified and rejected, at random, through models of every published shape: the tokens of plain greedy.

Each position has a bias of its own on the logits, or small random models would say one token for ever. The drafts are
known beforehand, and how many of them are right; so what the model says is read late, some steps at once.
"""

from functools import lru_cache
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import cache as mlx_lm_cache
from test_kv_generated import Entries, file_with
from toys import BASE, EXPERTS, FULL, SHARING, SLIDING, build, config, tokens

from straightline.runtime import make_cache, specialize

TINY = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "head_dim": 32,
    "global_head_dim": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "layer_types": [SLIDING, FULL, SLIDING],
}
SHARED = TINY | SHARING | {"num_kv_shared_layers": 2, "num_hidden_layers": 4, "layer_types": [SLIDING, FULL] * 2}
SHAPES = {
    "12b": config(**TINY),
    "31b": config(**TINY | {"num_global_key_value_heads": 2}),
    "26b": config(**TINY | EXPERTS | {"num_global_key_value_heads": 2, "num_experts": 4, "moe_intermediate_size": 32}),
    "e4b": config(**SHARED | {"use_double_wide_mlp": False}),
    "e2b": config(**SHARED | {"num_key_value_heads": 1}),
}
MIXES: dict[str, Entries | None] = {
    "plain": None,
    "mixed": [{"layer_idx": 0, "bits": 6, "group_size": 32}, {"layer_idx": 1, "bits": 8, "group_size": 64}],
}
WINDOW, PROMPT, COUNT, DEPTH = 8, 4, 280, 12
STEPS = {"generated": 150, "monolith": 60}
BIAS = mx.random.normal((COUNT, BASE["vocab_size"]), key=mx.random.key(3)) * 2
BOUND = 5e-3  # of logits: matmuls of another width round differently, and then a number may be packed as its neighbour


@lru_cache(maxsize=16)
def served(name: str, mix: str) -> Any:
    return specialize(build(SHAPES[name]), file_with(SHAPES[name], MIXES[mix]), strict=True)


@lru_cache(maxsize=16)
def greedy(name: str, mix: str) -> tuple[list[int], mx.array]:
    """COUNT tokens and their logits, one at a time: mlx-lm's code, with its own caches where nothing is packed."""
    model = served(name, mix)
    caches = make_cache(model, MIXES[mix])
    logits, found = [model.monolith(tokens(1, PROMPT), cache=caches)[0, -1:]], []
    for position in range(COUNT):
        found.append(mx.argmax(logits[-1] + BIAS[position], axis=-1))
        logits.append(model.monolith(found[-1][None], cache=caches)[0])
        if position % 16 == 0:
            mx.eval(logits[-1])
    return mx.concatenate(found).tolist(), mx.concatenate(logits[:COUNT])  # type: ignore[return-value]


@pytest.mark.parametrize("path", STEPS)
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("name", SHAPES)
def test_any_drafts_give_the_greedy_tokens(name: str, mix: str, path: str) -> None:
    """From inside the first window to dozens of them later; every other rejection is followed by a single token."""
    model, (truth, logits), rng = (
        served(name, mix),
        greedy(name, mix),
        np.random.default_rng(list(map(ord, name + mix + path))),
    )
    forward = model if path == "generated" else model.monolith
    caches = make_cache(model, MIXES[mix], rollback=True, depth=DEPTH)
    found, known, rejected, one_after = [forward(tokens(1, PROMPT), cache=caches)[0, -1:]], 1, 0, 0
    for step in range(STEPS[path]):
        widest = DEPTH + 6 if step % 8 == 0 else 5  # wider than what is written in place, too
        drafted = 0 if rejected and step % 2 else int(rng.integers(0, widest))
        right = min(drafted, max(int(rng.integers(0, 3)), drafted - DEPTH))
        one_after += rejected > 0 and not drafted and known > 2 * WINDOW
        wrong = [(token + 1) % 97 for token in truth[known + right : known + drafted]]
        block = [*truth[known - 1 : known + right], *wrong]
        found.append(forward(mx.array([block]), cache=caches)[0, : right + 1])
        known, rejected = known + right + 1, drafted - right
        assert mlx_lm_cache.can_trim_prompt_cache(caches)
        assert mlx_lm_cache.trim_prompt_cache(caches, rejected) == rejected
        if step % 8 == 0:
            mx.eval(found[-1])
    ours = mx.concatenate(found)
    assert mx.argmax(ours + BIAS[:known], axis=-1).tolist() == truth[:known]
    assert mx.abs(ours - logits[:known]).max().item() < BOUND
    assert STEPS[path] < known < COUNT - DEPTH and one_after > STEPS[path] / 8 and len(set(truth[:known])) > 40
