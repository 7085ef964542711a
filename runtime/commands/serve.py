"""mlx_lm.server on a specialized model. Every flag is mlx-lm's, but for --kv-config, --kernels and --tier."""

import argparse
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..errors import StraightlineError
from .loader import BEYOND, Loader, replaced, specialized, split

MOST_PORT = 65535
ENDING = 0.1  # seconds; a thread takes far less


def run(arguments: list[str]) -> int:
    """Until it is interrupted; then standard error says which path served, how often and why."""
    wishes, rest = split(arguments, "straightline serve")
    _expect_port(rest)
    with specialized("mlx_lm.server", wishes, rest) as program, _adapted(program):
        try:
            program.main()
        except OSError as error:
            if error.filename is not None:
                raise
            why = error.strerror or error
            raise StraightlineError(f"serve: it cannot listen there ({why}); choose another --host or --port") from None
    return 0


def _expect_port(arguments: list[str]) -> None:
    """Beyond the last one, the C library counts on from 0, and mlx-lm would serve where nobody looks for it."""
    peek = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    peek.add_argument("--port", type=int, default=0)
    try:
        port = peek.parse_known_args(arguments)[0].port
    except argparse.ArgumentError:
        return  # mlx-lm's own parser says so
    if not 0 <= port <= MOST_PORT:
        raise StraightlineError(f"serve: --port is {port}; expected 0 to {MOST_PORT}")


def _expect_place(host: str, port: int) -> None:
    """Raises OSError if mlx-lm's server will not be able to listen there."""
    places = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, address = places[0]  # as mlx-lm takes it
    with socket.socket(family) as place:
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        place.bind(address)


@contextmanager
def _one_sentence() -> Iterator[None]:
    """mlx-lm's loader has many ways to fail."""
    try:
        yield
    except StraightlineError:
        raise
    except Exception as error:
        raise StraightlineError(f"mlx_lm.server: {error}") from error


@contextmanager
def _adapted(program: Any) -> Iterator[None]:
    """mlx_lm.server, its `load` a Loader, made to speculate with any model and to end when it cannot start."""
    from ..kv import DEPTH
    from .speculation import KeptCaches, every_layer

    loader: Loader = program.load
    plain_stream = program.stream_generate
    most_drafted = max(DEPTH - BEYOND, loader.wishes.draft_tokens)
    generators = []

    class Provider(program.ModelProvider):  # type: ignore[misc]
        def __init__(self, cli_args: Any) -> None:
            """Before anybody listens, and before minutes go into weights."""
            super().__init__(cli_args)
            if not self.is_distributed:
                _expect_place(cli_args.host, cli_args.port)
            if cli_args.model is not None:
                loader.draft = cli_args.draft_model
                with _one_sentence():
                    loader.expect(cli_args.model, cli_args.adapter_path)

        def _load(self, model_path: str, adapter_path: str | None = None, draft_model_path: str | None = None) -> None:
            loader.draft = draft_model_path
            super()._load(model_path, adapter_path, draft_model_path)

        def load_default(self) -> None:
            try:
                with _one_sentence():
                    super().load_default()
            except StraightlineError as error:
                # In a thread, whose end would leave a server that answers nothing.
                print(f"error: {error}", file=sys.stderr, flush=True)
                os._exit(1)

    class Generator(program.ResponseGenerator):  # type: ignore[misc]
        def __init__(self, *arguments: Any) -> None:
            generators.append(self)
            super().__init__(*arguments)

        def _tokenize(self, *arguments: Any) -> Any:
            """Refuses an empty prompt here, where it fails alone; later it ends the thread that serves all."""
            found = super()._tokenize(*arguments)
            if not found[0]:
                raise StraightlineError("the prompt has no tokens; expected one or more")
            return found

    def stream(*arguments: Any, num_draft_tokens: int, **named: Any) -> Any:
        """A request may ask for any number; no more than the caches take back. The tokens are the same."""
        return plain_stream(*arguments, num_draft_tokens=min(num_draft_tokens, most_drafted), **named)

    ours = {
        "stream_generate": stream,
        "ModelProvider": Provider,
        "ResponseGenerator": Generator,
        "LRUPromptCache": KeptCaches,
        "make_prompt_cache": every_layer,
    }
    try:
        with replaced(program, ours):
            yield
    finally:
        for one in generators:
            one.stop_and_join()  # or a port that is taken would leave its thread behind, and the process with it
        # A thread's end takes Python's lock once more, to let go of MLX's random state; without it the process aborts.
        time.sleep(ENDING)
