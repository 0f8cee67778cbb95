"""setup.sh: a failed installation is never taken for an environment."""

from __future__ import annotations

import subprocess

from recipe.config import REPO

MAKE = 'source ./setup.sh; python=$(make_env broken "$(command -v python3)" "$1") || exit 69; echo "made $python"'


def test_a_failed_installation_ends_set_up_and_leaves_no_finished_environment(tmp_path):
    requirements = tmp_path / "requirements.txt"
    requirements.write_text(f"missing @ file://{tmp_path}/no-such-wheel-1.0-py3-none-any.whl\nalso==1\n")
    done = subprocess.run(["bash", "-c", MAKE, "bash", str(requirements)], cwd=REPO, capture_output=True, text=True,
                          env={"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(tmp_path), "INSTALLER": "pip",
                               "CACHE_PATH": str(tmp_path / "cache")})
    assert done.returncode == 69, done.stderr
    assert "made" not in done.stdout and "Run the same command again" in done.stderr
    assert not list(tmp_path.glob("cache/envs/*/.complete"))
