"""Names a busy port at once, before anything slow is loaded.

    python3 -m recipe.ports PUBLIC_PORT ENV_PORT    # exit code 69 and one sentence when one of them is taken

Standard library only.
"""

from __future__ import annotations

import os
import socket
import sys

from recipe.config import Settings, SettingsError
from recipe.exits import EXIT_UNAVAILABLE, EXIT_USAGE, Parser


class PortBusy(RuntimeError):
    """A port is taken; the message names the port, its setting and, where it can be seen, the process."""


def is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def bind(port: int, setting: str, host: str = "127.0.0.1") -> socket.socket:
    """A bound socket that does not listen yet: holds the port while the server loads. Raises PortBusy."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as err:
        sock.close()
        raise PortBusy(f"port {port} ({setting}) is in use{_by(port)}: end that process, "
                       f"or set {setting} to a free port ({err.strerror})") from None
    return sock


def _by(port: int) -> str:
    """' by process 12 (python3 -m http.server)', or nothing where the holder cannot be seen."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(table) as lines:
                rows = [line.split() for line in lines][1:]
        except OSError:
            continue
        inodes |= {row[9] for row in rows if row[3] == "0A" and int(row[1].rsplit(":", 1)[1], 16) == port}
    for pid in filter(str.isdigit, os.listdir("/proc") if inodes else ()):
        try:
            links = {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")}
            if links & {f"socket:[{inode}]" for inode in inodes}:
                with open(f"/proc/{pid}/cmdline", "rb") as file:
                    command = file.read().replace(b"\0", b" ").decode(errors="replace").strip()
                return f" by process {pid} ({command[:120]})"
        except OSError:
            continue  # another user's process, or one that has just ended
    return ""


def main(argv: list[str] | None = None) -> int:
    parser = Parser(__doc__)
    parser.add_argument("settings", nargs="+", metavar="SETTING", help="PUBLIC_PORT, POLICY_PORT or ENV_PORT")
    args = parser.parse_args(argv)
    try:
        values = Settings.load().environ()
        ports = {name: int(values[name]) for name in args.settings}
    except (SettingsError, KeyError) as err:
        print(f"Settings are wrong, nothing was started: {err}", file=sys.stderr)
        return EXIT_USAGE
    code = 0
    for name, port in ports.items():
        try:
            bind(port, name).close()
        except PortBusy as err:
            print(err, file=sys.stderr)
            code = EXIT_UNAVAILABLE
    return code


if __name__ == "__main__":
    sys.exit(main())
