"""vLLM's HTTP contract as TRL, the capture proxy and the evaluation use it; see conftest.py for other servers."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests

TOOL = {"type": "function", "function": {
    "name": "bash", "description": "Run a shell command",
    "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}}}
CAPTURE = {"logprobs": True, "top_logprobs": 0, "return_token_ids": True}  # what the capture proxy adds
BOS = 1  # <|startoftext|>
LONG = "Use the bash tool to list the files in /tmp. " * 30


def error_of(response: requests.Response, status: int) -> dict:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) >= {"message", "type", "param", "code"} and error["code"] == status
    return error


# -- what the server says about itself --------------------------------------------------------------------------------
def test_health_and_models(server):
    assert server.get("/health").status_code == 200
    models = server.get("/v1/models").json()["data"]
    base = next(m for m in models if m["id"] == server.model)
    assert base["max_model_len"] >= 64 and base["parent"] is None


def test_unknown_route_is_answered_by_fastapi_itself(server):
    answer = server.get("/no/such/route")
    assert (answer.status_code, answer.json()) == (404, {"detail": "Not Found"})


# -- chat -------------------------------------------------------------------------------------------------------------
def test_chat_returns_exact_tokens_with_aligned_logprobs(server):
    answer = server.chat(**CAPTURE, seed=1)
    choice = answer["choices"][0]
    assert answer["prompt_token_ids"] and choice["token_ids"]
    assert [e["token"] for e in choice["logprobs"]["content"]] == [f"token_id:{t}" for t in choice["token_ids"]]
    assert all(e["logprob"] <= 0 for e in choice["logprobs"]["content"])
    usage = answer["usage"]
    assert usage["prompt_tokens"] == len(answer["prompt_token_ids"])
    assert usage["completion_tokens"] == len(choice["token_ids"]) <= 8
    assert choice["finish_reason"] in ("length", "stop") and choice["message"]["role"] == "assistant"


def test_token_ids_only_on_request(server):
    answer = server.chat(logprobs=True, top_logprobs=0)
    assert answer.get("prompt_token_ids") is None and answer["choices"][0].get("token_ids") is None


def test_null_top_logprobs_means_no_logprobs(server):
    assert server.chat(logprobs=True, top_logprobs=None)["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
def test_logprobs_are_those_of_the_sampled_distribution(server, temperature):
    """At temperature T the gap of two log-probs is 1/T of the gap at 1; raw log-probs would not change."""
    def best(t: float) -> list[float]:
        entry = server.chat(max_tokens=1, temperature=t, seed=3, logprobs=True, top_logprobs=5)
        values = [e["logprob"] for e in entry["choices"][0]["logprobs"]["content"][0]["top_logprobs"]]
        return sorted(values, reverse=True)[:2]

    (first, second), (at_one, at_one_second) = best(temperature), best(1.0)
    assert first - second == pytest.approx((at_one - at_one_second) / temperature, abs=5e-3)


def test_sampled_logprobs_equal_prompt_logprobs_of_the_same_tokens(server):
    answer = server.chat(LONG, **CAPTURE, temperature=1.0, max_tokens=40, ignore_eos=True, seed=5)
    tokens = answer["choices"][0]["token_ids"]
    sampled = [e["logprob"] for e in answer["choices"][0]["logprobs"]["content"]]
    recomputed = server.prompt_logprobs(answer["prompt_token_ids"] + tokens)[-len(tokens):]
    assert sampled == pytest.approx(recomputed, abs=server.tolerance)


def test_seed_makes_sampling_repeatable(server):
    first, again, other = (server.chat(**CAPTURE, seed=s, max_tokens=24)["choices"][0]["token_ids"] for s in (7, 7, 8))
    assert first == again != other


def test_n_choices(server):
    answer = server.chat(**CAPTURE, n=3, seed=1, max_tokens=12)
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2]
    assert len({tuple(c["token_ids"]) for c in answer["choices"]}) > 1


def test_max_completion_tokens_wins_over_max_tokens(server):
    choice = server.chat(**CAPTURE, max_tokens=20, max_completion_tokens=5, ignore_eos=True)["choices"][0]
    assert len(choice["token_ids"]) == 5 and choice["finish_reason"] == "length"


def test_stop_token_is_returned_and_named(server):
    tokens = server.chat(**CAPTURE, temperature=0, ignore_eos=True, max_tokens=6)["choices"][0]["token_ids"]
    stop = tokens[3]
    choice = server.chat(**CAPTURE, temperature=0, ignore_eos=True, max_tokens=6, stop_token_ids=[stop])["choices"][0]
    assert choice["token_ids"] == tokens[: tokens.index(stop) + 1]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)


def test_stop_string_is_cut_off(server):
    whole = server.chat(temperature=0, ignore_eos=True, max_tokens=24)["choices"][0]["message"]["content"]
    stop = next(c for c in whole[2:] if c.isascii() and c.isprintable())
    choice = server.chat(temperature=0, ignore_eos=True, max_tokens=24, stop=[stop])["choices"][0]
    assert choice["message"]["content"] == whole[: whole.index(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)


def test_tools_reach_the_prompt_and_are_accepted_by_choice(server):
    without = server.chat(return_token_ids=True)["prompt_token_ids"]
    auto = server.chat(return_token_ids=True, tools=[TOOL], tool_choice="auto")
    assert len(auto["prompt_token_ids"]) > len(without)
    assert server.chat(tools=[TOOL], tool_choice="none")["choices"][0]["message"]["role"] == "assistant"


def test_agent_history_is_rendered(server):
    """Null content beside tool calls, arguments as JSON text, content in parts: what OpenCode sends back."""
    def prompt(arguments: str, result) -> list[int]:
        call = {"id": "call-1", "type": "function", "function": {"name": "bash", "arguments": arguments}}
        messages = [{"role": "user", "content": "list"}, {"role": "assistant", "content": None, "tool_calls": [call]},
                    {"role": "tool", "tool_call_id": "call-1", "content": result}]
        return server.chat(messages=messages, tools=[TOOL], return_token_ids=True)["prompt_token_ids"]

    text = prompt('{"command": "ls"}', "a.txt")
    assert prompt('{"command": "ls"}', [{"type": "text", "text": "a.txt"}]) == text
    assert prompt('{"command": "pwd"}', "a.txt") != text
    # A bad call of the past must not end the conversation; vLLM 0.26 answers 400 to it, 0.31 takes it for no arguments.
    version = server.get("/version").json()["version"]
    if version.startswith("0.26."):
        with pytest.raises(AssertionError, match="Expecting property name"):
            prompt("{broken", "a.txt")
    else:
        assert prompt("{broken", "a.txt") == prompt("{}", "a.txt")


def test_tokenize_gives_the_chat_prompt(server):
    messages = [{"role": "system", "content": "You are an agent."}, {"role": "user", "content": "hi"}]
    ids = server.chat(messages=messages, tools=[TOOL], return_token_ids=True)["prompt_token_ids"]
    answer = server.post("/tokenize", {"model": server.model, "messages": messages, "tools": [TOOL]}).json()
    assert answer["tokens"] == ids and answer["count"] == len(ids)
    assert ids[0] == BOS and ids.count(BOS) == 1, "the template writes it, the tokenizer must not do so again"
    text = server.post("/detokenize", {"model": server.model, "tokens": ids}).json()["prompt"]
    assert "You are an agent." in text and "<|im_start|>" in text


def test_streaming_gives_the_same_answer(server):
    fields = {"seed": 4, "max_tokens": 30, "temperature": 1.0}
    whole = server.chat(**fields)
    body = {"model": server.model, "messages": [{"role": "user", "content": "Reply with the single word: ok"}],
            "stream": True, "stream_options": {"include_usage": True}, **fields}
    with server.post("/v1/chat/completions", body, stream=True) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix(b"data: ") for line in response.iter_lines() if line]
    assert lines[-1] == b"[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    choices = [c["choices"][0] for c in chunks if c["choices"]]
    assert choices[0]["delta"]["role"] == "assistant"
    assert "".join(c["delta"].get("content") or "" for c in choices) == whole["choices"][0]["message"]["content"]
    assert choices[-1]["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]


def test_requests_at_once_get_the_answers_they_get_alone(server):
    def ask(seed: int) -> list[int]:
        return server.chat(LONG + "x" * seed, **CAPTURE, seed=seed, max_tokens=20 + seed)["choices"][0]["token_ids"]

    alone = [ask(seed) for seed in range(6)]
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(ask, range(6)))
    # bf16 kernels of a GPU round by the size of the batch, and a near tie may then fall the other way
    assert sum(a == b for a, b in zip(together, alone, strict=True)) >= (6 if server.is_ours else 4), (together, alone)


# -- completions ------------------------------------------------------------------------------------------------------
def test_text_and_token_prompts_agree(server):
    ids = server.post("/tokenize", {"model": server.model, "prompt": "List of tools"}).json()["tokens"]
    fields = {"temperature": 0, "return_token_ids": True, "logprobs": 0, "ignore_eos": True}
    by_text, by_ids = (server.complete(p, **fields)["choices"][0] for p in ("List of tools", ids))
    assert by_text["token_ids"] == by_ids["token_ids"] and by_ids["prompt_token_ids"] == ids
    logprobs = by_ids["logprobs"]
    assert logprobs["tokens"] == [f"token_id:{t}" for t in by_ids["token_ids"]]
    assert len(logprobs["token_logprobs"]) == len(by_ids["token_ids"]) and max(logprobs["token_logprobs"]) <= 0


def test_the_request_of_trls_own_worker(server):
    body = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0, "n": 1, "return_token_ids": True,
            "logprobs": 0, "seed": 2**62 + 5, "min_p": 0.0}
    choice = server.complete([1, 6, 30, 31, 32], **body)["choices"][0]
    assert len(choice["token_ids"]) == len(choice["logprobs"]["token_logprobs"])


def test_several_prompts(server):
    answer = server.complete([[1, 30, 31], [1, 40, 41, 42]], temperature=0, max_tokens=3, ignore_eos=True)
    assert [c["index"] for c in answer["choices"]] == [0, 1] and answer["usage"]["prompt_tokens"] == 7


def test_prompt_logprobs_shape(server):
    ids = [1, 30, 31, 32]
    entries = server.complete(ids, max_tokens=1, prompt_logprobs=2)["choices"][0]["prompt_logprobs"]
    assert entries[0] is None and len(entries) == len(ids)
    for token, entry in zip(ids[1:], entries[1:], strict=True):
        assert {"logprob", "rank", "decoded_token"} <= set(entry[str(token)])
        assert sorted(e["rank"] for e in entry.values())[:2] == [1, 2]


# -- refusals ---------------------------------------------------------------------------------------------------------
def chat_body(server, **fields) -> dict:
    return {"model": server.model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, **fields}


def test_unknown_model(server):
    for path, body in (("/v1/chat/completions", chat_body(server, model="no-such-model")),
                       ("/v1/completions", {"model": "no-such-model", "prompt": "hi"})):
        error = error_of(server.post(path, body), 404)
        assert error["type"] == "NotFoundError" and "no-such-model" in error["message"] and error["param"] == "model"


def test_malformed_json(server):
    response = requests.post(server.url + "/v1/chat/completions", data=b'{"model": ', timeout=30,
                             headers={"Content-Type": "application/json"})
    error_of(response, 400)


@pytest.mark.parametrize("fields", [
    {"temperature": 3}, {"temperature": -1}, {"top_p": 0}, {"top_k": -2}, {"min_p": 2}, {"max_tokens": "many"},
    {"n": 0}, {"n": 2, "temperature": 0}, {"tools": []}, {"tool_choice": "auto"}, {"stop": [""]},
    {"stream_options": {"include_usage": True}}, {"top_logprobs": 3}, {"logprobs": True, "top_logprobs": 1000},
], ids=str)
def test_wrong_values_are_refused(server, fields):
    error_of(server.post("/v1/chat/completions", chat_body(server, **fields)), 400)


def test_prompt_and_output_must_fit(server):
    limit = next(m for m in server.get("/v1/models").json()["data"] if m["id"] == server.model)["max_model_len"]
    error = error_of(server.post("/v1/chat/completions", chat_body(server, max_tokens=limit)), 400)
    assert "maximum context length" in error["message"] and str(limit) in error["message"]
    error_of(server.post("/v1/completions", {"model": server.model, "prompt": [30] * (limit + 1)}), 400)


def test_token_outside_the_vocabulary(server):
    error_of(server.post("/v1/completions", {"model": server.model, "prompt": [10**8], "max_tokens": 1}), 400)
