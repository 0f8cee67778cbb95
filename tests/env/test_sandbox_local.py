"""The local sandbox under each runtime: what is visible, what can be reached, what survives."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from harbor.models.task.config import EnvironmentConfig
from harbor.models.trial.paths import TrialPaths

from recipe import sandbox_process
from recipe.opencode_settings import LEAN_ENV
from recipe.sandbox_files import copy_file, copy_tree, inside, marked_processes, remove_tree, sweep
from recipe.sandbox_isolation import SandboxError, detect, sandbox_python
from recipe.sandbox_local import LocalSandbox

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture(params=["bwrap", "proot"])
def runtime(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def root():
    """A folder of sandboxes that any user can enter (proot runs the guests of a root server as nobody). Not below
    tmp_path: every pytest that starts meanwhile closes the folder above it to others."""
    folder = Path(tempfile.mkdtemp(prefix="sandbox-tests-"))
    folder.chmod(0o755)
    yield folder / "sandboxes"
    assert marked_processes(folder) == [], "a sandbox left processes behind"
    remove_tree(folder)


def make(root: Path, runtime: str, *, session_id: str = "trial__env", config: EnvironmentConfig | None = None,
         **kwargs) -> LocalSandbox:
    task = root.parent / "task/environment"
    (task / "input").mkdir(parents=True, exist_ok=True)
    (task / "input/data.csv").write_text("a,b\n1,2\n")
    trial = TrialPaths(root.parent / "trial")
    trial.mkdir()
    return LocalSandbox(environment_dir=task, environment_name="task", session_id=session_id, trial_paths=trial,
                        task_env_config=config or EnvironmentConfig(), root=root, run_id="test-run", runtime=runtime,
                        **kwargs)


def using(sandbox: LocalSandbox, body) -> None:
    async def run() -> None:
        await sandbox.start(False)
        try:
            await body(sandbox)
        finally:
            await sandbox.stop(delete=True)

    asyncio.run(run())


async def out(sandbox: LocalSandbox, command: str, **kwargs) -> str:
    result = await sandbox.exec(command, **kwargs)
    assert result.return_code == 0, (command, result.stdout, result.stderr)
    return result.stdout.strip()


def test_folders_home_and_python(root: Path, runtime: str) -> None:
    async def body(sandbox: LocalSandbox) -> None:
        assert await out(sandbox, "pwd; echo $HOME; cat ~/input/data.csv") == "/workdir\n/home/user\na,b\n1,2"
        assert await out(sandbox, "python3 -c 'import json, sqlite3, csv; print(6 * 7)'") == "42"
        assert await out(sandbox, "echo 5 > answer.txt; cd /tmp && touch x && cat /workdir/answer.txt") == "5"
        assert await out(sandbox, "cat /workdir/answer.txt; pwd", cwd="/home/user") == "5\n/home/user"
        assert await out(sandbox, "ls -d /logs/agent /logs/verifier /logs/artifacts") != ""
        assert (await sandbox.exec("exit 7")).return_code == 7
        assert await out(sandbox, "cat; echo end") == "end"  # stdin is /dev/null
        assert await sandbox.is_file("/workdir/answer.txt") and not await sandbox.is_dir("/workdir/answer.txt")

    using(make(root, runtime), body)
    assert [p.name for p in root.iterdir()] == [".etc"]


def test_nothing_of_the_machine_or_of_other_rollouts_is_visible(root: Path, runtime: str, monkeypatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    other = make(root, runtime, session_id="other__env")

    async def body(sandbox: LocalSandbox) -> None:
        await other.start(False)
        try:
            await out(other, "echo secret > /workdir/secret.txt")
            assert "hf_secret" not in await out(sandbox, "env; cat /proc/self/environ | tr '\\0' '\\n'")
            for path in (REPO, root.parent, root, other.folder, Path.home() / ".cache", Path("/etc/shadow")):
                seen = await sandbox.exec(f"ls -la {path} 2>/dev/null | grep -v '^total' | grep -vw '\\.\\.\\?$'")
                assert seen.stdout.strip() == "", (path, seen.stdout)
            assert await out(sandbox, "find /workdir /tmp /home -name secret.txt") == ""
            for path in ("/usr/planted", "/etc/planted", "/bin/planted"):
                if runtime == "bwrap" or os.geteuid() == 0:  # proot as an ordinary user has the machine's own modes
                    assert (await sandbox.exec(f"touch {path}")).return_code != 0 or runtime == "proot"
                assert not Path(path).exists()
        finally:
            await other.stop(delete=True)

    using(make(root, runtime), body)


def test_environment_is_merged_as_harbor_does(root: Path, runtime: str) -> None:
    async def body(sandbox: LocalSandbox) -> None:
        show = 'echo "$A $B $C"'
        with sandbox.scoped_exec_env({"B": "scoped", "C": "scoped"}):
            assert await out(sandbox, show, env={"B": "exec"}) == "persistent scoped scoped"
        assert await out(sandbox, show, env={"B": "exec"}) == "persistent exec"

    using(make(root, runtime, persistent_env={"A": "persistent", "B": "persistent"}), body)


def test_workdir_of_the_task(root: Path, runtime: str) -> None:
    async def body(sandbox: LocalSandbox) -> None:
        assert await out(sandbox, "pwd; touch here") == "/srv/work"

    using(make(root, runtime, config=EnvironmentConfig(workdir="/srv/work")), body)


STREAM = """
import sys, urllib.request
for line in urllib.request.urlopen(sys.argv[1], timeout=60):
    print(line.decode().strip(), flush=True)
    open("seen", "w").close()
"""


async def until(what: Callable[[], object], seconds: float = 120) -> None:
    """Waits for an event, as long as a loaded machine may need."""
    async with asyncio.timeout(seconds):
        while not what():
            await asyncio.sleep(0.02)


def test_capture_proxy_is_reached_under_the_same_url_and_streams(root: Path, runtime: str) -> None:
    async def run() -> None:
        async def sse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            """Two events as an engine streams: the second once the first was read."""
            seen = sandbox.folder / "workdir/seen"
            await reader.readuntil(b"\r\n\r\n")
            seen.unlink(missing_ok=True)
            head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
            writer.write(f"{head}data: one\n".encode())
            await until(seen.exists)
            writer.write(b"data: two\n")
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(sse, "127.0.0.1", 0)
        other = await asyncio.start_server(sse, "127.0.0.1", 0)
        port, closed = (s.sockets[0].getsockname()[1] for s in (server, other))
        sandbox = make(root, runtime, capture_port=port)
        await sandbox.start(False)
        try:
            (sandbox.folder / "workdir/stream.py").write_text(STREAM)
            for _ in range(2):  # every exec reaches it, not only the first
                lines = (await out(sandbox, f"python3 stream.py http://127.0.0.1:{port}/")).splitlines()
                assert lines == ["data: one", "data: two"]
            if runtime == "bwrap":
                result = await sandbox.exec(f"python3 stream.py http://127.0.0.1:{closed}/")
                assert "Connection refused" in result.stderr, "another port of this machine can be reached"
                interfaces = "import socket; print([name for _, name in socket.if_nameindex()])"
                assert "lo" in await out(sandbox, f'python3 -c "{interfaces}"')
                routes = await out(sandbox, "cat /proc/net/route")
                assert len(routes.splitlines()) <= 1, routes
        finally:
            await sandbox.stop(delete=True)
            server.close()
            other.close()

    asyncio.run(run())


def test_timeout_and_cancel_kill_the_tree(root: Path, runtime: str) -> None:
    tree = "setsid sh -c 'sleep 300' & sh -c 'sleep 300 & wait' & wait"

    async def body(sandbox: LocalSandbox) -> None:
        with pytest.raises(RuntimeError, match="timed out after 1 seconds"):
            await sandbox.exec(tree, timeout_sec=1)
        assert marked_processes(sandbox.folder) == []
        task = asyncio.create_task(sandbox.exec(tree))
        await until(lambda: marked_processes(sandbox.folder))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert marked_processes(sandbox.folder) == []

    using(make(root, runtime), body)


def test_a_killed_proot_leaves_no_folder(root: Path) -> None:
    def folders() -> list[Path]:
        return [path for pid in pids for path in Path("/tmp").glob(f"proot-{pid}-*")]

    pids: list[int] = []

    async def body(sandbox: LocalSandbox) -> None:
        task = asyncio.create_task(sandbox.exec("touch /workdir/runs; sleep 300"))
        await until((sandbox.folder / "workdir/runs").exists)
        pids.extend(sandbox._running)
        assert folders(), "proot keeps it elsewhere: remove it there"
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    using(make(root, "proot"), body)
    assert pids and not folders()


def test_background_processes_end_with_their_command(root: Path, runtime: str) -> None:
    async def body(sandbox: LocalSandbox) -> None:
        late = "until [ -e go ]; do sleep 0.05; done; echo 1 > /logs/verifier/reward.txt"
        assert await out(sandbox, f"({late}) & setsid sleep 300 & disown -a; echo done") == "done"
        (sandbox.folder / "workdir/go").touch()
        await asyncio.sleep(1)
        assert not await sandbox.is_file("/logs/verifier/reward.txt")

    using(make(root, runtime), body)


SERVER = """
import asyncio, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from recipe import sandbox_isolation
from test_sandbox_local import make
async def main():
    sandbox = make(Path({root!r}), {runtime!r})
    await sandbox.start(False)
    print(sandbox.folder, flush=True)
    sandbox_isolation._LAUNCH = {launch!r} + sandbox_isolation._LAUNCH
    await sandbox.exec("touch /workdir/ran; setsid sleep 300 & sleep 300")
asyncio.run(main())
"""


def test_killed_server_leaves_nothing_that_the_sweep_does_not_find(root: Path, runtime: str) -> None:
    code = SERVER.format(tests=str(Path(__file__).parent), root=str(root), runtime=runtime, launch="")
    server = subprocess.Popen([sys.executable, "-c", code], cwd=REPO, stdout=subprocess.PIPE, text=True)
    try:
        folder = Path(server.stdout.readline().strip())
        asyncio.run(until(lambda: marked_processes(root)))
    finally:
        server.send_signal(signal.SIGKILL)
        server.wait()
        server.stdout.close()
    if runtime == "bwrap":  # dies with its parent, no sweep needed
        asyncio.run(until(lambda: not marked_processes(root)))
    assert folder.is_dir()
    swept = subprocess.run([sys.executable, "-m", "recipe.sandbox_local", "sweep", "--run-dir", str(root.parent)],
                           cwd=REPO, capture_output=True, text=True, env={**os.environ, "KEEP_SANDBOX": ""})
    assert swept.returncode == 0 and "1 sandboxes removed" in swept.stdout, (swept.stdout, swept.stderr)
    assert marked_processes(root) == [] and not folder.exists()


def test_server_killed_before_bwrap_has_tied_itself_to_it(root: Path) -> None:
    """The launcher waits for its parent's death here: bwrap then starts as an orphan, and the command must not run."""
    orphan = 'while read -r _ _ _ parent _ </proc/$$/stat; [ "$parent" = "$PPID" ]; do sleep 0.05; done; '
    code = SERVER.format(tests=str(Path(__file__).parent), root=str(root), runtime="bwrap", launch=orphan)
    server = subprocess.Popen([sys.executable, "-c", code], cwd=REPO, stdout=subprocess.PIPE, text=True)
    try:
        folder = Path(server.stdout.readline().strip())
        asyncio.run(until(lambda: marked_processes(root)))
    finally:
        server.kill()
        server.wait()
        server.stdout.close()
    deadline = time.monotonic() + 60
    while marked_processes(root) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = marked_processes(root)
    sweep(root, "test-run")
    assert left == [] and not (folder / "workdir/ran").exists()


def test_links_of_the_agent_are_not_followed(root: Path, runtime: str, tmp_path: Path) -> None:
    secret = tmp_path / "host-secret"
    secret.mkdir()
    (secret / "key").write_text("secret")

    async def body(sandbox: LocalSandbox) -> None:
        await out(sandbox, f"ln -s {secret} /logs/link; ln -s {secret}/key /logs/agent/key; mkfifo /logs/agent/pipe; "
                           f"echo ok > /logs/agent/log.txt; ln -s {secret}/key /workdir/target")
        with pytest.raises(SandboxError, match="link"):
            await sandbox.download_file("/logs/agent/key", tmp_path / "stolen")
        with pytest.raises(SandboxError, match="link"):
            await sandbox.download_file("/logs/link/key", tmp_path / "stolen")
        with pytest.raises(SandboxError, match="link"):
            await sandbox.download_dir("/logs/link", tmp_path / "stolen")
        assert not (tmp_path / "stolen").exists()
        await sandbox.download_dir("/logs/agent", tmp_path / "logs")
        assert [p.name for p in (tmp_path / "logs").iterdir()] == ["log.txt"]
        (tmp_path / "upload").write_text("upload")
        await sandbox.upload_file(tmp_path / "upload", "/workdir/target")  # replaces the link
        assert (secret / "key").read_text() == "secret"
        assert await out(sandbox, "cat /workdir/target") == "upload"
        for path in ("/etc/passwd", "/usr/bin/x", "/workdir/../../x", "relative"):
            with pytest.raises(SandboxError):
                await sandbox.upload_file(tmp_path / "upload", path)

    using(make(root, runtime), body)


def test_tests_arrive_clean_and_are_the_verifiers(root: Path, runtime: str, tmp_path: Path) -> None:
    (tmp_path / "tests/sub").mkdir(parents=True)
    (tmp_path / "tests/test.sh").write_text("#!/bin/bash\ncat /tests/sub/data; ls /tests\n")
    (tmp_path / "tests/sub/data").write_text("data\n")

    async def body(sandbox: LocalSandbox) -> None:
        await sandbox.exec("echo 'print(1)' > /tests/json.py; mkdir /tests/sub")
        await sandbox.upload_dir(tmp_path / "tests", "/tests")
        await sandbox.upload_file(tmp_path / "tests/test.sh", "/tests/second.sh")
        await out(sandbox, "chmod +x /tests/test.sh")
        assert await out(sandbox, "/tests/test.sh") == "data\nsecond.sh\nsub\ntest.sh"

    using(make(root, runtime), body)


def test_output_is_bounded(root: Path, monkeypatch) -> None:
    monkeypatch.setattr(sandbox_process, "OUTPUT_LIMIT", 1000)

    async def body(sandbox: LocalSandbox) -> None:
        text = await out(sandbox, "echo first; head -c 3000000 /dev/zero | tr '\\0' x; echo; echo last")
        assert text.startswith("first") and text.endswith("last") and "bytes left out" in text and len(text) < 1200

    using(make(root, "bwrap"), body)


def test_kept_folder(root: Path) -> None:
    sandbox = make(root, "bwrap", keep=True)

    async def body(sandbox: LocalSandbox) -> None:
        await out(sandbox, "echo kept > ~/file")

    using(sandbox, body)
    assert (sandbox.folder / "home/user/file").read_text() == "kept\n"
    assert sweep(root, keep=True) == (0, 0) and sandbox.folder.is_dir()
    assert sweep(root) == (0, 1) and not sandbox.folder.exists()


def test_binary_on_path_cannot_be_changed(root: Path, tmp_path: Path) -> None:
    binary = tmp_path / "agent"
    binary.write_text("#!/bin/sh\necho agent 1.0\n")
    binary.chmod(0o755)

    async def body(sandbox: LocalSandbox) -> None:
        assert await out(sandbox, "opencode --version") == "agent 1.0"
        assert (await sandbox.exec("echo x > $(command -v opencode)")).return_code != 0

    using(make(root, "bwrap", opencode=binary), body)
    assert "agent 1.0" in binary.read_text()


def test_the_real_agent_starts_with_the_lean_settings(root: Path) -> None:
    binary = os.environ.get("OPENCODE_BIN")
    assert binary, "set OPENCODE_BIN to the pinned OpenCode binary (setup.sh prints it)"

    async def body(sandbox: LocalSandbox) -> None:
        assert json.loads(await out(sandbox, f"cat {LEAN_ENV['OPENCODE_MODELS_PATH']}")) == {}
        stock = await out(sandbox, "opencode models", env=LEAN_ENV | {"OPENCODE_MODELS_PATH": ""})
        lean = await out(sandbox, "opencode models", env=LEAN_ENV)  # Bun exits 1 on a variable that it does not know
        assert len(stock.splitlines()) > len(lean.splitlines()), (stock, lean)

    using(make(root, "bwrap", opencode=binary), body)


def test_python_outside_the_system_is_bound_with_its_prefix(root: Path) -> None:
    prefix, binary = sandbox_python(sys.executable)

    async def body(sandbox: LocalSandbox) -> None:
        version = await out(sandbox, "python3 -c 'import sys, ssl; print(sys.version.split()[0])'")
        assert version == sys.version.split()[0]

    if prefix:
        assert str(REPO) not in prefix and Path(binary).is_file()
    using(make(root, "bwrap", python=sys.executable), body)


def test_failed_start_leaves_nothing(root: Path) -> None:
    sandbox = make(root, "bwrap", config=EnvironmentConfig(workdir="/workdir/../../outside"))
    with pytest.raises(SandboxError, match="without '..'"):
        asyncio.run(sandbox.start(False))
    assert not sandbox.folder.exists()


def test_paths_and_copies(tmp_path: Path) -> None:
    assert inside(tmp_path, "/a/b") == tmp_path / "a/b"
    for wrong in ("a", "/a/../b"):
        with pytest.raises(SandboxError):
            inside(tmp_path, wrong)
    tree = tmp_path / "tree"
    (tree / "locked").mkdir(parents=True)
    (tree / "locked/file").write_text("x")
    (tree / "locked").chmod(0)
    (tree / "link").symlink_to("/etc")
    with pytest.raises(SandboxError, match="link"):
        copy_file(tree / "link", tmp_path / "copy")
    (tree / "locked").chmod(0o755)
    assert copy_tree(tree, tmp_path / "copy") == ["link"]
    assert copy_tree(tree, tmp_path / "copy", keep_links=True) == []
    assert os.readlink(tmp_path / "copy/link") == "/etc"
    (tree / "locked").chmod(0)
    remove_tree(tree)
    assert not tree.exists() and Path("/etc").is_dir()


def test_a_folder_that_another_thread_removes_at_the_same_time_is_no_error(tmp_path: Path, monkeypatch) -> None:
    """A sandbox that is being stopped while the sweep of an ending server comes by."""
    tree, unlink = tmp_path / "tree", os.unlink
    (tree / "folder").mkdir(parents=True)
    for name in ("a", "folder/b"):
        (tree / name).touch()

    def late(*args, **kwargs) -> None:
        monkeypatch.undo()
        shutil.rmtree(tree)
        unlink(*args, **kwargs)

    monkeypatch.setattr(os, "unlink", late)
    remove_tree(tree)
    assert not tree.exists() and os.unlink is unlink


def test_no_runtime_is_a_clear_error(monkeypatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    detect.cache_clear()
    try:
        with pytest.raises(SandboxError, match="bwrap and nsenter not installed.*apt-get install -y bubblewrap proot"):
            detect("auto")
    finally:
        detect.cache_clear()


def test_check_names_what_proot_loses() -> None:
    for runtime, expected in (("bwrap", "only the capture proxy"), ("proot", "no network isolation")):
        done = subprocess.run([sys.executable, "-m", "recipe.sandbox_local", "check", "--runtime", runtime],
                              cwd=REPO, capture_output=True, text=True)
        assert done.returncode == 0 and expected in done.stdout, (done.stdout, done.stderr)
