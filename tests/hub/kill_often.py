"""Kills a training with SIGKILL at random moments and starts it again until it is through, again and again.

    eval "$(bash setup.sh --local --tests)"
    "$TRAINER_PYTHON" tests/hub/kill_often.py --kills 20 --seed 0            # trainer and rollout worker, no agent
    "$TRAINER_PYTHON" tests/hub/kill_often.py --kills 3 --seed 0 --job       # bash run_job.sh --local, all of it

Checkpoints go to a double of the Hub. After a kill the next life begins in the same run folder or, as a new job would,
in an empty one; it must go on at the newest whole checkpoint of folder and repository. Once a run is through, the
steps that count (those of each life up to the checkpoint that the next one resumed) must be 1, 2, … MAX_STEPS, and
their tasks those of an unbroken run: none twice, none left out that was only queued. (Groups that could not be trained,
because they were stale or had no grade, are counted and told apart.) A broken rule raises Violation.
Prints one line a life. Exit code 0 when every rule held.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from argparse import ArgumentParser
from dataclasses import dataclass, field
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1] / "e2e")]

from hub_double import HubDouble, hub_environ  # noqa: E402
from marked import carrying  # noqa: E402
from training_process import TASKS, left_out, start, trained  # noqa: E402

from recipe import checkpoints, sandbox_files  # noqa: E402
from recipe.config import REPO  # noqa: E402

FRESH_SHARE = 0.5  # of the lives that follow a kill: on an empty disk, as a new job has it
RESUMED = re.compile(r"^(?:starting from the base model|(?:resuming from .*)?checkpoint-(\d+)(?: has all .*)?$)", re.M)


class Violation(AssertionError):
    """A rule that a killed and resumed training must keep was broken."""


def rule(holds: bool, text: str) -> None:
    if not holds:
        raise Violation(text)


@dataclass
class Life:
    folder: Path
    process: subprocess.Popen[str]
    mark: str  # in the environment of every process of this life
    log: Path
    log_start: int
    metrics_start: int  # lines of earlier lives
    born: float = field(default_factory=time.monotonic)

    def members(self) -> list[int]:
        return carrying(self.mark)

    def kill(self) -> None:
        """SIGKILL to every process at once, as when the machine goes."""
        while pids := self.members():
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.02)
        self.process.wait()

    def resumed(self) -> int | None:
        """The step that this life began at; None when it did not come so far."""
        text = self.log.read_text()[self.log_start:] if self.log.exists() else ""
        match = RESUMED.search(text)
        return int(match[1] or 0) if match else None

    def counted(self, first_group: int) -> dict[int, int]:
        return trained(self.folder, first_group, self.metrics_start)


class Trainer:
    """train_lora.py with its rollout worker, on rollouts that sample from a small engine without an agent."""

    steps, lull = 10, 4.0

    def __init__(self, hub: HubDouble, engine_url: str):
        self.hub, self.engine = hub, engine_url

    def begin(self, folder: Path, mark: str, repo: str, in_order: bool, home: Path
              ) -> tuple[subprocess.Popen[str], Path]:
        out = f"out-{mark[:8]}"
        # A group of 4 in 4 places: one group at a time, so tasks are trained in order. In 8 places slow ones fall back.
        return start(folder, self.engine, out, hub_environ(self.hub, home) | {"KILL_MARK": mark}, ADAPTER_REPO=repo,
                     MAX_STEPS=str(self.steps), SAVE_STEPS="1", MAX_INFLIGHT="4" if in_order else "8"), folder / out


class Job:
    """run_job.sh --local: set-up, tasks, servers, agents in sandboxes, training and evaluation."""

    steps, lull = 3, 20.0

    def __init__(self, hub: HubDouble):
        self.hub = hub

    def begin(self, folder: Path, mark: str, repo: str, in_order: bool, home: Path
              ) -> tuple[subprocess.Popen[str], Path]:
        from env_server_process import free_port

        ports = {name: str(free_port()) for name in ("PUBLIC_PORT", "POLICY_PORT", "ENV_PORT")}
        small = {"MAX_STEPS": str(self.steps), "SAVE_STEPS": "1", "N_TRAIN_TASKS": "12", "N_TASKS": "2",
                 "NUM_GENERATIONS": "2", "MAX_INFLIGHT": "2" if in_order else "4", "EVAL_CONCURRENCY": "2"}
        inherited = {name: value for name, value in os.environ.items() if name not in ("TRACKIO_DIR", "PRESET")}
        process = subprocess.Popen(
            ["bash", "run_job.sh", "--local"], cwd=REPO, start_new_session=True, text=True, stderr=subprocess.STDOUT,
            stdout=(folder.parent / f"{folder.name}.out").open("a"), stdin=subprocess.DEVNULL,
            env=inherited | hub_environ(self.hub, home) | ports | small | {
                "KILL_MARK": mark, "ADAPTER_REPO": repo, "RUN_DIR": str(folder)})
        return process, folder / "logs/train.log"


class Campaign:
    """Runs of one kind, one after the other, until `kills` lives were killed."""

    def __init__(self, kind: Trainer | Job, hub: HubDouble, folder: Path, seed: int):
        self.kind, self.hub, self.folder, self.random = kind, hub, folder, random.Random(seed)
        self.kills = self.runs = self.lives = 0
        self.left_out: dict[int, int] = {}

    def run_once(self, repo: str, kills: int) -> None:
        """One training from its first life to its end, with at most `kills` kills on the way."""
        self.runs += 1
        in_order = self.runs % 2 == 1
        self.hub.repo(repo)
        folder = self.folder / f"{self.runs}-1"
        history: dict[int, int] = {}  # step -> group, in the order of tasks
        self.left_out: dict[int, int] = {}  # step -> groups that it passed over because they could not be trained
        life, expected, killed = self.start_life(folder, repo, in_order), 0, 0
        while True:
            done = expected == self.kind.steps and killed  # nothing is left to lose but the end itself
            was_killed = killed < kills and not done and self.kill_somewhere(life, self.kind.steps - expected)
            if not was_killed:
                life.process.wait()
            resumed = life.resumed()
            if resumed is not None:
                rule(resumed == expected, f"began at step {resumed}, the newest whole checkpoint has {expected}")
                self.count(history, life, resumed)
            done = sorted(history)[-1] if history else 0
            print(f"{self.runs:4} {self.lives:5} {'killed' if was_killed else 'ended':>7} "
                  f"{time.monotonic() - life.born:7.1f} s {'-' if resumed is None else resumed:>9} {done:>10}   "
                  f"{life.folder.name}", flush=True)
            self.check_leftovers(life)
            if not was_killed:
                break
            killed += 1
            self.kills += 1
            here = self.random.random() >= FRESH_SHARE
            folder = life.folder if here else self.folder / f"{self.runs}-{self.lives + 1}"
            expected = max(self.newest_on_hub(repo), self.newest_in(folder))
            life = self.start_life(folder, repo, in_order)
        rule(life.process.returncode in (0, 2), f"a life ended with {life.process.returncode}; see {life.log}")
        self.check_end(repo, history, in_order)

    def start_life(self, folder: Path, repo: str, in_order: bool) -> Life:
        self.lives += 1
        mark = uuid.uuid4().hex
        metrics = folder / "metrics.jsonl"
        lines = len(metrics.read_text().splitlines()) if metrics.exists() else 0
        process, log = self.kind.begin(folder, mark, repo, in_order, self.folder / "home")
        return Life(folder, process, mark, log, len(log.read_text()) if log.exists() else 0, lines)

    def kill_somewhere(self, life: Life, remaining: int) -> bool:
        """SIGKILL at a random moment of the next half of the `remaining` steps, or of what precedes and follows them.

        The moment is a time behind a random step, so that a slow machine does not move all of them to the start.
        Returns False when the life ended by itself before.
        """
        steps, extra = self.random.randint(0, (remaining + 1) // 2), self.random.uniform(0, self.kind.lull)
        while life.process.poll() is None and (steps > len(life.counted(0)) or extra > 0):
            if steps <= len(life.counted(0)):
                extra -= 0.02
            time.sleep(0.02)
        if life.process.poll() is not None:
            return False
        life.kill()
        self.wait_for_hub()
        return True

    def wait_for_hub(self) -> None:
        """A commit that had arrived in full when its sender died is still carried out."""
        seen = -1
        while seen != len(self.hub.requests):
            seen = len(self.hub.requests)
            time.sleep(0.3)
        with self.hub.lock:
            pass

    def count(self, history: dict[int, int], life: Life, resumed: int) -> None:
        """Steps behind the resumed checkpoint are forgotten; those of this life follow."""
        position = 0
        if resumed:
            state = life.folder / f"checkpoints/checkpoint-{resumed}/rollout_state.json"
            position = json.loads(state.read_text())["prompt_index"]
        for step in [step for step in history if step > resumed]:
            del history[step], self.left_out[step]
        history |= life.counted(position)
        self.left_out |= left_out(life.folder, life.metrics_start)

    def newest_on_hub(self, repo: str) -> int:
        """Recomputed from what is stored; every checkpoint that has a manifest must be whole in every commit."""
        newest = 0
        for commit in self.hub.repo(repo).commits:
            for path in [p for p in commit.tree if p.endswith("/manifest.json")]:
                name = path.partition("/")[0]
                manifest = json.loads(commit.tree[path])
                for file, record in manifest["files"].items():
                    stored = commit.tree.get(f"{name}/{file}", b"")
                    rule(hashlib.sha256(stored).hexdigest() == record["sha256"], f"{repo}: {name}/{file} is not whole")
                newest = max(newest, manifest["step"])
        return newest

    @staticmethod
    def newest_in(folder: Path) -> int:
        found = [p for p in folder.glob("checkpoints/checkpoint-*") if checkpoints.damage(p) is None]
        return max((checkpoints.step_of(p) for p in found), default=0)

    def check_end(self, repo: str, history: dict[int, int], in_order: bool) -> None:
        steps, groups = self.kind.steps, list(history.values())
        rule(sorted(history) == list(range(1, steps + 1)), f"steps that count: {sorted(history)}")
        rule(len(set(groups)) == steps, f"a task was trained twice: {history}")
        files = self.hub.repo(repo).files()
        rule(self.newest_on_hub(repo) == steps, "the last checkpoint is not on the Hub")
        end = json.loads(files[f"checkpoint-{steps}/rollout_state.json"])["prompt_index"]
        ahead = json.loads(files[f"checkpoint-{steps}/task_cursor.json"])["trained_ahead"]
        done, passed = set(range(end)) | {end + g for g in ahead}, sum(self.left_out.values())
        rule(set(groups) <= done and len(done) == steps + passed,
             f"a task was left out: {history}, {passed} groups could not be trained, the cursor has {sorted(done)}")
        if in_order and not passed:
            rule(set(groups) == set(range(steps)), f"not the tasks of an unbroken run: {history}")

    @staticmethod
    def check_leftovers(life: Life) -> None:
        """No process of a sandbox outlives its job; an ended job leaves no sandbox folder either."""
        deadline = time.monotonic() + 60
        while left := sandbox_files.marked_processes(run_id=str(life.folder.resolve())):
            rule(time.monotonic() < deadline, f"sandbox processes are left: {left}")
            time.sleep(0.2)
        deadline = time.monotonic() + 60  # multiprocessing's resource tracker ends after the process that it serves
        while left := life.members():
            rule(time.monotonic() < deadline, f"processes are left: {left}")
            time.sleep(0.2)
        if life.process.returncode in (0, 2):
            rule(not [*life.folder.glob("sandboxes/*")], "sandbox folders are left")


def main() -> int:
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--per-run", type=int, default=6, help="most kills of one run")
    parser.add_argument("--job", action="store_true", help="kill bash run_job.sh --local instead of the trainer alone")
    args = parser.parse_args()
    import torch
    from lfm2_small import small_model
    from small_engine import SmallEngine

    torch.set_num_threads(1)  # the trainer needs the other core; threads that wait for one spin
    # Not below a private folder: under proot the agents run as nobody and have to be able to enter.
    folder = Path(tempfile.mkdtemp(prefix="kill-often-"))
    folder.chmod(0o755)
    with HubDouble() as hub, SmallEngine(small_model()) as engine:
        engine.server.handle_error = lambda *_: None  # the clients that are killed do not read their answers
        campaign = Campaign(Job(hub) if args.job else Trainer(hub, engine.url), hub, folder, args.seed)
        print(f"seed {args.seed}, {campaign.kind.steps} steps a run, {TASKS} tasks, in {folder}\n"
              " run  life     how     after   resumed  last step   folder", flush=True)
        while campaign.kills < args.kills:
            campaign.run_once(f"me/run-{campaign.runs + 1}", min(args.per_run, args.kills - campaign.kills))
    print(f"{campaign.kills} kills in {campaign.lives} lives of {campaign.runs} runs: steps and tasks exact, "
          "no checkpoint half-written, no sandbox left", flush=True)
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
