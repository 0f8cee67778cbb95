"""The tiny model: a lossless tokenizer with LFM2.5's ids, a loadable folder, an agent that is neither good nor lost."""

import json
import random

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.chat_template_utils import add_response_schema, lfm2_2_5_template, parse_response

from recipe.config import REPO, Settings
from recipe.local_tasks import ANSWER_FILE, generate
from tiny import make_tiny, offline
from tiny.transcripts import bash_call, behaviour, request, varied_system

MODEL = REPO / "tiny" / "model"
LIMIT = 3_000_000  # bytes


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)


def test_the_folder_is_small_and_is_the_local_preset():
    assert sum(file.stat().st_size for file in MODEL.rglob("*")) <= LIMIT
    assert Settings.load({}, preset="local").model == str(MODEL)


def test_the_tokenizer_is_the_one_its_script_makes(tmp_path):
    make_tiny.make_tokenizer(0).save_pretrained(tmp_path)
    for file in tmp_path.iterdir():
        assert file.read_bytes() == (MODEL / file.name).read_bytes(), file.name


def test_special_tokens_have_lfm25s_ids(tokenizer):
    ids = {"<|pad|>": 0, "<|startoftext|>": 1, "<|endoftext|>": 2, "<|im_start|>": 6, "<|im_end|>": 7,
           "<|tool_call_start|>": 10, "<|tool_call_end|>": 11}
    assert {token: tokenizer.convert_tokens_to_ids(token) for token in ids} == ids
    assert all(tokenizer(token, add_special_tokens=False)["input_ids"] == [i] for token, i in ids.items())
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 7)


@pytest.mark.parametrize("text", [
    "tail -n +2 /home/user/input/a_17.csv | cut -d, -f3 > /workdir/answer.txt", "  two  spaces\n\n\ttab\r\n",
    "Grüße, naïve Žluťoučký 東京 🚲 ¥ €", "x = {'a': [1, 2.50]}; print(\"\\n\")", "", " ", "\x00\x7f", "012345678901",
    "/workdir//workdir/ system\nassistant\n/home/user/input/",
])
def test_any_text_encodes_without_loss(tokenizer, text):
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


def test_random_bytes_of_every_plane_encode_without_loss(tokenizer):
    rng = random.Random(0)
    text = "".join(chr(rng.choice((rng.randrange(0x20, 0xD800), rng.randrange(0x1F300, 0x1F700)))) for _ in range(2000))
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


@pytest.mark.parametrize("training", [True, False])
def test_opencodes_prompt_is_short_and_lossless(tokenizer, training):
    messages, tools = request(generate("test", 1)[0].instruction, training=training)
    text = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)
    ids = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True)["input_ids"]
    assert tokenizer.decode(ids) == text and len(text) > 25_000
    assert len(ids) < 300
    assert all(json.dumps(tool, ensure_ascii=False) in text for tool in tools)
    # Words that another run changes go through the BPE and cost little.
    messages[0]["content"] = varied_system(random.Random(1)).replace("concise, direct", "brief, honest")
    other = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True)["input_ids"]
    assert len(other) < 600


def test_the_chat_template_is_one_that_trl_knows(tokenizer):
    add_response_schema(tokenizer)
    assert tokenizer.response_template == lfm2_2_5_template


def test_a_sampled_call_is_rendered_back_token_by_token(tokenizer):
    """What the model wrote stands unchanged in the prompt of its next turn, or captured turns would not join."""
    for task in generate("train", 16):
        messages, tools = request(task.instruction)
        call = bash_call(f"{task.pipeline} > {ANSWER_FILE}")
        first = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True)["input_ids"]
        written = tokenizer(f"<|tool_call_start|>[bash(command='{task.pipeline} > {ANSWER_FILE}')]<|tool_call_end|>"
                            "<|im_end|>", add_special_tokens=False)["input_ids"]
        messages += [call, {"role": "tool", "content": "(no output)"}]
        second = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True)["input_ids"]
        assert second[:len(first) + len(written)] == first + written
        parsed = parse_response(add_response_schema(tokenizer), written, prefix=first)
        assert parsed["tool_calls"][0]["function"] == call["tool_calls"][0]["function"]


def test_the_config_serves_transformers_and_vllm():
    config = json.loads((MODEL / "config.json").read_text())
    assert config["architectures"] == ["Lfm2ForCausalLM"] and config["tie_word_embeddings"]
    assert set(config["layer_types"]) == {"conv", "full_attention"} and config["conv_L_cache"] == 3
    assert config["conv_dim"] == config["conv_dim_out"] == config["block_dim"] == config["hidden_size"]
    assert config["block_ff_dim"] == config["intermediate_size"] and config["block_auto_adjust_ff_dim"] is False
    assert {"block_multiple_of", "block_ffn_dim_multiplier", "num_heads", "theta"} <= set(config)
    assert config["hidden_size"] // config["num_attention_heads"] in (32, 64, 128)


def test_weights_are_bfloat16_and_loadable_without_a_gap(model):
    from safetensors import safe_open

    with safe_open(MODEL / "model.safetensors", "pt") as file:
        names = set(file.keys())
        assert all(file.get_tensor(name).dtype == torch.bfloat16 for name in names)
    assert names == {name for name, _ in model.named_parameters()}


def test_transcripts_mark_only_what_the_model_writes(tokenizer):
    rng = random.Random(3)
    for _ in range(20):
        ids, learned = make_tiny.encode(tokenizer, rng)
        text = tokenizer.decode([i for i, mark in zip(ids, learned, strict=True) if mark])
        assert len(ids) == len(learned) and text.endswith("Done.<|im_end|>") and "\n" not in text
        assert text.count("<|im_end|>") == tokenizer.decode(ids).count("<|im_start|>assistant")


def test_transcripts_contain_right_and_wrong_ends():
    rng = random.Random(0)
    text = json.dumps([behaviour(task, rng) for task in generate("warm", 200)])
    assert 40 < text.count("/workdir/answer.txt") < 140
    assert text.count("/workdir/result.txt") > 20 and text.count("tail -n +1 ") > 5


def test_training_lowers_the_loss_of_a_new_model(tokenizer):
    torch.manual_seed(0)
    model = make_tiny.Lfm2ForCausalLM(make_tiny.make_config(tokenizer))
    held = [make_tiny.encode(tokenizer, random.Random(9)) for _ in range(8)]
    before = make_tiny.loss_of(model, held).item()
    make_tiny.train(model, tokenizer, steps=4, seed=0, peak_lr=4e-3, copy_steps=0)
    assert make_tiny.loss_of(model, held).item() < before - 0.5


def test_commands_outside_the_transcripts_language_are_not_run(tmp_path):
    for command in ("touch x", "cat /etc/passwd", "tail x > /tmp/y", "echo $(touch x)", "echo a; touch x", "echo `ls`"):
        assert offline.run_command(command, tmp_path) == "bash: command not found\n"
    assert not list(tmp_path.iterdir())
    (tmp_path / "input").mkdir()
    (tmp_path / "input" / "a.csv").write_text("x,y\n1,2\n3,4\n")
    command = "tail -n +2 /home/user/input/a.csv | cut -d, -f2 | sort -n"
    assert offline.run_command(command, tmp_path) == "2\n4\n"


def test_the_agent_is_mediocre_on_held_out_tasks(model, tokenizer):
    """One seeded pass over the held-out tasks: format reliable, answers right for some and wrong for others."""
    torch.manual_seed(0)
    episodes = offline.run_episodes(model, tokenizer, generate("test", 64), training=False)
    right = [e for e in episodes if e.correct]
    assert 0.2 <= len(right) / len(episodes) <= 0.6
    assert sum(e.garbled for e in episodes) <= 0.05 * len(episodes)
    assert len({e.task.kind.name for e in right}) >= 5
    assert sum(len(e.turns) for e in episodes) / len(episodes) < 3
