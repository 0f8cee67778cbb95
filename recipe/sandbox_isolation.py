"""What separates a local sandbox from the machine: bubblewrap, or proot where user namespaces are refused.

`detect()` tries what the machine allows and says what is lost; `Isolation.argv()` turns one shell command into the
argument list that runs it inside; `open_network()` makes a network of one address, the capture proxy's.
Standard library only.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

MARKER = "RECIPE_SANDBOX"  # on the host side of every sandbox process: its folder; `sandbox_files.sweep` looks for it
MARKER_RUN = "RECIPE_SANDBOX_RUN"
SYSTEM = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32")
NOBODY = 65534  # user and group that proot's guests become when the env server is root
PROOT_FILTER = Path(__file__).with_name("proot_filter.py")
AGENT_BIN = "/opt/opencode/bin"

# Rollouts are the first to go when memory ends (not the trainer), and leave no core files.
_LAUNCH = 'ulimit -c 0; echo 500 >/proc/self/oom_score_adj 2>/dev/null || :; exec "$@"'

# Runs once per sandbox in a fresh network namespace (bubblewrap has brought `lo` up): hands the listening socket and
# the namespaces to the env server. A socket belongs to the namespace it was made in, whoever accepts on it, so no
# process of ours has to stay inside, and the agent has none that it could kill.
_NETWORK_HELPER = """
import os, socket, sys
channel = socket.socket(fileno=int(sys.argv[1]))
listener = socket.create_server(("127.0.0.1", int(sys.argv[2])), backlog=64)
fds = [os.open("/proc/self/ns/" + name, os.O_RDONLY) for name in ("net", "user")]
socket.send_fds(channel, [b"ok"], [listener.fileno(), *fds])
"""


class SandboxError(RuntimeError):
    """The sandbox cannot do what was asked; the message says why and what to do."""


@dataclasses.dataclass(frozen=True)
class Network:
    """A namespace whose only listener is `listener`; `fds` keep it alive: (network namespace, its user namespace)."""

    listener: socket.socket
    fds: tuple[int, int]

    def enter(self) -> list[str]:
        """Command prefix that joins the namespace. It names our fds by path so that the command inherits none."""
        net, user = (f"/proc/{os.getpid()}/fd/{fd}" for fd in self.fds)
        owner = [] if os.geteuid() == 0 else [f"--user={user}", "--preserve-credentials"]
        return ["nsenter", f"--net={net}", *owner, "--"]

    def close(self) -> None:
        self.listener.close()
        for fd in self.fds:
            os.close(fd)


@dataclasses.dataclass(frozen=True)
class Isolation:
    """The level this machine allows: `runtime` is bwrap or proot; `lost` names each missing guarantee."""

    runtime: str
    lost: tuple[str, ...] = ()

    @property
    def own_network(self) -> bool:
        return self.runtime == "bwrap"

    def describe(self) -> str:
        if not self.lost:
            return f"{self.runtime}: own processes, files and network; only the capture proxy can be reached"
        return f"{self.runtime}, weaker isolation: " + "; ".join(self.lost)

    def argv(self, command: str, *, folder: Path, writable: Sequence[str], read_only: Sequence[str], etc: Path,
             binds: Sequence[tuple[str, str]], cwd: str, network: Network | None,
             fd: int | None = None) -> list[str]:
        """Arguments that run `command` by bash inside.

        `writable` and `read_only` are top-level names: `folder/name` appears as `/name`. `binds` are further
        (host path, path inside) pairs, read-only. `fd` is the command's end of a socket whose other end is ours.
        Under proot the exit code is written to it as soon as the command itself has ended: proot waits for everything
        that the command left running. Under bwrap a line is, and the command begins when one comes back.
        """
        launch = ["/bin/sh", "-c", _LAUNCH, "sh"]
        shell = ["/bin/bash", "-c", command]
        if self.runtime == "proot":
            pairs = [(f"/{name}", f"/{name}") for name in SYSTEM if Path("/", name).is_dir()]
            pairs += [("/dev", "/dev"), ("/proc", "/proc"), (str(etc), "/etc"), *binds]
            bound = [arg for host, inside in pairs for arg in ("-b", f"{host}:{inside}")]
            if fd is not None:
                report = f'/bin/bash -c "$1" {fd}>&-; echo $? >&{fd}'
                shell = ["/bin/bash", "-c", report, "bash", command]
            # Only proot itself can be tied to our life; a guest that outlives it is ended by the sweep.
            tie = [sys.executable, "-I", "-S", str(PROOT_FILTER), "setpriv", "--pdeathsig", "KILL"]
            if os.geteuid() == 0:
                tie += [f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--no-new-privs"]
            return [*launch, *tie, "proot", "-r", str(folder), *bound, "-w", cwd, *shell]
        if fd is not None:
            # bwrap asks the kernel to die with its parent, but does not look whether the parent lives still: were we
            # killed before it asked, it would run on. So the command, the last to start, waits until bwrap's init (pid
            # 1 in here) has asked, which it has as soon as it sleeps, and then for a word of ours, who live still.
            tied = 'until read -r _ _ state _ </proc/1/stat; [ "$state" = S ]; do :; done'
            alone = f'{tied}; echo >&{fd} && read -r -u {fd} || exit 1; exec /bin/bash -c "$1" {fd}<&-'
            shell = ["/bin/bash", "-c", alone, "bash", command]
        args = ["bwrap", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try",
                "--unshare-user-try" if os.geteuid() == 0 else "--unshare-user", "--cap-drop", "ALL",
                "--die-with-parent", "--new-session", "--hostname", "sandbox",
                "--unsetenv", MARKER, "--unsetenv", MARKER_RUN]
        for name in SYSTEM:
            path = Path("/", name)
            if path.is_symlink():
                args += ["--symlink", os.readlink(path), str(path)]
            elif path.is_dir():
                args += ["--ro-bind", str(path), str(path)]
        args += ["--ro-bind", str(etc), "/etc", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/run"]
        for name in writable:
            args += ["--bind", str(folder / name), f"/{name}"]
        for name in read_only:
            args += ["--ro-bind", str(folder / name), f"/{name}"]
        for host, inside in binds:
            args += ["--ro-bind", host, inside]
        args += ["--remount-ro", "/", "--chdir", cwd]
        if network is None:
            return [*launch, *args, "--unshare-net", "--", *shell]
        return [*launch, *network.enter(), *args, "--", *shell]


def open_network(port: int) -> Network:
    """A fresh network namespace with one listening socket on 127.0.0.1:`port`, held by this process.

    Raises SandboxError when the kernel refuses it.
    """
    ours, theirs = socket.socketpair()
    user = "--unshare-user-try" if os.geteuid() == 0 else "--unshare-user"
    with ours, theirs:
        ours.settimeout(20)
        done = subprocess.run(
            ["bwrap", user, "--unshare-net", "--die-with-parent", "--dev-bind", "/", "/", "--", sys.executable, "-I",
             "-S", "-c", _NETWORK_HELPER, str(theirs.fileno()), str(port)],
            pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30)
        if done.returncode != 0:
            raise SandboxError(f"no network namespace for the sandbox: {done.stderr.strip()[-500:]}")
        _, (listener, *namespaces), _, _ = socket.recv_fds(ours, 2, 3)
    return Network(socket.socket(fileno=listener), (namespaces[0], namespaces[1]))


def prepare_etc(folder: Path) -> Path:
    """A small /etc at `folder`, made once: names, certificates and the linker's cache, nothing of this machine's."""
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=".etc-", dir=folder.parent))
    made.chmod(0o755)
    texts = {
        "passwd": f"root:x:0:0:root:/home/user:/bin/bash\nuser:x:{NOBODY}:{NOBODY}:user:/home/user:/bin/bash\n",
        "group": f"root:x:0:\nuser:x:{NOBODY}:\n",
        "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
        "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
        "resolv.conf": "",
        "hostname": "sandbox\n",
    }
    for name, text in texts.items():
        (made / name).write_text(text)
    for name in ("ld.so.cache", "localtime", "services", "protocols", "mime.types", "ssl/certs/ca-certificates.crt"):
        if Path("/etc", name).is_file():
            (made / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(Path("/etc", name), made / name)
    if Path("/etc/alternatives").is_dir():  # Debian's /usr/bin/awk and others are links through it
        shutil.copytree("/etc/alternatives", made / "alternatives", symlinks=True)
    try:
        made.rename(folder)
    except OSError:  # another rollout was first
        shutil.rmtree(made)
    return folder


def _try(isolation: Isolation) -> str:
    """Empty when a command runs under `isolation` on this machine, else the reason."""
    missing = [tool for tool in ({"bwrap": ("bwrap", "nsenter"), "proot": ("proot", "setpriv")}[isolation.runtime])
               if not shutil.which(tool)]
    if missing:
        return f"{' and '.join(missing)} not installed"
    with tempfile.TemporaryDirectory(prefix="sandbox-probe-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "tmp").mkdir()
        network = None
        try:
            if isolation.own_network:
                network = open_network(1024 + os.getpid() % 60000)
            argv = isolation.argv("echo alive > /tmp/probe", folder=folder, writable=("tmp",), read_only=(),
                                  etc=prepare_etc(folder / ".etc"), binds=(), cwd="/tmp", network=network)
            (folder / "tmp").chmod(0o777)
            done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30)
            if done.returncode == 0 and (folder / "tmp/probe").is_file():
                return ""
            return done.stderr.strip()[-500:] or f"exit code {done.returncode}"
        except (OSError, SandboxError, subprocess.TimeoutExpired) as err:
            return str(err)
        finally:
            if network:
                network.close()


@functools.cache
def detect(runtime: str = "auto") -> Isolation:
    """The strongest isolation that works here among those `runtime` (auto, bwrap, proot) allows.

    Raises SandboxError that names, for each one tried, why it does not work.
    """
    lost = ("no network isolation: the agent reaches whatever this machine reaches",
            "the process list of this machine is visible",
            "files are hidden by path translation only, not by the kernel")
    choices = {"bwrap": Isolation("bwrap"), "proot": Isolation("proot", lost)}
    tried = []
    for name in choices if runtime == "auto" else [runtime]:
        reason = _try(choices[name])
        if not reason:
            return choices[name]
        tried.append(f"{name}: {reason}")
    raise SandboxError("no local sandbox works on this machine (" + "; ".join(tried) + "). Install both with "
                       "`apt-get install -y bubblewrap proot`, or set SANDBOX to a remote one.")


@functools.cache
def sandbox_python(python: str | None = None) -> tuple[str | None, str]:
    """(prefix to bind, interpreter) of the sandbox's python3. The prefix is None for the system's, which is there.

    A named `python` may be a shim or a venv's: what is bound is the installation behind it.
    """
    if python is None and os.access("/usr/bin/python3", os.X_OK):
        return None, "/usr/bin/python3"
    asked = python or sys.executable
    code = "import sys; print(sys.base_prefix); print(getattr(sys, '_base_executable', sys.executable))"
    try:
        done = subprocess.run([asked, "-I", "-c", code], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as err:
        raise SandboxError(f"the sandbox's python {asked!r} does not run: {err}. Name one that does.") from err
    prefix = os.path.realpath(done.stdout.split("\n")[0])
    binary = shutil.which("python3", path=f"{prefix}/bin") or os.path.realpath(done.stdout.split("\n")[1])
    return (None if prefix in ("/usr", "/usr/local") else prefix), binary
