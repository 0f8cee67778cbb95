"""A reverse proxy that deletes request headers, as the one in front of a Hugging Face Job does to Authorization."""

from __future__ import annotations

import http.client
from http.server import BaseHTTPRequestHandler

from loopback import LoopbackServer


class HeaderProxy(LoopbackServer):
    """Forwards everything to 127.0.0.1:`target`; header names in `strip` (lower case) do not arrive there. With
    `status` set it answers that, with a page of its own, as a route does that has lost its way."""

    def __init__(self, target: int) -> None:
        self.target, self.strip, self.stripped, self.status = target, set[str](), 0, 0
        super().__init__(_handler(self))


def _handler(proxy: HeaderProxy) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.0"  # a response ends with its connection: nothing to re-frame

        def _forward(self) -> None:
            headers = {k: v for k, v in self.headers.items() if k.lower() not in proxy.strip}
            proxy.stripped += len(self.headers) - len(headers)
            headers["Connection"] = "close"
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if proxy.status:
                self.send_error(proxy.status)
                return
            upstream = http.client.HTTPConnection("127.0.0.1", proxy.target)
            try:
                upstream.request(self.command, self.path, body or None, headers)
                response = upstream.getresponse()
                self.send_response(response.status)
                for name, value in response.getheaders():
                    if name.lower() not in ("transfer-encoding", "connection", "content-length", "server", "date"):
                        self.send_header(name, value)
                self.end_headers()
                while chunk := response.read1(65536):
                    self.wfile.write(chunk)
                    self.wfile.flush()
            except OSError:
                self.close_connection = True  # either side went away, which some tests do on purpose
            finally:
                upstream.close()

        do_GET = do_POST = do_DELETE = _forward

        def log_message(self, *_: object) -> None:
            """Quiet."""

    return Handler
