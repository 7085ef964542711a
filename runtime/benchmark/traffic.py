"""Bytes that one call must read: weights and K/V, by formula. Writes and activations are not counted."""

import math
from typing import Any

from mlx.utils import tree_flatten

from ...codegen.spec import Attention, Spec
from ..model import text_model
from .cells import Cell

ROWS_ONLY = ("embed_tokens", "embed_tokens_per_layer")  # looked up: one row a token


def bytes_read(model: Any, spec: Spec, cell: Cell) -> int:
    """Of a call as the cell says, right after its context."""
    return weights_read(model, cell.tokens) + kv_read(model, spec, cell)


def weights_read(model: Any, tokens: int) -> int:
    """Each matrix once, whatever the number of tokens; of experts the chosen ones, at most so many as there are."""
    text = text_model(model)
    tied = "lm_head" not in text
    total = 0
    for name, array in tree_flatten(text.parameters()):
        table = next((one for one in ROWS_ONLY if one in name.split(".")), None)
        if table is not None:
            whole = tied and table == "embed_tokens"  # the logits read all of it
            total += array.nbytes * tokens // array.shape[0] + (array.nbytes if whole else 0)
        elif ".switch_glu." in name:
            chosen = min(tokens * text.args.top_k_experts, array.shape[0])
            total += array.nbytes * chosen // array.shape[0]
        else:
            total += array.nbytes
    return total


def kv_read(model: Any, spec: Spec, cell: Cell) -> int:
    """K and V of every layer that attends, those included that read another layer's."""
    itemsize = text_model(model)["model"]["norm"]["weight"].dtype.size
    return sum(_layer(spec, index, cell, itemsize) for index in range(len(spec.layers)))


def _layer(spec: Spec, index: int, cell: Cell, itemsize: int) -> int:
    layer, stored = spec.layers[index], spec.kv_of(index)
    rows = cell.context + cell.width
    if layer.attention is Attention.SLIDING:
        rows = min(rows, spec.sliding_window + cell.width - 1)
    per_row: float = layer.head_dim * itemsize
    if stored is not None:
        per_row = layer.head_dim * stored.bits / 8 + 2 * itemsize * layer.head_dim / stored.group_size
    return math.ceil(2 * cell.batch * layer.kv_heads * rows * per_row)
