"""mlx_lm.generate on a specialized model and straightline's loop. Every flag is mlx-lm's, but for a few of our own.

--kv-config, --kernels and --tier as for `serve`; --steps N: tokens computed before one read of the host; --overlap:
tokens are handed to the device in a second thread, where they can be.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

from ..errors import StraightlineError
from .loader import Wishes, replaced, specialized, split


def run(arguments: list[str]) -> int:
    """At the end, standard error says which path served, how often and why."""
    own = argparse.ArgumentParser(prog="straightline generate", add_help=False, allow_abbrev=False)
    own.add_argument("--steps", type=int, metavar="N", help="tokens computed before one read (default: 8)")
    own.add_argument(
        "--overlap", action="store_true", help="hand tokens to the device in a second thread, where that can be"
    )
    mine, others = own.parse_known_args(arguments)
    if mine.steps is not None and mine.steps < 1:
        raise StraightlineError(f"--steps is {mine.steps}; expected a whole number from 1")
    options = {name: value for name, value in vars(mine).items() if value}
    wishes, rest = split(others, "straightline generate", [own])
    _expect_flags(rest)
    with (
        specialized("mlx_lm.generate", wishes, rest) as program,
        replaced(program, _ours(program, options, wishes)),
    ):
        program.main()
    return 0


def _expect_flags(arguments: list[str]) -> None:
    """What mlx-lm's program looks at once the model is loaded."""
    peek = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    peek.add_argument("--max-tokens", type=int, default=1)
    peek.add_argument("--chat-template-config", default="{}")
    try:
        theirs, _ = peek.parse_known_args(arguments)
    except argparse.ArgumentError:
        return  # mlx-lm's own parser says so
    if theirs.max_tokens == 0 or theirs.max_tokens < -1:
        raise StraightlineError(f"--max-tokens is {theirs.max_tokens}; expected 1 or more, or -1 for no limit")
    try:
        json.loads(theirs.chat_template_config)
    except ValueError as error:
        raise StraightlineError(f"--chat-template-config is not JSON ({error}); expected an object") from None


def _ours(program: Any, options: dict[str, Any], wishes: Wishes) -> dict[str, Any]:
    """In the place of two functions that mlx-lm's program looks up: its loop, and its reader of prompt caches."""
    return {
        "stream_generate": _Looped(program.stream_generate, options),
        "load_prompt_cache": _Reader(program.load_prompt_cache, wishes),
    }


class _Reader:
    """Called as mlx-lm's `load_prompt_cache`.

    Refuses what the caches of a file cannot do: mlx-lm goes on with wrong rows, or as if nothing had been asked for.
    """

    def __init__(self, plain: Callable[..., Any], wishes: Wishes) -> None:
        self.plain = plain
        self.wishes = wishes

    def __call__(self, file_name: str, return_metadata: bool = False) -> Any:
        for flag, wish in (("--draft-model", self.wishes.draft), ("--kv-config", self.wishes.kv_config)):
            if wish is not None:
                raise StraightlineError(
                    f"{flag} and --prompt-cache-file are both given, but the caches of a file are stored as they are; "
                    "expected one of them only"
                )
        return self.plain(file_name, return_metadata=return_metadata)


class _Looped:
    """Called as mlx-lm's `stream_generate`. What the loop does not do goes there, with a line that says so."""

    def __init__(self, plain: Callable[..., Iterator[Any]], options: dict[str, Any]) -> None:
        self.plain = plain
        self.options = options

    def __call__(
        self,
        model: Any,
        tokenizer: Any,
        prompt: Any,
        max_tokens: int = 256,
        draft_model: Any = None,
        input_embeddings: Any = None,
        num_draft_tokens: int | None = None,
        **options: Any,
    ) -> Iterator[Any]:
        from ..decoding import stream

        reason = (
            "with a draft model" if draft_model is not None else "with images" if input_embeddings is not None else ""
        )
        if not reason:
            return stream(model, tokenizer, prompt, max_tokens, **options, **self.options)
        print(f"straightline generate: {reason}, mlx-lm's own loop runs", file=sys.stderr)
        if draft_model is not None:
            options |= {"draft_model": draft_model, "num_draft_tokens": num_draft_tokens}
        if input_embeddings is not None:
            options["input_embeddings"] = input_embeddings
        return self.plain(model, tokenizer, prompt, max_tokens, **options)
