"""A reverse proxy that deletes request headers, as the one in front of a Hugging Face Job does to Authorization."""

from __future__ import annotations

from forwarder import Forwarder
from loopback import LoopbackServer


class HeaderProxy(LoopbackServer):
    """Forwards everything to 127.0.0.1:`target`; header names in `strip` (lower case) do not arrive there. With
    `status` set it answers that, with a page of its own, as a route does that has lost its way."""

    def __init__(self, target: int) -> None:
        self.target, self.strip, self.stripped, self.status = target, set[str](), 0, 0
        super().__init__(_handler(self))


def _handler(proxy: HeaderProxy) -> type[Forwarder]:
    class Handler(Forwarder):
        def do_GET(self) -> None:
            body = self.read_body()
            if proxy.status:
                self.send_error(proxy.status)
            else:
                self.pass_on(proxy.target, self.path, body, proxy.strip)

        do_POST = do_DELETE = do_GET

        def left_out(self, headers: int) -> None:
            proxy.stripped += headers

    return Handler
