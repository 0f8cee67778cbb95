"""Does the way from a remote sandbox to the capture proxy lead to *this* capture proxy?

A forwarder or a proxy that has lost its job still answers: with an error page, or with another job's server. So the
public port serves CHALLENGE, which signs a caller's random text with a secret that only this process has, and
`RouteCheck` asks it through the public URL: at the start, before any rollout, and for as long as the server runs. The
answer also says which headers arrived: the key of a session travels in x-api-key, because a proxy on the way may take
Authorization for itself.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import time
from typing import Any

from recipe.gate import Gate

CHALLENGE = "/route-check"
CAUSE = "route"
PROBE_KEY = "route-check"  # stands for a session's key
TIMEOUT_S = 20.0
START_LIMIT_S = 180.0  # a proxy may need a moment to see a port that has just opened
RETRY_S = 5.0


class RouteLost(RuntimeError):
    """The public URL does not lead to this capture proxy; the message says what came instead."""


def _sign(secret: bytes, text: str) -> str:
    return hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()


class RouteCheck:
    """The challenge of one server, and the loop that meets it through `url`, the capture proxy's public URL."""

    def __init__(self, url: str, gate: Gate, every: float) -> None:
        self.url, self.gate, self.every = url.rstrip("/"), gate, every
        self._secret = secrets.token_bytes(32)

    def route(self, prefix: str) -> Any:
        """The Starlette route that answers challenges below `prefix`."""
        from starlette.responses import JSONResponse
        from starlette.routing import Route

        async def answer(request: Any) -> Any:
            return JSONResponse(
                {"signed": _sign(self._secret, request.query_params.get("nonce", "")[:200]),
                 "x_api_key": request.headers.get("x-api-key") == PROBE_KEY,
                 "authorization": request.headers.get("authorization") == f"Bearer {PROBE_KEY}"},
                headers={"Cache-Control": "no-store"})

        return Route(prefix + CHALLENGE, answer, methods=["GET"])

    async def ask(self) -> str:
        """One look at the public URL; says what was found. Raises RouteLost."""
        import httpx

        nonce, began = secrets.token_hex(16), time.monotonic()
        try:
            async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:  # a new connection, as an agent makes
                response = await client.get(self.url + CHALLENGE, params={"nonce": nonce}, headers={
                    "x-api-key": PROBE_KEY, "Authorization": f"Bearer {PROBE_KEY}"})
        except httpx.HTTPError as err:
            raise RouteLost(f"{self.url} cannot be reached ({type(err).__name__}: {err})") from err
        try:
            body = response.json() if response.status_code == 200 else {}
        except ValueError:
            body = {}
        if not isinstance(body, dict) or not hmac.compare_digest(str(body.get("signed")), _sign(self._secret, nonce)):
            raise RouteLost(f"{self.url} does not lead to this capture proxy: HTTP {response.status_code}, "
                            f"{' '.join(response.text.split())[:120]!r}")
        if not body["x_api_key"]:
            raise RouteLost(f"the way to {self.url} takes the x-api-key header away, by which the proxy knows a "
                            "rollout: use another way (PUBLIC_URL)")
        return (f"answered in {(time.monotonic() - began) * 1000:.0f} ms; Authorization is "
                f"{'forwarded' if body['authorization'] else 'taken away on the way'}, x-api-key arrives")

    async def first(self) -> str:
        """`ask` until it succeeds. Raises RouteLost after START_LIMIT_S."""
        until = time.monotonic() + START_LIMIT_S
        while True:
            try:
                return await self.ask()
            except RouteLost as err:
                if time.monotonic() + RETRY_S > until:
                    raise
                print(f"[env] route: {err}; asking again", flush=True)
            await asyncio.sleep(RETRY_S)

    async def confirm(self) -> None:
        """Closes the gate when two looks in a row fail, opens it when one succeeds."""
        try:
            await self.ask()
        except RouteLost:
            await asyncio.sleep(min(RETRY_S, self.every))
            try:
                await self.ask()
            except RouteLost as err:
                self.gate.close(CAUSE, f"The route of the sandboxes is lost: {err}. It is asked again every "
                                       f"{min(RETRY_S, self.every):.0f} s; if it stays away the watchdog ends the run.")
                return
        self.gate.open(CAUSE, f"{self.url} leads to this capture proxy again.")

    async def watch(self, limit: float) -> None:
        """`confirm` every `every` seconds, more often while the route is lost. Raises RouteLost once the gate, for
        whatever cause, has been closed for `limit` seconds: the last resort when no watchdog looks."""
        while True:
            await asyncio.sleep(min(RETRY_S, self.every) if self.gate.reason() else self.every)
            await self.confirm()
            if self.gate.closed_for() > limit:
                raise RouteLost(f"no rollout could be started for {limit:.0f} s. {self.gate.reason()}")
