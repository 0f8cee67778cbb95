"""The HTTP contract of the policy server, asked of vLLM: what the CPU server does otherwise is that server's bug."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from recipe.config import REPO


@pytest.mark.parametrize("mode", [pytest.param(mode, marks=pytest.mark.policy(f"tiny-{mode}"))
                                  for mode in ("train", "eval", "cached")])
def test_vllm_keeps_the_contract_that_the_cpu_server_keeps(mode, server, capfd):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-rs", "tests/contract/test_policy_server.py",
         "tests/contract/test_policy_control.py"], cwd=REPO, capture_output=True, text=True,
        env=os.environ | {"POLICY_URL": server.url, "POLICY_MODEL": server.model, "CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.stdout[-12000:]
    with capfd.disabled():  # what this mode does not offer, with the reason, and how many passed
        print(f"\n{mode}:", *(line for line in done.stdout.splitlines() if "SKIPPED" in line or "passed" in line),
              sep="\n  ")


@pytest.mark.policy("tiny-train")
def test_the_capture_proxys_probe_grades_it_fit_for_training(server):
    from openenv.core.harness.capture.validate_llm import validate_llm

    report = validate_llm(server.url, server.model)
    assert (report.rollout_type, report.capture_level) == ("train", "tokens"), report.findings
    # the tiny model's two best tokens lie too close for the probe to tell; tests/contract measures it
    assert report.logprobs_mode != "raw" and report.param_fixes == []
