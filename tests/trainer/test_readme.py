"""The README says what the code does: its table of settings, its scripts, its launch snippet."""

from __future__ import annotations

import ast
import re

from recipe.config import REPO, markdown_table

README = (REPO / "README.md").read_text(encoding="utf-8")


def test_settings_table_is_the_code_s():
    assert markdown_table() in README, "regenerate it: python3 -m recipe.config table"


def test_no_placeholder_is_left():
    assert "@@" not in README


def test_every_script_it_names_exists():
    named = set(re.findall(r"`((?:recipe/|tiny/|data/)?[\w/]+\.(?:py|sh))`", README))
    named |= {path for path in re.findall(r"\bbash (\w+\.sh)\b", README)}
    assert named and not {path for path in named if not (REPO / path).is_file()}


def test_launch_snippet_is_python_and_names_the_job():
    snippet = re.search(r"python - <<'EOF'\n(.*?)\nEOF", README, re.DOTALL)[1]
    call = next(node for node in ast.walk(ast.parse(snippet))
                if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "run_job")
    arguments = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    assert arguments["image"] == "'vllm/vllm-openai:v0.31.0'" and arguments["flavor"] == "'h200x2'"
    assert arguments["timeout"] == "'72h'" and arguments["expose_public"] == "[8000]"
    assert {"env", "secrets", "command"} <= set(arguments)
