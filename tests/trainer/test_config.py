"""How presets combine: an environment variable, then --local, then RECIPE, then the default."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from recipe.config import LORA_TARGETS, QWEN_TARGETS, REPO, Settings, SettingsError
from train_lora import trainer_arguments, worker_arguments

DEEPCODER = dict(
    model="Qwen/Qwen3-4B-Instruct-2507", dataset="agentica-org/DeepCoder-Preview-Dataset",
    dataset_config="primeintellect", tool_call_parser="hermes", n_train_tasks=64, max_steps=100, num_generations=8,
    max_inflight=8, temperature=1.0, learning_rate=1e-5, max_output_tokens=16384, max_staleness=4, agent_timeout=180,
    lora=False, lora_targets=QWEN_TARGETS, trackio_project="opencode", trackio_space="", per_device_batch=4,
    fork_threshold=1024, save_steps=0, print_completions=2, sandbox="local", train_turns="tool-calls", engine="vllm")


def chosen(names, **environ: str) -> dict:
    settings = Settings.load(environ)
    return {name: getattr(settings, name) for name in names}


def test_deepcoder_is_the_example_s_setup():
    assert chosen(DEEPCODER, RECIPE="deepcoder") == DEEPCODER


def test_local_wins_over_the_recipe_and_a_variable_over_both():
    local = chosen(("model", "max_steps", "learning_rate", "lora_targets", "tool_call_parser", "dataset", "lora",
                    "train_turns"), RECIPE="deepcoder", PRESET="local")
    assert local.pop("model").endswith("tiny/model")
    assert local == dict(max_steps=80, learning_rate=5e-4, lora_targets=LORA_TARGETS, tool_call_parser="lfm2",
                         dataset="generated", lora=True, train_turns="tool-calls")
    for preset in ("job", "local"):
        mine = dict(RECIPE="deepcoder", PRESET=preset, MAX_STEPS="3", LORA="0", DATASET="me/problems", SAVE_STEPS="7")
        assert chosen(("max_steps", "lora", "dataset", "save_steps"), **mine) == dict(
            max_steps=3, lora=False, dataset="me/problems", save_steps=7)


@pytest.mark.parametrize("recipe", ["smoldataenvs", "deepcoder"])
@pytest.mark.parametrize("preset", ["job", "local"])
def test_settings_survive_the_environment(preset, recipe):
    settings = Settings.load({"PRESET": preset, "RECIPE": recipe})
    assert (settings.preset, settings.recipe) == (preset, recipe)
    assert Settings.load(settings.environ()) == settings


@pytest.mark.parametrize(("environ", "said"), [
    ({"RECIPE": "chess"}, "RECIPE='chess': must be one of smoldataenvs, deepcoder"),
    ({"DATASET": "problems"}, "DATASET='problems': must be"),
    ({"RECIPE": "deepcoder", "ADAPTER_REPO": "me/a"}, "set LORA=1"),
    ({"SAVE_STEPS": "-1"}, "SAVE_STEPS"), ({"PER_DEVICE_BATCH": "0"}, "PER_DEVICE_BATCH"),
    ({"MODEL": "/no/such/folder"}, "MODEL=/no/such/folder: this folder does not exist"),
    ({"MODEL": f"{REPO}/tests"}, "lacks config.json: name a folder that holds a model, or a Hub id"),
    ({"MODEL": "./no/model"}, "does not exist"), ({"MODEL": "runs/a/model"}, "does not exist"),
    ({"LORA_R": "513"}, "LORA_R='513': must lie between 1 and 512, the largest rank that vLLM serves"),
    ({"LORA_TARGETS": "q_proj,foo"}, "foo is no module of an LFM2 or Qwen3 model: take some of q_proj, "),
    ({"OPENCODE_VERSION": "1.19.0"}, "but OPENCODE_INTEGRITY is the hash of 1.18.33: set both")])
def test_wrong_values_are_named(environ, said):
    with pytest.raises(SettingsError) as error:
        Settings.load(environ)
    assert said in str(error.value) and str(error.value).count("\n") == 0, "one sentence"


@pytest.mark.parametrize("value", ["inf", "-inf", "nan", "1e999"])
def test_no_setting_is_without_a_bound(value):
    """Of a tolerance a run would not notice that it checks nothing."""
    floats = [f.metadata["env"] for f in dataclasses.fields(Settings) if isinstance(f.default, float)]
    assert "CANARY_TOLERANCE" in floats and "LEARNING_RATE" in floats
    for name in floats:
        with pytest.raises(SettingsError, match=f"{name}='{value}': must be a number"):
            Settings.load({name: value})


@pytest.mark.parametrize("environ", [
    {"LORA_R": "512"}, {"LORA_TARGETS": "self_attn.q_proj,conv.in_proj"}, {"LORA_TARGETS": "o_proj,gate_proj"},
    {"MODEL": f"{REPO}/tiny/model"}, {"MODEL": "me/model"}, {"SEED": "1" * 400},
    {"MODEL": "/of/the/policy/server", "POLICY_URL": "http://10.0.0.1:8001"},
    {"OPENCODE_VERSION": "1.19.0", "OPENCODE_INTEGRITY": "sha512-YQ=="},
    {"OPENCODE_VERSION": "1.19.0", "ENVIRONMENTS": "present"}])
def test_right_values_are_taken(environ):
    settings = Settings.load(environ).environ()
    assert {name: settings[name] for name in environ} == environ


@pytest.mark.parametrize("environ, there, dtype", [
    ({}, False, "float32"), ({}, True, "bfloat16"), ({"ENGINE": "vllm"}, False, "bfloat16"),
    ({"ENGINE": "vllm", "DTYPE": "float32"}, True, "float32"), ({"DTYPE": "float32"}, True, "float32")])
def test_local_runs_on_vllm_are_in_bfloat16_as_jobs_are(monkeypatch, environ, there, dtype):
    monkeypatch.setattr("recipe.config.vllm_runs_here", lambda _: there)
    settings = Settings.load(environ, preset="local")
    assert settings.dtype == dtype and Settings.load(settings.environ()) == settings


SLIPS = {"MAX_STEP": "MAX_STEPS", "LEARNINGRATE": "LEARNING_RATE", "N_TASK": "N_TASKS", "TOPP": "TOP_P", "GPU": "GPUS",
         "POLICY_GPUS": "POLICY_GPU", "ADAPTER_REPOS": "ADAPTER_REPO", "OPENCODE_VERION": "OPENCODE_VERSION",
         "max_steps": "MAX_STEPS"}
OTHERS = """
    PATH HOME PWD OLDPWD USER SHELL TERM LANG LC_ALL TZ TMPDIR EDITOR MAIL HOSTNAME PORT HOST MODE TYPE RESET
    DEBUG DATABASE DATABASE_URL XDG_CACHE_HOME XDG_RUNTIME_DIR PIP_CACHE_DIR UV_CACHE_DIR HF_CACHE_DIR HF_HOME
    HF_TOKEN HF_ENDPOINT HF_HUB_CACHE HF_HUB_OFFLINE HF_DATASETS_CACHE TRANSFORMERS_CACHE TRACKIO_DIR
    TRACKIO_SPACE_ID SPACE_ID SPACE_HOST JOB_ID CUDA_VISIBLE_DEVICES CUDA_HOME NVIDIA_VISIBLE_DEVICES
    NCCL_SOCKET_IFNAME VLLM_HOST_IP VLLM_PORT VLLM_CACHE_ROOT SLURM_GPUS OMP_NUM_THREADS OMP_WAIT_POLICY
    PYTHONPATH VIRTUAL_ENV CONDA_PREFIX SSH_AUTH_SOCK OPENCODE_CONFIG OPENCODE_MODEL WANDB_PROJECT WANDB_DIR
    MODEL_NAME MODEL_ID MODEL_DIR DATASET_DIR OPENAI_API_KEY DAYTONA_API_KEY E2B_API_KEY TRAINER_PYTHON
    ENV_PYTHON OPENCODE_BIN ENV_BASE_PYTHON TRAINER_BASE_PYTHON LAUNCHER_BASE_PYTHON INSTALLER TORCH_INDEX
    PUBLIC_URL TRAIN_SCRIPT EVAL_SCRIPT VLLM_FLAGS STEP_GRACE SERVER_GRACE CAPTURE_ADMIN_KEY CHROMIUM
    SETUP_TESTS
"""


def test_a_model_is_not_trained_onto_itself(tmp_path):
    folder = tmp_path / "run/model"
    folder.mkdir(parents=True)
    (folder / "config.json").touch()
    environ = {"LORA": "0", "MODEL": f"{tmp_path}/run/../run/model"}
    with pytest.raises(SettingsError, match="is where LORA=0 puts its result: set RUN_DIR to another folder"):
        Settings.load({**environ, "RUN_DIR": str(tmp_path / "run")})
    for other in ({"RUN_DIR": str(tmp_path / "next")}, {"RUN_DIR": str(tmp_path / "run"), "LORA": "1"}, {}):
        Settings.load(environ | other)


def test_a_variable_that_is_almost_a_setting_is_named_and_no_other_one():
    def check(**environ: str) -> str:
        done = subprocess.run([sys.executable, "-m", "recipe.config", "check"], cwd=REPO, text=True,
                              capture_output=True, env=environ)
        assert done.returncode == 0, "a warning"
        return done.stderr

    said = check(**dict.fromkeys(SLIPS, "1")).splitlines()
    assert said == [f"WARN {slip} is set, but no setting is called so: is {meant} meant?"
                    for slip, meant in SLIPS.items()]
    assert check(**dict.fromkeys(OTHERS.split(), "1")) == ""
    assert check(**Settings.load({}).environ(), MAX_STEP="5") == "", "a script that exports all of them has looked"


def test_trl_gets_what_the_recipe_says(tmp_path):
    settings = Settings.load({"RECIPE": "deepcoder", "RUN_DIR": str(tmp_path)})
    arguments = trainer_arguments(settings, gpu=True)
    expected = dict(per_device_train_batch_size=4, save_strategy="no", learning_rate=1e-5, dtype="float32", bf16=True,
                    max_completion_length=16384, project="opencode", max_inflight_tasks=8)
    assert {name: arguments[name] for name in expected} == expected, "weights in fp32 under bf16 autocast"
    worker = worker_arguments(settings, None, None, None, [7])
    assert worker["rollout_reward_fn"].__name__ == "deepcoder_reward"
    expected = dict(lossless_capture=False, fork_threshold_tokens=1024, log_completions=True,
                    num_completions_to_print=2)
    assert {name: worker[name] for name in expected} == expected
    first = worker_arguments(Settings.load({"RUN_DIR": str(tmp_path)}), None, None, None, [7])
    assert first["lossless_capture"] and not first["log_completions"]
