"""Competitive-programming problems as Harbor tasks: rows of DeepCoder's shape, cleaned, with held-out tests.

A row has `problem` (the statement), `tests` (a list, or a JSON string of one, of {type, input, output}) and
`solutions`, which nobody reads. `choose` gives the problems of a split, `files` the files of one task.

The held-out tests are in the task's tests/ alone. Harbor uploads that folder when the agent has ended, and the verifier
(recipe/stdin_verifier.py) takes them out of the sandbox again before the solution runs.
"""

from __future__ import annotations

import functools
import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipe import hub, made_problems
from recipe.config import Settings, SettingsError
from recipe.stdin_verifier import SPARE_SECONDS, TEST_SECONDS

MIN_TESTS = 3  # fewer say too little about a solution
MAX_TESTS = 12  # of one problem: what bounds the time of a verification
MOST_MADE = 3000  # problems of a split with DATASET=generated: 5 ms each
STDIN = "stdin_stdout"
PREFIX = "Solve the following coding problem using the programming language python:"
# What follows the last of these tells the reader to answer with code in the reply.
SUFFIXES = ("The input will be", "Now solve the problem", "Now solve this problem")
SPLITS = ("train", "test")

INSTRUCTION = """\
Write a Python program that solves the problem below. Save it as solution.py in the current folder; there is no such \
file yet. The program reads its input from standard input and prints the answer, and nothing else, to standard output.

When it is written, try it with bash on every example of the problem, for instance

printf '1 2\\n3\\n' | python3 solution.py

and compare what it prints with what the example asks for. Where they differ, or the program fails, correct \
solution.py and try again. You are done when all examples pass.

The problem:

{problem}
"""

DOCKER_IMAGE = "docker.io/library/python:3.12-slim"
DOCKERFILE = "FROM python:3.12-slim\nRUN mkdir -p /workdir\nWORKDIR /workdir\n"
# exec: a solution that kills its parents finds no shell that waits for the verifier.
TEST_SH = "#!/bin/sh\nexec python3 -I -B /tests/verify.py /tests/tests.json /workdir /logs/verifier\n"


@dataclass(frozen=True)
class Problem:
    """A problem that can be a task: its cleaned statement and at least MIN_TESTS tests, (stdin, stdout) each."""

    statement: str
    tests: tuple[tuple[str, str], ...]

    @property
    def name(self) -> str:
        return "deepcoder_" + hashlib.sha256(self.statement.encode()).hexdigest()[:12]

    @property
    def instruction(self) -> str:
        return INSTRUCTION.format(problem=self.statement)


def clean(text: str) -> str:
    """The statement without the dataset's request around it."""
    text = text.strip().removeprefix(PREFIX)
    ends = [text.rfind(suffix) for suffix in SUFFIXES]
    return text[:min((end for end in ends if end >= 0), default=len(text))].strip()


def stdin_tests(tests: Any) -> list[tuple[str, str]]:
    """(input, output) of the tests that are run with stdin and stdout; a test that does not say is one. Those of
    another form, such as arguments and results of a function, are left out, and so are all of a row that is damaged."""
    try:
        tests = json.loads(tests) if isinstance(tests, str) else tests
    except ValueError:
        tests = None
    texts = [(test.get("input") or "", test.get("output")) for test in (tests if isinstance(tests, list) else ())
             if isinstance(test, dict) and (test.get("type") or STDIN) == STDIN]
    return [(given, wanted) for given, wanted in texts if isinstance(given, str) and isinstance(wanted, str)]


def problem_of(row: dict[str, Any]) -> Problem | None:
    """The row's problem, or None when it has too few tests or no statement."""
    tests = stdin_tests(row["tests"])
    statement = clean(row["problem"])
    return Problem(statement, tuple(tests[:MAX_TESTS])) if statement and len(tests) >= MIN_TESTS else None


def choose(rows: Sequence[dict[str, Any]], split: str, n_train: int, n_test: int, seed: int) -> list[Problem]:
    """The problems of `split`, no statement twice and none in both splits.

    `seed` shuffles the training problems. The held-out ones are the last of the shuffle with seed 0, in every run.
    Raises SettingsError when `rows` has too few.
    """
    seen: set[str] = set()

    def take(order: Iterator[int], n: int, wanted: str) -> list[Problem]:
        taken: list[Problem] = []
        while len(taken) < n:
            index = next(order, None)
            if index is None:
                raise SettingsError(f"DATASET has only {len(taken)} problems left for {wanted} with {MIN_TESTS} or "
                                    "more stdin/stdout tests: lower N_TRAIN_TASKS or N_TASKS.")
            problem = problem_of(rows[index])
            if problem and problem.name not in seen:
                seen.add(problem.name)
                taken.append(problem)
        return taken

    def order(seed: int) -> list[int]:
        return random.Random(seed).sample(range(len(rows)), len(rows))

    held_out = take(reversed(order(0)), n_test, "evaluation")
    return held_out if split == "test" else take(iter(order(seed)), n_train, "training")


def rows_of(settings: Settings) -> Sequence[dict[str, Any]]:
    """The rows of DATASET. Raises SettingsError when there is none, HubError when the Hub cannot be asked."""
    if settings.dataset == "generated":
        if max(settings.n_train_tasks, settings.n_tasks) > MOST_MADE:
            raise SettingsError(f"DATASET=generated makes {MOST_MADE} problems of each split at most: lower "
                                "N_TRAIN_TASKS or N_TASKS.")
        return made_rows(2 * (settings.n_train_tasks + settings.n_tasks))
    return hub_rows(settings.dataset, settings.dataset_config, settings.dataset_revision)


made_rows = functools.cache(made_problems.rows)  # both splits come from them


@functools.cache
def hub_rows(dataset: str, config: str, revision: str) -> Sequence[dict[str, Any]]:
    from datasets import load_dataset

    def load() -> Any:
        try:
            return load_dataset(dataset, config, revision=revision, split="train")
        except (FileNotFoundError, ValueError) as err:
            return err  # no other attempt would find it

    found = hub.repeat(load, dataset, f"reading {dataset} ({config})")
    if isinstance(found, Exception):
        raise SettingsError(f"DATASET={dataset}, DATASET_CONFIG={config}, DATASET_REVISION={revision}: "
                            f"{hub.explain(found, dataset)}")
    return found


def task_toml(problem: Problem) -> str:
    limit = TEST_SECONDS * len(problem.tests) + 3 * SPARE_SECONDS  # the verifier ends by itself before
    return f"""\
schema_version = "1.2"
artifacts = []

[task]
name = "deepcoder/{problem.name}"
description = "Write solution.py for a competitive-programming problem"
authors = []
keywords = ["code"]

[metadata]
source_dataset = "deepcoder"
held_out_tests = {len(problem.tests)}

[environment]
docker_image = "{DOCKER_IMAGE}"
build_timeout_sec = 600
cpus = 1
memory_mb = 4096
storage_mb = 1024
allow_internet = true

[verifier]
timeout_sec = {limit}

[agent]
timeout_sec = 600
"""


def files(problem: Problem) -> dict[str, str]:
    """Relative path -> text of every file of the task."""
    tests = [{"input": given, "output": wanted} for given, wanted in problem.tests]
    return {
        "task.toml": task_toml(problem),
        "instruction.md": problem.instruction,
        "environment/Dockerfile": DOCKERFILE,
        "tests/test.sh": TEST_SH,
        "tests/verify.py": Path(__file__).with_name("stdin_verifier.py").read_text(encoding="utf-8"),
        "tests/tests.json": json.dumps(tests),
    }
