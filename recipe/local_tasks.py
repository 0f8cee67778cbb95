"""Tasks of the SmolDataEnvs shape that need no network: small CSV files and questions that a shell pipeline answers.

``generate(split, n, seed)`` is deterministic. The splits share no file name, no cell and no instruction: words and
numbers are dealt to a split by a remainder (``_owner``), so a transcript memorised on one task answers no other one.
The ``warm`` split feeds only the warm start of the tiny model (tiny/make_tiny.py).

Standard library only.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass

SPLITS = ("train", "test", "warm")
MOST = 3000  # tasks of one split: each has a file name of its own, and there are 3,600 of those
INPUT_DIR = "/home/user/input"
ANSWER_FILE = "/workdir/answer.txt"

STEMS = ("orders", "trips", "plants", "books", "birds", "shops", "tools", "games", "songs", "boats", "cars", "rooms")
LABEL_NAMES = ("name", "title", "label", "code")
CATEGORY_NAMES = ("city", "team", "kind", "group", "color")
NUMBER_NAMES = ("price", "stock", "weight", "score", "age", "height", "length", "speed", "cost", "points")
_ONSETS = ("b", "d", "f", "g", "k", "l", "m", "n", "p", "r", "s", "t", "v", "z", "br", "kr", "st", "tr")
_VOWELS = ("a", "e", "i", "o", "u")
_CODAS = ("", "", "l", "n", "r", "s", "k")


@dataclass(frozen=True)
class Kind:
    """One kind of question. `pipeline` prints the answer; its fields are {file} and {k} (column, from 1)."""

    name: str
    column: str | None  # which column it asks about: label, category, number or None
    question: str
    pipeline: str
    difficulty: str


# No quote, backslash or parenthesis: the chat template writes a tool's arguments between single quotes without escapes,
# and TRL's parser ends a call at the first closing parenthesis.
KINDS = {kind.name: kind for kind in (
    Kind("rows", None, "How many data rows does the file have?", "tail -n +2 {file} | wc -l", "easy"),
    Kind("first", "label", "What is column {k} ({name}) of the first data row?",
         "head -n 2 {file} | tail -n 1 | cut -d, -f{k}", "easy"),
    Kind("last", "label", "What is column {k} ({name}) of the last data row?",
         "tail -n 1 {file} | cut -d, -f{k}", "easy"),
    Kind("distinct", "category", "How many different values does column {k} ({name}) have?",
         "tail -n +2 {file} | cut -d, -f{k} | sort -u | wc -l", "medium"),
    Kind("largest", "number", "What is the largest value of column {k} ({name})?",
         "tail -n +2 {file} | cut -d, -f{k} | sort -n | tail -n 1", "medium"),
    Kind("smallest", "number", "What is the smallest value of column {k} ({name})?",
         "tail -n +2 {file} | cut -d, -f{k} | sort -n | head -n 1", "medium"),
    Kind("second", "number", "What is the second largest value of column {k} ({name})?",
         "tail -n +2 {file} | cut -d, -f{k} | sort -n | tail -n 2 | head -n 1", "hard"),
)}
# One round of tasks: each kind once, the hard one twice.
ROUND = tuple(KINDS[name] for name in (
    "rows", "first", "last", "second", "distinct", "largest", "smallest", "second"))


@dataclass(frozen=True)
class LocalTask:
    """A generated task: what is asked, of which file, and the answer. `header` and `rows` are the CSV's cells."""

    name: str
    kind: Kind
    file_name: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    k: int  # column asked about, from 1; 0 where the question is about whole rows

    @property
    def csv(self) -> str:
        return "".join(",".join(row) + "\n" for row in (self.header, *self.rows))

    @property
    def question(self) -> str:
        column = self.header[self.k - 1] if self.k else ""
        return self.kind.question.format(k=self.k, name=column)

    @property
    def instruction(self) -> str:
        columns = ", ".join(f"{i} {name}" for i, name in enumerate(self.header, 1))
        return (f"The file {INPUT_DIR}/{self.file_name} is a CSV file with a header row. Columns: {columns}.\n\n"
                f"{self.question}\n\nWrite only the value to {ANSWER_FILE}, then stop.\n")

    @property
    def pipeline(self) -> str:
        """Shell pipeline that prints the answer inside the sandbox."""
        return self.kind.pipeline.format(file=f"{INPUT_DIR}/{self.file_name}", k=self.k)

    @property
    def answer(self) -> str:
        return _ANSWERS[self.kind.name](self)

    def cells(self) -> set[str]:
        return {cell for row in self.rows for cell in row}


def _column(task: LocalTask) -> list[str]:
    return [row[task.k - 1] for row in task.rows]


_ANSWERS: dict[str, Callable[[LocalTask], str]] = {
    "rows": lambda t: str(len(t.rows)),
    "first": lambda t: _column(t)[0],
    "last": lambda t: _column(t)[-1],
    "distinct": lambda t: str(len(set(_column(t)))),
    "largest": lambda t: str(max(map(int, _column(t)))),
    "smallest": lambda t: str(min(map(int, _column(t)))),
    "second": lambda t: str(sorted(map(int, _column(t)))[-2]),
}


def _owner(text: str) -> str:
    """The only split that may use this word or number."""
    return SPLITS[int(text) % len(SPLITS) if text.isdigit() else zlib.crc32(text.encode()) % len(SPLITS)]


def _word(rng: random.Random, split: str) -> str:
    while True:
        n = rng.choice((2, 2, 2, 3))
        word = "".join(rng.choice(part) for _ in range(n) for part in (_ONSETS, _VOWELS, _CODAS)).capitalize()
        if _owner(word) == split:
            return word


def _number(rng: random.Random, split: str, low: int, high: int) -> str:
    while True:
        number = str(rng.randint(low, high))
        if _owner(number) == split:
            return number


def _distinct(n: int, draw: Callable[[], str]) -> list[str]:
    found: dict[str, None] = {}
    while len(found) < n:
        found[draw()] = None
    return list(found)


def make_task(rng: random.Random, split: str, kind: Kind, index: int) -> LocalTask:
    """One task with fresh data; draws only from `rng`."""
    n_rows = rng.randint(8, 40)
    categories = _distinct(rng.randint(3, 7), lambda: _word(rng, split))
    numbers = rng.sample(NUMBER_NAMES, 2)
    columns = {
        "label": (rng.choice(LABEL_NAMES), _distinct(n_rows, lambda: _word(rng, split))),
        "category": (rng.choice(CATEGORY_NAMES), [rng.choice(categories) for _ in range(n_rows)]),
        "number": (numbers[0], _distinct(n_rows, lambda: _number(rng, split, 10, 999))),
        "other": (numbers[1], [_number(rng, split, 10, 999) for _ in range(n_rows)]),
    }
    order = rng.sample(list(columns), len(columns))
    return LocalTask(
        name=f"local_{split}_{index:04d}_{kind.name}",
        kind=kind,
        file_name=f"{rng.choice(STEMS)}_{_number(rng, split, 100, 999)}.csv",
        header=tuple(columns[c][0] for c in order),
        rows=tuple(zip(*(columns[c][1] for c in order), strict=True)),
        k=order.index(kind.column) + 1 if kind.column else 0,
    )


def generate(split: str, n: int, seed: int = 0) -> list[LocalTask]:
    """`n` tasks with unique instructions, the kinds in the shares of ROUND and shuffled order. Raises ValueError."""
    if split not in SPLITS:
        raise ValueError(f"split {split!r} is unknown: use one of {', '.join(SPLITS)}")
    if n > MOST:
        raise ValueError(f"{n} tasks are asked of the generator, which makes {MOST} at most")
    rng = random.Random(f"{split}:{seed}")
    tasks: list[LocalTask] = []
    files: set[str] = set()
    kinds: list[Kind] = []
    while len(tasks) < n:
        kinds = kinds or rng.sample(ROUND, len(ROUND))
        task = make_task(rng, split, kinds[-1], len(tasks))
        if task.file_name not in files:
            kinds.pop()
            files.add(task.file_name)
            tasks.append(task)
    return tasks


DOCKERFILE = f"FROM python:3.12-slim\nCOPY input {INPUT_DIR}\nRUN mkdir -p /workdir\nWORKDIR /workdir\n"

# The exact answer is settled without starting Python; the grader is for the same value in another form.
TEST_SH = """\
#!/bin/sh
# Grades /workdir/answer.txt: 1.0 or 0.0 to /logs/verifier/reward.txt. No file or an empty one is a clean 0.0.
set -eu
mkdir -p /logs/verifier
answer=$(cat /workdir/answer.txt 2>/dev/null || true)
if [ -z "$answer" ]; then
  echo 0.0 > /logs/verifier/reward.txt
elif [ "$answer" = "$EXPECTED_ANSWER" ]; then
  echo 1.0 > /logs/verifier/reward.txt
else
  printf '%s' "$answer" | python3 /tests/grader.py > /logs/verifier/reward.part
  mv /logs/verifier/reward.part /logs/verifier/reward.txt
fi
"""

GRADER_PY = '''\
"""Scores the answer on stdin against EXPECTED_ANSWER: prints 1.0 or 0.0. Numbers may differ by ATOL or RTOL."""
import os
import sys


def score(answer: str, expected: str, atol: float, rtol: float) -> float:
    answer, expected = (" ".join(text.lower().split()) for text in (answer, expected))
    if answer == expected:
        return 1.0
    try:
        got, want = float(answer.replace(",", "")), float(expected)
    except ValueError:
        return 0.0
    return float(abs(got - want) <= max(atol, rtol * abs(want)))


if __name__ == "__main__":
    env = os.environ
    print(score(sys.stdin.read(), env["EXPECTED_ANSWER"], float(env.get("ATOL", 0)), float(env.get("RTOL", 0))))
'''


def task_toml(task: LocalTask) -> str:
    mode = "numeric" if task.answer.isdigit() else "label"
    return f"""\
schema_version = "1.2"
artifacts = []

[task]
name = "local/{task.name}"
description = "{task.question}"
authors = []
keywords = ["data-agent", "local"]

[metadata]
source_dataset = "local"
kind = "{task.kind.name}"
gold_answer = "{task.answer}"
difficulty_tier = "{task.kind.difficulty}"

[environment]
build_timeout_sec = 600
cpus = 1
memory_mb = 1024
storage_mb = 1024
allow_internet = true

[verifier]
timeout_sec = 60

[verifier.env]
EXPECTED_ANSWER = "{task.answer}"
QUESTION = "{task.question}"
REWARD_MODE = "{mode}"
ATOL = "0.001"
RTOL = "0"

[agent]
timeout_sec = 600
"""


def files(task: LocalTask) -> dict[str, str]:
    """Relative path -> text of every file of the task."""
    return {
        "task.toml": task_toml(task),
        "instruction.md": task.instruction,
        "environment/Dockerfile": DOCKERFILE,
        f"environment/input/{task.file_name}": task.csv,
        "tests/test.sh": TEST_SH,
        "tests/grader.py": GRADER_PY,
    }
