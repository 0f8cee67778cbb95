"""Rollouts of RECIPE=deepcoder side by side: nothing shared between sandboxes, nothing left after them.

    python tests/e2e/many_rollouts.py --rollouts 32 --inflight 8     # in the trainer's environment; about 2 minutes

Real: env server, Harbor, sandboxes, OpenCode, capture proxy, verifier. The engine is scripted: every agent leaves files
under names of its own in each folder it may write, a server on one fixed port and a process that detaches itself, looks
whether it sees those of others, writes the right solution and ends.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

from env_server_process import EnvServer, start_server  # noqa: E402
from scripted_engine import Reply, ScriptedEngine, tool_results  # noqa: E402

from recipe import deepcoder, made_problems, sandbox_files, sandbox_isolation  # noqa: E402
from recipe.harbor_sessions import HarborSessionFactory  # noqa: E402

TASKS = 4
FOLDERS = "/tmp /home/user /workdir /logs/agent"
LEAVE_AND_LOOK = f"""\
id=$(cat /proc/sys/kernel/random/uuid)
for folder in {FOLDERS}; do touch $folder/mark-$id; done
setsid sleep 600 >/dev/null 2>&1 </dev/null &
python3 -m http.server 7777 --bind 127.0.0.1 >/dev/null 2>&1 </dev/null &
sleep 2
echo "marks $(for folder in {FOLDERS}; do ls $folder; done | grep -c ^mark-)"
if kill -0 $!; then echo "port mine"; else echo "port taken"; fi
"""


def rows() -> list[dict]:
    return made_problems.rows(TASKS)


def make_run(folder: Path) -> None:
    """Tasks of the first made problems in both splits of the run folder, with time for a busy machine."""
    for split in ("train", "test"):
        for problem in map(deepcoder.problem_of, rows()):
            for name, text in deepcoder.files(problem).items():
                path = folder / "tasks" / split / problem.name / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text.replace("TEST_SECONDS = 6", "TEST_SECONDS = 60"))
                path.chmod(0o755)


def solution(request: dict) -> str:
    """The solution of the problem that an agent's request is about."""
    text = next(str(m["content"]) for m in request["messages"] if m["role"] == "user").replace("\\n", "\n")
    return next(row["solutions"][0] for row in rows() if deepcoder.clean(row["problem"])[:300] in text)


def write(code: str) -> str:
    return f"cat > solution.py <<'END'\n{code}END\n"


def script(request: dict) -> Reply:
    if tool_results(request):
        return Reply(text="All examples pass.")
    return Reply(calls=(("bash", {"command": LEAVE_AND_LOOK + write(solution(request)), "description": "Solve"}),))


def run(server: EnvServer, rollouts: int, inflight: int) -> list[tuple[float | None, str, str]]:
    """(reward, what the agent saw, trial) of `rollouts` rollouts, `inflight` at once."""
    factory = HarborSessionFactory.from_settings(server.settings, "train")(sampling={"temperature": 1.0})
    prompts = [row["prompt"] for row in factory.prompt_rows()]

    def one(number: int) -> tuple[float | None, str, str]:
        session = factory.create(prompts[number % len(prompts)])
        try:
            session.wait_for_completion()
            seen = "\n".join(tool_results({"messages": session.result.turns[-1].request_messages}))
            return session.verify([]).env_reward, seen, session.result.trial_name
        finally:
            session.close()

    with ThreadPoolExecutor(inflight) as pool:
        return list(pool.map(one, range(rollouts)))


def check(server: EnvServer, results: list[tuple[float | None, str, str]]) -> None:
    """Raises AssertionError where a rollout saw another one, or something of any is left."""
    own_network = sandbox_isolation.detect(server.settings.sandbox_runtime).own_network
    for reward, seen, trial in results:
        assert reward == 1.0, (trial, reward, seen)
        assert f"marks {len(FOLDERS.split())}\n" in seen, f"{trial} saw files of another rollout: {seen}"
        assert not own_network or "port mine" in seen, f"{trial} shared its port: {seen}"
    assert len({trial for _, _, trial in results}) == len(results)
    root, until = server.settings.run_path / "sandboxes", time.monotonic() + 60
    while left := [*sandbox_files.marked_processes(run_id=str(server.settings.run_path)),
                   *(p.name for p in root.iterdir() if not p.name.startswith("."))]:
        assert time.monotonic() < until, f"left behind: {left}"
        time.sleep(0.2)
    for folder in ("/tmp", os.path.expanduser("~")):
        assert not [name for name in os.listdir(folder) if name.startswith("mark-")], "a file outside of its sandbox"
    for _, _, trial in results:
        files = {p.name for p in (server.settings.run_path / "trials" / trial / "verifier").iterdir()}
        assert files == {"reward.txt", "test-stdout.txt"}, files


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=32)
    parser.add_argument("--inflight", type=int, default=8, help="2 or more")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="recipe-many-") as name, ScriptedEngine(script) as engine:
        folder = Path(name)
        folder.chmod(0o755)
        make_run(folder)
        server = start_server(folder, engine.port, RECIPE="deepcoder", MAX_INFLIGHT=str(args.inflight),
                              NUM_GENERATIONS="2")
        try:
            began = time.monotonic()
            results = run(server, args.rollouts, args.inflight)
            seconds = time.monotonic() - began
            check(server, results)
        finally:
            server.stop()
    print(f"{args.rollouts} rollouts, {args.inflight} in flight: {seconds:.0f} s; every reward 1.0, no file or port "
          "shared, no process, folder or file left")


if __name__ == "__main__":
    main()
