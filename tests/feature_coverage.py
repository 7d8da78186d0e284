"""Which rows of docs/features.md have tests, and why the others are open: `./everbatch test --features` prints the table.

Rows are read from the document's tables and tests from their marks (`@pytest.mark.feature("004-15", ...)`, on functions,
classes, parameters and in `pytestmark`) in the syntax trees, so nothing is imported or run.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.table import Table

TESTS = Path(__file__).parent
DOCUMENT = TESTS.parent / "docs" / "features.md"
TITLES = {
    "000": "TensorRT-LLM's Executor",
    "001": "its batch manager",
    "002": "its LLM API",
    "003": "QServe",
    "004": "LMDeploy's TurboMind",
    "W": "the wire",
}
WIRE = [f"W-{number:02d}" for number in range(1, 13)]  # one row of the document names all of them

# Rows without tests, and why. A row that gets one is taken out here.
OPEN = {
    "000-41": "half of it: as with replicate=False they run on rank 0, once a step, and its tokens reach all ranks "
    "(tests/ranks/test_one_account.py); with replicate=True too, for no other rank has logits or samples",
    "004-35": "a session takes 3,392 bytes, 4 a token and 112 a block of its table: tests/engine/test_session_memory.py",
}


def rows() -> dict[str, str]:
    """Feature id -> its name, of all rows, in the order of the document."""
    found = re.findall(r"^\| (00\d-\d\d) \| ([^|]*) \|", DOCUMENT.read_text(), re.MULTILINE)
    return dict(sorted((feature, name.strip()) for feature, name in found)) | {
        feature: "see wires.md" for feature in WIRE
    }


def reasons() -> dict[str, str]:
    """Feature id -> why it is open."""
    return {feature: reason for spans, reason in OPEN.items() for span in spans.split() for feature in _ids(span)}


def tested_ids() -> dict[str, list[str]]:
    """Feature id -> names of the tests (file::function) that are marked with it."""
    found: dict[str, list[str]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        tree = ast.parse(path.read_text(), str(path))
        owners = _owners(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("mark.feature"):
                name = f"{path.relative_to(TESTS.parent)}::{owners.get(node, 'module')}"
                for argument in node.args:
                    found.setdefault(_text(argument, name), []).append(name)
    return found


def _ids(span: str) -> list[str]:
    """`000-41` or `001-61..63`, spelled out."""
    first, _, last = span.partition("..")
    document, number = first.split("-")
    return [f"{document}-{each:02d}" for each in range(int(number), int(last or number) + 1)]


def _owners(tree: ast.Module) -> dict[ast.AST, str]:
    """Node -> name of the innermost function or class whose decorators hold it."""
    owners: dict[ast.AST, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            owners.update({inner: node.name for decorator in node.decorator_list for inner in ast.walk(decorator)})
    return owners


def _text(argument: ast.expr, where: str) -> str:
    if not (isinstance(argument, ast.Constant) and re.fullmatch(r"(00\d|W)-\d\d", str(argument.value))):
        raise ValueError(f'{where}: {ast.unparse(argument)} is no feature id; write it like "004-15"')
    return argument.value


def main() -> int:
    """Print the table. Exit status 1 when a row has neither a test nor a reason."""
    names, tested, why = rows(), tested_ids(), reasons()
    console = Console()
    table = Table("row", "feature", "tests", box=None, pad_edge=False)
    for feature, name in names.items():
        if feature in tested:
            table.add_row(feature, name, str(len(tested[feature])))
    console.print(table)
    console.print("\n[bold]Open[/bold], and why")
    for reason in dict.fromkeys(why.values()):
        console.print(f"  {reason}:")
        for feature in (feature for feature in names if why.get(feature) == reason and feature not in tested):
            console.print(f"    {feature}  {names[feature]}", highlight=False)
    forgotten = [feature for feature in names if feature not in tested and feature not in why]
    for feature in forgotten:
        console.print(f"  [red]{feature}  {names[feature]} has no test[/red]", highlight=False)
    totals = Counter(feature.split("-")[0] for feature in names)
    done = Counter(feature.split("-")[0] for feature in names if feature in tested)
    console.print()
    for document, total in totals.items():
        console.print(
            f"{document:4} {done[document]:3d} of {total:3d} rows have tests  ({TITLES[document]})", highlight=False
        )
    console.print(f"all  {done.total():3d} of {totals.total():3d}", highlight=False)
    return 1 if forgotten else 0


if __name__ == "__main__":
    sys.exit(main())
