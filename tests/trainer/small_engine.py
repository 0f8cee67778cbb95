"""A policy server and rollouts for tests of the trainer: real sampling from the weights it was sent, no agent.

`SmallEngine` is the parent's side: a tiny model behind the weight-transfer routes and POST /sample.
`SmallSessions` is the rollout worker's side: each session samples two turns over HTTP and every second one is right.
Draws depend on the session and the weights alone, not on which thread comes first.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import requests
import torch
from openenv.core.harness.training import TrainingTrace, TrainingTurn
from safetensors.torch import load_file

sys.path.append(str(Path(__file__).parents[1] / "e2e"))  # also in the worker that imports this by itself

from loopback import LoopbackServer  # noqa: E402

TURN = 6  # tokens that the policy samples per turn
PATIENCE = 300  # seconds, of what only hangs when something is broken


def first_prompt(task: int) -> list[int]:
    """What a session of `task` asks first."""
    return [1, 6, 8 + task]


class SmallEngine(LoopbackServer):
    """`with SmallEngine(model) as engine:` serves `model` on engine.url; engine.received counts finished syncs.

    `hold` maps the number of a sync to a task and how many of its sessions must have asked before that sync begins.
    """

    def __init__(self, model: torch.nn.Module, hold: dict[int, tuple[int, int]] | None = None):
        self.model, self.lock, self.received, self.calls = copy.deepcopy(model).eval(), threading.Lock(), 0, []
        self.served: list[dict[str, torch.Tensor]] = []  # weights after each sync
        self.running = threading.Event()  # cleared while paused: calls wait, as they do in vLLM
        self.running.set()
        self.hold, self.asked, self.came = hold or {}, Counter(), threading.Condition()
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path == "/received":
                    self.reply({"received": engine.received})
                    return
                self.reply({"vllm_config": {"lora_config": None, "weight_transfer_config": {"backend": "file"}}})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
                self.reply(engine.handle(self.path, body))

            def reply(self, answer: dict[str, Any]) -> None:
                payload = json.dumps(answer).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(payload)))
                self.end_headers()
                self.wfile.write(payload)

            def log_message(self, *_: Any) -> None:
                pass

        super().__init__(Handler)

    def handle(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path == "/sample":
            with self.came:
                self.asked[tuple(body["prompt"])] += 1
                self.came.notify_all()
            return self.when_running(lambda: self.sample(body["prompt"], body["seed"]))
        if path == "/v1/completions":
            return self.when_running(lambda: self.score(body["prompt"]))
        self.calls.append(path)
        if path.startswith("/pause"):
            self.wait_for_calls(*self.hold.get(self.received + 1, (0, 0)))
            self.running.clear()
            with self.lock:  # a call under way ends first
                return {}
        if path == "/resume":
            self.running.set()
        if path == "/update_weights":
            tensors = load_file(body["update_info"]["path"])
            with self.lock:
                self.model.load_state_dict(tensors, strict=False)
                self.served.append(tensors)
        self.received += path == "/finish_weight_update"
        return {}

    def when_running(self, function: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        while True:
            self.running.wait()
            with self.lock:
                if self.running.is_set():
                    return function()

    def wait_for_calls(self, task: int, number: int) -> None:
        asked = tuple(first_prompt(task))
        with self.came:
            assert self.came.wait_for(lambda: self.asked[asked] >= number, PATIENCE), self.asked

    @torch.no_grad()
    def sample(self, prompt: list[int], seed: int) -> dict[str, Any]:
        ids, log_probs, generator = list(prompt), [], torch.Generator().manual_seed(seed)
        for _ in range(TURN):
            distribution = self.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].log_softmax(-1)
            token = int(torch.multinomial(distribution.exp(), 1, generator=generator))
            ids.append(token)
            log_probs.append(float(distribution[token]))
        return {"ids": ids[len(prompt):], "log_probs": log_probs}

    @torch.no_grad()
    def score(self, ids: list[int]) -> dict[str, Any]:
        """What vLLM answers to prompt_logprobs=0."""
        logits = self.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1]
        scores = logits.log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
        entries = [{str(token): {"logprob": score}} for token, score in zip(ids[1:], scores, strict=True)]
        return {"choices": [{"prompt_logprobs": [None, *entries]}]}


@dataclass(eq=False)  # TRL keeps sessions in a set
class SmallSession:
    """TrainableSession of two sampled turns with one tool call each; `fate` says how the rollout goes.

    "says nothing trained" has no turn with loss;
    "boots 2": the first call is made after the engine's second sync; "spans 3": the second after its third.
    `may_begin` waits for what must have happened before the first call, and `ended` is told that nothing follows.
    """

    url: str
    task: int
    fate: str
    number: int = 0  # of its task's sessions; every second one is right, so that each group has a gradient
    call_times: tuple[float, float] | None = None
    may_begin: Callable[[], None] = lambda: None
    ended: Callable[[], None] = lambda: None

    def wait_for_completion(self, timeout_s: float | None = None) -> int:
        if self.fate == "fails":
            raise RuntimeError("the sandbox did not start")
        self.may_begin()
        self.turns, prompt = [], first_prompt(self.task)
        when, _, syncs = self.fate.partition(" ")
        if when == "boots":
            self.wait_for_syncs(int(syncs))
        first = time.time()
        for turn in range(2):
            if turn == 1 and when == "spans":
                self.wait_for_syncs(int(syncs))
            draw = {"prompt": prompt, "seed": (self.task * 1000 + self.number) * 2 + turn}
            drawn = requests.post(f"{self.url}/sample", json=draw, timeout=PATIENCE).json()
            call = {"function": {"name": "bash", "arguments": "{}"}}
            self.turns.append(TrainingTurn(
                node_id=uuid.uuid4().hex, prompt_token_ids=prompt, completion_token_ids=drawn["ids"],
                per_token_logps=drawn["log_probs"],
                loss_mask=[0] * len(prompt) + [int(when != "says")] * len(drawn["ids"]),
                request={"messages": []}, response={"choices": [{"message": {"content": "", "tool_calls": [call]}}]}))
            # a tool result follows; with "forks" the second turn rewrites the history instead of appending to it
            prompt = [1, 6, 9] if self.fate == "forks" else prompt + drawn["ids"] + [6, 10]
        self.call_times = (first, time.time())
        return 0

    def wait_for_syncs(self, number: int) -> None:
        deadline = time.monotonic() + PATIENCE
        while requests.get(f"{self.url}/received", timeout=PATIENCE).json()["received"] < number:
            if time.monotonic() > deadline:
                raise RuntimeError(f"the engine did not receive {number} syncs")
            time.sleep(0.05)

    def fetch_training_trace(self) -> TrainingTrace:
        return TrainingTrace(turns=self.turns)

    def verify(self, transcript: Any, final_state: Any = None) -> Any:
        correct = float(self.number % 2)
        return SimpleNamespace(env_reward=None if self.fate == "ungraded" else correct)

    @property
    def record(self) -> dict[str, Any]:
        return {"task": str(self.task), "trial": uuid.uuid4().hex, "reason": self.fate}

    def close(self) -> None:
        self.ended()


@dataclass
class SmallSessions:
    """Session factory; `fates` maps a task to how the rollouts of its group end, in order of creation.

    With `in_order` a group's sessions call the model once those of the groups before it have ended: otherwise a group
    may overtake another one of which a rollout is slow, and so it is now and then on a busy machine.
    """

    url: str
    tasks: int
    fates: dict[int, list[str]]
    log: Path  # one line a created session, with the process that runs it
    in_order: bool = False
    generations: int = 4  # sessions of a group

    def __call__(self, sampling: Any = None) -> SmallSessions:
        assert sampling["temperature"] == 1.0 and sampling["top_p"] == 1.0
        self.changed = threading.Condition()  # sessions are made and run by several threads
        self.created: Counter[int] = Counter()  # sessions by task
        self.left: dict[int, set[int]] = {}  # by group: its sessions that have not ended
        return self

    def prompt_rows(self) -> list[dict[str, Any]]:
        return [{"prompt": [{"role": "user", "content": str(i)}]} for i in range(self.tasks)]

    def create(self, task: Any, seed: int | None = None, episode_id: str | None = None) -> SmallSession:
        index = int(task[-1]["content"])
        with self.changed:
            number = self.created[index]
            self.created[index] += 1
            self.left.setdefault(seed, set(range(self.generations)))
            with self.log.open("a") as file:
                file.write(f"{os.getpid()} {index}\n")
        fates = self.fates.get(index, ["runs"])
        return SmallSession(self.url, index, fates[number % len(fates)], number,
                            may_begin=partial(self.wait_for_turn, seed), ended=partial(self.end, seed, number))

    def wait_for_turn(self, group: int) -> None:
        def is_next() -> bool:
            return not self.in_order or not any(left for before, left in self.left.items() if before < group)

        with self.changed:
            if not self.changed.wait_for(is_next, PATIENCE):
                raise RuntimeError(f"groups before {group} do not end: {self.left}")

    def end(self, group: int, number: int) -> None:
        with self.changed:
            self.left[group].discard(number % self.generations)
            self.changed.notify_all()
