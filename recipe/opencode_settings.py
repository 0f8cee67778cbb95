"""Settings of the unmodified OpenCode that make a rollout cheap; switched as one by OPENCODE_LEAN.

`LEAN_CONFIG` is merged into the agent's opencode.json and `LEAN_ENV` into the environment of its process.
None of them changes what the model sees of the task: the system prompt, the tools and their schemas stay as they are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

# OpenCode builds its list of all known models and providers (thousands) at every start unless a file names others;
# ours names none, the one provider it needs is in its configuration. A local sandbox shows NO_MODELS at MODELS_PATH, a
# remote one writes it with the agent; where that file is missing OpenCode falls back to its own list.
MODELS_PATH = "/opt/opencode/models.json"
NO_MODELS = Path(__file__).with_name("opencode_models.json")

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
    "OPENCODE_MODELS_PATH": MODELS_PATH,
    # The session database (1.2 MB) belongs to no log: Harbor's default would copy it out of every rollout.
    "XDG_DATA_HOME": "/tmp/opencode/data",
    "XDG_STATE_HOME": "/tmp/opencode/state",
    # A run lives for seconds: the last compiler tier and collecting below 192 MiB cost more than they give, and
    # parallel collectors only take the cores from other rollouts. (Bun refuses to start on a name it does not know.)
    "BUN_JSC_useFTLJIT": "0",
    "BUN_JSC_largeHeapSize": str(192 << 20),
    "BUN_JSC_numberOfGCMarkers": "1",
}
