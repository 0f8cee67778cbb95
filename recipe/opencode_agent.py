"""Harbor's OpenCode agent with a pinned binary instead of nvm, Node and `npm i -g` in every sandbox.

Only `install()` differs: OpenCode itself, its prompts, its tools and the way Harbor runs and reads it are untouched.
In a local sandbox the binary is already on PATH. A remote sandbox fetches the one npm platform package (58 MB),
checks its hash and unpacks the one file that is needed.
"""

from __future__ import annotations

import shlex
from typing import Any, override

from harbor.agents.installed.opencode import OpenCode
from harbor.environments.base import BaseEnvironment

from recipe.opencode_settings import MODELS_PATH

IMPORT_PATH = "recipe.opencode_agent:PinnedOpenCode"

# Runs as root in the sandbox. Two downloaders and four attempts, because a rollout that dies in its set-up is a
# rollout paid for and lost; the hash is checked after each attempt, so a truncated file is fetched again.
INSTALL = r"""
set -u
mkdir -p "$(dirname {models})" && printf '{{}}' >{models} # no other models: see recipe/opencode_settings.py
if [ "$(opencode --version 2>/dev/null)" = {version} ]; then exit 0; fi
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
for attempt in 1 2 3 4; do
  if command -v curl >/dev/null; then
    curl -fsSL --connect-timeout 20 --max-time 300 -o "$work/package.tgz" {url}
  else
    wget -q -T 60 -O "$work/package.tgz" {url}
  fi
  if printf '%s  %s\n' {sha512} "$work/package.tgz" | sha512sum -c - >/dev/null 2>&1; then
    tar -xzf "$work/package.tgz" -C "$work" {member} &&
      install -m 755 "$work/{member}" /usr/local/bin/opencode && exit 0
    echo "unpacking OpenCode failed" >&2; exit 1
  fi
  echo "OpenCode {version}, attempt $attempt: {url} did not arrive with the pinned hash" >&2
  sleep $((attempt * 3))
done
exit 1
"""


class PinnedOpenCode(OpenCode):
    """OpenCode at an exact version.

    Keyword arguments beside Harbor's own, which come from the seam (recipe/seams.py):
        download: None where the sandbox already has the binary on PATH, else {"url", "sha512" (hex), "member"}.
    """

    def __init__(self, *args: Any, download: dict[str, str] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._download = download

    @override
    async def install(self, environment: BaseEnvironment) -> None:
        """Make `opencode` available on PATH. Raises RuntimeError when it is not there afterwards."""
        if self._download is None:
            found = await environment.exec(command="command -v opencode")
            if found.return_code != 0:
                raise RuntimeError("this sandbox has no opencode on PATH: its runtime did not provide the binary")
            return
        # stdbuf and tee, which Harbor's command line uses, are coreutils too.
        await self.ensure_system_dependencies(environment, ("curl", "coreutils"))
        fields = {k: shlex.quote(v) for k, v in self._download.items() if k != "member"}
        await self.exec_as_root(environment, command=INSTALL.format(
            version=shlex.quote(str(self._version)), models=MODELS_PATH, member=self._download["member"], **fields))
