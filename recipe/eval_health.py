"""Is what an evaluation stands on alive: the policy server, the env server, and the route of the sandboxes to it?"""

from __future__ import annotations

import os
import time

import requests

from recipe.config import Settings

LOOKS, PAUSE = 3, 2.0  # a server under load may miss one look; seconds between two
TIMEOUT_S = 20.0


def addresses(settings: Settings) -> dict[str, str]:
    """What -> URL that answers 200 while it is alive."""
    from recipe.sandbox_setup import public_url

    found = {"the policy server (see logs/policy*.log of the run folder)": f"{settings.policy_url}/health",
             "the env server (see logs/env.log of the run folder)": f"{settings.env_url}/health"}
    if route := public_url(settings, os.environ):  # a forwarder's address only the env server knows, and watches
        found["the route of the sandboxes to the capture proxy"] = f"{route}/health"
    return found


def problem(settings: Settings, looks: int = LOOKS, pause: float = PAUSE) -> str | None:
    """None when all answer in one of `looks` looks, else one sentence that names what does not and how."""
    for look in range(looks):
        wrong = [f"{what} is down: {url} {answer}" for what, url in addresses(settings).items()
                 if (answer := _ask(url))]
        if not wrong:
            return None
        if look + 1 < looks:
            time.sleep(pause)
    return "; ".join(wrong)


def _ask(url: str) -> str | None:
    """What came instead of 200."""
    try:
        status = requests.get(url, timeout=TIMEOUT_S).status_code
    except requests.RequestException as err:
        return f"cannot be reached ({type(err).__name__})"
    return None if status == 200 else f"answers {status}"
