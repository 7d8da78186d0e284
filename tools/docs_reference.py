"""The pages of the site that are made of sources: what can be imported, with its docstrings, and the options of the command line.

Nothing is imported for it: modules are read as text. tools/docs_site.py adds the pages while mkdocs builds the site.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Place in the site -> title, package, and what the page says first.
PACKAGES = {
    "reference/client.md": ("The Python client, name by name", "client", "[How it is used](../client.md)."),
    "reference/llm.md": (
        "The LLM API, name by name",
        "compat.llm",
        "[How it is used](../llm.md).",
    ),
    "reference/executor.md": ("The Executor, name by name", "backend.executor", "[How it is used](../executor.md)."),
    "reference/values.md": (
        "Requests, results and settings, name by name",
        "backend.api",
        "What [the Executor](executor.md) takes and gives; [every setting](../configuration.md) is a field of one of these.",
    ),
}
COMMAND_LINE = "reference/command-line.md"
WIDTH = 100  # characters: a longer signature has a line for each parameter
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def pages() -> dict[str, str]:
    """Place in the site -> text of each page."""
    made = {place: package_page(*row) for place, row in PACKAGES.items()}
    return {**made, COMMAND_LINE: command_line_page()}


def command_line_page() -> str:
    """The help of each command, which tools/write_help.py keeps beside the sources."""
    texts = {path.stem: path.read_text() for path in sorted((ROOT / "deploy" / "help").glob("*.txt"))}
    first = "# The command line\n\nWhat `--help` of each command says.\n"
    parts = [f"\n## `{_typed(name)}`\n\n```text\n{text.strip(chr(10))}\n```\n" for name, text in texts.items()]
    return first + "".join(parts)


def package_page(title: str, package: str, first: str) -> str:
    """The page of what a package exports: each class with its fields and public methods, each function."""
    parts = [f"# {title}\n\n{first}\n"]
    for name, definition, module in sorted(exports(package), key=lambda each: each[0].lower()):
        parts.append(
            _of_class(definition, module)
            if isinstance(definition, ast.ClassDef)
            else _of_function(name, definition, "##")
        )
    return "\n".join(parts)


def exports(package: str) -> Iterator[tuple[str, ast.ClassDef | _Function, Path]]:
    """(name, definition, file) of each class and function in the package's `__all__` that this project defines."""
    init = ROOT / package.replace(".", "/") / "__init__.py"
    names = next(names for node in _tree(init).body if (names := _all_of(node)))
    for node in _tree(init).body:
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            file = ROOT / f"{node.module.replace('.', '/')}.py"
            for alias in node.names if file.exists() else ():
                found = next((each for each in _tree(file).body if getattr(each, "name", None) == alias.name), None)
                if alias.name in names and isinstance(found, ast.ClassDef | _Function):
                    yield alias.name, found, file


def _of_class(definition: ast.ClassDef, file: Path) -> str:
    fields = [
        _source(node, file)
        for node in definition.body
        if isinstance(node, ast.AnnAssign | ast.Assign) and _is_public(node)
    ]
    methods = [node for node in definition.body if isinstance(node, _Function) and _is_shown(node)]
    start = next(
        (node for node in definition.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"), None
    )
    parts = [f"## `{definition.name}`\n", _docstring(definition)]
    if start is not None:
        parts.append(_code(_signature(definition.name, start)))
        parts.append(_docstring(start))
    if fields:
        parts.append(_code("\n".join(fields)))
    parts += [_of_function(f"{definition.name}.{method.name}", method, "###") for method in methods]
    return "\n".join(part for part in parts if part)


def _of_function(name: str, definition: ast.ClassDef | _Function, level: str) -> str:
    assert isinstance(definition, _Function)
    is_property = any(ast.unparse(each) in ("property", "cached_property") for each in definition.decorator_list)
    shown = f"{name}{_returned(definition)}" if is_property else _signature(name, definition)
    return "\n".join(part for part in (f"{level} `{name}`\n", _code(shown), _docstring(definition)) if part)


def _signature(name: str, function: _Function) -> str:
    """A function as it is called, without `self`."""
    arguments = ast.parse(f"def f({ast.unparse(function.args)}): ...").body[0]
    assert isinstance(arguments, ast.FunctionDef)
    if arguments.args.args and arguments.args.args[0].arg in ("self", "cls"):
        del arguments.args.args[0]
    line = f"{name}({ast.unparse(arguments.args)}){_returned(function)}"
    prefix = "await " if isinstance(function, ast.AsyncFunctionDef) else ""
    if len(line) <= WIDTH:
        return prefix + line
    words = ast.unparse(arguments.args)
    return f"{prefix}{name}(\n{textwrap.indent(chr(10).join(_split(words)), '    ')}\n){_returned(function)}"


def _split(arguments: str) -> list[str]:
    """The parameters of a signature, each with its comma: commas within brackets and texts part nothing."""
    parts, depth, quote, begin = [], 0, "", 0
    for index, letter in enumerate(arguments):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter == "," and depth == 0:
            parts.append(arguments[begin : index + 1].strip())
            begin = index + 1
        else:
            depth += (letter in "([{") - (letter in ")]}")
    return [*parts, arguments[begin:].strip() + ","]


def _returned(function: _Function) -> str:
    returned = ast.unparse(function.returns) if function.returns is not None else "None"
    return "" if returned == "None" else f" -> {returned}"


def _docstring(node: ast.ClassDef | _Function) -> str:
    """A docstring as text of a page: code stays code, and nothing else is read as markup."""
    text = ast.get_docstring(node) or ""
    pieces = re.split(r"(`+[^`]+`+)", text)
    plain = [piece if piece.startswith("`") else re.sub(r"([\\*<\[\]|#])", r"\\\1", piece) for piece in pieces]
    return "".join(plain) + "\n" if text else ""


def _code(text: str) -> str:
    return f"```python\n{text}\n```\n"


def _source(node: ast.stmt, file: Path) -> str:
    """The lines of a field as they stand in the source, with the comment behind them."""
    return textwrap.dedent("\n".join(_lines(file)[node.lineno - 1 : node.end_lineno]))


def _is_public(node: ast.AnnAssign | ast.Assign) -> bool:
    target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
    return isinstance(target, ast.Name) and not target.id.startswith("_")


def _is_shown(method: _Function) -> bool:
    marks = [ast.unparse(each) for each in method.decorator_list]
    return not method.name.startswith("_") and not any(mark == "overload" or mark.endswith(".setter") for mark in marks)


def _all_of(node: ast.stmt) -> list[str]:
    """The names that `__all__ = [...]` lists; of another statement none."""
    is_list = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    return list(ast.literal_eval(node.value)) if is_list and isinstance(node, ast.Assign) else []


def _typed(name: str) -> str:
    return "./everbatch" if name == "everbatch" else f"./everbatch {name}"


@cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


@cache
def _lines(file: Path) -> list[str]:
    return file.read_text().splitlines()
