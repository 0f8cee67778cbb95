"""The command with which a job that ended goes on: what was set for it is set again.

    python3 -m recipe.resume_command "run_eval.sh --adapter you/name"     # prints it; recipe/job.sh exports RESUME_WITH

Tokens and keys are no settings, so none is in it; an address that has one inside is named by its variable.
Standard library only.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping

from recipe.config import Settings
from recipe.exits import Parser

# What the scripts read beside the settings, as their heads say.
OF_SCRIPTS = ("TRAINER_BASE_PYTHON", "ENV_BASE_PYTHON", "INSTALLER", "TORCH_INDEX", "PUBLIC_URL", "TRAIN_SCRIPT",
              "EVAL_SCRIPT", "VLLM_FLAGS")
MADE = ("TRAINER_PYTHON", "ENV_PYTHON", "OPENCODE_BIN")  # by setup.sh, which finds its own again


def command(script: str = "run_job.sh", environ: Mapping[str, str] | None = None) -> str:
    """The command of `script` (with its arguments, quoted) for the settings of `environ`. Raises SettingsError."""
    environ = os.environ if environ is None else environ
    settings = Settings.load(environ)
    preset = {"PRESET": settings.preset, "RECIPE": settings.recipe, "PATH": environ.get("PATH", "")}
    usual = Settings.load(preset).environ() | {"RECIPE": Settings.recipe}
    usual["DTYPE"] = Settings.usual_dtype(settings.preset, settings.recipe, settings.engine)
    # RESUME=never would refuse what is to be resumed.
    values = {name: value for name, value in settings.environ().items()
              if value != usual[name] and name not in ("RUN_DIR", "RESUME")}
    values |= {name: environ[name] for name in OF_SCRIPTS if environ.get(name)}
    values |= {name: environ[name] for name in MADE
               if environ.get(name) and not environ[name].startswith(f"{settings.cache_path}/")}
    words = [f"RUN_DIR={shlex.quote(str(settings.run_path))}"]
    words += [f'{name}="${name}"' if re.search(r"//[^/\s]*@", value) else f"{name}={shlex.quote(value)}"
              for name, value in values.items()]
    return " ".join([*words, "bash", script, *["--local"] * (settings.preset == "local")])


def of_this_job() -> str:
    """The command of the job that this process belongs to, or of the whole job where it was started by hand."""
    return os.environ.get("RESUME_WITH") or command()


if __name__ == "__main__":
    parser = Parser(__doc__)
    parser.add_argument("script", help="the script with its arguments, quoted for the shell")
    print(command(parser.parse_args().script))
    sys.exit()
