"""The token sequences that a model is measured on: pieces of a text, or the prompts of a .jsonl each by itself."""

from collections.abc import Callable
from itertools import islice
from pathlib import Path

from ..errors import StraightlineError
from .prompts import prompts


def sequences(
    path: Path, encode: Callable[[str], list[int]], vocabulary: int, length: int, count: int
) -> list[list[int]]:
    """At most `count` of them, of at most `length` tokens; no more of the file is read. Raises StraightlineError.

    Lines of a text are joined, so that there is a past to look back on, and each piece begins as the tokenizer begins
    a text (with <bos>, for Gemma).
    """
    if path.suffix == ".txt":
        found = _pieces(path, encode, vocabulary, length, count)
    else:
        found = [list(tokens[:length]) for tokens in islice(prompts(path, encode, vocabulary), count)]
    if not found:
        raise StraightlineError(f"{path.name}: has no prompts; expected one a line")
    return found


def _pieces(
    path: Path, encode: Callable[[str], list[int]], vocabulary: int, length: int, count: int
) -> list[list[int]]:
    start = list(encode(""))
    room = max(length - len(start), 1)
    text: list[int] = []
    for tokens in prompts(path, lambda line: encode(line + "\n"), vocabulary):
        text += tokens[len(start) :]
        if len(text) >= room * count:
            break
    return [start + text[at : at + room] for at in range(0, min(len(text), room * count), room)]
