"""`make test-mutants`: one small fault at a time in a copy of the core; a fault that no test notices is a gap in the tests.

It goes on where it was stopped and ends with a table and the survivors; docs/testing.md says why the known ones live.
(mutmut 3.8 fails with pytest 9.2 and leaves out all that is outside of functions; cosmic-ray starts Python anew for every
fault. Here torch is imported once and shared by all.)
"""

import ast
import hashlib
import json
import os
import shutil
import signal
import sys
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path

import hypothesis  # noqa: F401
import pytest
import torch  # noqa: F401

ROOT = Path(__file__).parents[1]
WORK, SECONDS = ROOT / "build/mutants", 120  # a fault that keeps its tests busy for so long is noticed
# The test files that check each module, those that notice most in little time first.
CHECKED_BY = {
    "routing": "test_routing test_modes test_recipes test_sequence",
    "sequence": "test_sequence test_recipes test_layer",
    "grid": "test_sparse test_layer routers/test_dense",
    "layer": "test_tokens routers/test_routers routers/test_ada_k test_layer",
    "routers/raytraced": "test_recipes routers/test_raytraced_options test_cost test_layer",
    "cost": "test_modes test_cost",
    "training/evaluation": "training/test_evaluation",
    "training/objective": "training/test_objective training/test_options",
}
SWAPS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.BitXor: ast.BitOr,
    ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip
SKIPPED = (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom)  # words for people or the type checker
SKIPPED_FIELDS = ("annotation", "returns", "decorator_list", "ctx")


def replacements(node: ast.AST, field: str) -> Iterator[ast.AST]:
    """What may stand in a node's place, each a fault."""
    match node:
        case ast.Constant(bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(int(value) | float(value)):
            yield from (ast.Constant(value + 1), ast.Constant(value - 1))
        case ast.Constant(str(value)):
            yield ast.Constant(f"{value}?")
        case ast.UnaryOp():
            yield node.operand
        case ast.Return(ast.AST()):
            yield ast.Return(None)
        case ast.Expr(ast.Call()):
            yield ast.Pass()
        case ast.Call():
            keywords = node.keywords
            yield from (ast.Call(node.func, node.args, keywords[:i] + keywords[i + 1 :]) for i in range(len(keywords)))
            if len(node.args) > 1:
                yield ast.Call(node.func, node.args[:-1], keywords)
    if type(node) in SWAPS:
        yield SWAPS[type(node)]()
    if field in ("test", "ifs"):
        yield ast.UnaryOp(ast.Not(), node)


def faults(tree: ast.AST, node: ast.AST, line: int = 0) -> Iterator[tuple[int, str, str]]:
    """Every fault below a node: its line, what it is, and the whole source with it."""
    for field, value in ast.iter_fields(node):
        for index, child in enumerate(value if isinstance(value, list) else [value]):
            words = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
            words |= isinstance(child, ast.FunctionDef) and child.name == "extra_repr"
            if words or not isinstance(child, ast.AST) or isinstance(child, SKIPPED) or field in SKIPPED_FIELDS:
                continue
            line = getattr(child, "lineno", line)
            for new in (*replacements(child, field), child):  # the last puts it back
                if isinstance(value, list):
                    value[index] = new
                else:
                    setattr(node, field, new)
                if new is not child:
                    told = ast.unparse(new if isinstance(new, ast.expr | ast.stmt) else node).partition("\n")[0]
                    if isinstance(new, ast.Call) and isinstance(child, ast.Call):
                        dropped = [
                            one for one in (*child.args, *child.keywords) if one not in (*new.args, *new.keywords)
                        ]
                        told = f"{ast.unparse(new.func)}(…) without {ast.unparse(dropped[0])}"
                    yield line, f"{field}: {told[:90]}", ast.unparse(ast.fix_missing_locations(tree))
            yield from faults(tree, child, line)


def start_tests(place: Path, files: list[str]) -> int:
    """A process that exits with 0 if every test passes, and is killed if that takes too long."""
    if pid := os.fork():
        return pid
    try:
        os.setsid()  # a signal to a group stays among the tests
        signal.alarm(SECONDS)
        os.chdir(place)
        sys.path[0] = os.environ["PYTHONPATH"] = str(place / "src")
        os.environ["RAYTRACED_OPERATIONS"] = "plain"  # the path that is changed
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        options = ["-x", "--assert=plain", "-p", "no:cacheprovider", "-k", "not compile and not export"]
        os._exit(pytest.main([*options, *files]))
    finally:
        os._exit(1)


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("modules", nargs="*", default=list(CHECKED_BY))
    parser.add_argument("--processes", type=int, default=2)
    sys.dont_write_bytecode = True
    given, results = parser.parse_args(), WORK / "results.json"
    known = json.loads(results.read_text()) if results.exists() else {}
    free, at_work, found = [WORK / f"tree-{number}" for number in range(given.processes)], {}, []
    for place in free:
        shutil.rmtree(place, ignore_errors=True)
        for folder in ("src", "tests"):
            shutil.copytree(ROOT / folder, place / folder, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", place)

    def wait() -> None:
        pid, status = os.wait()
        place, path, source, told, keys = at_work.pop(pid)
        (place / path).write_text(source)
        free.append(place)
        known[keys[0] if status else keys[1]] = bool(status)
        results.write_text(json.dumps(known, indent=0))
        print("killed  " if status else "survived", *told, flush=True)

    for module in given.modules:
        path, files = f"src/raytraced/{module}.py", [f"tests/{name}.py" for name in CHECKED_BY[module].split()]
        source, tests = (ROOT / path).read_text(), "".join((ROOT / file).read_text() for file in files)
        tree = ast.parse(source)
        for line, what, text in [(0, "no fault at all", source), *faults(tree, tree)]:
            # A fault stays noticed; one that was not is tried again when its tests have changed.
            keys = [hashlib.sha256(one.encode()).hexdigest()[:20] for one in (text, text + tests)]
            found.append((module, line, what, keys))
            if known.keys().isdisjoint(keys):
                if not free:
                    wait()
                place = free.pop()
                (place / path).write_text(text)
                at_work[start_tests(place, files)] = place, path, source, (module, line, what), keys
    while at_work:
        wait()
    print(f"\n{'module':24}{'faults':>8}{'killed':>8}{'survived':>10}")
    for module in given.modules:
        killed = [keys[0] in known for name, line, _, keys in found if name == module and line]
        print(f"{module:24}{len(killed):8}{sum(killed):8}{len(killed) - sum(killed):10}")
    print(
        *(f"survived: {m}:{line}  {what}" for m, line, what, keys in found if line and keys[0] not in known), sep="\n"
    )
    if broken := [module for module, line, _, keys in found if not line and keys[0] in known]:
        sys.exit(f"the tests of {', '.join(broken)} fail without any fault: their figures mean nothing")


if __name__ == "__main__":
    main()
