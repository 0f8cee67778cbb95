"""Manifests: what counts as a whole checkpoint."""

from __future__ import annotations

import dataclasses
import os
import socket
import subprocess

import pytest

from recipe.cells import InfrastructureError
from recipe.checkpoints import MANIFEST, damage
from recipe.config import REPO, Settings
from recipe.evaluation import held_out_tasks
from recipe.harbor_sessions import served_tasks


@pytest.mark.parametrize("text", ["", "{", "{}", "[]", "null", '{"files": []}', '{"step": 4}'])
def test_a_manifest_of_another_shape_is_no_manifest(tmp_path, text):
    folder = tmp_path / "checkpoint-4"
    folder.mkdir()
    (folder / MANIFEST).write_text(text)
    assert damage(folder) == "it was not written to its end"


def test_an_env_server_that_is_not_there_is_named():
    with socket.socket() as closed:  # bound, but nobody listens
        closed.bind(("127.0.0.1", 0))
        settings = dataclasses.replace(Settings.load({"PRESET": "local"}), env_port=closed.getsockname()[1])
        with pytest.raises(InfrastructureError, match="does not answer .* start it with bash serve_env.sh"):
            held_out_tasks(settings)
        with pytest.raises(ConnectionError, match=f"{settings.env_url} does not answer .* bash serve_env.sh"):
            served_tasks(settings.env_url, "train")  # as the training asks


def test_a_job_whose_disk_is_gone_at_its_end_needs_a_repository(tmp_path):
    environ = {name: value for name, value in os.environ.items() if name not in ("PRESET", "RECIPE", "ADAPTER_REPO")}
    done = subprocess.run(["bash", "run_job.sh"], cwd=REPO, capture_output=True, text=True, timeout=120, env=environ | {
        "JOB_ID": "1", "HF_TOKEN": "hf_x", "RUN_DIR": str(tmp_path)})
    assert done.returncode == 64 and "set ADAPTER_REPO=owner/name" in done.stderr
