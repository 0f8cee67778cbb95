"""Files and leftovers of local sandboxes: copies that no link of the agent's can redirect, and the sweep.

Standard library only; the sweep also runs where the env server's packages are not installed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import stat
import time
from pathlib import Path, PurePosixPath

from recipe.sandbox_isolation import MARKER, MARKER_RUN, SandboxError


def inside(folder: Path, path: str | PurePosixPath) -> Path:
    """Host path of the sandbox path `path` below `folder`, its links not followed.

    Raises SandboxError when the path is relative, climbs, or one of its folders is a link: the agent can make one
    that points at the host's files, and the host would follow it.
    """
    pure = PurePosixPath(path)
    if not pure.is_absolute() or ".." in pure.parts:
        raise SandboxError(f"{str(path)!r} must be an absolute path without '..'")
    host = folder
    for part in pure.parts[1:]:
        if host.is_symlink():
            raise SandboxError(f"{str(path)!r} leads through a link made in the sandbox; it is not followed")
        host = host / part
    return host


def copy_file(source: Path, target: Path) -> None:
    """Copy one regular file with its mode. An existing target is replaced, never written through.

    Raises SandboxError when `source` is a link or no regular file.
    """
    # O_NONBLOCK: opening a named pipe must not wait for a writer.
    try:
        fd = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as err:
        if source.is_symlink():
            raise SandboxError(f"{source.name!r} is a link; it is not followed") from err
        raise
    with os.fdopen(fd, "rb") as reading:
        mode = os.fstat(fd).st_mode
        if not stat.S_ISREG(mode):
            raise SandboxError(f"{source.name!r} is not a regular file")
        target.unlink(missing_ok=True)
        made = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(made, "wb") as writing:
            shutil.copyfileobj(reading, writing, 1 << 20)
            os.fchmod(made, (mode & 0o777) | 0o600)


def copy_tree(source: Path, target: Path, *, keep_links: bool = False) -> list[str]:
    """Copy what `source` holds into `target` (made if absent, else merged). Returns what was left out.

    Links are copied as links with `keep_links` (into a sandbox), else left out (out of one), and so are pipes,
    sockets and devices.
    """
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        target.unlink()
    target.mkdir(parents=True, exist_ok=True)
    left_out = []
    for entry in os.scandir(source):
        path, goal = Path(entry.path), target / entry.name
        if entry.is_symlink():
            if not keep_links:
                left_out.append(entry.name)
                continue
            if goal.is_dir() and not goal.is_symlink():
                remove_tree(goal)
            goal.unlink(missing_ok=True)
            goal.symlink_to(os.readlink(path))
        elif entry.is_dir(follow_symlinks=False):
            left_out += [f"{entry.name}/{name}" for name in copy_tree(path, goal, keep_links=keep_links)]
        elif entry.is_file(follow_symlinks=False):
            copy_file(path, goal)
        else:
            left_out.append(entry.name)
    return left_out


def remove_tree(folder: Path) -> None:
    """Remove a folder whatever modes its owner left in it. Links are removed, not followed. Another thread may remove
    it at the same time: at the end of a server the sweep meets sandboxes that are being stopped."""
    def open_up(function, path, error):
        if not isinstance(error[1], FileNotFoundError):
            with contextlib.suppress(FileNotFoundError):
                force(function, path)

    def force(function, path):
        for blocked in (os.path.dirname(path), path):
            if not os.path.islink(blocked):
                os.chmod(blocked, 0o700)
        if function in (os.open, os.scandir, os.listdir):
            shutil.rmtree(path, onerror=open_up)
        else:
            function(path)

    if folder.is_dir():
        shutil.rmtree(folder, onerror=open_up)


def environ_of(process: Path) -> bytes:
    """The environment of a process, given as its folder in /proc. In the middle of its exec a process shows none: that
    is waited for, or it would be taken for one without a marker and outlive its sandbox. Raises OSError when it is
    gone."""
    for _ in range(1000):
        if environ := (process / "environ").read_bytes():
            return environ
        begins, ends = (process / "stat").read_text().rpartition(")")[2].split()[47:49]  # where its memory has it
        if begins == ends != "0":
            break  # it was given none
        try:
            os.readlink(process / "exe")
        except FileNotFoundError:
            break  # a thread of the kernel has no program, and one that has ended has none any more
        time.sleep(0.001)
    return b""


def marked_processes(below: Path | None = None, run_id: str | None = None) -> list[int]:
    """Ids of processes that belong to a sandbox below the folder `below`, or to the run `run_id`.

    A process is known by the marker in its environment, or, should it have dropped that, by a working folder or
    root inside a sandbox. Processes of other users stay unseen.
    """
    found = []
    base = f"{below}/" if below else None
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            environ = environ_of(Path(entry.path)).split(b"\0")
        except OSError:
            continue
        values = dict(item.split(b"=", 1) for item in environ if b"=" in item)
        marker = os.fsdecode(values.get(MARKER.encode(), b"")) + "/"
        places = [marker]
        for link in ("cwd", "root"):
            try:
                places.append(os.readlink(os.path.join(entry.path, link)) + "/")
            except OSError:
                continue
        of_run = run_id and values.get(MARKER_RUN.encode()) == run_id.encode()
        if of_run or (base and any(place.startswith(base) for place in places)):
            found.append(int(entry.name))
    return found


def clear_after_proot(*pids: int) -> None:
    """Removes the empty folders that processes of proot leave when they are killed; where they are is built into it."""
    for pid in pids:
        for folder in Path("/tmp").glob(f"proot-{pid}-*"):
            with contextlib.suppress(OSError):
                folder.rmdir()


def kill_marked(below: Path | None = None, run_id: str | None = None, patience: float = 20.0) -> int:
    """SIGKILL until none is left (a process may fork while we look). Returns how many were killed.

    Raises SandboxError when some outlive `patience` seconds.
    """
    killed: set[int] = set()
    deadline = time.monotonic() + patience
    while pids := marked_processes(below, run_id):
        if time.monotonic() > deadline:
            raise SandboxError(f"processes {pids} of a sandbox do not end; look at them with `ps -p {pids[0]} -f`")
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
            except ProcessLookupError:
                continue
        time.sleep(0.02)
    clear_after_proot(*killed)
    return len(killed)


def sweep(root: Path, run_id: str | None = None, keep: bool = False) -> tuple[int, int]:
    """End and remove what the sandboxes below `root` left. Returns (processes killed, folders removed).

    With `keep` the folders stay.
    """
    root = root.resolve()
    killed = kill_marked(root, run_id)
    folders = [] if keep or not root.is_dir() else [entry for entry in root.iterdir() if entry.is_dir()]
    for folder in folders:
        remove_tree(folder)
    return killed, len([folder for folder in folders if not folder.name.startswith(".")])
