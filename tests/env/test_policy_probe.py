"""The capture proxy's own probes of an engine, against the CPU policy server: it must be graded fit for training."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from openenv.core.harness.capture.upstream import InferenceClient
from openenv.core.harness.capture.validate import check_turn, check_upstream_response
from openenv.core.harness.capture.validate_llm import require_llm, validate_llm

REPO = Path(__file__).resolve().parents[2]
MODEL = "tiny-policy"
TOOL = {"type": "function", "function": {"name": "bash", "parameters": {
    "type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}}}


@pytest.fixture(scope="module")
def policy_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A CPU policy server on a random model, in the trainer's environment as in a run."""
    python = os.environ.get("TRAINER_PYTHON")
    assert python, "TRAINER_PYTHON is not set: run_tests.sh sets it, or `source setup.sh; setup_all`"
    folder, environ = tmp_path_factory.mktemp("model"), {**os.environ, "PYTHONPATH": str(REPO)}
    subprocess.run([python, "tests/contract/policy_fixture.py", str(folder)], cwd=REPO, env=environ, check=True,
                   capture_output=True)
    process = subprocess.Popen(
        [python, "-m", "recipe.policy_cpu", "--model", str(folder), "--served-model-name", MODEL, "--port", "0",
         "--max-model-len", "2048", "--dev-mode"], cwd=REPO, env=environ, stdout=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline()
        assert line.startswith("Serving "), f"the policy server did not start: {line!r}"
        yield line.split(" on ")[1].strip()
    finally:
        process.terminate()
        process.wait(120)
        process.stdout.close()


def test_engine_is_graded_for_training(policy_url):
    report = validate_llm(policy_url, MODEL)
    assert (report.rollout_type, report.capture_level) == ("train", "tokens"), report.findings
    assert report.logprobs_mode == "processed"
    assert report.served_models == [MODEL] and report.param_fixes == []
    assert not [finding for finding in report.findings if "FATAL" in finding]
    assert require_llm(policy_url, MODEL, require_tokens=True).ok


def test_unserved_model_is_found_at_once(policy_url):
    report = validate_llm(policy_url, "another")
    assert not report.ok and MODEL in str(report.findings)


def test_a_captured_call_passes_the_proxys_checks(policy_url):
    """The request as the proxy prepares it: ids and log-probs must pair, which its normalisation verifies."""
    async def call() -> dict:
        client = InferenceClient(policy_url, served_model=MODEL)
        try:
            return await client.completion({
                "model": MODEL, "messages": [{"role": "user", "content": "list the files"}], "max_tokens": 40,
                "temperature": 1.0, "top_p": 0.9, "stream": False, "tools": [TOOL], "tool_choice": "auto"})
        finally:
            await client.aclose()

    payload = asyncio.run(call())
    assert check_upstream_response(payload).findings == []
    choice = payload["choices"][0]
    logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    report = check_turn(payload["prompt_token_ids"], choice["token_ids"], logprobs,
                        finish_reason=choice["finish_reason"])
    assert report.ok, report.text()
    assert payload["_openenv_sampling"]["top_p"] == 1.0, "the proxy switches truncation off"
