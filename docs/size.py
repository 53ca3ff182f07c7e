"""Count the package: lines of code without docstrings, comments and blank lines, classes, and the
names that more than one class has.

python docs/size.py             the whole package
python docs/size.py rewards     a part
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def lines_of_code(source: str, tree: ast.Module) -> int:
    """Return how many lines hold code; the lines of a longer string or call all count."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            docstring = node.body[0]
            lines.difference_update(range(docstring.lineno, docstring.end_lineno + 1))
    return len(lines)


def main(part: str = "") -> None:
    files = sorted((ROOT / "openrl" / part).rglob("*.py"))
    lines = functions = 0
    classes: Counter[str] = Counter()
    for path in files:
        source = path.read_text()
        tree = ast.parse(source)
        lines += lines_of_code(source, tree)
        classes.update(n.name for n in ast.walk(tree) if isinstance(n, ast.ClassDef))
        functions += sum(
            isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef) for n in ast.walk(tree)
        )
    print(f"{lines} lines of code in {len(files)} files")
    print(f"{classes.total()} classes, {functions} functions")
    if several := [name for name, count in sorted(classes.items()) if count > 1]:
        print(f"names of several classes: {', '.join(several)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
