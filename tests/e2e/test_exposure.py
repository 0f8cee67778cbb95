"""What the public port answers, to whom, and what listens where."""

from __future__ import annotations

from pathlib import Path

import pytest
import requests
from env_server_process import ADMIN_KEY, EnvServer

CONTROL_PLANE = ["/", "/health", "/metadata", "/schema", "/state", "/reset", "/step", "/mcp", "/ws", "/web", "/docs",
                 "/openapi.json", "/envs", "/harbor_env/splits", "/harbor_env/num_tasks", "/harbor_env/task",
                 "/v1/models", "/v1/chat/completions", "/sessions", "/captures", "//harbor_env/splits"]


@pytest.mark.parametrize("path", CONTROL_PLANE)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_public_port_serves_nothing_but_capture(server: EnvServer, method: str, path: str):
    prepared = requests.Request(method, server.public_url, json={} if method == "POST" else None).prepare()
    prepared.url = f"http://127.0.0.1:{server.settings.public_port}{path}"  # as written: no path normalisation
    assert requests.Session().send(prepared, timeout=120).status_code == 404


def test_climbing_out_of_the_mount_meets_the_proxy(server: EnvServer):
    prepared = requests.Request("GET", server.public_url).prepare()
    prepared.url = f"{server.capture_url}/../harbor_env/splits"
    response = requests.Session().send(prepared, timeout=120)
    assert response.status_code == 405 and "train" not in response.text, "the proxy's catch-all takes POST only"


def test_control_plane_is_where_it_should_be(server: EnvServer):
    assert requests.get(server.settings.env_url + "/harbor_env/splits", timeout=120).json()[0]["name"] == "train"
    listening = {}  # port -> addresses, as the kernel sees it
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        address, state = line.split()[1], line.split()[3]
        if state == "0A":
            listening.setdefault(int(address.split(":")[1], 16), set()).add(address.split(":")[0])
    assert listening[server.settings.env_port] == {"0100007F"}, "the control plane must listen on loopback only"
    assert listening[server.settings.public_port] == {"0100007F"}, "with local sandboxes nobody else needs this port"


MANAGEMENT = [("POST", "/sessions"), ("GET", "/sessions"), ("GET", "/sessions/x"), ("DELETE", "/sessions/x"),
              ("GET", "/sessions/x/rollout"), ("GET", "/sessions/x/trace_entries")]


@pytest.mark.parametrize(("method", "path"), MANAGEMENT)
@pytest.mark.parametrize("key", [None, "wrong"])
def test_management_needs_the_admin_key(server: EnvServer, method: str, path: str, key: str | None):
    headers = {"x-api-key": key} if key else {}
    body = {} if method == "POST" else None
    assert requests.request(method, server.capture_url + path, headers=headers, json=body,
                            timeout=120).status_code == 401


def test_management_opens_to_the_admin_key(server: EnvServer):
    response = requests.get(server.capture_url + "/sessions", headers={"x-api-key": ADMIN_KEY}, timeout=120)
    assert response.status_code == 200 and "sessions" in response.json()


@pytest.mark.parametrize("headers", [{}, {"x-api-key": "unknown"}, {"Authorization": "Bearer unknown"},
                                     {"Authorization": f"Bearer {ADMIN_KEY}"}])
def test_unknown_session_key_gets_401_and_no_model_call(server: EnvServer, engine, headers):
    body = {"model": "scripted", "messages": [{"role": "user", "content": "hello"}]}
    response = requests.post(server.capture_url + "/v1/chat/completions", headers=headers, json=body, timeout=120)
    assert response.status_code == 401
    assert engine.requests == []


def test_the_admin_key_is_in_no_log(server: EnvServer):
    assert ADMIN_KEY not in server.log.read_text()
