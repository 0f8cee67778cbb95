"""The README's launch commands, run as they are printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from hub_double import HubDouble, hub_environ
from test_launch import CODE, KEPT, launcher  # noqa: F401 (a fixture)
from world import bundle

from recipe.config import REPO, Settings


def test_upload_and_launch_as_printed(hub: HubDouble, launcher: str, tmp_path: Path):  # noqa: F811
    blocks = re.findall(r"```bash\n(.*?)```", (REPO / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    printed = [block.replace("YOU/", "me/") for block in blocks if "YOU/" in block]
    assert any("hf upload" in block for block in printed) and any("run_job(" in block for block in printed)
    # `uv run --with 'huggingface_hub>=2.4' python -` is the launcher's interpreter here.
    uv = tmp_path / "bin/uv"
    uv.parent.mkdir()
    uv.write_text(f'#!/bin/sh\n[ "$1 $2 $4" = "run --with python" ] || exit 9\nshift 4\nexec {launcher} "$@"\n')
    uv.chmod(0o755)
    environ = {name: os.environ[name] for name in KEPT if name in os.environ} | hub_environ(hub, tmp_path)
    environ["PATH"] = f"{uv.parent}:{Path(sys.executable).parent}:{environ['PATH']}"
    checkout = bundle(tmp_path)
    for name in (".git/config", "runs/a/metrics.jsonl"):  # what the command leaves out
        (checkout / name).parent.mkdir(parents=True)
        (checkout / name).touch()
    for block in printed:
        done = subprocess.run(["bash", "-euo", "pipefail", "-c", block], cwd=checkout, env=environ, capture_output=True,
                              text=True, timeout=600)
        assert done.returncode == 0, block + done.stdout + done.stderr
    specs = [job["spec"] for job in hub.jobs.values()]
    assert [(s["flavor"], s["timeoutSeconds"] // 3600) for s in specs] == [("h200x2", 72), ("h200", 48), ("h200", 48)]
    assert [re.search(r"bash /app/(\w+)\.sh", s["command"][2])[1] for s in specs] == [
        "run_job", "run_eval_watch", "run_eval"]
    for spec in specs:
        assert spec["expose"] == {"ports": [8000], "portsPublic": [8000]}
        assert spec["secrets"] == {"HF_TOKEN": "hf_write"} and spec["dockerImage"] == "vllm/vllm-openai:v0.31.0"
        assert spec["environment"]["ADAPTER_REPO"] == "me/LFM2.5-2.6B-opencode-lora-RL"
        Settings.load(spec["environment"])
    assert specs[1]["environment"]["N_TASKS"] == "100"
    uploaded = hub.repo(CODE).files()
    tracked = subprocess.run(["git", "ls-files"], cwd=REPO, capture_output=True, text=True, check=True).stdout.split()
    assert {"run_job.sh", "recipe/config.py"} <= set(tracked) <= set(uploaded), set(tracked) - set(uploaded)
    assert not [path for path in uploaded if path.startswith((".git/", "runs/"))]
