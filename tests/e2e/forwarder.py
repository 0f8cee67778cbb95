"""What the proxies of the tests have in common: a handler that passes its request on to a server of this machine."""

from __future__ import annotations

import http.client
from http.server import BaseHTTPRequestHandler

HOP = {"transfer-encoding", "connection", "content-length", "server", "date"}


class Forwarder(BaseHTTPRequestHandler):
    """A subclass says in `do_GET` and its like what is passed on, and may note what `left_out` and `answered` say."""

    protocol_version = "HTTP/1.0"  # a response ends with its connection: nothing to re-frame

    def read_body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def pass_on(self, port: int, path: str, body: bytes, strip: set[str]) -> None:
        """Answers what 127.0.0.1:`port` does, to which headers in `strip` (lower case) do not go."""
        headers = {k: v for k, v in self.headers.items() if k.lower() not in strip}
        self.left_out(len(self.headers) - len(headers))
        upstream = http.client.HTTPConnection("127.0.0.1", port)
        try:
            upstream.request(self.command, path, body or None, headers | {"Connection": "close"})
            response = upstream.getresponse()
            self.answered(response.status)
            self.send_response(response.status)
            for name, value in response.getheaders():
                if name.lower() not in HOP:
                    self.send_header(name, value)
            self.end_headers()
            while chunk := response.read1(65536):
                self.wfile.write(chunk)
                self.wfile.flush()
        except (OSError, http.client.HTTPException):
            self.close_connection = True  # either side went away, which some tests do on purpose
        finally:
            upstream.close()

    def left_out(self, headers: int) -> None:
        """So many headers were taken away."""

    def answered(self, status: int) -> None:
        """The server's answer begins."""

    def log_message(self, *_: object) -> None:
        """Quiet."""
