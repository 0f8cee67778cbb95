"""Which rollouts count: results as the env server returns them, without a server."""

from __future__ import annotations

import json
import pickle
import threading
import time

import pytest
from openenv.core.harness import TrainableSession
from openenv.harbor.client import HarborEnv
from openenv.harbor.models import HarborRolloutResult, HarborTurn

from recipe import harbor_sessions, phases
from recipe.call_times import CAME, FIRST_CALL, LAST_CALL, WENT
from recipe.grading import count_tool_calls, eval_outcome, problem_of
from recipe.harbor_sessions import HarborSessionFactory, RolloutAborted, RolloutFailed, UnknownPrompt

ROWS = ["What is one?", "What is two?"]


def turn(**more) -> HarborTurn:
    fields = dict(turn=0, node_id="n", prompt_token_ids=[1, 2], completion_token_ids=[3, 4],
                  per_token_logps=[-0.1, -0.2], loss_mask=[0, 0, 1, 1],
                  tool_calls=[{"name": "bash", "arguments": "{}"}])
    return HarborTurn(**fields | more)


def result(**more) -> HarborRolloutResult:
    fields = dict(turns=[turn()], n_turns=1, reward=1.0, trial_name="t", capture_level="tokens")
    return HarborRolloutResult(**fields | more)


TIMEOUT = dict(ok=False, exception_type="AgentTimeoutError", error="Agent execution timed out")
UNGRADED = {
    "401 at the proxy": (dict(turns=[], n_turns=0, reward=0.0, ok=False, findings=["[FATAL] no_turns"],
                              exception_type="NonZeroAgentExitCodeError"), "not captured"),
    "agent never called the model": (dict(turns=[], n_turns=0, reward=0.0), "not captured"),
    "timeout before the first call": (dict(turns=[], n_turns=0, reward=0.0, **TIMEOUT), "not captured"),
    "only an auxiliary call": (dict(turns=[turn(role="auxiliary")], reward=0.0), "not captured"),
    "dead sandbox": (dict(reward=None, ok=False, exception_type="SandboxError", error="gone"), "SandboxError: gone"),
    "agent crashed": (dict(reward=0.0, ok=False, exception_type="NonZeroAgentExitCodeError", error="exit 1"), "exit 1"),
    "broken capture": (dict(findings=["[FATAL] length_mismatch"], ok=False), "length_mismatch"),
    "broken capture of a timeout": (dict(findings=["[FATAL] length_mismatch"], **TIMEOUT), "length_mismatch"),
    "verifier without a reward": (dict(reward=None), "no reward"),
    "timeout without a reward": (dict(reward=None, **TIMEOUT), "no reward"),
    "engine probed too early": (dict(capture_level="text"), "graded 'text'"),
    "not ok for another reason": (dict(ok=False, error="capture failed validation"), "capture failed validation"),
}


@pytest.mark.parametrize(("fields", "says"), UNGRADED.values(), ids=UNGRADED)
def test_ungraded(fields, says, tmp_path):
    made = result(**fields)
    assert says in problem_of(made)
    outcome = eval_outcome(made, 2.0, tmp_path)
    assert (outcome.status, outcome.reward) == ("ungraded", None) and says in outcome.reason


@pytest.mark.parametrize("reward", [0.0, 0.5, 1.0])
def test_graded(reward, tmp_path):
    outcome = eval_outcome(result(reward=reward), 2.0, tmp_path)
    assert (outcome.status, outcome.reward, outcome.reason) == ("graded", reward, "")
    assert (outcome.tokens, outcome.prompt_tokens, outcome.model_calls, outcome.tool_calls) == (2, 2, 1, 1)


def test_timeout_is_flagged_but_graded(tmp_path):
    outcome = eval_outcome(result(reward=0.0, **TIMEOUT), 2.0, tmp_path)
    assert (outcome.status, outcome.reward, outcome.timed_out, outcome.reason) == ("graded", 0.0, True, "agent timeout")


def test_seconds_by_phase_are_those_of_harbors_record(tmp_path):
    def span(start: float, end: float) -> dict[str, str]:
        return {key: f"2026-01-01T00:00:{second:09.6f}Z" for key, second in (("started_at", start),
                                                                           ("finished_at", end))}

    (tmp_path / "t").mkdir()
    record = {"environment_setup": span(0, 1.5), "agent_setup": span(1.5, 2), "agent_execution": span(2, 12),
              "verifier": span(13, 13.25)}
    (tmp_path / "t/result.json").write_text(json.dumps(record))
    outcome = eval_outcome(result(phase_timings={"model_seconds": 4.0}), 14.0, tmp_path)
    assert outcome.phases == {"sandbox": 2.0, "agent": 6.0, "model": 4.0, "verifier": 0.25}
    cells = [{"phases": outcome.phases, "seconds": 14.0}, {"phases": {}, "seconds": 99.0}]
    assert phases.means(cells) == outcome.phases | {"other": 1.75}
    (tmp_path / "t/result.json").write_text(json.dumps(record | {"agent_execution": None, "verifier": None}))
    assert eval_outcome(result(), 14.0, tmp_path).phases == {"sandbox": 2.0, "agent": 0, "model": 0, "verifier": 0}


def test_tool_calls_are_those_of_the_agents_kept_turns():
    calls = [{"name": "bash"}, {"name": "read"}, {"name": ""}]
    made = result(turns=[turn(tool_calls=calls), turn(tool_calls=calls, discarded=True),
                         turn(tool_calls=calls, role="auxiliary"), turn(tool_calls=[])])
    assert count_tool_calls(made) == 2


# -- sessions on a stand-in for the server ---------------------------------------------------------------------
class Server:
    """Answers what HarborEnv asks: tasks by index, and `reply` for a rollout."""

    def __init__(self) -> None:
        self.reply, self.asked, self.closed = result(), [], 0


@pytest.fixture
def server(monkeypatch) -> Server:
    made = Server()

    def run_rollout(self, **arguments):
        made.asked.append(arguments)
        return made.reply() if callable(made.reply) else made.reply

    def get_task_range(self, split, start, stop):
        return [harbor_sessions.HarborTaskRef(index=i, task_id=str(i), task_name=f"task-{i}", instruction=text + "\n")
                for i, text in enumerate(ROWS)][start:stop]

    def close(self):
        made.closed += 1

    monkeypatch.setattr(HarborEnv, "run_rollout", run_rollout)
    monkeypatch.setattr(HarborEnv, "get_task_range", get_task_range)
    monkeypatch.setattr(HarborEnv, "splits", lambda self: [{"name": "train", "num_tasks": len(ROWS)}])
    for client in (HarborEnv, harbor_sessions._Client):
        monkeypatch.setattr(client, "close", close)
    monkeypatch.setattr(HarborEnv, "__enter__", lambda self: self)
    monkeypatch.setattr(HarborEnv, "__exit__", lambda self, *_: None)
    return made


@pytest.fixture
def factory(server) -> HarborSessionFactory:
    made = HarborSessionFactory("http://127.0.0.1:1", "train", "local", agent_timeout=90, agent_step_limit=6)
    return pickle.loads(pickle.dumps(made(sampling={"temperature": 0.8})))


def test_a_session_asks_for_its_task_with_the_trainers_policy_and_limits(server, factory):
    session = factory.create([{"role": "user", "content": "  What is two?"}], seed=7, episode_id="e")
    assert isinstance(session, TrainableSession)
    session.wait_for_completion()
    (asked,) = server.asked
    assert (asked["split"], asked["task_index"], asked["purpose"]) == ("train", 1, "train")
    assert asked["sampling"] == {"temperature": 0.8}
    assert (asked["agent_timeout_sec"], asked["agent_step_limit"], asked["sandbox"]) == (90.0, 6, "local")
    assert session.fetch_training_trace().turns[0].completion_token_ids == [3, 4]
    assert session.verify([]).env_reward == 1.0
    session.close()
    assert server.closed == 1


@pytest.mark.parametrize(("fields", "says"), UNGRADED.values(), ids=UNGRADED)
def test_a_session_that_may_not_be_graded_raises_what_trl_leaves_out(server, factory, fields, says):
    server.reply = result(**fields)
    with pytest.raises(RolloutFailed, match=says) as caught:
        factory.create(ROWS[0]).wait_for_completion()
    # TRL takes these three from fetch_training_trace for a broken producer and stops the worker.
    assert not isinstance(caught.value, (ValueError, TypeError, KeyError, TimeoutError))


@pytest.mark.parametrize("turns", [[turn(per_token_logps=[0.1, -0.2])], [turn(loss_mask=[0, 0, 0, 0])],
                                   [turn(loss_mask=None)]], ids=["positive logprob", "all masked", "no mask"])
def test_tokens_that_cannot_be_trained_on_are_left_out(server, factory, turns):
    server.reply = result(turns=turns)
    with pytest.raises(RolloutFailed):
        factory.create(ROWS[0]).wait_for_completion()


def test_a_timeout_keeps_its_turns_and_its_reward(server, factory):
    server.reply = result(reward=0.0, **TIMEOUT)
    session = factory.create(ROWS[0])
    with pytest.raises(TimeoutError):
        session.wait_for_completion()
    assert len(session.fetch_training_trace().turns) == 1 and session.verify([]).env_reward == 0.0


@pytest.mark.parametrize("ahead", [0.0, 100.0, -100.0])
def test_call_times_are_in_the_trainers_clock(server, factory, ahead):
    """The env server may run on another machine, and the times are compared with those of the trainer's syncs."""
    def reply():
        came = time.time()
        time.sleep(0.05)
        there = {CAME: came, FIRST_CALL: came + 0.01, LAST_CALL: came + 0.04, WENT: time.time()}
        return result(phase_timings={name: value + ahead for name, value in there.items()})

    server.reply = reply
    session = factory.create(ROWS[0])
    assert session.call_times is None
    asked = time.time()
    session.wait_for_completion()
    first, last = session.call_times
    assert asked - 1 < first < last < time.time() + 1


def test_a_dead_server_fails_the_rollout(server, factory):
    def refuse():
        raise ConnectionRefusedError("nobody listens")

    server.reply = refuse
    with pytest.raises(RolloutFailed, match="nobody listens"):
        factory.create(ROWS[0]).wait_for_completion()


def test_close_lets_the_waiting_thread_go(server, factory):
    running, held = threading.Event(), threading.Event()

    def hang():
        running.set()
        held.wait(600)
        return result()

    server.reply = hang
    session = factory.create(ROWS[0])
    threading.Thread(target=lambda: (running.wait(), session.close()), daemon=True).start()
    started = time.monotonic()
    with pytest.raises(RolloutAborted):
        session.wait_for_completion()
    assert time.monotonic() - started < 240
    held.set()
    with pytest.raises(RolloutAborted):
        session.wait_for_completion()


def test_unknown_prompts_and_splits_are_refused_by_name(factory):
    with pytest.raises(UnknownPrompt, match="What is three.*2 tasks are served"):
        factory.create([{"role": "user", "content": "What is three?"}])
    with pytest.raises(LookupError, match=r"serves the splits \['train'\], not 'test'"):
        HarborSessionFactory("http://127.0.0.1:1", "test", "local", 90, 6).prompt_rows()


def test_two_tasks_with_one_instruction_are_refused(server, factory, monkeypatch):
    monkeypatch.setattr("test_grading.ROWS", ["What is one?", " What is one? "])
    with pytest.raises(ValueError, match="tasks task-0 and task-1 .* have the same instruction"):
        HarborSessionFactory("http://127.0.0.1:1", "train", "local", 90, 6).prompt_rows()
