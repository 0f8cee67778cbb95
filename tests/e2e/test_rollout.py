"""Whole rollouts: session factory, env server, Harbor, sandbox, the real OpenCode, capture proxy, verifier."""

from __future__ import annotations

import pickle
import threading
import time
from dataclasses import replace

import pytest
from env_server_process import AGENT_LIMITS, EnvServer
from header_proxy import HeaderProxy
from openenv.core.harness import TrainableSession
from scripted_engine import Reply, ScriptedEngine, bash_then_answer, encode, tool_results
from trl.experimental.async_grpo.async_rollout_worker import _chain_to_sequences
from trl.experimental.async_grpo.openenv_harness import _tool_call_counts_by_name, _turns_from_training_trace

from recipe import sandbox_files
from recipe.harbor_sessions import (
    HarborSession,
    HarborSessionFactory,
    RolloutAborted,
    RolloutFailed,
    UnknownPrompt,
    count_tool_calls,
    run_eval_rollout,
)

# The policy fields that OpenEnv's proxy sends for full-vocabulary sampling at temperature 1.
POLICY = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "frequency_penalty": 0.0,
          "presence_penalty": 0.0, "repetition_penalty": 1.0}
TOOLS = ["bash", "edit", "glob", "grep", "read", "skill", "todowrite", "write"]


@pytest.fixture
def factory(server: EnvServer) -> HarborSessionFactory:
    made = HarborSessionFactory.from_settings(server.settings, "train")(sampling=POLICY_SAMPLING)
    return pickle.loads(pickle.dumps(made))  # as in the spawned worker


POLICY_SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}


def session_for(factory: HarborSessionFactory, task) -> HarborSession:
    return factory.create([{"role": "user", "content": task.instruction}], seed=0, episode_id="e")


def assert_nothing_left(server: EnvServer, seconds: float = 120) -> None:
    """No process and no folder of a sandbox of this run, within `seconds`."""
    root = server.settings.run_path / "sandboxes"
    deadline = time.monotonic() + seconds
    while True:
        folders = [p.name for p in root.iterdir() if not p.name.startswith(".")] if root.is_dir() else []
        processes = sandbox_files.marked_processes(run_id=str(server.settings.run_path))
        if not folders and not processes:
            return
        assert time.monotonic() < deadline, f"left behind: folders {folders}, processes {processes}"
        time.sleep(0.2)


def test_right_answer_gives_reward_and_the_sampled_tokens(server, engine: ScriptedEngine, factory, tasks):
    task = tasks[0]
    engine.script = bash_then_answer(f"{task.pipeline} > /workdir/answer.txt", answer="The answer is written.")
    session = session_for(factory, task)
    assert isinstance(session, TrainableSession) and session.call_times is None
    started = time.time()
    session.wait_for_completion()
    ended = time.time()
    trace = session.fetch_training_trace()
    verdict = session.verify([])
    session.close()

    assert verdict.env_reward == 1.0
    assert session.result.atif == "match", "Harbor's own record of the agent must agree with the capture"
    assert session.result.findings == []
    assert len(trace.turns) == 2
    first, last = session.call_times
    assert started < first < last < ended, "the agent calls the model after its start, and the verifier runs after it"
    requests = engine.agent_requests()
    assert len(requests) == 2, "a title call or a retry reached the engine"
    last = trace.turns[-1]
    assert last.completion_token_ids == encode("The answer is written.<|im_end|>")
    assert last.loss_mask == [0] * len(last.prompt_token_ids) + [1] * len(last.completion_token_ids)
    first = trace.turns[0]
    assert last.prompt_token_ids[: len(first.prompt_token_ids)] == first.prompt_token_ids
    assert all(lp < 0 for turn in trace.turns for lp in turn.per_token_logps)
    for request in requests:
        assert {key: request[key] for key in POLICY} == POLICY
        assert request["max_tokens"] == server.settings.max_output_tokens
        assert sorted(tool["function"]["name"] for tool in request["tools"]) == TOOLS

    # One count of tool calls: ours on the result is TRL's on the trace.
    counts = _tool_call_counts_by_name(trace.to_trace_entries())
    assert sum(counts.values()) == count_tool_calls(session.result) == 1
    assert [len(turn.output_ids) for turn in _turns_from_training_trace(trace)] == [
        len(turn.completion_token_ids) for turn in trace.turns]

    trial = server.settings.run_path / "trials" / session.record["trial"]
    assert (trial / "result.json").is_file() and (trial / "agent" / "opencode.txt").is_file()
    size = sum(path.stat().st_size for path in trial.rglob("*") if path.is_file())
    assert size < 300_000, "the agent's database stayed"
    assert_nothing_left(server)


AWKWARD = """"[1]", '\\n' it's # (
\t{'a': 1} \\\\ $(id) é ]), x=1
"""


def test_awkward_arguments_reach_the_tool_and_come_back_token_by_token(engine: ScriptedEngine, factory, tasks):
    """Quotes, brackets, line breaks and backslashes of a heredoc: the agent's shell sees them, and the next prompt
    begins with the tokens that were sampled, so that both turns are one row."""
    engine.script = bash_then_answer(f"cat <<'EOF'\n{AWKWARD}EOF")
    session = session_for(factory, tasks[0])
    session.wait_for_completion()
    first, last = session.fetch_training_trace().turns
    session.close()
    assert [text.strip() for text in tool_results(engine.agent_requests()[-1])] == [AWKWARD.strip()]
    held, end = first.prompt_token_ids + first.completion_token_ids, encode("<|im_end|>")
    assert held[-len(end):] == end and last.prompt_token_ids[:len(held)] == held
    rows, tally = _chain_to_sequences(_turns_from_training_trace(session.fetch_training_trace()), "rollout", 0)
    assert len(rows) == 1 and tally["fork"] == 0


def test_wrong_answer_is_graded_zero(engine: ScriptedEngine, factory, tasks):
    engine.script = bash_then_answer("echo 31415926 > /workdir/answer.txt")
    session = session_for(factory, tasks[1])
    session.wait_for_completion()
    assert session.verify([]).env_reward == 0.0
    session.close()


def test_evaluation_sees_the_same_request_as_training(server, engine: ScriptedEngine, factory, tasks):
    """Prompt, tools, sampling and cap: a difference would evaluate another agent than the one that was trained."""
    engine.script = bash_then_answer("cat /workdir/answer.txt")
    session = session_for(factory, tasks[0])
    session.wait_for_completion()
    session.close()
    training = engine.agent_requests()
    engine.requests.clear()
    result = run_eval_rollout(server.settings, "train", 0, "scripted")
    evaluation = engine.agent_requests()

    assert (result.status, result.reward, result.tool_calls, result.model_calls) == ("graded", 0.0, 1, 2)
    assert result.tokens == sum(len(turn.completion_token_ids) for turn in session.result.turns)
    assert result.trial_name and result.seconds > 0 and not result.timed_out
    for one, other in zip(training, evaluation, strict=True):
        assert _without_ids(one) == _without_ids(other)


def _without_ids(request: dict) -> dict:
    """The request without the random ids of tool calls."""
    copy = pickle.loads(pickle.dumps(request))
    for message in copy["messages"]:
        message.pop("tool_call_id", None)
        for call in message.get("tool_calls") or []:
            call.pop("id")
    return copy


def test_budget_ends_the_agent_and_the_rollout_is_graded(server, engine: ScriptedEngine, factory, tasks):
    engine.script = lambda request: Reply(calls=(("bash", {"command": f"echo {len(tool_results(request))}",
                                                            "description": "Count"}),))
    session = session_for(factory, tasks[2])
    session.wait_for_completion()
    assert session.result.budget_stop_count >= 1
    assert len(engine.agent_requests()) == server.settings.max_model_calls == len(session.fetch_training_trace().turns)
    assert session.verify([]).env_reward == 0.0
    session.close()


def test_a_conversation_that_fills_the_context_is_graded_on_its_work(engine: ScriptedEngine, factory, tasks):
    """Longer than MAX_MODEL_LEN is the agent's own doing, as too many calls are: vLLM's 400 takes no grade away."""
    full = Reply(status=400, error="This model's maximum context length is 40960 tokens. However, you requested 4096 "
                 "output tokens and your prompt contains 36865 input tokens, for a total of 40961 tokens. Please "
                 "reduce the length of the input prompt or the number of requested output tokens.")
    write = bash_then_answer(f"{tasks[0].pipeline} > /workdir/answer.txt")
    engine.script = lambda request: full if tool_results(request) else write(request)
    session = session_for(factory, tasks[0])
    session.wait_for_completion()
    assert session.verify([]).env_reward == 1.0 and len(session.fetch_training_trace().turns) == 1
    assert [f.split(":")[0] for f in session.result.findings] == ["[WARN] context_budget_exhausted"]
    assert len(engine.agent_requests()) == 2, "the agent was told to stop, it did not repeat the call"
    session.close()


def test_agent_timeout_is_flagged_but_scored(engine: ScriptedEngine, factory, tasks):
    late, held = threading.Event(), threading.Event()

    def hold() -> None:
        late.set()
        held.wait(2 * AGENT_LIMITS[-1])

    def script(request):
        if tool_results(request):
            return Reply(text="too late", wait=hold)
        return Reply(calls=(("bash", {"command": f"{tasks[0].pipeline} > /workdir/answer.txt", "description": "x"}),))

    engine.script = script
    try:
        for limit in AGENT_LIMITS:
            session = replace(factory, agent_timeout=limit).create(tasks[0].instruction)
            with pytest.raises((TimeoutError, RolloutFailed)) as ended:
                session.wait_for_completion()
            if late.is_set():
                break
            session.close()
        assert ended.type is TimeoutError, ended.value
        assert session.verify([]).env_reward == 1.0, "the answer was written before time ran out"
        assert len(session.fetch_training_trace().turns) == 1
    finally:
        held.set()
        session.close()


def test_engine_that_refuses_every_call_is_ungraded(server, engine: ScriptedEngine, factory, tasks):
    engine.script = lambda request: Reply(status=400)
    session = session_for(factory, tasks[0])
    with pytest.raises(RolloutFailed, match="model calls were not captured"):
        session.wait_for_completion()
    assert session.result.n_turns == 0
    assert session.record["task"] == tasks[0].name and "were not captured" in session.record["reason"]
    session.close()


@pytest.mark.parametrize(("stripped", "graded"), [({"authorization"}, True), ({"authorization", "x-api-key"}, False)])
def test_stripped_authorization(server, engine, proxy: HeaderProxy, factory, tasks, stripped, graded):
    """With x-api-key the rollout works; without it the proxy answers 401 and the verifier's 0.0 must not count."""
    proxy.strip, before = stripped, proxy.stripped
    engine.script = bash_then_answer(f"{tasks[0].pipeline} > /workdir/answer.txt")
    session = session_for(factory, tasks[0])
    if graded:
        session.wait_for_completion()
        assert session.verify([]).env_reward == 1.0
    else:
        with pytest.raises(RolloutFailed):
            session.wait_for_completion()
        assert session.result.reward == 0.0, "Harbor's verifier ran: this is the case that must not reach training"
        outcome = run_eval_rollout(server.settings, "train", 0, "scripted")
        assert (outcome.status, outcome.reward) == ("ungraded", None)
        assert engine.agent_requests() == []
    session.close()
    assert proxy.stripped > before


def test_close_from_another_thread_ends_the_rollout_everywhere(server, engine: ScriptedEngine, factory, tasks):
    reached, held = threading.Event(), threading.Event()

    def script(request):
        reached.set()
        return Reply(text="late", wait=lambda: held.wait(600))

    engine.script = script
    session = session_for(factory, tasks[0])
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            session.wait_for_completion()
        except BaseException as err:  # noqa: BLE001 - looked at below
            raised.append(err)

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        assert reached.wait(600), "the agent never called the model"
        session.close()
        thread.join(600)
        assert not thread.is_alive(), "it waits for the model, or for the agent's timeout"
        assert isinstance(raised[0], RolloutAborted)
        assert_nothing_left(server)
    finally:
        held.set()


def test_prompts_are_the_servers_and_others_are_refused(server, factory, tasks):
    rows = factory.prompt_rows()
    assert [row["task"] for row in rows] == [task.name for task in tasks]
    assert [row["prompt"][0]["content"] for row in rows] == [task.instruction.strip() for task in tasks]
    with pytest.raises(UnknownPrompt, match="never asked"):
        factory.create([{"role": "user", "content": "A question that was never asked"}])
    with pytest.raises(LookupError, match="'validation'"):
        HarborSessionFactory.from_settings(server.settings, "validation").prompt_rows()
