"""Serves a small Lfm2 model on the CPU over vLLM's HTTP contract; ended by SIGTERM or Ctrl-C.

    python -m recipe.policy_cpu --model tiny/model --port 8001 --dev-mode

Exit codes: 64 wrong usage (a model that is too large or of another kind), 69 the port is taken or the engine died.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from recipe.exits import EXIT_UNAVAILABLE, EXIT_USAGE, Parser
from recipe.ports import PortBusy, bind


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(__doc__, prog="python -m recipe.policy_cpu")
    parser.add_argument("--model", required=True, help="folder or Hub id of an Lfm2 model with tokenizer and template")
    parser.add_argument("--served-model-name", help="name that requests use (default: --model)")
    parser.add_argument("--host", default="127.0.0.1", help="bind address (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8001, help="port, 0 picks a free one (default: %(default)s)")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--max-model-len", type=int, default=16384, help="prompt and output, in tokens")
    parser.add_argument("--max-parameters", type=int, default=200_000_000, help="largest model that is served")
    parser.add_argument("--chat-template", type=Path, help="file with another chat template than the model's own")
    parser.add_argument("--dev-mode", action="store_true", help="serve the pausing and weight-update routes")
    parser.add_argument("--enable-lora", action="store_true", help="serve adapters loaded at run time")
    parser.add_argument("--max-lora-rank", type=int, default=32)
    parser.add_argument("--prefix-cache-mb", type=int, default=256, help="0 switches prefix caching off")
    parser.add_argument("--max-num-seqs", type=int, default=16, help="completions that run at once")
    parser.add_argument("--threads", type=int, default=1, help="threads of one matrix product (default: %(default)s)")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    # Imports after the arguments: --help must not take the seconds that torch takes.
    try:
        sock = bind(args.port, "POLICY_PORT", args.host)  # held while the model loads, so that a clash shows at once
    except PortBusy as error:
        print(error, file=sys.stderr)
        return EXIT_UNAVAILABLE

    import torch
    import uvicorn

    from recipe.policy_cpu.app import create_app
    from recipe.policy_cpu.load import ModelRefused, load_service

    torch.set_num_threads(args.threads)
    servers: list[uvicorn.Server] = []

    def on_death() -> None:
        for server in servers:
            server.should_exit = True

    try:
        service = load_service(args, on_death)
    except ModelRefused as error:
        print(error, file=sys.stderr)
        return EXIT_USAGE
    servers.append(uvicorn.Server(uvicorn.Config(create_app(service), log_level="warning",
                                                 timeout_graceful_shutdown=5)))
    sock.listen(128)
    host, port = sock.getsockname()[:2]
    print(f"Serving {service.store.base.name} on http://{host}:{port}", flush=True)
    servers[0].run(sockets=[sock])  # on SIGTERM or SIGINT it closes connections and ends the process by that signal
    if service.engine.failure is not None:
        print(f"The engine died: {service.engine.failure!r}", file=sys.stderr)
        return EXIT_UNAVAILABLE
    return 0


if __name__ == "__main__":
    sys.exit(main())
