"""What ./regen.sh and `straightline` share as commands: one sentence for what cannot be used, and the exit code."""

import argparse
import io
import os
import sys
from collections.abc import Callable
from typing import NoReturn

INTERRUPTED = 128 + 2
BROKEN_PIPE = 128 + 13


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message} (see {self.prog} --help)\n")


def print_anything() -> None:
    """Names and paths may hold what the terminal cannot show."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def exit_code(run: Callable[[], int], *refusals: type[Exception]) -> int:
    """That of `run`; 1 and a sentence on standard error for a refusal or a file that cannot be used."""
    try:
        code = run()
        if sys.stdout is not None:
            sys.stdout.flush()
    except refusals as error:
        return failed(str(error))
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader (head, a pager) has seen enough; Python would complain once more when it closes standard output.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except OSError as error:
        return failed(f"{error.filename or 'standard output'}: {error.strerror or error}")
    return code


def failed(sentence: str) -> int:
    print(f"error: {sentence}", file=sys.stderr)
    return 1
