"""serve_policy.sh: the commands it would run, per engine and mode, and what it refuses."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]


def run(*arguments: str, **settings: str) -> subprocess.CompletedProcess:
    keep = ("PATH", "HOME", "LANG", "PYENV_ROOT", "TRAINER_PYTHON")
    environ = {name: os.environ[name] for name in keep if name in os.environ} | settings
    return subprocess.run(["bash", str(REPO / "serve_policy.sh"), *arguments], env=environ, capture_output=True,
                          text=True, timeout=120)


def command(mode: str, **settings: str) -> list[str]:
    result = run("--mode", mode, "--print-command", **settings)
    assert result.returncode == 0, result.stderr
    return shlex.split(result.stdout)


def value(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


def test_vllm_for_training():
    words = command("train", ENGINE="vllm")
    assert words[:4] == ["VLLM_SERVER_DEV_MODE=1", "vllm", "serve", "LiquidAI/LFM2.5-2.6B"]
    assert {"--return-tokens-as-token-ids", "--enable-auto-tool-choice", "--no-enable-prefix-caching"} <= set(words)
    wanted = {"--host": "127.0.0.1", "--port": "8001", "--logprobs-mode": "processed_logprobs",
              "--tool-call-parser": "lfm2", "--weight-transfer-config": '{"backend":"nccl"}',
              "--max-model-len": "40960", "--dtype": "bfloat16", "--generation-config": "vllm",
              "--gpu-memory-utilization": "0.85",
              "--worker-extension-cls": "recipe.vllm_weights.FlatWeights",
              "--served-model-name": "LiquidAI/LFM2.5-2.6B"}
    assert {flag: value(words, flag) for flag in wanted} == wanted
    assert "--enable-lora" not in words and "--revision" not in words


def test_one_gpu_leaves_the_trainer_room_and_further_flags_come_last():
    words = command("train", ENGINE="vllm", GPUS="1", VLLM_FLAGS="--enforce-eager --max-num-seqs 8")
    assert value(words, "--gpu-memory-utilization") == "0.4" and value(words, "--max-num-seqs") == "8"
    assert value(command("train", ENGINE="vllm", GPUS="1", GPU_MEMORY_UTILIZATION="0.5"),
                 "--gpu-memory-utilization") == "0.5"


def test_a_vllm_without_command_runs_as_module(tmp_path):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").touch()
    words = command("train", ENGINE="vllm", PYTHONPATH=str(tmp_path))
    assert words[1:5] == ["python3", "-m", "vllm.entrypoints.openai.api_server", "--model"]


def test_vllm_for_evaluation():
    words = command("eval", ENGINE="vllm", LORA_R="24", PREFIX_CACHING="1", POLICY_GPU="1", MODEL_REVISION="abc")
    assert words[:2] == ["CUDA_VISIBLE_DEVICES=1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"]
    assert value(words, "--max-lora-rank") == "32", "24 is no rank vLLM has; 32 is the next"
    assert value(words, "--mamba-cache-mode") == "align" and value(words, "--revision") == "abc"
    assert {"--enable-lora", "--enable-prefix-caching", "--enable-prompt-tokens-details"} <= set(words)
    weight_routes = ("DEV_MODE", "weight-transfer", "worker-extension")
    assert not any(part in word for word in words for part in weight_routes), "nobody can change the base"


def test_the_second_recipe_s_model():
    words = command("train", ENGINE="vllm", RECIPE="deepcoder")
    assert words[3] == value(words, "--served-model-name") == "Qwen/Qwen3-4B-Instruct-2507"
    assert value(words, "--tool-call-parser") == "hermes" and "--enable-lora" not in words
    words = command("eval", ENGINE="vllm", RECIPE="deepcoder", PREFIX_CACHING="1")
    assert "--enable-lora" not in words and "--mamba-cache-mode" not in words
    result = run("--mode", "eval", "--weights", "/runs/a/model", "--print-command", ENGINE="vllm", RECIPE="deepcoder",
                 MODEL_REVISION="abc")
    words = shlex.split(result.stdout)
    assert words[words.index("serve") + 1] == "/runs/a/model"
    assert value(words, "--served-model-name") == "Qwen/Qwen3-4B-Instruct-2507", "the agent sees one name"
    words = command("eval", ENGINE="vllm", RECIPE="deepcoder", LORA="1")
    assert "--enable-lora" in words


def test_cpu_engine():
    words = command("train", ENGINE="cpu", PRESET="local")
    assert words[1:4] == ["-m", "recipe.policy_cpu", "--model"] and "--dev-mode" in words
    assert value(words, "--dtype") == "float32" and "--enable-lora" not in words
    words = command("eval", ENGINE="cpu", PRESET="local")
    assert "--enable-lora" in words and "--dev-mode" not in words


@pytest.mark.parametrize("arguments, settings, said", [
    ([], {}, "--mode train"), (["--mode"], {}, "--mode"), (["--mode", "serve"], {}, "--mode train"),
    (["--wrong"], {}, "--wrong"), (["--mode", "train"], {"ENGINE": "tpu"}, "ENGINE"),
    (["--mode", "eval", "--print-command"], {"LORA_R": "1000"}, "512")])
def test_wrong_usage_is_64(arguments, settings, said):
    result = run(*arguments, **settings)
    assert result.returncode == 64 and said in result.stderr, result.stderr


def test_weight_routes_without_a_key_are_told_at_start():
    anywhere = run("--mode", "train", "--print-command", POLICY_HOST="0.0.0.0").stderr
    assert "WARNING" in anywhere and "whoever reaches 0.0.0.0:8001 can replace the policy's weights" in anywhere
    loopback = run("--mode", "train", "--print-command").stderr
    assert "ask for no key" in loopback and "WARNING" not in loopback
    assert "key" not in run("--mode", "eval", "--print-command", POLICY_HOST="0.0.0.0").stderr


def test_busy_port_is_named_before_anything_starts():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = run("--mode", "train", PRESET="local", ENGINE="cpu", POLICY_PORT=port, TRAINER_PYTHON="/bin/false")
    assert result.returncode == 69 and port in result.stderr


def test_help():
    result = run("--help")
    assert result.returncode == 0 and "--mode train" in result.stdout and "Exit codes" in result.stdout


def test_addresses_on_several_machines():
    from recipe.config import Settings, SettingsError

    alone = Settings.load({"POLICY_PORT": "9001"})
    assert (alone.policy_url, alone.env_url) == ("http://127.0.0.1:9001", "http://127.0.0.1:8002")
    apart = Settings.load({"POLICY_URL": "http://10.0.0.1:8001/", "ENV_URL": "http://10.0.0.2:8002"})
    assert (apart.policy_url, apart.env_url) == ("http://10.0.0.1:8001", "http://10.0.0.2:8002")
    with pytest.raises(SettingsError, match="POLICY_URL='10.0.0.1:8001': must be http://HOST:PORT"):
        Settings.load({"POLICY_URL": "10.0.0.1:8001"})
