"""Settings of the unmodified OpenCode that make a rollout cheap; switched as one by OPENCODE_LEAN.

`LEAN_CONFIG` is merged into the agent's opencode.json and `LEAN_ENV` into the environment of its process.
None of them changes what the model sees of the task: the system prompt, the tools and their schemas stay as they are.
"""

from __future__ import annotations

from typing import Any

LEAN_CONFIG: dict[str, Any] = {
    # The title of a session is a model call of its own: it costs a call and is dropped as auxiliary in training.
    "agent": {"title": {"disable": True}},
    "autoupdate": False,
    "share": "disabled",
    # Snapshots are git commits of the work folder around each step; nothing reads them in a rollout.
    "snapshot": False,
}

LEAN_ENV: dict[str, str] = {
    # Each of these is a download that a sandbox without network can only wait for.
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
    "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
}
