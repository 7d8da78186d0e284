"""Planted bugs that are generated: each changes one expression or statement of a function in a plain way.

    a < b            a <= b, True, False        min(a, b)              max(a, b), a, b
    a and b          a or b, a, b               f(a, b)                f(b, a)
    a + b            a - b, a, b                a.f()                  a
    not a            a                          f(x), a.b = c          pass
    a if b else c    a, c                       return a               return None
    7, True          8, 6, False                if a: ...              if True: ..., if False: ...
    f(a, ...)        a                          f(a, b=c)              f(a), f(a, b=None)
    a.f(b)           a                          (a, b), [a, b]         (b,), (a,), [b], [a]
    a[b:c]           a, a[b:], a[:c]            for a in b             for a in ()
    any(a)           all(a)                     a += b                 a = b, pass
    -a               a                          a = b                  a = None
    continue         break                      raise, del             pass

Some change nothing that can be observed, so a survivor is a question to the reader and not a failed test. These are the operators
of mutmut and cosmic-ray, which patch files on the disk; here the process under test compiles the changed syntax tree.
"""

from __future__ import annotations

import ast
import importlib.machinery
import types
from collections.abc import Iterator
from copy import copy
from pathlib import Path
from typing import Any, NamedTuple, cast

SWAPPED: dict[type[ast.AST], type[Any]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
BOUNDS = {"min": "max", "max": "min"}
QUANTIFIERS = {"any": "all", "all": "any"}
NOTHING = ast.Tuple([], ast.Load())
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Change(NamedTuple):
    """One change of a file. `line`: of the file, or of the function's source; `text`: what it makes of what."""

    line: int
    text: str
    owner: ast.AST  # its `field`, or the field's element `index`, becomes `value`
    field: str
    index: int | None
    value: ast.AST

    def apply(self) -> None:
        if self.index is None:
            setattr(self.owner, self.field, self.value)
        else:
            getattr(self.owner, self.field)[self.index] = self.value


def changes(tree: ast.Module) -> list[Change]:
    """All changes of the functions in a module, in the order of the source."""
    functions = [node for node in ast.walk(tree) if isinstance(node, FUNCTIONS)]
    return sorted((found for function in functions for found in _in_function(function)), key=lambda change: change.line)


def changed(source: str, number: int) -> ast.Module:
    """The module's syntax tree with one of its changes. Raises IndexError."""
    tree = ast.parse(source)
    changes(tree)[number].apply()
    return ast.fix_missing_locations(tree)


def plant(path: Path, number: int) -> None:
    """Let this process import the module at `path` with one change. Call it before anything has imported the module."""
    code = compile(changed(path.read_text(), number), str(path), "exec", dont_inherit=True)
    loader = importlib.machinery.SourceFileLoader
    usual = loader.get_code

    def get_code(self: importlib.machinery.SourceFileLoader, name: str) -> types.CodeType | None:
        return cast(types.CodeType, code) if self.path == str(path) else usual(self, name)

    loader.get_code = get_code  # type: ignore[method-assign]


def _in_function(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[Change]:
    for statement in function.body:
        for node in _nodes(statement):
            for field, index, child in _children(node):
                for value in _variants(child):
                    text = f"{_short(child)} -> {_short(value)}"
                    yield Change(getattr(child, "lineno", getattr(node, "lineno", 0)), text, node, field, index, value)
    for index, statement in enumerate(function.body):
        for value in _variants(statement):
            text = f"{_short(statement)} -> {_short(value)}"
            yield Change(statement.lineno, text, function, "body", index, value)


def _nodes(node: ast.AST) -> Iterator[ast.AST]:
    """A statement and all in it, but nothing of functions within it: they have changes of their own."""
    if not isinstance(node, FUNCTIONS):
        yield node
        for child in ast.iter_child_nodes(node):
            yield from _nodes(child)


def _children(node: ast.AST) -> Iterator[tuple[str, int | None, ast.AST]]:
    for field, value in ast.iter_fields(node):
        if isinstance(value, ast.AST):
            yield field, None, value
        elif isinstance(value, list):
            yield from ((field, index, each) for index, each in enumerate(value) if isinstance(each, ast.AST))


def _variants(node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.Compare(ops=[operator], comparators=_) if type(operator) in SWAPPED:
            yield _with(node, ops=[SWAPPED[type(operator)]()])
            yield from (ast.Constant(True), ast.Constant(False))
        case ast.BoolOp(op=operator, values=values):
            yield _with(node, op=SWAPPED[type(operator)]())
            yield from (rest[0] if len(rest) == 1 else _with(node, values=rest) for rest in _without_one(values))
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in SWAPPED:
            yield from (_with(node, op=SWAPPED[type(operator)]()), left, right)
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield operand
        case ast.IfExp(body=body, orelse=orelse):
            yield from (body, orelse)
        case ast.Constant(value=bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(value=int() as value):
            yield from (ast.Constant(value + 1), ast.Constant(value - 1))
        case ast.Call():
            yield from _calls(node)
        case ast.stmt():
            yield from _statements(node)
        case _:
            yield from _sequences(node)


def _sequences(node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.Subscript(value=value, slice=ast.Slice(lower=lower, upper=upper) as bounds):
            yield value
            if lower and upper:
                yield from (_with(node, slice=_with(bounds, **{side: None})) for side in ("lower", "upper"))
        case ast.Tuple(elts=values) | ast.List(elts=values) | ast.Set(elts=values) if len(values) > 1:
            yield from (_with(node, elts=rest) for rest in _without_one(values))
        case ast.comprehension(ifs=conditions):
            yield _with(node, iter=NOTHING)
            if len(conditions) == 1:
                yield _with(node, ifs=[])


def _calls(node: ast.Call) -> Iterator[ast.AST]:
    match node:
        case ast.Call(func=ast.Name(id="min" | "max" as name), args=[*arguments]):
            yield _with(node, func=ast.Name(BOUNDS[name], ast.Load()))
            yield from arguments if len(arguments) == 2 else ()
            return
        case ast.Call(func=ast.Name(id="any" | "all" as name)):
            yield _with(node, func=ast.Name(QUANTIFIERS[name], ast.Load()))
        case ast.Call(func=ast.Attribute(value=value)):
            yield value
    match node.args:
        case [first, second]:
            yield _with(node, args=[second, first])
    yield from node.args[:1]
    yield from (_with(node, keywords=rest) for rest in _without_one(node.keywords))
    for index, keyword in enumerate(node.keywords):
        others = (node.keywords[:index], node.keywords[index + 1 :])
        yield _with(node, keywords=[*others[0], _with(keyword, value=ast.Constant(None)), *others[1]])


def _statements(node: ast.stmt) -> Iterator[ast.stmt]:
    match node:
        case ast.If() | ast.While():
            yield from (_with(node, test=ast.Constant(value)) for value in (True, False))
        case ast.For():
            yield _with(node, iter=NOTHING)
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            yield ast.Return(ast.Constant(None))
        case ast.Continue():
            yield ast.Break()
        case ast.Expr(value=ast.Call() | ast.Await() | ast.YieldFrom()) | ast.Raise() | ast.Delete():
            yield ast.Pass()
        case ast.AugAssign(target=target, value=value):
            yield from (ast.Pass(), ast.Assign([target], value, lineno=node.lineno))
        case ast.Assign(targets=targets, value=value):
            if isinstance(targets[0], ast.Attribute | ast.Subscript):
                yield ast.Pass()
            if not isinstance(value, ast.Constant):
                yield _with(node, value=ast.Constant(None))


def _without_one(values: list[Any]) -> Iterator[list[Any]]:
    return (values[:index] + values[index + 1 :] for index in range(len(values)))


def _with(node: Any, **fields: Any) -> Any:
    twin = copy(node)
    for name, value in fields.items():
        setattr(twin, name, value)
    return twin


def _short(node: ast.AST) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 60 else f"{text[:57]}..."
