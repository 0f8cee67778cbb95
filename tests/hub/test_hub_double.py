"""The double answers the real client as the Hub does."""

from __future__ import annotations

import concurrent.futures
from pathlib import Path

import pytest
from huggingface_hub import CommitOperationAdd, HfApi, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

BIG = bytes(range(256)) * 40


def add(path: str, content: bytes) -> CommitOperationAdd:
    return CommitOperationAdd(path, content)


def test_a_folder_travels_there_and_back(hub, tmp_path):
    api = HfApi()
    assert api.whoami()["name"] == "me"
    for _ in range(2):
        api.create_repo("me/a", exist_ok=True, private=True)
    (tmp_path / "up/sub").mkdir(parents=True)
    (tmp_path / "up/w.safetensors").write_bytes(BIG)
    (tmp_path / "up/sub/a.json").write_text("{}")
    first = api.upload_folder(repo_id="me/a", folder_path=tmp_path / "up", path_in_repo="x")
    assert hub.repo("me/a").files() == {"x/w.safetensors": BIG, "x/sub/a.json": b"{}"}
    assert hub.repo("me/a").commits[-1].lfs == {"x/w.safetensors"} and hub.repo("me/a").private
    api.create_commit("me/a", [add("x/sub/a.json", b"[]")], commit_message="later")
    tree = {e.path: e for e in api.list_repo_tree("me/a", recursive=True, revision=first.oid)}
    assert tree["x/w.safetensors"].lfs.size == len(BIG) and "x/sub" in tree
    root = snapshot_download("me/a", revision=first.oid, allow_patterns="x/*", local_dir=tmp_path / "down")
    assert (tmp_path / "down/x/w.safetensors").read_bytes() == BIG
    assert (tmp_path / "down/x/sub/a.json").read_text() == "{}", "an old commit stays what it was"
    assert str(root) == str(tmp_path / "down")
    assert Path(hf_hub_download("me/a", "x/sub/a.json")).read_text() == "[]"


def test_what_is_missing_or_forbidden_says_so(hub):
    api = HfApi()
    hub.repo("me/a").add("files", {"a": b"1"})
    hub.repo("other/gated", gated=True).add("files", {"config.json": b"{}"})
    hub.tokens["hf_read"] = "read"
    with pytest.raises(RepositoryNotFoundError):
        api.repo_info("me/nothing")
    with pytest.raises(RevisionNotFoundError):
        api.repo_info("me/a", revision="f" * 40)
    with pytest.raises(EntryNotFoundError):
        hf_hub_download("me/a", "b")
    with pytest.raises(GatedRepoError):
        hf_hub_download("other/gated", "config.json")
    for call in (lambda: HfApi(token="hf_read").create_commit("me/a", [add("b", b"")], commit_message="b"),
                 lambda: HfApi(token="hf_read").create_repo("me/b"),
                 lambda: api.auth_check("other/gated", write=True)):
        with pytest.raises(HfHubHTTPError, match="403"):
            call()


def test_a_stale_parent_is_refused_and_parallel_commits_stack(hub):
    api = HfApi()
    old = hub.repo("me/a").commits[-1].sha
    api.create_commit("me/a", [add("a", b"1")], commit_message="a", parent_commit=old)
    with pytest.raises(HfHubHTTPError, match="412"):
        api.create_commit("me/a", [add("b", b"1")], commit_message="b", parent_commit=old)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda i: api.create_commit("me/a", [add(f"f{i}", b"1")], commit_message="f"), range(8)))
    assert len(hub.repo("me/a").commits) == 10 and len(hub.repo("me/a").files()) == 9


@pytest.mark.parametrize("fault", [429, 503, "reset", "cut"])
def test_injected_faults_reach_the_client(hub, fault):
    api = HfApi()
    hub.repo("me/a")
    hub.fail(1, fault, "POST .*/commit/")
    with pytest.raises(Exception, match="429|503|reset|[Dd]isconnected|closed"):
        api.create_commit("me/a", [add("a", b"x" * 4000)], commit_message="a")
    assert hub.repo("me/a").files() == {}
    api.create_commit("me/a", [add("a", b"1")], commit_message="a")
    hub.fail(2, fault, "PUT /lfs/")
    api.create_commit("me/a", [add("w.safetensors", BIG)], commit_message="the client itself repeats uploads")
    assert hub.repo("me/a").files()["w.safetensors"] == BIG
