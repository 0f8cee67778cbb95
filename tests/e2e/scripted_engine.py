"""A policy server for tests: vLLM's chat contract with replies from a script instead of a model.

What a capture proxy needs of vLLM is real here: token ids of prompt and completion whose prefixes line up over the
turns of a conversation, one log-probability per sampled token, processed log-probabilities (dividing the logits by
the temperature halves the gap of the two best at T=2), LFM2's tool-call text, usage, /health and /v1/models.

    with ScriptedEngine(lambda request: Reply(text="done")) as engine:
        requests.post(engine.url + "/v1/chat/completions", json={...})
        engine.requests   # every chat request in order, as received

Standard library only, so that it runs in either Python environment.
"""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from typing import Any

from loopback import LoopbackServer

LOGITS = (2.0, 0.0, -1.0, -2.0, -3.0)  # of the five best tokens, at every position
PROBE_REPLY = "ok"


@dataclass(frozen=True)
class Reply:
    """One assistant turn: text, tool calls as (name, arguments), or an HTTP error instead."""

    text: str = ""
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()
    status: int = 200
    error: str = "scripted failure"
    wait: Callable[[], Any] | None = None  # called before answering, to hold a request open


Script = Callable[[dict[str, Any]], Reply]


def tool_results(request: dict[str, Any]) -> list[str]:
    """The texts of the tool results in a chat request, oldest first: what a script decides on."""
    return [_text(m.get("content")) for m in request["messages"] if m.get("role") == "tool"]


def bash_then_answer(command: str, answer: str = "done") -> Script:
    """A script for the agent: one bash call, then a closing sentence."""

    def script(request: dict[str, Any]) -> Reply:
        if tool_results(request):
            return Reply(text=answer)
        return Reply(calls=(("bash", {"command": command, "description": "Write the answer"}),))

    return script


class ScriptedEngine(LoopbackServer):
    """Serves a script on a free loopback port between __enter__ and __exit__."""

    def __init__(self, script: Script, model: str = "scripted", max_model_len: int = 65536, port: int = 0) -> None:
        self.script, self.model, self.max_model_len = script, model, max_model_len
        self.requests: list[dict[str, Any]] = []
        super().__init__(_handler(self), port)

    def agent_requests(self) -> list[dict[str, Any]]:
        """The requests that came through the agent: the capability probes have no system message."""
        return [r for r in self.requests if r["messages"][0]["role"] == "system"]

    def answer(self, request: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Status and body of one chat completion."""
        self.requests.append(request)
        reply = self._reply(request)
        if reply.wait:
            reply.wait()
        if reply.status != 200:
            return reply.status, {"error": {"message": reply.error, "type": "error", "code": reply.status}}
        prompt = encode("".join(_render(m) for m in request["messages"]) + "<|im_start|>assistant\n")
        body = _body(reply.text, [(name, args) for name, args in reply.calls])
        sampled = encode(body + "<|im_end|>")[: int(request.get("max_tokens") or 1 << 30)]
        message: dict[str, Any] = {"role": "assistant", "content": reply.text or None, "tool_calls": []}
        for name, args in reply.calls:
            message["tool_calls"].append({"id": f"call-{uuid.uuid4().hex[:8]}", "type": "function",
                                          "function": {"name": name, "arguments": json.dumps(args)}})
        choice: dict[str, Any] = {"index": 0, "message": message,
                                  "finish_reason": "tool_calls" if reply.calls else "stop"}
        if request.get("logprobs"):
            choice["logprobs"] = {"content": _logprobs(sampled, request)}
        response = {
            "id": f"chatcmpl-{uuid.uuid4().hex}", "object": "chat.completion", "created": 0,
            "model": self.model, "choices": [choice],
            "usage": {"prompt_tokens": len(prompt), "completion_tokens": len(sampled),
                      "total_tokens": len(prompt) + len(sampled)},
        }
        if request.get("return_token_ids"):
            response["prompt_token_ids"] = prompt
            choice["token_ids"] = sampled
        return 200, response

    def _reply(self, request: dict[str, Any]) -> Reply:
        if request["messages"][0]["role"] == "system":
            return self.script(request)
        tools = request.get("tools") or []  # a capability probe
        return Reply(calls=((tools[0]["function"]["name"], {"command": "ls"}),)) if tools else Reply(text=PROBE_REPLY)


def encode(text: str) -> list[int]:
    """Token ids of a text: its UTF-8 bytes, moved past LFM2's special ids."""
    return [byte + 100 for byte in text.encode()]


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content)
    return content or ""


def _body(text: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    rendered = ", ".join(f"{name}({', '.join(f'{k}={json.dumps(v)}' for k, v in sorted(args.items()))})"
                         for name, args in calls)
    return text + (f"<|tool_call_start|>[{rendered}]<|tool_call_end|>" if calls else "")


def _render(message: dict[str, Any]) -> str:
    calls = [(c["function"]["name"], json.loads(c["function"]["arguments"]))
             for c in message.get("tool_calls") or []]
    return f"<|im_start|>{message['role']}\n{_body(_text(message.get('content')), calls)}<|im_end|>\n"


def _logprobs(sampled: list[int], request: dict[str, Any]) -> list[dict[str, Any]]:
    temperature = float(request.get("temperature") or 1.0) or 1.0
    scaled = [logit / temperature for logit in LOGITS]
    log_sum = math.log(sum(math.exp(s) for s in scaled))
    best = [s - log_sum for s in scaled]
    wanted = int(request.get("top_logprobs") or 0)
    entries = []
    for token in sampled:
        top = [{"token": f"token_id:{token + i}", "logprob": lp, "bytes": None}
               for i, lp in enumerate(best[:wanted])]
        entries.append({"token": f"token_id:{token}", "logprob": best[0], "bytes": None, "top_logprobs": top})
    return entries


def _handler(engine: ScriptedEngine) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if self.path == "/health":
                self._send(200, {})
            elif self.path == "/v1/models":
                self._send(200, {"object": "list", "data": [{"id": engine.model, "object": "model",
                                                            "max_model_len": engine.max_model_len}]})
            else:
                self._send(404, {"detail": "Not Found"})

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/v1/chat/completions":
                self._send(*engine.answer(request))
            else:
                self._send(404, {"detail": "Not Found"})

        def _send(self, status: int, payload: dict[str, Any]) -> None:
            body = json.dumps(payload).encode()
            try:
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
            except OSError:
                pass  # the caller went away, which some tests do on purpose

        def log_message(self, *_: object) -> None:
            """Quiet: the tests read `engine.requests` instead."""

    return Handler
