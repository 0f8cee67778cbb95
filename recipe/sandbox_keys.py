"""The credential that the configured sandbox needs, looked at before anything is set up.

    python3 -m recipe.sandbox_keys     # exit code 64 and one sentence when it is missing

Standard library only. Values are never printed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from recipe.config import Settings, SettingsError
from recipe.exits import EXIT_USAGE, Parser

# sandbox -> (variable, where it is made)
KEYS = {"hf-sandbox": ("HF_TOKEN", "a token that may run Jobs, from https://huggingface.co/settings/tokens; in a Job, "
                       "secrets={\"HF_TOKEN\": …}"),
        "daytona": ("DAYTONA_API_KEY", "from https://app.daytona.io/dashboard/keys"),
        "e2b": ("E2B_API_KEY", "from https://e2b.dev/dashboard?tab=keys")}


def check(sandbox: str, environ: Mapping[str, str]) -> None:
    """Raises SettingsError when the key of `sandbox` is missing."""
    if sandbox not in KEYS:
        return
    name, source = KEYS[sandbox]
    if environ.get(name, "").strip():
        return
    if sandbox == "hf-sandbox":  # `hf auth login` leaves it in a file
        home = environ.get("HF_HOME") or os.path.join(environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
        if Path(environ.get("HF_TOKEN_PATH") or os.path.join(home, "token")).expanduser().is_file():
            return
    raise SettingsError(f"SANDBOX={sandbox} needs {name}: set it ({source}), or choose another SANDBOX; --local needs "
                        "none.")


def main(argv: list[str] | None = None) -> int:
    Parser(__doc__).parse_args(argv)
    try:
        check(Settings.load().sandbox, os.environ)
    except SettingsError as err:
        print(f"Settings are wrong, nothing was started:\n{err}", file=sys.stderr)
        return EXIT_USAGE
    return 0


if __name__ == "__main__":
    sys.exit(main())
