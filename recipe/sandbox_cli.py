"""Command line of the local sandbox: `python -m recipe.sandbox_local check | sweep`. Standard library only."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from recipe.exits import EXIT_UNAVAILABLE, Parser
from recipe.sandbox_files import sweep
from recipe.sandbox_isolation import SandboxError, detect


def main(argv: list[str] | None = None) -> int:
    parser = Parser("Local sandboxes of rollouts.", prog="recipe.sandbox_local")
    what = parser.add_subparsers(dest="what", required=True)
    checking = what.add_parser("check", help="print which isolation works on this machine and what is lost")
    checking.add_argument("--runtime", choices=("auto", "bwrap", "proot"), default="auto")
    sweeping = what.add_parser("sweep", help="kill and remove what a run left; KEEP_SANDBOX=1 keeps the folders")
    sweeping.add_argument("--run-dir", type=Path, required=True, help="the run's folder; sandboxes/ is swept")
    sweeping.add_argument("--run-id", help="also kill marked processes of this run, wherever its folder was")
    args = parser.parse_args(argv)
    try:
        if args.what == "check":
            print(f"local sandbox: {detect(args.runtime).describe()}")
            return 0
        keep = os.environ.get("KEEP_SANDBOX", "").lower() in ("1", "true")
        killed, removed = sweep(args.run_dir / "sandboxes", args.run_id, keep)
    except SandboxError as err:
        print(f"local sandbox: {err}", file=sys.stderr)
        return EXIT_UNAVAILABLE
    if killed or removed:
        print(f"sweep of {args.run_dir / 'sandboxes'}: {killed} processes ended, {removed} sandboxes removed")
    return 0
