"""How processes of a sandbox are found, also those that are hard to see."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from pathlib import Path

from recipe.sandbox_files import environ_of, marked_processes
from recipe.sandbox_isolation import MARKER


def test_a_process_in_the_middle_of_its_exec_is_found(tmp_path: Path) -> None:
    """The kernel shows no environment of it then. One that does nothing but exec is so in one look of twelve."""
    again = 'exec /bin/sh -c "$1" sh "$1"'
    process = subprocess.Popen(["/bin/sh", "-c", again, "sh", again], cwd="/", env={MARKER: str(tmp_path / "sandbox")})
    try:
        assert [look for look in range(100) if marked_processes(tmp_path) != [process.pid]] == []
    finally:
        process.kill()
        process.wait()


def has_no_program(process: Path) -> bool:
    try:
        os.readlink(process / "exe")
    except OSError as err:
        return isinstance(err, FileNotFoundError)
    return False


def test_what_has_no_environment_is_not_waited_for(monkeypatch) -> None:
    """A process that was given none, and threads of the kernel where they can be seen."""
    bare, looks, sleep = subprocess.Popen(["sleep", "600"], env={}), [], time.sleep

    def counted(seconds: float) -> None:
        looks.append(seconds)
        sleep(seconds)

    monkeypatch.setattr(time, "sleep", counted)
    try:
        for process in (Path(f"/proc/{bare.pid}"), *filter(has_no_program, [*Path("/proc").glob("[0-9]*")][:20])):
            with contextlib.suppress(OSError):  # one that has ended meanwhile
                assert environ_of(process) == b""
        assert len(looks) < 1000
    finally:
        bare.kill()
        bare.wait()
