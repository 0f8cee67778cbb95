"""The test folders can be given to one pytest: their modules are found by name, so each name exists once."""

from __future__ import annotations

import re
from collections import Counter

from recipe.config import REPO

FILES = sorted((REPO / "tests").rglob("*.py"))


def test_module_names_are_unique():
    names = Counter(path.name for path in FILES if path.name != "conftest.py")
    assert [name for name, count in names.items() if count > 1] == []


def test_nothing_is_imported_from_a_conftest():
    """Of several conftest.py, only the last loaded one has that name: helpers have modules of their own."""
    pattern = re.compile(r"^\s*(from|import) conftest\b", re.M)
    assert [str(path.relative_to(REPO)) for path in FILES if pattern.search(path.read_text())] == []
