"""Finds the places of a source that mutants.py may change, and into what.

A text has a character per byte (latin-1), so that places are bytes. A place is its begin, its end and what it becomes.
"""

import ast
import itertools
import re
from collections.abc import Iterable, Iterator
from typing import Any

Place = tuple[int, int, str]

COMPARISONS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="}
WORDS = {"is": "is not", "is not": "is", "in": "not in", "not in": "in", "and": "or", "or": "and"}
ARITHMETIC = {"+": "-", "-": "+", "*": "+", "/": "*", "//": "*", "%": "+"}
OPERATORS = COMPARISONS | WORDS | ARITHMETIC
NAMES = {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum"}
QUIET = ("logger.", "warnings.")


def python_places(text: str) -> Iterator[Place]:
    """Yields those of a module in Python: none in annotations, decorators, f-strings, `__all__`, calls of a logger."""
    begins = [0, *(match.end() for match in re.finditer("\n", text))]

    def begin(node: Any) -> int:
        return begins[node.lineno - 1] + node.col_offset

    def end(node: Any) -> int:
        return begins[node.end_lineno - 1] + node.end_col_offset

    def between(nodes: Iterable[ast.AST]) -> Iterator[Place]:
        """The operators between neighbours."""
        for left, right in itertools.pairwise(nodes):
            gap = text[end(left) : begin(right)]
            found = re.fullmatch(r"[\s)]*(is not|not in|\w+|[^\w\s()]+)[\s(]*", gap)  # no comment
            if found and found[1] in OPERATORS:
                yield end(left) + found.start(1), end(left) + found.end(1), OPERATORS[found[1]]

    def places(node: ast.AST, in_function: bool) -> Iterator[Place]:
        for name, field in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list"):
                continue
            for child in field if isinstance(field, list) else [field]:
                if isinstance(child, ast.AST) and not left_out(child):
                    yield from own(child, in_function)
                    yield from places(child, in_function or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef))

    def left_out(node: ast.AST) -> bool:
        if isinstance(node, ast.JoinedStr):
            return True
        source = text[begin(node) : end(node)] if hasattr(node, "lineno") else ""
        return source.startswith((*QUIET, "__all__", "if TYPE_CHECKING"))

    def own(node: ast.AST, in_function: bool) -> Iterator[Place]:
        match node:
            case ast.Compare():
                yield from between([node.left, *node.comparators])
            case ast.BinOp():
                yield from between([node.left, node.right])
            case ast.BoolOp():
                yield from between(node.values)
            case ast.Constant(value=bool()):
                yield begin(node), end(node), str(not node.value)
            case ast.Constant(value=int(number)):
                yield begin(node), end(node), str(number + 1)
            case ast.Name(id=name) | ast.Attribute(attr=name) if name in NAMES:
                yield end(node) - len(name), end(node), NAMES[name]
            case ast.Return(value=ast.AST() as value) if not isinstance(value, ast.Constant):
                yield begin(node), end(node), "return None" + lines(node)
            case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]) | ast.AugAssign() | ast.Expr(value=ast.Call()):
                if in_function:  # and no new name, which would be missed at once
                    yield begin(node), end(node), "pass" + lines(node)
        match node:
            case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
                yield begin(test), end(test), f"not ({text[begin(test) : end(test)]})"
            case ast.comprehension():
                for test in node.ifs:
                    yield begin(test), end(test), f"not ({text[begin(test) : end(test)]})"

    def lines(node: ast.AST) -> str:
        """As many as it has, for the numbers of those that follow."""
        return "\n" * text.count("\n", begin(node), end(node))

    yield from places(ast.parse(text.encode("latin-1")), False)


NOT_CODE = re.compile(
    r'//[^\n]*|/\*.*?\*/|R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|(?<!\w)\'(?:\\.|[^\'\\\n])+\'|^[ \t]*\#(?:\\\n|[^\n])*'
    r"|\bstatic_assert\b[^;]*;|\bthrow\b[^;]*;",
    re.DOTALL | re.MULTILINE,
)
CPP = [
    (re.compile(r"(?<= )(?:<=?|>=?|==|!=|&&|\|\||[-+*/%])(?=\s)"), COMPARISONS | ARITHMETIC | {"&&": "||", "||": "&&"}),
    (re.compile(r"\b(?:true|false|min|max)\b"), NAMES | {"true": "false", "false": "true"}),
]
NUMBER = re.compile(r"(?<![\w.'])(?<!e[-+])\d+(?![\w.'])")
CONDITION = re.compile(r"\b(?:if|while) \(")
# Up to its semicolon: an assignment to what has no space in it (a declaration has), or a call.
STATEMENT = re.compile(
    r"(?<=[;{})])\s*"
    r"(return (?!(?:nullptr|false|0);)[^;{}]+;|(?:[^\s;{}()]|\([^\s;{}]*\))+(?: [-+*/%|&^]?= [^;{}]+|\([^;{}]*\));)"
)


def cpp_places(text: str) -> Iterator[Place]:
    """Yields those of a source in C++: none in comments, strings, messages of exceptions, lines of the preprocessor."""
    code = NOT_CODE.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)
    for pattern, becomes in CPP:
        for found in pattern.finditer(code):
            yield *found.span(), becomes[found[0]]
    for found in NUMBER.finditer(code):
        yield *found.span(), str(int(found[0]) + 1)
    for found in CONDITION.finditer(code):
        opened, close = 1, found.end()
        while opened and close < len(code):
            opened += {"(": 1, ")": -1}.get(code[close], 0)
            close += 1
        yield found.end(), close - 1, f"!({text[found.end() : close - 1]})"
    for found in STATEMENT.finditer(code):
        short = "return {};" if found[1].startswith("return") else ";"
        yield *found.span(1), short + "\n" * found[1].count("\n")
