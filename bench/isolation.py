#!/usr/bin/env python3
"""What isolating packed rows changes, on the rollouts of a real run: each row is scored with it and without.

    TRAIN_SCRIPT=bench/isolation.py TOKEN_BUDGET=4096 MAX_STEPS=12 N_TASKS=4 bash run_job.sh --local

Takes train_lora.py's place in the job. Every row of every step is scored a second time, without gradient, with the
stock short convolutions of transformers, and trained with the isolated ones. The importance ratio of sequences that the
trained weights sampled is 1 where the trainer scores what the sampler sampled. Writes RUN_DIR/isolation.json and prints
the table. Exit codes are those of train_lora.py.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import train_lora
from recipe.config import Settings
from recipe.report import markdown_table

ROWS: list[dict[str, float]] = []  # sequences sampled wholly under the trained weights


@contextmanager
def stock_convolutions(model: Any) -> Iterator[None]:
    """The short convolutions as transformers has them, which reach over the borders."""
    from recipe import short_conv

    convolutions = [module for module in model.modules()
                    if isinstance(module, short_conv.Lfm2ShortConv) and "forward" in vars(module)]
    isolated = [conv.forward for conv in convolutions]
    for conv in convolutions:
        conv.forward = lambda *args, conv=conv, seq_idx=None, **kwargs: type(conv).forward(conv, *args, **kwargs)
    try:
        yield
    finally:
        for conv, forward in zip(convolutions, isolated, strict=True):
            conv.forward = forward


def compare_rows() -> None:
    """Makes the trainer score each row both ways."""
    import torch

    from recipe.group_trainer import GroupGRPOTrainer

    compute_loss = GroupGRPOTrainer.compute_loss

    def both(self: GroupGRPOTrainer, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        stock = inputs | {"health": copy.deepcopy(inputs["health"])}
        with stock_convolutions(model), torch.no_grad():
            compute_loss(self, model, stock, *args, **kwargs)
        loss = compute_loss(self, model, inputs, *args, **kwargs)
        ROWS.extend({"step": self.state.global_step + 1, "sequences": len(inputs["health"]), "trained": new.trained,
                     "isolated": new.ratio, "isolated_min": new.ratio_min, "isolated_max": new.ratio_max,
                     "stock": old.ratio, "stock_min": old.ratio_min, "stock_max": old.ratio_max}
                    for new, old in zip(inputs["health"], stock["health"], strict=True) if new.fresh)
        return loss

    GroupGRPOTrainer.compute_loss = both


def table(rows: list[dict[str, float]]) -> str:
    tokens = sum(row["trained"] for row in rows)

    def cells(name: str, how: str) -> list[str]:
        off = [abs(row[how] - 1) for row in rows]
        mean = sum(row[how] * row["trained"] for row in rows) / tokens
        return [name, f"{mean:.6f}", f"{max(off):.1e}", f"{sum(o > 1e-4 for o in off)} of {len(rows)}",
                f"{min(row[how + '_min'] for row in rows):.4f} to {max(row[how + '_max'] for row in rows):.4f}"]

    return "\n".join(markdown_table(
        ["", "mean ratio", "furthest sequence from 1", "sequences beyond 1 ± 1e-4", "single tokens"],
        [cells("without isolation", "stock"), cells("with isolation", "isolated")]))


def main(argv: list[str] | None = None) -> int:
    compare_rows()
    code = train_lora.main(argv)
    if ROWS:
        (Settings.load().run_path / "isolation.json").write_text(json.dumps(ROWS, indent=1) + "\n")
        packed = sum(row["sequences"] > 1 for row in ROWS)
        print(f"\n{len(ROWS)} sequences sampled wholly under the trained weights, {packed} of them in packed rows\n\n"
              f"{table(ROWS)}\n", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
