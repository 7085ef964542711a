"""Logit lens: what the model would say next if it stopped after each layer.

python examples/logit_lens.py [CHECKPOINT] [--prompt TEXT]; without a checkpoint, on a tiny random model.
"""

import argparse
import sys

import mlx.core as mx

from straightline.runtime import HiddenTap, StraightlineError, load
from straightline.runtime.toy import toy


def main() -> None:
    parser = argparse.ArgumentParser(description="What each layer would say next.")
    parser.add_argument("checkpoint", nargs="?", help="a folder or a hub id")
    parser.add_argument("--prompt", default="The capital of France is")
    arguments = parser.parse_args()
    model, tokenizer = load(arguments.checkpoint, generate=True) if arguments.checkpoint else toy()
    text = model.get("language_model", model)  # checkpoints hold the text model beside other towers
    last = len(text.layers)

    tap = HiddenTap(range(last + 1), position=-1)
    logits = model(mx.array([tokenizer.encode(arguments.prompt)]), tap=tap)[0, -1]

    for index in range(last + 1):
        # The last index is the stream after the final norm; the others still need it.
        rows = tap.captured[index] if index == last else text.model.norm(tap.captured[index])
        head = text.model.embed_tokens.as_linear if text.tie_word_embeddings else text.lm_head
        chances = mx.softmax(head(rows)[0, 0].astype(mx.float32))
        best = mx.argmax(chances).item()
        name = "norm" if index == last else f"{index}"
        print(f"{name:>5}  {chances[best].item():6.1%}  {tokenizer.decode([best])!r}")
    print(f"The model says {tokenizer.decode([mx.argmax(logits).item()])!r}.")


if __name__ == "__main__":
    try:
        main()
    except StraightlineError as error:
        sys.exit(f"error: {error}")
