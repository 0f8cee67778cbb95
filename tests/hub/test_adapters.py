"""Adapters and checkpoints of a Hub repository: which are whole, at which commit they are read, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hub_double import HubDouble

from recipe import adapters, checkpoints
from recipe import hub as recipe_hub
from recipe.adapters import AdapterError, HubCheckpoints
from recipe.config import Settings

REPO = "me/adapter"
WEIGHTS, STATE = b"weights" * 3000, b"optimizer" * 3000


@pytest.fixture(autouse=True)
def no_waits(monkeypatch):
    monkeypatch.setattr(recipe_hub, "FIRST_WAIT", 0.01)


def checkpoint_files(tmp_path: Path, step: int, weights: bytes = WEIGHTS) -> dict[str, bytes]:
    """Path in the repository -> content of a sealed checkpoint."""
    folder = tmp_path / weights[:5].decode() / f"checkpoint-{step}"
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in {"adapter_config.json": b"{}", "adapter_model.safetensors": weights, "optimizer.pt": STATE,
                          "trainer_state.json": json.dumps({"global_step": step}).encode()}.items():
        (folder / name).write_bytes(content)
    checkpoints.seal(folder, Settings.load({}))
    return {f"checkpoint-{step}/{path.name}": path.read_bytes() for path in folder.iterdir()}


def test_a_checkpoint_pushed_in_two_commits_is_seen_whole_or_not_at_all(hub: HubDouble, tmp_path):
    source = HubCheckpoints(REPO, tmp_path / "downloads")
    assert source.look() == {}, "training has not made the repository yet"
    repo = hub.repo(REPO)
    files = checkpoint_files(tmp_path, 100)
    for late in ("manifest.json", "adapter_model.safetensors", "optimizer.pt"):
        repo.add("start", {"checkpoint-100/": None})
        repo.add("first half", {p: c for p, c in files.items() if not p.endswith(late)})
        assert source.look() == {} and sorted(source.incomplete) == [100], late
        whole = repo.add("second half", files, {"checkpoint-100/adapter_model.safetensors"})
        assert sorted(source.look()) == [100] and source.incomplete == {}
        found = source.get(100)
        assert (found.folder / "adapter_model.safetensors").read_bytes() == WEIGHTS
        assert found.source == f"{REPO}/checkpoint-100@{whole.sha}"
        assert not (found.folder / "optimizer.pt").exists(), "who evaluates does not download the optimizer"


def test_other_weights_of_the_same_size_under_the_old_manifest_are_refused(hub: HubDouble, tmp_path):
    repo = hub.repo(REPO)
    repo.add("whole", checkpoint_files(tmp_path, 100))
    new = checkpoint_files(tmp_path, 100, WEIGHTS[::-1])
    repo.add("first half", {p: c for p, c in new.items() if p.endswith(".safetensors")})
    source = HubCheckpoints(REPO, tmp_path / "downloads")
    source.look()
    with pytest.raises(AdapterError, match="adapter_model.safetensors is not what its manifest says"):
        source.get(100)
    assert source.look() == {} and "is not what" in source.incomplete[100]
    repo.add("second half", new)
    assert source.look() == {100: adapters.adapter_digest(source.get(100).folder)}


def test_a_checkpoint_is_read_at_the_commit_that_was_listed(hub: HubDouble, tmp_path):
    repo = hub.repo(REPO)
    listed = repo.add("whole", checkpoint_files(tmp_path, 100))
    source = HubCheckpoints(REPO, tmp_path / "downloads")
    digest = source.look()[100]
    repo.add("another run", checkpoint_files(tmp_path, 100, WEIGHTS[::-1]))
    found = source.get(100)
    assert adapters.adapter_digest(found.folder) == digest and found.source.endswith(listed.sha)
    assert source.look()[100] != digest


def test_a_poll_of_an_unchanged_repository_is_one_request_and_survives_faults(hub: HubDouble, tmp_path):
    hub.repo(REPO).add("whole", checkpoint_files(tmp_path, 100))
    source = HubCheckpoints(REPO, tmp_path / "downloads")
    for fault in (429, 503, "reset"):
        hub.fail(1, fault, "GET /api/")
        hub.fail(1, fault, "GET .*manifest.json")
        hub.fail(1, fault, "GET .*safetensors")
    assert sorted(source.look()) == [100] and source.get(100)
    hub.requests.clear()
    assert sorted(source.look()) == [100] and len(hub.requests) == 1


@pytest.mark.parametrize(("text", "place", "results"), [
    (REPO, "", "final_results"), (f"{REPO}/checkpoint-100", "checkpoint-100", "checkpoint-100_final_results"),
    (f"{REPO}/checkpoint-100@{{sha}}", "checkpoint-100", "checkpoint-100_{sha8}_final_results"),
    (f"{REPO}@{{sha}}", "", "{sha8}_final_results")])
def test_an_adapter_by_name(hub: HubDouble, tmp_path, capsys, text, place, results):
    files = checkpoint_files(tmp_path, 100)
    root = {p.split("/")[1]: c for p, c in files.items() if "adapter_" in p}
    sha = hub.repo(REPO).add("whole", files | root).sha
    if "{sha}" in text:
        hub.repo(REPO).add("later", checkpoint_files(tmp_path, 100, WEIGHTS[::-1]))
    text, results = text.format(sha=sha), results.format(sha8=sha[:8])
    assert adapters.main([text, "--into", str(tmp_path / "into")]) == 0
    folder, source, name = capsys.readouterr().out.splitlines()
    assert (Path(folder) / "adapter_model.safetensors").read_bytes() == WEIGHTS
    assert source == f"{REPO}{'/' if place else ''}{place}@{sha}" and name == results


def test_what_is_no_adapter_and_what_can_not_be_reached_end_differently(hub: HubDouble, tmp_path, capsys, monkeypatch):
    hub.repo(REPO).add("half", {"checkpoint-100/adapter_config.json": b"{}"})
    into = ["--into", str(tmp_path / "into")]
    for wrong, message in ((f"{REPO}/checkpoint-100", "lacks adapter_model.safetensors"),
                           (f"{REPO}@nowhere", "nowhere"), ("me/absent", "does not exist"), ("absent", "neither")):
        assert adapters.main([wrong, *into]) == 64
        assert message in capsys.readouterr().err
    monkeypatch.setattr(recipe_hub, "ATTEMPTS", 2)
    hub.fail(1000, 503, "GET /api/")
    assert adapters.main([REPO, *into]) == 69
    assert "still failing after 2 attempts" in capsys.readouterr().err
