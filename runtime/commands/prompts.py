"""Prompts from a file: .txt with one a line, or .jsonl with {"text": ...} or {"tokens": [...]} a line."""

import hashlib
import json
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..errors import StraightlineError


def read_prompts(path: Path, encode: Callable[[str], list[int]], vocabulary: int) -> list["array[int]"]:
    """The token ids of each prompt, in order; blank lines are passed over. Raises StraightlineError naming the line."""
    found = list(prompts(path, encode, vocabulary))
    if not found:
        raise StraightlineError(f"{path.name}: has no prompts; expected one a line")
    return found


def prompts(path: Path, encode: Callable[[str], list[int]], vocabulary: int) -> Iterator["array[int]"]:
    """The same, one by one: what is not asked for is not read."""
    for number, line in _lines(path):
        where = f"{path.name}: line {number}"
        found = _from_json(line, where) if path.suffix == ".jsonl" else line
        tokens = encode(found) if isinstance(found, str) else found
        if not tokens:
            raise StraightlineError(f"{where} has no tokens; expected one or more")
        wrong = next((one for one in tokens if type(one) is not int or not 0 <= one < vocabulary), None)
        if wrong is not None:
            raise StraightlineError(f"{where} has the token {wrong!r}; expected integers from 0 to {vocabulary - 1}")
        yield array("i", tokens)


def require_prompts(path: Path) -> None:
    """Refuses a file that cannot be read or is empty, before minutes go into a model's weights."""
    if next(_lines(path), None) is None:
        raise StraightlineError(f"{path.name}: has no prompts; expected one a line")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    if path.suffix not in (".txt", ".jsonl"):
        raise StraightlineError(f"{path.name or path}: expected a .txt or .jsonl file of prompts, one a line")
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line.rstrip("\r\n")
    except OSError as error:
        raise StraightlineError(f"{path}: cannot be read ({error.strerror}); expected a file of prompts") from None
    except UnicodeDecodeError as error:
        raise StraightlineError(f"{path.name}: is not UTF-8 ({error.reason}); expected text") from None


def _from_json(line: str, where: str) -> Any:
    try:
        entry = json.loads(line)
    except RecursionError:
        raise StraightlineError(f"{where} is nested too deeply; expected an object") from None
    except ValueError as error:
        raise StraightlineError(f"{where} is not JSON ({error}); expected an object") from None
    if not isinstance(entry, dict) or ("text" in entry) == ("tokens" in entry):
        raise StraightlineError(f'{where}: expected an object with "text" or "tokens"')
    found = entry.get("text", entry.get("tokens"))
    if not isinstance(found, str if "text" in entry else list):
        raise StraightlineError(f'{where}: expected a string as "text", or a list as "tokens"')
    if isinstance(found, str) and not found.isascii() and any("\ud800" <= letter <= "\udfff" for letter in found):
        raise StraightlineError(f"{where}: the text has half of a surrogate pair; expected whole characters")
    return found


def digest(prompts: list["array[int]"]) -> str:
    """16 hex digits that change with any token, and with where a prompt ends."""
    hashed = hashlib.sha256()
    for tokens in prompts:
        hashed.update(len(tokens).to_bytes(8, "little"))
        hashed.update(tokens.tobytes())
    return hashed.hexdigest()[:16]
