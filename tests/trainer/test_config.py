"""How presets combine: an environment variable, then --local, then RECIPE, then the default."""

from __future__ import annotations

import pytest

from recipe.config import LORA_TARGETS, QWEN_TARGETS, Settings, SettingsError
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
    assert local == dict(max_steps=40, learning_rate=1e-3, lora_targets=LORA_TARGETS, tool_call_parser="lfm2",
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
    ({"SAVE_STEPS": "-1"}, "SAVE_STEPS"), ({"PER_DEVICE_BATCH": "0"}, "PER_DEVICE_BATCH")])
def test_wrong_values_are_named(environ, said):
    with pytest.raises(SettingsError, match=said.replace("(", r"\(")):
        Settings.load(environ)


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
