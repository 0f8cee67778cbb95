"""Small competitive-programming problems in the shape of DeepCoder's rows, made here: no network, any number.

`rows(n)` is deterministic and its first rows do not depend on n. Each row is one of KINDS with numbers of its own in
the statement, so that no two statements, and no two solutions, are alike.

    python -m recipe.made_problems 100 problems.jsonl     # a dataset of the same shape as a file

Standard library only.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipe.exits import Parser

TESTS = 14  # of one problem, the first two of which are examples in the statement
PREFIX = "Solve the following coding problem using the programming language python:\n\n"
SUFFIX = ("\n\nThe input will be given via stdin and the output should be printed to stdout by your code."
          "\n\nNow solve the problem by providing the code.")


@dataclass(frozen=True)
class Kind:
    """A family of problems. `ask` and `code` are formatted with a and b, two numbers of the problem; `draw` makes an
    input and `answer` its output, both from the same numbers."""

    ask: str
    code: str
    draw: Callable[[random.Random, int, int], str]
    answer: Callable[[str, int, int], object]


def _numbers(rng: random.Random, a: int, b: int) -> str:
    count = rng.randint(1, 20)
    return f"{count}\n{' '.join(str(rng.randint(-99, 99)) for _ in range(count))}\n"


def _word(rng: random.Random, a: int, b: int) -> str:
    return "".join(rng.choice("abcdeiou") for _ in range(rng.randint(1, 30))) + "\n"


def _pair(rng: random.Random, a: int, b: int) -> str:
    return f"{rng.randint(1, 200)} {rng.randint(1, 200)}\n"


def _list(text: str) -> list[int]:
    return [int(word) for word in text.split()[1:]]


LIST = "The first line has a number n (1 to 20), the second n integers between -99 and 99. "
READ = "n = int(input())\nx = list(map(int, input().split()))\n"
KINDS = (
    Kind(LIST + "Print {a} times their sum, plus {b}.", READ + "print({a} * sum(x) + {b})",
         _numbers, lambda t, a, b: a * sum(_list(t)) + b),
    Kind(LIST + "Print how many of them are greater than {a} or less than -{b}.",
         READ + "print(sum(v > {a} or v < -{b} for v in x))",
         _numbers, lambda t, a, b: sum(v > a or v < -b for v in _list(t))),
    Kind(LIST + "Print the largest of them after each was raised by {a} and then reduced modulo {b}.",
         READ + "print(max((v + {a}) % {b} for v in x))",
         _numbers, lambda t, a, b: max((v + a) % b for v in _list(t))),
    Kind(LIST + "Print the integers in ascending order on one line, those divisible by {a} before all others, and "
         "{b} behind the last one.",
         READ + "print(*sorted(x, key=lambda v: (v % {a} != 0, v)), {b})",
         _numbers, lambda t, a, b: " ".join(map(str, [*sorted(_list(t), key=lambda v: (v % a != 0, v)), b]))),
    Kind("The input is one word of small letters. Every vowel (a, e, i, o, u) is worth {a} points, every other letter "
         "{b}. Print the points of the word.",
         "w = input()\nprint(sum({a} if c in 'aeiou' else {b} for c in w))",
         _word, lambda t, a, b: sum(a if c in "aeiou" else b for c in t.strip())),
    Kind("The input is one word of small letters. Rotate it {a} places to the left (the first letter moves to the end "
         "each time) and print the result {b} times, one a line.",
         "w = input()\nk = {a} % len(w)\nfor _ in range({b}):\n    print(w[k:] + w[:k])",
         _word, lambda t, a, b: "\n".join([(w := t.strip())[a % len(w):] + w[:a % len(w)]] * b)),
    Kind("The input is two integers x and y between 1 and 200. A coin of value {a} and a coin of value {b} are each "
         "worth what they say. Print the number of coins of value {a} that fit into x, and of value {b} into y, on "
         "one line.",
         "x, y = map(int, input().split())\nprint(x // {a}, y // {b})",
         _pair, lambda t, a, b: " ".join(str(int(v) // n) for v, n in zip(t.split(), (a, b), strict=True))),
    Kind("The input is two integers x and y between 1 and 200. Count the integers from 1 to x * y, both included, that "
         "are divisible by {a} or by {b}.",
         "x, y = map(int, input().split())\nprint(sum(v % {a} == 0 or v % {b} == 0 for v in range(1, x * y + 1)))",
         _pair, lambda t, a, b: sum(v % a == 0 or v % b == 0 for v in
                                    range(1, int(t.split()[0]) * int(t.split()[1]) + 1))),
)


def row(index: int) -> dict[str, Any]:
    """Problem `index`: {"problem", "solutions", "tests"}, the tests without the two examples."""
    kind, turn = KINDS[index % len(KINDS)], index // len(KINDS)
    a, b = 2 + turn % 17, 3 + turn // 17  # a pair of numbers that no other problem of the kind has
    rng = random.Random(index)
    inputs = [kind.draw(rng, a, b) for _ in range(TESTS)]
    tests = [{"type": "stdin_stdout", "input": text, "output": f"{kind.answer(text, a, b)}\n"} for text in inputs]
    examples = "".join(f"\n\nExample {i}\nInput\n{test['input']}Output\n{test['output'].rstrip()}"
                       for i, test in enumerate(tests[:2], 1))
    return {"problem": PREFIX + kind.ask.format(a=a, b=b) + examples + SUFFIX,
            "solutions": [kind.code.format(a=a, b=b) + "\n"], "tests": tests[2:]}


def rows(n: int) -> list[dict[str, Any]]:
    return [row(index) for index in range(n)]


def main(argv: list[str] | None = None) -> int:
    parser = Parser(__doc__)
    parser.add_argument("n", type=int, help="number of problems")
    parser.add_argument("file", type=Path, help="JSON lines to write")
    args = parser.parse_args(argv)
    args.file.write_text("".join(json.dumps(r) + "\n" for r in rows(args.n)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
