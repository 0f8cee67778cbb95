"""The verifier of RECIPE=deepcoder in the local sandbox, under each runtime: scores, and solutions that mean harm."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from test_sandbox_local import make

from recipe import deepcoder, stdin_verifier
from recipe.deepcoder import Problem
from recipe.sandbox_files import marked_processes, remove_tree

SECRET = "31415926"
TESTS = (("1 2\n", "3\n"), ("5 6", "11"), ("7 8\n", f"{SECRET}\n"), ("9 1\n", "10\r\n\r\n"))
SUM = "print(sum(map(int, input().split())))\n"


@pytest.fixture
def root():
    """A folder of sandboxes that any user can enter (proot runs the guests of a root server as nobody)."""
    folder = Path(tempfile.mkdtemp(prefix="verifier-"))
    folder.chmod(0o755)
    yield folder / "sandboxes"
    assert marked_processes(folder) == [], "a sandbox left processes behind"
    assert [p.name for p in (folder / "sandboxes").iterdir()] == [".etc"], "a sandbox left files behind"
    remove_tree(folder)


def grade(root: Path, runtime: str, solution: str | None, *, tests=TESTS, agent: str = ":", seconds: int = 60,
          after: str = "true") -> tuple[float | None, str]:
    """Reward (None: ungraded) of `solution` as Harbor's verifier finds it, and what the verifier printed.

    `seconds` is the time of a test, long enough for a busy machine. `agent` is a command that ran before the tests were
    uploaded, `after` one that runs after the verifier.
    """
    folder = root.parent / "task/tests"
    folder.mkdir(parents=True)
    for path, text in deepcoder.files(Problem("sum", tuple(tests))).items():
        if path.startswith("tests/"):
            if path.endswith("verify.py"):
                text = text.replace("TEST_SECONDS = 6", f"TEST_SECONDS = {seconds}").replace("GRACE = 5", "GRACE = 1")
            (folder.parent / path).write_text(text)
    (folder / "test.sh").chmod(0o755)

    async def body() -> tuple[float | None, str]:
        sandbox = make(root, runtime)
        await sandbox.start(False)
        try:
            if solution is not None:
                (root.parent / "solution.py").write_text(solution)
                await sandbox.upload_file(root.parent / "solution.py", "/workdir/solution.py")
            await sandbox.exec(agent)
            await sandbox.exec("rm -f -- /logs/verifier/reward.txt /logs/verifier/reward.json")
            await sandbox.upload_dir(folder, "/tests")
            await sandbox.exec("(/tests/test.sh) > /logs/verifier/test-stdout.txt 2>&1", timeout_sec=300)
            assert (await sandbox.exec(after)).return_code == 0
            logs = root.parent / "logs"
            await sandbox.download_dir("/logs/verifier", logs)
        finally:
            await sandbox.stop(delete=True)
        assert not (logs / "reward.json").exists(), "Harbor would take it before reward.txt"
        said = (logs / "test-stdout.txt").read_text() if (logs / "test-stdout.txt").exists() else "its log is gone"
        return (float((logs / "reward.txt").read_text()) if (logs / "reward.txt").exists() else None), said

    return asyncio.run(body())


BOTH = ("bwrap", "proot")


@pytest.mark.parametrize("runtime", BOTH)
@pytest.mark.parametrize(("solution", "reward"), [
    (SUM, 0.75), (f"x = sum(map(int, input().split()))\nprint({SECRET} if x == 15 else x, '  \\n\\n')\n", 1.0),
    ("import nothing", 0.0), (None, 0.0)])
def test_the_score_is_the_fraction_of_tests_that_pass(root, runtime, solution, reward):
    found, said = grade(root, runtime, solution)
    assert found == reward, said


def test_words_count_not_the_space_between_them():
    assert stdin_verifier.same("1 2\r\n3  \n\n\n", "1 2\n3") and stdin_verifier.same("1\n2 3", "1 2\n3\n")
    assert not stdin_verifier.same("12", "1 2") and not stdin_verifier.same("1 2", "1 2 3")


PLANT = """
for name in ("reward.txt", "reward.json"):
    try:
        open("/logs/verifier/" + name, "w").write("1.0")
    except OSError:
        pass
"""
# Every one ends by itself or is bounded, should the verifier fail to end it.
HOSTILE = {
    "fork bomb": "import os, time\nfor _ in range(8): os.fork()\ntime.sleep(20)",
    "endless output": "while True: print('3' * 1000)",
    "sleeps": "import time; time.sleep(20)",
    "ignores SIGTERM": "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(20)",
    "reads the tests": f"""
import glob, os
for path in glob.glob('/tests/*') + glob.glob('/proc/[0-9]*/mem') + glob.glob('/proc/[0-9]*/fd/*'):
    try:
        text = open(path, 'rb').read(1 << 20) if not path.endswith('mem') else b''
    except OSError:
        continue
    if b'{SECRET[:4]}' b'{SECRET[4:]}' in text:
        print({SECRET[:4]}{SECRET[4:]})
""",
    "reads the verifier's memory": """
import glob, re
for maps in glob.glob('/proc/[0-9]*/maps'):
    try:
        areas, memory = open(maps).read(), open(maps[:-4] + 'mem', 'rb')
    except OSError:
        continue
    if maps.split('/')[2] == 'self' or b'solution.py' in open(maps[:-4] + 'cmdline', 'rb').read():
        continue
    for start, end in re.findall(r'^(\\w+)-(\\w+) rw', areas, re.M):
        memory.seek(int(start, 16))
        try:
            found = re.search(rb'"output": "(\\d{8})', memory.read(int(end, 16) - int(start, 16)))
        except OSError:
            continue
        if found:
            print(int(found[1]))
""",
    "writes the reward": PLANT,
    "leaves a writer behind": f"""
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        until = time.time() + 20
        while time.time() < until:
            {PLANT.strip().replace(chr(10), chr(10) + "            ")}
""",
    "makes the reward a folder": "import os\nos.makedirs('/logs/verifier/reward.txt/x', exist_ok=True)",
    "takes the folder away": "import shutil\nshutil.rmtree('/logs/verifier')\nopen('/logs/verifier', 'w')",
    "kills its parents": """
import os
for pid in range(os.getppid(), 1, -1):
    try:
        if b'verify.py' in open(f'/proc/{pid}/cmdline', 'rb').read():
            os.kill(pid, 9)
    except OSError:
        continue
""",
    "memory": "x = []\nfor _ in range(60): x.append(b'1' * (100 << 20))",
    "memory of many": "import os, time\nfor _ in range(5): os.fork()\nx = b'1' * (200 << 20)\ntime.sleep(20)",
}


# Where there are no namespaces: what depends on finding and ending processes by their parents.
WITHOUT_NAMESPACE = ("fork bomb", "endless output", "ignores SIGTERM", "reads the tests", "leaves a writer behind",
                     "kills its parents")


@pytest.mark.parametrize(("runtime", "name"), [*(("bwrap", name) for name in HOSTILE),
                                               *(("proot", name) for name in WITHOUT_NAMESPACE)])
def test_hostile_solutions_get_their_zero_and_harm_nothing(root, runtime, name):
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    try:
        reward, said = grade(root, runtime, HOSTILE[name], tests=TESTS[2:3], seconds=3)
        assert reward == 0.0, said
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


@pytest.mark.parametrize("runtime", BOTH)
@pytest.mark.parametrize("agent", [
    "rm -rf /logs/verifier; ln -s /tmp /logs/verifier", "mkdir -p /logs/verifier/test-stdout.txt/x",
    "chmod 0 /logs/verifier", "mkdir -p /tests; echo '[]' > /tests/tests.json", "echo 'raise OSError' > json.py",
    "rm -rf solution.py; ln -s /tests/verify.py solution.py"])
def test_an_agent_that_prepares_the_ground_gains_nothing(root, runtime, agent):
    reward, said = grade(root, runtime, "print('wrong')", tests=TESTS[:1], agent=agent)
    assert reward == 0.0, said


@pytest.mark.parametrize("runtime", BOTH)
def test_the_agent_finds_no_test_and_the_verifier_leaves_none(root, runtime):
    look = f"grep -rqs {SECRET[:4]}{SECRET[4:]} /tests /workdir /logs /tmp /home"
    reward, _ = grade(root, runtime, SUM, agent=f"if {look}; then echo 'raise OSError' > solution.py; fi",
                      after=f"! {look}")
    assert reward == 0.75


@pytest.mark.parametrize("tests", [(), None])
def test_a_verifier_that_could_not_run_is_ungraded(root, tests, monkeypatch):
    if tests is None:  # no program runs: a limit that no interpreter can start under
        broken = Path(stdin_verifier.__file__).read_text().replace("MEMORY = 2_000_000_000", "MEMORY = 1_000_000")
        original = Path.read_text
        monkeypatch.setattr(Path, "read_text", lambda self, *a, **k: broken if self.name == "stdin_verifier.py"
                            else original(self, *a, **k))
    reward, said = grade(root, "bwrap", SUM, tests=TESTS if tests is None else tests)
    assert reward is None and "ungraded" in said


def test_limits_are_those_of_the_recipe():
    text = Path(stdin_verifier.__file__).read_text()
    assert re.search(r"^TEST_SECONDS = 6$", text, re.M) and "SPARE_SECONDS = 30" in text
    assert (stdin_verifier.MEMORY, stdin_verifier.OUTPUT, stdin_verifier.GRACE) == (2e9, 2e6, 5)
    toml = deepcoder.files(Problem("p", TESTS))["task.toml"]
    assert f"timeout_sec = {4 * 6 + 90}" in toml, "Harbor's limit is beyond the verifier's own"
    first = json.loads(deepcoder.files(Problem("p", TESTS))["tests/tests.json"])[0]
    assert first == {"input": "1 2\n", "output": "3\n"}
    assert os.access(stdin_verifier.__file__, os.R_OK)
