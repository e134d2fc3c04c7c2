"""Lines of code per package: comments, docstrings and blank lines do not count.

    python -m benchmarks.lines [TREE [BEFORE]] [--json]

TREE is a folder with `src/atoll` in it (here by default). With BEFORE, another checkout, both are
shown side by side. Generated code is left out.
"""

import ast
import io
import json
import sys
import tokenize
from collections import Counter
from pathlib import Path

_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def lines_of(source: str) -> tuple[int, int]:
    """How many lines of `source` hold code, and how many a comment."""
    code: set[int] = set()
    comments: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comments.add(token.start[0])
        elif token.type not in _NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - _docstrings(source)), len(comments)


def _docstrings(source: str) -> set[int]:
    found: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for first in node.body[:1]:
                if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                    found.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return found


def count(tree: Path) -> dict[str, tuple[int, int, int]]:
    """By package of `tree`: files, lines of code, lines with a comment."""
    root = tree / "src" / "atoll"
    files: Counter[str] = Counter()
    code: Counter[str] = Counter()
    comments: Counter[str] = Counter()
    for path in sorted(root.rglob("*.py")):
        if "proto" in path.parts:
            continue
        inside = path.relative_to(root)
        package = inside.parts[0] if len(inside.parts) > 1 else "(root)"
        found = lines_of(path.read_text())
        files[package] += 1
        code[package] += found[0]
        comments[package] += found[1]
    return {name: (files[name], code[name], comments[name]) for name in sorted(files)}


def main() -> None:
    words = [word for word in sys.argv[1:] if word != "--json"]
    now = count(Path(words[0] if words else "."))
    before = count(Path(words[1])) if len(words) > 1 else {}
    if "--json" in sys.argv:
        print(json.dumps({"now": now, "before": before}, indent=1))
        return
    print(f"{'package':12} {'files':>11} {'code':>15} {'comments':>13}")
    for name in sorted({*now, *before}):
        _show(name, now.get(name, (0, 0, 0)), before.get(name))
    totals = [tuple(map(sum, zip(*each.values(), strict=True))) for each in (now, before) if each]
    _show("all", totals[0], totals[1] if before else None)
    if before:
        print(f"code: {100 * (totals[0][1] / totals[1][1] - 1):+.1f} %")


def _show(name: str, now: tuple[int, ...], before: tuple[int, ...] | None) -> None:
    was = before or ((0, 0, 0) if before is not None else None)
    shown = [f"{b} -> {n}" if was else str(n) for n, b in zip(now, was or now, strict=True)]
    print(f"{name:12} {shown[0]:>11} {shown[1]:>15} {shown[2]:>13}")


if __name__ == "__main__":
    main()
