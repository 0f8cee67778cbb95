"""Heartbeat of a run, and the watchdog that turns a silent stall into a loud, resumable failure.

    python -m recipe.watchdog --run-dir runs/job-1 --pid 4242
    python -m recipe.watchdog --run-dir runs/job-1 --beat tasks       # one beat, for shell scripts

Everything that makes progress calls ``beat(run/heartbeat.json, phase)``: each optimizer step, skipped group, phase
change and finished evaluation cell. The watchdog reads that file; when the phase's limit passes without a beat it
says so, sends SIGTERM to the job's main process (whose trap ends all processes and sweeps the sandboxes) and leaves
``stalled.json`` in the run folder, by which the job knows to exit with 75.

Should the main process be killed outright (kill -9), the watchdog also ends the sessions that it listed in the run
folder's ``processes``, so that no server outlives its job.

Standard library only: shell scripts, the trainer and the servers' interpreters all use this file.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Container
from pathlib import Path
from typing import Any

from recipe.config import Settings
from recipe.exits import EXIT_STALLED, Parser

HEARTBEAT = "heartbeat.json"
STALLED = "stalled.json"
BLOCKED = "blocked.json"  # written by the env server while no rollout can be started, and why (recipe/gate.py)
PROCESSES = "processes"  # lines "<session id> <name>", kept by recipe/job.sh

# Seconds without a beat that each phase may take; None means Settings.stall_limit. Phases that are not training have
# their own health checks, so these limits only catch what those checks cannot see, such as a download that hangs.
PHASE_LIMITS: dict[str, float | None] = {
    "setup": 3600,  # environments of several GB on a slow line
    "tasks": 3600,  # one HTTP request a task, 1,250 tasks
    "resume": 3600,  # a checkpoint of some 500 MB from the Hub, with attempts
    "policy": 2400,  # vLLM downloads the model, compiles and captures graphs
    "env": 900,
    "train-setup": 2400,  # the trainer loads the model and joins the weight transfer
    "train": None,
    "save": 1800,  # a checkpoint on its way to the Hub
    "eval-setup": 2400,
    "eval": None,
}
DEFAULT_LIMIT = 3600.0  # a phase that is not in the table


def beat(path: str | os.PathLike[str], phase: str, **info: Any) -> None:
    """Writes the heartbeat at `path` in one atomic step, so that a reader never sees half of it.

    `phase` is a key of PHASE_LIMITS; `info` is anything JSON can hold (step=…, cells=…) and is shown on a stall.
    """
    write_atomic(Path(path), json.dumps({"phase": phase, "time": time.time(), "pid": os.getpid(), **info}))


def write_atomic(path: Path, text: str) -> None:
    """Writes `text` so that a reader sees the old file or the new one, whoever else writes it at the same time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(fd, "w") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """The last heartbeat, or None where none was written yet."""
    try:
        return json.loads(Path(path).read_text())
    except FileNotFoundError:
        return None


def limit_of(phase: str, settings: Settings) -> float:
    """Seconds that `phase` may stay without a beat."""
    limit = PHASE_LIMITS.get(phase, DEFAULT_LIMIT)
    return float(settings.stall_limit) if limit is None else limit


def overdue(heartbeat: dict[str, Any], settings: Settings, now: float) -> float | None:
    """Seconds since the last beat when that is beyond the phase's limit, else None."""
    silent = now - heartbeat["time"]
    return silent if silent > limit_of(heartbeat["phase"], settings) else None


def stall_message(heartbeat: dict[str, Any], silent: float, settings: Settings, resume: str,
                  blocked: dict[str, Any] | None = None) -> str:
    info = ", ".join(f"{k}={v}" for k, v in heartbeat.items() if k not in ("phase", "time", "pid"))
    return (f"STALLED in phase {heartbeat['phase']}: {silent:.0f} s without progress, the limit of this phase is "
            f"{limit_of(heartbeat['phase'], settings):.0f} s{f' (last beat: {info})' if info else ''}. "
            f"{'No rollout can be started: ' + blocked['message'] + ' ' if blocked else ''}"
            f"The run is stopped; checkpoints and finished evaluation cells are kept. Resume with:\n  {resume}")


def session_of(process: Path) -> int | None:
    """Session id of a living process by its folder in /proc; None of one that ended, waited for or not."""
    try:
        state, _, _, sid = (process / "stat").read_text(errors="replace").rpartition(")")[2].split()[:4]
    except OSError:
        return None
    return None if state in "ZX" else int(sid)


def alive(pid: int) -> bool:
    """Whether process `pid` runs."""
    return session_of(Path(f"/proc/{pid}")) is not None


def watch(run_dir: Path, pid: int, settings: Settings, resume: str, poll: float) -> int:
    """Watches until process `pid` is gone (0) or its run stalls (EXIT_STALLED, after SIGTERM to `pid`)."""
    started = time.time()
    print(f"watching process {pid}; limit in training {settings.stall_limit} s", flush=True)
    while alive(pid):
        heartbeat = read(run_dir / HEARTBEAT) or {"phase": "setup", "time": started}
        # A beat from before the start may be that of an interrupted run: its phase counts, its age does not.
        heartbeat["time"] = max(heartbeat["time"], started)
        silent = overdue(heartbeat, settings, time.time())
        if silent is not None:
            message = stall_message(heartbeat, silent, settings, resume, read(run_dir / BLOCKED))
            write_atomic(run_dir / STALLED, json.dumps({**heartbeat, "silent": silent, "message": message}))
            print(message, file=sys.stderr, flush=True)
            os.kill(pid, signal.SIGTERM)
            return EXIT_STALLED
        time.sleep(poll)
    for name in end_orphans(run_dir / PROCESSES):
        print(f"the job's main process {pid} is gone: ended {name}, which it had left running", file=sys.stderr)
    return 0


def end_orphans(listing: Path, grace: float = 10.0) -> list[str]:
    """Ends all sessions in `listing` but this process's own, SIGTERM first; returns the names of those still alive."""
    if not listing.exists():
        return []
    names = {int(sid): name for sid, name in (line.split() for line in listing.read_text().splitlines())}
    names.pop(os.getsid(0), None)
    ended = sorted({names[sid] for _, sid in session_members(names)})
    deadline = time.monotonic() + grace
    for sign in (signal.SIGTERM, signal.SIGKILL):
        for pid, _ in session_members(names):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, sign)
        while session_members(names) and time.monotonic() < deadline:
            time.sleep(0.2)
    return ended


def session_members(sids: Container[int]) -> list[tuple[int, int]]:
    """(pid, session id) of living processes whose session is one of `sids`."""
    found = ((int(process.name), session_of(process)) for process in Path("/proc").glob("[0-9]*"))
    return [(pid, sid) for pid, sid in found if sid is not None and sid in sids]


def main(argv: list[str] | None = None) -> int:
    parser = Parser(__doc__)
    parser.add_argument("--run-dir", type=Path, required=True, help="folder that holds heartbeat.json")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--pid", type=int, help="main process of the job, which gets the SIGTERM")
    what.add_argument("--beat", metavar="PHASE", choices=sorted(PHASE_LIMITS), help="write one heartbeat and end")
    parser.add_argument("--resume", default="", help="command that resumes the run, for the message")
    parser.add_argument("--poll", type=float, default=2.0, help="seconds between two looks at the heartbeat")
    args = parser.parse_args(argv)
    if args.beat:
        beat(args.run_dir / HEARTBEAT, args.beat)
        return 0
    resume = args.resume or f"RUN_DIR={args.run_dir} bash run_job.sh"
    return watch(args.run_dir, args.pid, Settings.load(), resume, args.poll)


if __name__ == "__main__":
    sys.exit(main())
