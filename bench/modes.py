"""One GPU beside two: the rows of two runs of bench.loop in one table.

    python3 -m bench.modes ONE.json TWO.json        as `python3 -m bench.loop … --out` wrote them

Idle is the mean of the mode's GPUs. Prices are those of bench.loop: $5 an hour for one H200, $10 for two. Versions and
settings that the runs do not have in common stand below the table: only otherwise equal runs may be compared.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from statistics import mean
from typing import Any

from bench.common import RESULTS, parser, report
from bench.loop import PRICES

PLACES = ("GPUS", "RUN_DIR", "PUBLIC_PORT", "POLICY_PORT", "ENV_PORT")  # may differ between the modes


def settings_of(result: dict[str, Any]) -> dict[str, str]:
    """NAME=VALUE of the command that bench.loop ran."""
    found = dict(re.findall(r"\b([A-Z][A-Z0-9_]*)=(\S*)", result["arguments"].get("run", "")))
    return {name: value for name, value in found.items() if name not in PLACES}


def row_of(result: dict[str, Any]) -> dict[str, Any]:
    (row,) = result["rows"]
    idle = [value for name, value in row.items() if re.fullmatch(r"GPU \S+ idle %", name)]
    return {"GPUs": row["GPUs"], "weights by": (result.get("weights_to") or "not said").split(": ")[-1],
            "steps": row["steps"], "s a step": row["s a step"], "rollouts a minute": row["rollouts a minute"],
            "GPU idle %": round(mean(idle), 1) if idle else None, "waiting s": row.get("waiting s"),
            "sync s": row["sync s"], "paused s": row["paused s"], "$ an hour": PRICES[row["GPUs"]],
            "$ for 1,000 steps": row["$ for 1,000 steps"]}


def differences(one: dict[str, Any], two: dict[str, Any]) -> dict[str, list[Any]]:
    return {name: [one.get(name), two.get(name)] for name in sorted(one.keys() | two.keys())
            if one.get(name) != two.get(name)}


def main(argv: list[str] | None = None) -> int:
    options = parser(__doc__, model=False)
    options.add_argument("results", type=Path, nargs=2, metavar="JSON")
    args = options.parse_args(argv)
    args.out = args.out or RESULTS / "modes.json"
    results = sorted((json.loads(path.read_text()) for path in args.results), key=lambda r: r["rows"][0]["GPUs"])
    rows = [row_of(result) for result in results]
    if rows[0]["GPUs"] == rows[1]["GPUs"]:
        options.error(f"both runs are of {rows[0]['GPUs']} GPU(s): name one of each mode")
    settings = [settings_of(result) for result in results]
    versions = [{name: value for name, value in result["versions"].items() if name != "gpus"} for result in results]
    ran = {name: value for name, value in versions[0].items() if versions[1].get(name) == value}
    report("modes", args, rows, ran, settings_that_differ=differences(*settings),
           versions_that_differ=differences(*versions), settings=settings[0])
    return 0


if __name__ == "__main__":
    sys.exit(main())
