"""Activation steering: add the difference between two prompts to one layer, and watch the text change.

python examples/steering.py [CHECKPOINT] [--prompt TEXT] [--toward TEXT] [--away TEXT] [--layer 9] [--strength 4]

An edited stream is no longer mlx-lm's: the bit-equal promise ends where an edit begins.
"""

import argparse
import sys

import mlx.core as mx
import mlx_lm

from straightline.runtime import HiddenTap, StraightlineError, load
from straightline.runtime.toy import toy


def main() -> None:
    parser = argparse.ArgumentParser(description="The same prompt with and without a push.")
    parser.add_argument("checkpoint", nargs="?", help="a folder or a hub id")
    parser.add_argument("--prompt", default="I think that you are")
    parser.add_argument("--toward", default="I love this so much")
    parser.add_argument("--away", default="I hate this so much")
    parser.add_argument("--layer", type=int, help="by default a third of the depth")
    parser.add_argument("--strength", type=float, default=4.0)
    parser.add_argument("--max-tokens", type=int, default=32)
    arguments = parser.parse_args()
    model, tokenizer = load(arguments.checkpoint, generate=True) if arguments.checkpoint else toy()
    layer = len(model.layers) // 3 if arguments.layer is None else arguments.layer

    def last_row(prompt: str) -> mx.array:
        tap = HiddenTap([layer], position=-1)
        model(mx.array([tokenizer.encode(prompt)]), tap=tap)
        return tap.captured[layer]

    direction = last_row(arguments.toward) - last_row(arguments.away)
    mx.eval(direction)

    def push(index: int, rows: mx.array) -> mx.array:
        return (rows + arguments.strength * direction).astype(rows.dtype)

    plain = mlx_lm.generate(model, tokenizer, arguments.prompt, max_tokens=arguments.max_tokens)
    with model.tapped([layer], edit=push):
        steered = mlx_lm.generate(model, tokenizer, arguments.prompt, max_tokens=arguments.max_tokens)
    print(f"Layer {layer}, a push of length {mx.linalg.norm(arguments.strength * direction).item():.2f}.")
    print(f"Plain:   {plain!r}")
    print(f"Steered: {steered!r}")


if __name__ == "__main__":
    try:
        main()
    except StraightlineError as error:
        sys.exit(f"error: {error}")
