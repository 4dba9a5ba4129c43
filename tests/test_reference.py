"""The reference explains every argument, every field and every result of what it lists."""

import ast
import inspect
import re
import runpy
from functools import cache
from pathlib import Path

import pytest

REFERENCE = runpy.run_path(str(Path(__file__).parents[1] / "docs/reference.py"))
PACKAGE, Function = REFERENCE["PACKAGE"], ast.FunctionDef | ast.AsyncFunctionDef
RESULT = re.compile(r"^(Returns|Yields)\b.*:$", re.M)
LISTED = sorted({pair for page in REFERENCE["PAGES"].values() for pair in REFERENCE["listed"](page)})


@cache
def classes() -> dict[str, list[ast.ClassDef]]:
    """The classes of the package by name."""
    found: dict[str, list[ast.ClassDef]] = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(node)
    return found


def bases(node: ast.ClassDef) -> list[ast.ClassDef]:
    """The classes of the package that a class inherits from, at any distance."""
    names = [re.sub(r"\[.*", "", ast.unparse(each)).rpartition(".")[2] for each in node.bases]
    direct = [each for name in names for each in classes().get(name, ()) if each is not node and name != node.name]
    # a class that is called like its base is found in the base's file
    same = [each for each in classes().get(node.name, ()) if node.name in names and ast.dump(each) != ast.dump(node)]
    return [*direct, *same, *(each for one in direct for each in bases(one))]


def explained(docstring: str | None) -> set[str]:
    """The names that the sections of a docstring explain: `name: text`, or `first, second: text`."""
    items = re.findall(r"^    (\*{0,2}\w+(?:, \*{0,2}\w+)*): ", inspect.cleandoc(docstring or ""), re.M)
    return {name.strip(" *") for item in items for name in item.split(",")}


def parameters(node: Function) -> set[str]:
    """The named parameters of a function, without self."""
    given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return {each.arg for each in given} - {"self", "cls"}


def overridden(node: ast.ClassDef, method: Function) -> list[Function]:
    """The same method of the classes that a class inherits from."""
    parts = [each for base in bases(node) for each in base.body if isinstance(each, Function)]
    return [each for each in parts if each.name == method.name]


def says_result(node: Function, docs: list[str]) -> bool:
    """Whether a function says what it returns; its one line says so for a property, and where there are no arguments."""
    is_property = any(ast.unparse(each) == "property" for each in node.decorator_list)
    nothing = node.returns is None or ast.unparse(node.returns) == "None"
    return nothing or is_property or not parameters(node) or any(RESULT.search(doc) for doc in docs)


def gaps_of_function(label: str, node: Function, bases: list[Function]) -> list[str]:
    """What a function leaves unexplained."""
    docs = [ast.get_docstring(each) or "" for each in (node, *bases)]
    missing = parameters(node) - set().union(*map(explained, docs))
    result = [] if says_result(node, docs) else [f"{label}: what it returns"]
    return [f"{label}: {name}" for name in sorted(missing)] + result


def gaps(module: str, name: str) -> list[str]:
    """The arguments, fields and results that an entry of the reference leaves unexplained."""
    node = REFERENCE["definitions"](module)[name]
    if not isinstance(node, ast.ClassDef):
        return gaps_of_function(name, node, [])
    made = [each for each in node.body if isinstance(each, Function) and each.name == "__init__"]
    fields = [] if made else [text.partition(":")[0] for text in REFERENCE["fields_of"](node)]
    names = {*fields, *(arg for each in made for arg in parameters(each))}
    said = explained(ast.get_docstring(node)) | set(REFERENCE["described_fields"](module, node))
    found = [f"{name}: {each}" for each in sorted(names - said)]
    for method in REFERENCE["public_methods"](node):
        found += gaps_of_function(f"{name}.{method.name}", method, overridden(node, method))
    return found


@pytest.mark.parametrize(("module", "name"), LISTED)
def test_every_argument_field_and_result_is_explained(module, name):
    assert gaps(module, name) == []


def test_internal_methods_exist():
    methods = {
        (node.name, each.name)
        for module, name in LISTED
        for node in [REFERENCE["definitions"](module)[name]]
        if isinstance(node, ast.ClassDef)
        for each in node.body
        if isinstance(each, Function)
    }
    named = {(name, method) for name, hidden in REFERENCE["INTERNAL"].items() for method in hidden}
    assert named <= methods


def test_a_missing_argument_is_noticed():
    node = ast.parse('def f(a: int, b: int) -> int:\n    """One.\n\n    Args:\n        a: A.\n    """').body[0]
    assert gaps_of_function("f", node, []) == ["f: b", "f: what it returns"]
