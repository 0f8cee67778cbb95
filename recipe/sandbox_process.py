"""Running one command of a sandbox, and carrying its connections to the capture proxy."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from harbor.environments.base import ExecResult, OutputCallback

OUTPUT_LIMIT = 8 << 20  # bytes kept of each stream of one command: half from its start, half from its end


class Bounded:
    """Output of a command, at most OUTPUT_LIMIT bytes of it: the beginning and the end."""

    def __init__(self) -> None:
        self.head, self.tail, self.dropped = bytearray(), bytearray(), 0

    def add(self, chunk: bytes) -> None:
        room = max(0, OUTPUT_LIMIT // 2 - len(self.head))
        self.head += chunk[:room]
        self.tail += chunk[room:]
        if (excess := len(self.tail) - OUTPUT_LIMIT // 2) > 0:
            self.dropped += excess
            del self.tail[:excess]

    def text(self) -> str:
        gap = f"\n[{self.dropped} bytes left out]\n".encode() if self.dropped else b""
        return bytes(self.head + gap + self.tail).decode(errors="replace")


async def run(argv: Callable[[int], Sequence[str]], environ: Mapping[str, str], timeout_sec: float | None, *,
              on_output: OutputCallback | None, running: set[int], kill: Callable[[int], None],
              reports: bool) -> ExecResult:
    """Run a command in a session of its own with no input, and `kill` what it started on end, timeout or cancel.

    `argv` gives its arguments, made for the file descriptor of a socket to us: where it `reports` (proot), its wrapper
    writes the exit code there, else it asks there whether it may begin. `running` holds its process id meanwhile.
    Raises RuntimeError after `timeout_sec`.
    """
    ours, theirs = socket.socketpair()
    try:
        process = await asyncio.create_subprocess_exec(
            *argv(theirs.fileno()), env=environ, cwd="/", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, start_new_session=True, pass_fds=(theirs.fileno(),))
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    running.add(process.pid)
    stdout, stderr = Bounded(), Bounded()
    code = None
    try:
        async with asyncio.timeout(timeout_sec or None):
            waits = [_read(process.stdout, "stdout", stdout, on_output),
                     _read(process.stderr, "stderr", stderr, on_output), process.wait()]
            waits.append(_end_with_report(process.pid, ours, kill) if reports else _let_begin(ours))
            code = (await asyncio.gather(*waits))[-1]
    except TimeoutError:
        raise RuntimeError(f"Command timed out after {timeout_sec} seconds") from None
    finally:
        kill(process.pid)
        ours.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), 10)
        running.discard(process.pid)
    return ExecResult(stdout=stdout.text(), stderr=stderr.text(),
                      return_code=process.returncode if code is None else code)


async def _read(stream: asyncio.StreamReader, name: Any, output: Bounded, on_output: OutputCallback | None) -> None:
    while chunk := await stream.read(1 << 16):
        output.add(chunk)
        if on_output:
            await on_output(chunk.decode(errors="replace"), name)


async def _end_with_report(pid: int, ours: socket.socket, kill: Callable[[int], None]) -> int | None:
    """Exit code that a command under proot reports; what it left running ends then, as with bubblewrap.

    None when it ended without a report.
    """
    report = await _word(ours)
    kill(pid)
    return int(report) if report else None


async def _let_begin(ours: socket.socket) -> None:
    """Answers a command under bubblewrap that is ready to begin; says nothing to one that failed before."""
    if await _word(ours):
        with contextlib.suppress(OSError):
            ours.send(b"\n")


async def _word(ours: socket.socket) -> bytes:
    """What a command says, or b"" when it ends without a word."""
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(ours, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(ours)
    try:
        return ours.recv(16)
    except ConnectionResetError:
        return b""


async def relay(listener: socket.socket, port: int, logger: logging.Logger) -> asyncio.Server:
    """Carry each connection that `listener` accepts to 127.0.0.1:`port`, chunk by chunk as they come (SSE)."""

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            upstream_reader, upstream_writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError as err:
            logger.warning(f"the capture proxy on port {port} refuses a rollout: {err}")
            writer.close()
            return
        try:
            await asyncio.gather(_pump(reader, upstream_writer), _pump(upstream_reader, writer))
        except OSError:
            pass  # either side went away; the other learns it from the close below
        finally:
            writer.close()
            upstream_writer.close()

    return await asyncio.start_server(forward, sock=listener)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while chunk := await reader.read(1 << 16):
        writer.write(chunk)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()
