"""Report modules longer than house style likes, and core's total; print only, never fail."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

LONG_LINES = 350
VERY_LONG_LINES = 600


def code_lines(source: str) -> int:
    """Return the number of lines that hold code: no blanks, comments or docstrings."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        if isinstance(node, kinds) and ast.get_docstring(node, clean=False) is not None:
            first = node.body[0]
            docstrings.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    lines = enumerate(source.splitlines(), start=1)
    return sum(
        1
        for number, line in lines
        if line.strip() and not line.strip().startswith("#") and number not in docstrings
    )


def main() -> None:
    """Print the long modules, longest first, and the size of core."""
    root = Path(__file__).parent.parent / "src" / "tierwise"
    sizes = {path: len(path.read_text().splitlines()) for path in root.rglob("*.py")}
    for path, lines in sorted(sizes.items(), key=lambda item: -item[1]):
        if lines > LONG_LINES:
            note = "split where a seam shows" if lines > VERY_LONG_LINES else "long"
            sys.stdout.write(f"{lines:5d} lines  {path.relative_to(root)}  ({note})\n")
    core = sum(code_lines(path.read_text()) for path in (root / "core").glob("*.py"))
    sys.stdout.write(f"{len(sizes)} modules, {sum(sizes.values())} lines; core: {core} of code\n")


if __name__ == "__main__":
    main()
