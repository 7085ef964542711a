"""Features for a drafter: the hidden states of a few layers for each token of a text, and of what follows it.

python examples/drafter_features.py [CHECKPOINT] [--prompt TEXT] [--layers 5,17] [--out FILE.safetensors]
"""

import argparse
import sys

import mlx.core as mx
import mlx_lm

from straightline.runtime import StraightlineError, load
from straightline.runtime.toy import toy


def main() -> None:
    parser = argparse.ArgumentParser(description="Hidden states of a few layers, joined.")
    parser.add_argument("checkpoint", nargs="?", help="a folder or a hub id")
    parser.add_argument("--prompt", default="Once upon a time")
    parser.add_argument("--layers", help="tap indices, e.g. 5,17,29; by default three spread over the depth")
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--out", help="a safetensors file to write")
    arguments = parser.parse_args()
    model, tokenizer = load(arguments.checkpoint, generate=True) if arguments.checkpoint else toy()
    depth = len(model.layers)
    layers = [1, depth // 2, depth - 2]
    if arguments.layers:
        layers = [int(one) for one in arguments.layers.split(",")]

    prompt = tokenizer.encode(arguments.prompt)
    with model.tapped(layers) as taps:
        answers = mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=arguments.max_tokens)
        tokens = prompt + [answer.token for answer in answers]

    # mlx-lm's loop runs ahead of the tokens that it hands out: there may be a row more than tokens.
    rows = [taps.rows(index)[0, : len(tokens)] for index in layers]
    features = mx.concatenate(rows, axis=-1)
    ids = mx.array(tokens[: features.shape[0]])
    print(f"{ids.size} tokens, layers {layers}: features {features.shape} of {features.dtype}")
    print(f"Text: {tokenizer.decode(tokens)!r}")
    print(f"Forwards: {model.dispatch.counts}")
    if arguments.out:
        mx.save_safetensors(arguments.out, {"features": features, "tokens": ids}, {"layers": str(layers)})
        print(f"Written to {arguments.out}.")


if __name__ == "__main__":
    try:
        main()
    except StraightlineError as error:
        sys.exit(f"error: {error}")
