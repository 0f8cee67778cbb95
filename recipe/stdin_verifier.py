#!/usr/bin/env python3
"""Runs a solution on held-out tests and writes the fraction that it passes; each task has it as tests/verify.py.

    python3 -I verify.py TESTS.json WORKDIR REWARD_DIR      # solution.py in WORKDIR, reward.txt into REWARD_DIR

It runs beside the solution, in the same sandbox and as the same user, so it trusts nothing that the solution can
reach. The tests are read into memory and deleted before the solution runs, and no other process may read that memory
(under proot it may: proot itself has to). Each run has a process namespace of its own where the kernel grants one: the
solution sees nobody that it could kill, and nothing of it outlives its run. Where there is none (proot), its processes
are found by their parents. Either way a 0.0 stands in the reward file before the first run, and the score is written
when no process of the solution is left.

A run is over after TEST_SECONDS, when it has written OUTPUT bytes, has more than PROCESSES processes, or uses more than
MEMORY bytes, each process or all together. RLIMIT_NPROC cannot count them: it counts a user's processes on the whole
machine, and none of root's.

Without a solution the score is 0.0. A verifier that cannot run programs writes nothing: that is ungraded, not wrong.
Standard library only, Python >= 3.8: it runs with the sandbox's own interpreter.
"""

import ctypes
import json
import os
import resource
import select
import shutil
import signal
import sys
import time

TEST_SECONDS = 6
SPARE_SECONDS = 30  # of the whole, beside TEST_SECONDS for each test
MEMORY = 2_000_000_000
OUTPUT = 2_000_000
PROCESSES = 64
GRACE = 5.0  # seconds between SIGTERM and SIGKILL
POLL = 0.02  # seconds between two looks at a run
PAGE = os.sysconf("SC_PAGE_SIZE")
LIBC = ctypes.CDLL(None, use_errno=True)
CLONE_NEWUSER, CLONE_NEWPID = 0x10000000, 0x20000000
PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 4, 36
PROBE = "print(int(input()) + 1)"  # a program that every working verifier can run


def same(got, want):
    """Equal as whitespace-separated tokens: what differs in line ends, trailing blanks or empty lines is equal too."""
    return got.split() == want.split()


def descendants():
    """{pid: (depth, resident bytes)} of every process below this one, its children having depth 1. An orphan moves up
    to us, so none is missed."""
    parents, resident, found = {}, {}, {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as file:
                fields = file.read().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        if fields[0] not in "ZX":
            parents[int(name)], resident[int(name)] = int(fields[1]), int(fields[21]) * PAGE
    for pid in parents:
        depth, ancestor = 1, parents[pid]
        while ancestor in parents and ancestor != os.getpid():
            depth, ancestor = depth + 1, parents[ancestor]
        if ancestor == os.getpid():
            found[pid] = (depth, resident[pid])
    return found


def send(signum, pids):
    for pid in pids:
        try:
            os.kill(pid, signum)
        except ProcessLookupError:
            continue


def end_all():
    """Ends every descendant; returns when the kernel has cleared them away."""
    # With its first process a namespace ends at once, however many are in it.
    send(signal.SIGKILL, [pid for pid, (depth, _) in descendants().items() if depth <= 2])
    stopped = set()
    while True:  # without a namespace: stopped until no new one appears, none can fork away from the kill
        new = set(descendants()) - stopped
        send(signal.SIGSTOP, new)
        if not new:
            break
        stopped |= new
    send(signal.SIGKILL, stopped)
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(POLL / 4)
        except ChildProcessError:
            return


def start(argv, stdin, stdout):
    """Forks `argv` with its limits, in its own process group and, if possible, namespace; returns the group's id.

    Three processes: one that enters the namespace, the namespace's first one, which may not be the program because
    the kernel shields a first process from SIGTERM, and the program.
    """
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        LIBC.unshare(CLONE_NEWUSER | CLONE_NEWPID)
        for _ in range(2):
            child = os.fork()
            if child:
                status = os.waitpid(child, 0)[1]
                os._exit(0 if status == 0 else 1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_WRONLY)
        for number, fd in enumerate((stdin, stdout, null)):
            os.dup2(fd, number)
        os.closerange(3, 1024)
        for kind, limit in ((resource.RLIMIT_AS, MEMORY), (resource.RLIMIT_FSIZE, OUTPUT), (resource.RLIMIT_CORE, 0)):
            resource.setrlimit(kind, (limit, limit))
        os.execve(argv[0], argv, {"PATH": os.environ.get("PATH", os.defpath), "HOME": "/tmp", "LANG": "C.UTF-8"})
    finally:
        os._exit(127)


def run(argv, text, seconds):
    """Output of `argv` given `text`, or None when it broke a limit. Nothing of it is left when this returns."""
    stdin = os.memfd_create("input")
    os.write(stdin, text.encode())
    os.lseek(stdin, 0, os.SEEK_SET)
    reading, writing = os.pipe()
    deadline = time.monotonic() + seconds
    group = start(argv, stdin, writing)
    os.close(stdin)
    os.close(writing)
    os.set_blocking(reading, False)
    output, open_, ended = bytearray(), True, False
    try:
        while not ended:
            ended = os.waitpid(group, os.WNOHANG)[0] == group
            if open_ and select.select([reading], [], [], 0 if ended else POLL)[0]:
                while open_ and len(output) <= OUTPUT:
                    try:
                        chunk = os.read(reading, 1 << 16)
                    except BlockingIOError:
                        break
                    open_ = bool(chunk)
                    output += chunk
            elif not open_ and not ended:
                time.sleep(POLL)
            running = descendants()
            if len(output) > OUTPUT or len(running) > PROCESSES + 3 or sum(r for _, r in running.values()) > MEMORY:
                return None
            if time.monotonic() > deadline:
                terminate(group)
                return None
        return output.decode(errors="replace")
    finally:
        os.close(reading)
        end_all()


def terminate(group):
    """SIGTERM to the process group, and GRACE seconds to end."""
    os.killpg(group, signal.SIGTERM)
    until = time.monotonic() + GRACE
    while time.monotonic() < until and len(descendants()) <= PROCESSES + 3:
        if os.waitpid(group, os.WNOHANG)[0] == group:
            return
        time.sleep(POLL)


def write_reward(folder, value):
    """Puts the reward in its place whatever lies there: the solution may write where we write."""
    def remove(path):
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        elif os.path.lexists(path):
            os.unlink(path)

    if os.path.islink(folder) or not os.path.isdir(folder):
        remove(folder)
        os.makedirs(folder)
    os.chmod(folder, 0o755)
    part = os.path.join(folder, ".reward.part")
    for path in (os.path.join(folder, "reward.json"), os.path.join(folder, "reward.txt"), part):
        remove(path)
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644), "w") as file:
        file.write(f"{value:.6f}\n")
    os.rename(part, os.path.join(folder, "reward.txt"))


def main(tests_file, workdir, reward_dir):
    tests_file, workdir, reward_dir = map(os.path.abspath, (tests_file, workdir, reward_dir))
    with open(tests_file) as file:
        tests = json.load(file)
    os.unlink(tests_file)
    with open("/proc/self/status") as file:
        traced = "TracerPid:\t0\n" not in file.read()
    if not traced:
        LIBC.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # Its time is that of a machine that is busy, not that of a solution.
    if not tests or run([sys.executable, "-c", PROBE], "41", SPARE_SECONDS) != "42\n":
        print("ungraded: the verifier has no tests or cannot run a program here")
        return 1
    write_reward(reward_dir, 0.0)
    try:
        os.chdir(workdir)
        there = os.path.isfile("solution.py")
    except OSError:
        there = False
    passed, deadline = 0, time.monotonic() + TEST_SECONDS * len(tests) + SPARE_SECONDS
    for number, test in enumerate(tests if there else (), 1):
        left = deadline - time.monotonic()
        if left <= 0:
            print(f"out of time before test {number}")
            break
        got = run([sys.executable, "solution.py"], test["input"], min(TEST_SECONDS, left))
        if got is not None and same(got, test["output"]):
            passed += 1
    write_reward(reward_dir, passed / len(tests))
    print(f"{passed} of {len(tests)} tests passed" if there else "no solution.py")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
