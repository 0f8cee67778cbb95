"""RECIPE=deepcoder through the real chain: held-out tests stay hidden, solutions are graded, rollouts share nothing."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import many_rollouts
import pytest
from env_server_process import EnvServer, start_server
from scripted_engine import Reply, ScriptedEngine, tool_results

from recipe.harbor_sessions import HarborSessionFactory
from recipe.rewards import deepcoder_reward


@pytest.fixture(scope="module")
def deepcoder_server(engine: ScriptedEngine) -> Iterator[EnvServer]:
    folder = Path(tempfile.mkdtemp(prefix="recipe-deepcoder-"))
    folder.chmod(0o755)
    many_rollouts.make_run(folder)
    server = start_server(folder, engine.port, RECIPE="deepcoder")
    yield server
    server.stop()
    shutil.rmtree(folder)


LOOK = ("for folder in / /tests /home /tmp /workdir /logs /opt /root; do ls -a $folder 2>/dev/null; done; "
        "cat /tests/* /proc/[0-9]*/environ 2>/dev/null; grep -rsl {needle} /tests /workdir /logs /home /tmp /opt /etc; "
        "find / -path /usr -prune -o -path /proc -prune -o -name tests.json -print -o -name verify.py -print; "
        "echo looked")


def test_held_out_tests_are_out_of_the_agents_reach_and_prose_carries_no_loss(deepcoder_server, engine):
    row = many_rollouts.rows()[3]  # sorted lists: outputs that nobody guesses
    outputs = [test["output"].strip() for test in row["tests"] if len(test["output"]) > 20]
    look = LOOK.format(needle="'" + outputs[0][:20] + "'")

    def script(request: dict) -> Reply:
        turns = len(tool_results(request))
        if turns == 0:
            return Reply(calls=(("bash", {"command": look, "description": "Look"}),))
        if turns == 1:
            command = many_rollouts.write(row["solutions"][0])
            return Reply(calls=(("bash", {"command": command, "description": "Write"}),))
        return Reply(text="Done.")

    engine.script = script
    factory = HarborSessionFactory.from_settings(deepcoder_server.settings, "train")
    prompt = next(r["prompt"] for r in factory.prompt_rows() if "in ascending order" in r["prompt"][0]["content"])
    session = factory.create(prompt)
    session.wait_for_completion()
    seen = tool_results({"messages": session.result.turns[-1].request_messages})[0]
    verdict = session.verify([])
    session.close()

    assert "looked" in seen and len(outputs) > 5
    assert not [text for text in outputs if text in seen] and "tests.json" not in seen and "verify.py" not in seen
    assert verdict.env_reward == 1.0, "the tests were there for the verifier"
    said = deepcoder_server.settings.run_path / "trials" / session.result.trial_name / "verifier/test-stdout.txt"
    assert said.read_text().strip() == f"{len(row['tests'])} of {len(row['tests'])} tests passed"

    # Both bash turns carry loss, the closing words do not; TRL's outcome gives the recipe's reward.
    masks = [any(turn.loss_mask) for turn in session.fetch_training_trace().turns]
    assert masks == [True, True, False]
    from trl.experimental.async_grpo.openenv_harness import HarnessRolloutOutcome, _tool_call_counts_by_name
    calls = _tool_call_counts_by_name(session.fetch_training_trace().to_trace_entries())
    outcome = HarnessRolloutOutcome(env_reward=verdict.env_reward, completion=[], trace=[], tool_failure_count=0,
                                    tool_call_count=sum(calls.values()), tool_calls_by_name=calls, timed_out=False)
    assert calls == {"bash": 2} and deepcoder_reward(outcome) == 1.0


def test_rollouts_side_by_side_share_nothing_and_leave_nothing(deepcoder_server, engine):
    engine.script = many_rollouts.script
    many_rollouts.check(deepcoder_server, many_rollouts.run(deepcoder_server, rollouts=4, inflight=4))
