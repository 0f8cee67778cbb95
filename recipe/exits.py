"""Exit codes of all scripts, in one place: what each means, as `python3 -m recipe.exits` prints it.

The numbers above 2 are those of sysexits.h where it has one. Standard library only: the image's Python, the trainer's
and the env server's use this file.
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

EXIT_UNGRADED = 2
EXIT_USAGE = 64  # EX_USAGE
EXIT_UNAVAILABLE = 69  # EX_UNAVAILABLE
EXIT_STALLED = 75  # EX_TEMPFAIL: try again, the run folder holds what is needed
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143

MEANING = {
    0: "done",
    1: "a test failed (`run_tests.sh`); a Python script met an error nobody foresaw and shows its traceback",
    EXIT_UNGRADED: "evaluated, but some cells stayed ungraded: the same command tries them again",
    EXIT_USAGE: "wrong settings, arguments or input; the message says what to change",
    EXIT_UNAVAILABLE: "a server or a step died or could not start, or what it needs is missing; the message names it",
    EXIT_STALLED: "the watchdog saw no progress within the phase's limit",
    EXIT_INTERRUPTED: "ended by Ctrl-C (SIGINT)",
    EXIT_TERMINATED: "ended by SIGTERM, after what was under way was saved",
}


class Parser(argparse.ArgumentParser):
    """argparse with a module's docstring as help, and 64 for wrong arguments: its own 2 stands for ungraded cells."""

    def __init__(self, doc: str | None = None, **more: object) -> None:
        super().__init__(**{"description": doc, "formatter_class": argparse.RawDescriptionHelpFormatter, **more})

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(EXIT_USAGE, f"{self.prog}: error: {message}\n")


def missing_package(err: ModuleNotFoundError) -> str:
    """What to do about a script that was started with an interpreter that lacks its packages."""
    return (f"{Path(sys.executable).name} has no {err.name}: run this in the trainer's environment,\n"
            f'  eval "$(bash setup.sh --local)" && "$TRAINER_PYTHON" {shlex.join(sys.argv)}')


@contextlib.contextmanager
def packages_of(module: str) -> Iterator[None]:
    """Around a script's imports, with its __name__: --help needs no package, and what else is asked of an interpreter
    without them ends with what to do."""
    try:
        yield
    except ModuleNotFoundError as err:
        if module != "__main__":
            raise
        if not {"-h", "--help"} & {*sys.argv[1:]}:
            print(missing_package(err), file=sys.stderr)
            sys.exit(EXIT_UNAVAILABLE)


def markdown_table() -> str:
    """The README's table of exit codes."""
    rows = (f"| {code} | {text} |" for code, text in MEANING.items())
    return "\n".join(["| exit code | meaning |", "| --- | --- |", *rows])


if __name__ == "__main__":
    Parser(__doc__).parse_args()
    print(markdown_table())
