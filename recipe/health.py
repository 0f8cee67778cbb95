"""Health of the policy gradient: what each step's rows say about it, and the alarms.

The importance ratio p_trainer / p_sampler of tokens that the trained weights sampled is 1 up to rounding. It is the one
figure that shows a mistake anywhere between sampler and loss: other weights, other text, other sampling, other maths.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

RATIO_BAND = (0.998, 1.002)  # where the mean ratio of rows sampled wholly under the trained weights must lie
RATIO_STEPS = 3  # steps running outside the band before the alarm
OVERSIZE_SHARE = 0.01  # of all rows, above which sequences longer than TOKEN_BUDGET raise an alarm
CONTRAST = 1e-6  # rewards closer than this are equal


@dataclass
class RowHealth:
    """One trained sequence, as metrics.jsonl records it."""

    group: int
    rollout: int
    tokens: int
    trained: int  # tokens that carry loss
    tool_calls: int
    reward: float
    advantage: float
    staleness: int  # optimizer steps between the weights that sampled the first token and those that are trained
    fresh: bool  # sampled from first to last token under the weights that are trained
    sampled: int = 0  # rollouts of its group, ungraded ones included
    rowless: list[float] = field(default_factory=list)  # rewards of its group's rollouts that have no turn with loss
    # of its rollout's turns: prompts aligned again with what was held before, prompts that began another row instead,
    # and the tokens by which both differed
    realign: int = 0
    fork: int = 0
    drift_tokens: int = 0
    ratio: float = float("nan")  # mean importance ratio of the trained tokens
    ratio_min: float = float("nan")
    ratio_max: float = float("nan")
    clipped: float = float("nan")  # share of the trained tokens whose gradient the clip takes away
    kl: float = float("nan")  # estimate of KL(sampler || trainer) per trained token, nats: E[ratio - 1 - log ratio]
    entropy: float = float("nan")  # of the trained distribution per trained token, nats


class RatioOutside(RuntimeError):
    """The importance ratio left its band for several steps, and RATIO_STOP asked to stop then."""


class RatioAlarm:
    """Warns when the mean ratio of fresh rows is outside RATIO_BAND for RATIO_STEPS steps that have such rows."""

    def __init__(self) -> None:
        self.outside: list[float] = []

    def feed(self, fresh_ratio: float | None) -> str | None:
        """Takes one step's mean, None without fresh rows; returns the warning at every further step of an alarm."""
        if fresh_ratio is None:
            return None
        if RATIO_BAND[0] <= fresh_ratio <= RATIO_BAND[1]:
            self.outside = []
            return None
        self.outside.append(fresh_ratio)
        if len(self.outside) < RATIO_STEPS:
            return None
        figures = ", ".join(f"{ratio:.5f}" for ratio in self.outside[-RATIO_STEPS:])
        return (f"RATIO ALARM: the mean importance ratio of rows sampled wholly under the trained weights is outside "
                f"{RATIO_BAND[0]}-{RATIO_BAND[1]} for {len(self.outside)} steps running (last: {figures}). The trainer "
                "scores another policy than the one that sampled. Likely causes: a truncated or rescaled distribution "
                "(TOP_P, TOP_K, TEMPERATURE, repetition penalty, log-probs that are not the processed ones); a weight "
                "update that did not arrive in full (see sync/canary_gap); another chat template or tokenizer in the "
                "server; packed sequences that see each other; DTYPE of server and trainer differing.")


class OversizeAlarm:
    """Counts sequences longer than the budget of a packed row. They are trained, in a row of their own."""

    def __init__(self, token_budget: int) -> None:
        self.token_budget, self.rows, self.oversize, self.raised = token_budget, 0, 0, False

    def feed(self, rows: list[RowHealth]) -> list[str]:
        """Takes one step's sequences; returns a line for each that is too long, and once the alarm."""
        too_long = [row for row in rows if 0 < self.token_budget < row.tokens]
        self.rows += len(rows)
        self.oversize += len(too_long)
        lines = [f"longer than TOKEN_BUDGET={self.token_budget}: {row.tokens} tokens of rollout {row.rollout}, group "
                 f"{row.group}; trained in a row of its own" for row in too_long]
        if self.oversize > OVERSIZE_SHARE * self.rows and not self.raised:
            self.raised = True
            lines.append(f"OVERSIZE ALARM: {self.oversize} of {self.rows} sequences are longer than TOKEN_BUDGET="
                         f"{self.token_budget}. Nothing is dropped, but memory is not bounded by it: raise "
                         "TOKEN_BUDGET, or lower MAX_MODEL_LEN, MAX_MODEL_CALLS or MAX_OUTPUT_TOKENS.")
        return lines


def has_contrast(rewards: list[float]) -> bool:
    """Whether a group's rewards differ; where they don't, every advantage and so the gradient is zero."""
    return max(rewards) - min(rewards) > CONTRAST


def token_mean(rows: list[RowHealth], field: str = "ratio") -> float:
    """Mean of a per-row figure over the trained tokens of `rows`."""
    return sum(getattr(row, field) * row.trained for row in rows) / sum(row.trained for row in rows)


def step_health(rows: list[RowHealth]) -> dict[str, Any]:
    """What one group's rows amount to, as metrics.jsonl records it."""
    fresh = [row for row in rows if row.fresh]
    rollouts = {row.rollout: row for row in rows}
    return {
        **_ratio(rows), "fresh_rows": len(fresh), "fresh_ratio_mean": token_mean(fresh) if fresh else None,
        "kl": token_mean(rows, "kl"), "entropy": token_mean(rows, "entropy"),
        "staleness_mean": sum(row.staleness for row in rows) / len(rows),
        "staleness_max": max(row.staleness for row in rows),
        "by_staleness": {str(age): {"rows": len(of_age)} | _ratio(of_age)
                         for age in sorted({row.staleness for row in rows})
                         for of_age in [[row for row in rows if row.staleness == age]]},
        "contrast": has_contrast([row.reward for row in rows] + rows[0].rowless),
        "forks": sum(row.fork for row in rollouts.values()), "realigned": sum(r.realign for r in rollouts.values()),
        "drift_tokens": sum(row.drift_tokens for row in rollouts.values()),
        "ungraded_rollouts": max(0, rows[0].sampled - len(rollouts) - len(rows[0].rowless)),
    }


def _ratio(rows: list[RowHealth]) -> dict[str, float]:
    return {"ratio_mean": token_mean(rows), "ratio_min": min(row.ratio_min for row in rows),
            "ratio_max": max(row.ratio_max for row in rows), "clipped": token_mean(rows, "clipped")}
