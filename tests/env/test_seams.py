"""The places where OpenEnv and Harbor are extended: what we put there, and what a changed one says."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import logging

import pytest
from harbor.agents.factory import AgentFactory
from openenv.core.harness.capture import sessions
from openenv.harbor import environment, rollout
from openenv.harbor import seams as stock_seams

from recipe import seams
from recipe.call_times import CallTimes
from recipe.config import Settings

URL = "http://127.0.0.1:8000/capture"


@pytest.fixture
def settings(tmp_path) -> Settings:
    return Settings.load({"PRESET": "local", "RUN_DIR": str(tmp_path), "MODEL": "LiquidAI/LFM2.5-2.6B"})


@pytest.fixture
def trial(settings, tmp_path, monkeypatch):
    """Builds trial configurations as a rollout does, with the seams installed; keyword arguments override."""
    monkeypatch.setitem(stock_seams.SEAMS, "opencode", stock_seams.SEAMS["opencode"])
    monkeypatch.setattr(rollout, "build_trial_config", rollout.build_trial_config)
    monkeypatch.setattr(rollout, "run_rollout", rollout.run_rollout)
    monkeypatch.setattr(environment, "_ROLLOUT_TIMEOUT_S", environment._ROLLOUT_TIMEOUT_S)
    monkeypatch.setattr(sessions, "evaluation_sampling", sessions.evaluation_sampling)

    def build(settings=settings, url=URL, **more):
        seams.install(settings, url, CallTimes())
        arguments = dict(task_dir=tmp_path, harness="opencode", sandbox=settings.sandbox, intercept_url=URL,
                         session_id="the-key", model="adapter-17", trial_name="t", trials_dir=tmp_path)
        return rollout.build_trial_config(**arguments | more)

    return build


def test_the_pinned_versions_have_the_shape_we_extend():
    seams.check()


@pytest.mark.parametrize("training", [True, False])
def test_agent_is_configured_alike_in_training_and_evaluation(trial, training):
    agent = trial(training=training).agent
    config = agent.kwargs["opencode_config"]
    options = config["provider"]["intercepted"]["options"]
    assert options["headers"] == {"x-api-key": "the-key"} and options["apiKey"] == "the-key"
    assert options["baseURL"] == URL + "/v1"
    assert config["tools"] == {"task": False, "question": False, "webfetch": False}
    assert config["agent"]["title"] == {"disable": True}
    assert agent.env["OPENCODE_DISABLE_MODELS_FETCH"] == "1"
    # Whatever the engine serves, base or adapter, the agent shows the model one name.
    assert agent.model_name == "intercepted/LFM2.5-2.6B"
    assert list(config["provider"]["intercepted"]["models"]) == ["LFM2.5-2.6B"]


def test_harbor_makes_our_agent_of_it(trial, tmp_path):
    agent = AgentFactory.create_agent_from_config(trial().agent, logs_dir=tmp_path, logger=logging.getLogger())
    assert type(agent).__name__ == "PinnedOpenCode" and agent.version() == "1.18.33"


def test_lean_settings_can_be_switched_off(trial, settings):
    agent = trial(dataclasses.replace(settings, opencode_lean=False)).agent
    assert "agent" not in agent.kwargs["opencode_config"] and agent.env == {}


def test_local_sandbox_is_given_by_import_path(trial, settings):
    config = trial(url="http://127.0.0.1:4321/capture").environment
    assert config.type is None and config.import_path == "recipe.sandbox_local:LocalSandbox"
    assert config.kwargs["capture_port"] == 4321
    assert config.kwargs["root"] == str(settings.run_path / "sandboxes")
    # The whole path: a sweep of another run whose folder has the same name must not end this one's processes.
    assert config.kwargs["run_id"] == str(settings.run_path)


def test_remote_sandboxes_get_the_pinned_package(trial, settings):
    config = trial(dataclasses.replace(settings, sandbox="hf-sandbox"))
    assert config.environment.type is None
    assert config.environment.import_path == "recipe.hf_sandbox:PinnedHFSandbox" and config.environment.kwargs == {}
    download = config.agent.kwargs["download"]
    assert download["url"].endswith("/opencode-linux-x64/-/opencode-linux-x64-1.18.33.tgz")
    assert len(bytes.fromhex(download["sha512"])) == 64


@pytest.mark.parametrize("sandbox", ["daytona", "e2b"])
def test_other_backends_are_harbors_own(trial, settings, sandbox):
    config = trial(dataclasses.replace(settings, sandbox=sandbox))
    assert config.environment.type.value == sandbox and config.environment.import_path is None
    assert "download" in config.agent.kwargs


def test_another_sandbox_than_the_configured_one_is_refused(trial):
    with pytest.raises(ValueError, match="SANDBOX=local, not in e2b"):
        trial(sandbox="e2b")


def test_evaluation_pins_the_policy_that_training_pins(trial):
    trial()
    session = sessions.SessionRegistry().create(purpose="eval", eval_sampling={"temperature": 0.7, "top_k": 20})
    assert session.eval_sampling == {**seams.NEUTRAL, "temperature": 0.7, "top_k": 20}
    assert sessions.SessionRegistry().create(purpose="eval").eval_sampling == {}


def test_limit_of_a_rollout_follows_the_agents_timeout(trial, settings):
    trial(dataclasses.replace(settings, agent_timeout=5000))
    assert environment._ROLLOUT_TIMEOUT_S == 5000 + seams.SETUP_TIMEOUT_S


def _other_parameters(task_dir, harness):
    raise AssertionError("never called")


@dataclasses.dataclass(frozen=True)
class _OtherSeam:
    name: str


@pytest.mark.parametrize(("module", "name", "other", "says"), [
    (rollout, "build_trial_config", _other_parameters, ["rollout.py", "parameters of build_trial_config"]),
    (stock_seams, "Seam", _OtherSeam, ["seams.py", "fields of Seam", "('name',)"]),
    (stock_seams, "OPENCODE_PROVIDER", "other", ["seams.py", "model_fmt", "expected other/{model}"]),
    (environment, "_ROLLOUT_TIMEOUT_S", None, ["environment.py", "_ROLLOUT_TIMEOUT_S"]),
])
def test_a_changed_seam_stops_with_file_version_and_expectation(monkeypatch, module, name, other, says):
    if name == "OPENCODE_PROVIDER":  # the provider block follows the name, model_fmt is fixed in the table
        stock = stock_seams.SEAMS["opencode"]
        monkeypatch.setitem(stock_seams.SEAMS, "opencode", stock)
    monkeypatch.setattr(module, name, other)
    with pytest.raises(seams.SeamError) as caught:
        seams.check()
    for part in ["openenv 0.10.0", "expected", "recipe/seams.py", *says]:
        assert part in str(caught.value)


def test_a_changed_provider_block_stops(monkeypatch):
    stock = stock_seams.SEAMS["opencode"]
    monkeypatch.setitem(stock_seams.SEAMS, "opencode", dataclasses.replace(stock, kwargs=lambda *a: {"config": {}}))
    with pytest.raises(seams.SeamError, match="down to the provider options.*KeyError"):
        seams.check()


def test_another_version_stops(monkeypatch):
    real = importlib.metadata.version
    monkeypatch.setattr(seams, "version", lambda name: "0.26.0" if name == "harbor" else real(name))
    with pytest.raises(seams.SeamError, match="harbor is 0.26.0, expected 0.25.0"):
        seams.check()
