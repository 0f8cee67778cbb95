"""Checks that TRL still has the shape that our overrides and replacements were written against.

TRL's asynchronous GRPO is experimental: its private functions may change with any release. Each override states what
it expects through these functions, so that a change stops the job at start with a message that names file, version
and expectation, instead of training something else.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import trl

TRL_VERSION = "1.15.0"


class TrlShapeError(RuntimeError):
    """The installed TRL differs from the one this recipe was written against."""


def mismatch(where: str, expected: str, found: str) -> TrlShapeError:
    return TrlShapeError(f"{where} of trl {trl.__version__}: expected {expected}, found {found}. This recipe is "
                         f"written against trl {TRL_VERSION}: install that version (bash setup.sh), or adapt the "
                         "override that names this function.")


def expect_parameters(function: Callable[..., Any], expected: tuple[str, ...]) -> None:
    """`function` takes exactly `expected`, by name and in order; * and ** parameters count with their name."""
    found = tuple(inspect.signature(function).parameters)
    if found != expected:
        where = f"{inspect.getsourcefile(inspect.unwrap(function))}: {function.__qualname__}"
        raise mismatch(where, f"parameters ({', '.join(expected)})", f"({', '.join(found)})")


def missing_source(function: Callable[..., Any], fragments: tuple[str, ...]) -> str | None:
    """The first of `fragments` that the source of `function` does not contain, white space apart."""
    source = "".join(inspect.getsource(function).split())
    return next((fragment for fragment in fragments if "".join(fragment.split()) not in source), None)


def expect_source(function: Callable[..., Any], *fragments: str) -> None:
    """The source of `function` contains each of `fragments`, white space apart."""
    fragment = missing_source(function, fragments)
    if fragment is not None:
        where = f"{inspect.getsourcefile(inspect.unwrap(function))}: {function.__qualname__}"
        raise mismatch(where, f"the code `{fragment}`", "other code")


def replace_global(module: ModuleType, name: str, replacement: Any) -> Any:
    """Replaces a module global and returns the old value; raises when the module has no such global."""
    if name not in vars(module):
        raise mismatch(f"{module.__file__}", f"a global called {name}", "none")
    old = vars(module)[name]
    setattr(module, name, replacement)
    return old
