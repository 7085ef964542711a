"""A specialized model and a plain mlx-lm model of the same seed, and what it means that they agree."""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import toys
from comparing import FOUR_BIT, assert_same, file_of

from straightline.runtime import specialize
from straightline.runtime.toy import VOCABULARY

# The five shapes in six layers, wide enough for the tokenizer of runtime/toy.py.
TEXT_SHAPES = {
    name: config | {"vocab_size": VOCABULARY, "vocab_size_per_layer_input": VOCABULARY}
    for name, config in toys.SHORT.items()
}


@dataclass
class Pair:
    """`model` is specialized and strict unless said otherwise; `plain` is what straightline never sees."""

    model: Any
    plain: Any

    def agree(self, lengths: tuple[int, ...] = (12, 1, 3), batch: int = 1) -> None:
        """The same bytes for a prompt over the window, for steps, and without a cache."""
        vocab = text(self.model).args.vocab_size
        caches = self.model.make_cache(), self.plain.make_cache()
        for seed, length in enumerate(lengths):
            ids = toys.tokens(batch, length, vocab, seed)
            pair = self.model(ids, cache=caches[0]), self.plain(ids, cache=caches[1])
            mx.eval(pair)
            assert_same(*pair, f"logits of call {seed}")
        ids = toys.tokens(2, 9, vocab, 7)
        assert_same(self.model(ids), self.plain(ids), "logits without a cache")

    def served(self, path: str = "generated") -> None:
        """Agree, with every call on this path."""
        before = dict(self.model.dispatch.counts)
        self.agree()
        after = self.model.dispatch.counts
        assert {name: after[name] - before[name] for name in after} == {"generated": 0, "monolith": 0} | {path: 4}


def pair(
    config: dict[str, Any],
    *,
    dtype: mx.Dtype = mx.float32,
    quantize: Any = None,
    seed: int = 0,
    outer: bool = False,
    strict: bool = True,
) -> Pair:
    built = [toys.build(config, dtype=dtype, quantize=quantize, seed=seed, outer=outer) for _ in range(2)]
    return Pair(specialize(built[0], file_of(config), strict=strict), built[1])


def four_bit(config: dict[str, Any], **how: Any) -> Pair:
    """As most people run them, but in float32: bfloat16 is ten times slower on a CPU."""
    return pair(config, quantize=FOUR_BIT, **how)


def text(model: Any) -> Any:
    return model.get("language_model", model)
