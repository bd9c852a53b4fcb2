"""Text that every Python has: its own standard library.

`stdlib:docstrings`: a function's source without its docstring → the docstring. `stdlib:text`: the language
reference topics that `help()` shows, and module documentation. Modules are split by a hash of their top-level name,
so no module is in both `train` and `test`.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import sys
import sysconfig
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("stdlib:docstrings", "stdlib:text")
SPLITS = ("train", "test")
# Parts of the library folder that are not the library: tests, vendored wheels, generated tables, installed packages.
_SKIPPED = {
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "dist-packages",
    "lib2to3",
    "ensurepip",
    "encodings",
    "turtledemo",
}
# Of ten modules, so many are held out.
_HELD_OUT_TENTHS = 2
# Long enough to say something, short enough to learn many of them in little time.
_SOURCE_CHARACTERS = (40, 500)
_DOCSTRING_CHARACTERS = (25, 600)
_PROMPT = "Write the docstring of this Python function.\n\n```python\n{source}\n```"


def version() -> str:
    """What the data depends on: this Python and this module's rules."""
    return f"python {sys.version.split()[0]}, rules 2"


@functools.cache
def rows(name: str, split: str) -> tuple[dict[str, Any], ...]:
    """Rows of a standard-library data set, in a fixed order; parsing takes seconds, so it is done once a process."""
    return tuple(_docstring_rows(split) if name == "stdlib:docstrings" else _text_rows(split))


def split_of(module: str) -> str:
    """`train` or `test`, by the module's top-level name."""
    digest = hashlib.sha256(module.partition(".")[0].encode()).digest()
    return "test" if digest[0] % 10 < _HELD_OUT_TENTHS else "train"


def _modules(split: str) -> Iterator[tuple[str, ast.Module, str]]:
    """(dotted name, syntax tree, source) of the split's modules."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        module = ".".join(part for part in parts if part != "__init__")
        if not module or _SKIPPED & set(parts) or split_of(module) != split:
            continue
        try:
            source = path.read_text(encoding="utf-8")
            yield module, ast.parse(source), source
        except (UnicodeDecodeError, SyntaxError, ValueError):
            continue


def _docstring_rows(split: str) -> Iterator[dict[str, Any]]:
    seen: set[str] = set()
    for module, tree, source in _modules(split):
        lines = source.splitlines()
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            docstring = _docstring(node)
            if docstring is None or len(node.body) < 2:
                continue
            code = _without_docstring(node, lines)
            if _SOURCE_CHARACTERS[0] <= len(code) <= _SOURCE_CHARACTERS[1] and code not in seen:
                seen.add(code)
                yield {
                    "prompt": _PROMPT.format(source=code),
                    "completion": docstring,
                    "source": f"{module}:{node.lineno}",
                }


def _docstring(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str | None:
    """The docstring, if it is of fair length and more than one word."""
    text = (ast.get_docstring(node) or "").strip()
    shortest, longest = _DOCSTRING_CHARACTERS
    return text if shortest <= len(text) <= longest and " " in text else None


def _without_docstring(node: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> str:
    docstring = node.body[0]
    kept = (
        lines[node.lineno - 1 : docstring.lineno - 1]
        + lines[docstring.end_lineno or docstring.lineno : node.end_lineno]
    )
    return textwrap.dedent("\n".join(kept)).strip()


def _text_rows(split: str) -> Iterator[dict[str, Any]]:
    from pydoc_data.topics import topics

    for topic, text in sorted(topics.items()):
        if split_of(f"topic {topic}") == split:
            yield {"text": text.strip(), "source": f"topic {topic}"}
    for module, tree, _ in _modules(split):
        documents = [ast.get_docstring(tree)]
        documents += [ast.get_docstring(node) for node in tree.body if isinstance(node, ast.ClassDef)]
        text = "\n\n".join(inspect.cleandoc(document) for document in documents if document)
        if len(text) >= 200:
            yield {"text": text, "source": module}
