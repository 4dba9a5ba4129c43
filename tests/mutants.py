"""`make test-mutants`: one small fault at a time in a copy of the core; a fault that no test notices is a gap in the tests.

It continues where it was stopped, and ends with a table and the survivors; docs/testing.md explains the known ones.
(mutmut 3.8 fails with pytest 9.2 and leaves out all that is outside of functions; cosmic-ray starts Python anew for every
fault. Here torch is imported once and shared by all, and the tests that noticed the last faults run first.)
"""

import ast
import gc
import hashlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import sympy  # noqa: F401
import torch.distributed.tensor  # noqa: F401

ROOT = Path(__file__).parents[1]
WORK, SECONDS = ROOT / "build/mutants", 120  # a fault whose tests take longer counts as noticed
# The test files that check each module, those that notice most in little time first.
CHECKED_BY = {
    "routing": "test_routing test_modes test_recipes test_sequence",
    "sequence": "test_sequence test_transforms test_recipes test_layer",
    "experts": "test_sparse test_layer routers/test_dense test_transforms",
    "layer": "test_tokens test_cost routers/test_routers routers/test_ada_k test_layer test_early_exit test_transforms",
    "routers/raytraced": "test_recipes routers/test_raytraced_options test_cost test_early_exit test_layer test_sequence test_transforms",
    "routers/raytraced_config": "test_recipes routers/test_raytraced_options",
    "cost": "test_modes test_cost",
    "training/evaluation": "training/test_evaluation extensions/test_new_task",
    "training/objective": "training/test_objective training/test_options",
}
SWAPS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.BitXor: ast.BitOr,
    ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip
SKIPPED = (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom)  # texts for readers or the type checker
SKIPPED_FIELDS = ("annotation", "returns", "decorator_list", "ctx")


def replacements(node: ast.AST, field: str) -> Iterator[ast.AST]:
    """Nodes that may replace a node; each is a fault."""
    match node:
        case ast.Constant(bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(int(value) | float(value)):
            yield from (ast.Constant(value + 1), ast.Constant(value - 1))
        case ast.Constant(str(value)):
            yield ast.Constant(f"{value}?")
        case ast.UnaryOp() if not isinstance(
            node.operand, ast.Constant
        ):  # a number is replaced by one higher and one lower
            yield node.operand
        case ast.Return(ast.AST() as value) if ast.unparse(value) != "None":
            yield ast.Return(None)
        case ast.Expr(ast.Call()):
            yield ast.Pass()
        case ast.Call():
            keywords = node.keywords
            for index, keyword in enumerate(keywords):
                if keyword.arg not in ("device", "strict"):  # has an effect on a GPU only; an assertion
                    yield ast.Call(node.func, node.args, keywords[:index] + keywords[index + 1 :])
            if len(node.args) > 1:
                yield ast.Call(node.func, node.args[:-1], keywords)
    if type(node) in SWAPS:
        yield SWAPS[type(node)]()
    if field in ("test", "ifs"):
        yield ast.UnaryOp(ast.Not(), node)


def faults(tree: ast.AST, node: ast.AST, line: int = 0) -> Iterator[tuple[int, str, str]]:
    """Every fault below a node: its line, a description, and the whole source with it."""
    for field, value in ast.iter_fields(node):
        for index, child in enumerate(value if isinstance(value, list) else [value]):
            words = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
            words |= isinstance(child, ast.FunctionDef) and child.name == "extra_repr"
            words |= isinstance(child, ast.keyword) and child.arg == "strict"
            words |= field == "args" and index == 3 and ast.unparse(node).startswith("require(")  # the rule, in words
            if words or not isinstance(child, ast.AST) or isinstance(child, SKIPPED) or field in SKIPPED_FIELDS:
                continue
            line = getattr(child, "lineno", line)
            for new in (*replacements(child, field), child):  # the last restores it
                if isinstance(value, list):
                    value[index] = new
                else:
                    setattr(node, field, new)
                if new is not child:
                    fault = ast.unparse(new if isinstance(new, ast.expr | ast.stmt) else node).partition("\n")[0]
                    if isinstance(new, ast.Call) and isinstance(child, ast.Call):
                        dropped = [
                            one for one in (*child.args, *child.keywords) if one not in (*new.args, *new.keywords)
                        ]
                        fault = f"{ast.unparse(new.func)}(…) without {ast.unparse(dropped[0])}"
                    yield line, f"{field}: {fault[:90]}", ast.unparse(ast.fix_missing_locations(tree))
            yield from faults(tree, child, line)


class Watch:
    """A plugin of pytest that runs the tests that noticed the last faults first, then quick ones.

    Tests that do not call the function of a fault are left out. A run without a fault records which functions each test
    calls, identified by their first lines. Calls of a fixture count for every test of the file.
    """

    def __init__(self, place: Path, path: str, killers: list[str], chosen: list[str] | None) -> None:
        self.place, self.path, self.chosen = place, str(place / path), chosen
        self.ranks = {name: rank for rank, name in enumerate(dict.fromkeys((*killers, *(chosen or ()))))}
        self.calls: dict[str, set[int]] = {}
        self.seconds: dict[str, float] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if self.chosen is None or item.nodeid in self.chosen]
        items.sort(key=lambda item: self.ranks.get(item.nodeid, len(self.ranks)))

    def trace(self, name: str) -> None:
        lines = self.calls.setdefault(name, set())

        def note(frame: Any, event: str, argument: Any) -> None:
            if frame.f_code.co_filename == self.path:
                lines.add(frame.f_code.co_firstlineno)
            elif frame.f_code is subprocess.Popen.__init__.__code__:
                lines.add(0)  # another process may call any function

        if self.chosen is None:
            threading.settrace(note)
            sys.settrace(note)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self.trace(item.nodeid.partition("::")[0])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> None:
        self.trace(item.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self.seconds[report.nodeid] = report.duration
        if report.failed:
            (self.place / "killer").write_text(report.nodeid)
            os._exit(1)  # at once: the end of a session collects garbage for longer than most tests take

    def pytest_sessionfinish(self) -> None:
        if self.chosen is None:
            sys.settrace(None)
            calls = {
                name: [*self.calls[name], *self.calls[name.partition("::")[0]]]
                for name in sorted(self.seconds, key=self.seconds.__getitem__)
            }
            (self.place / "calls").write_text(json.dumps(calls))


def start_tests(place: Path, path: str, files: list[str], killers: list[str], chosen: list[str] | None) -> int:
    """A process that exits with 0 if every test passes, and is killed if that takes too long."""
    if pid := os.fork():
        return pid
    try:
        os.setsid()  # a signal to a group stays among the tests
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        signal.alarm(10 * SECONDS)  # for a process that waits without end
        os.chdir(place)
        sys.path[0] = os.environ["PYTHONPATH"] = str(place / "src")
        os.environ["RAYTRACED_KERNELS"] = "plain"  # the path that is changed
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        options = ["-x", "--assert=plain", "-p", "no:cacheprovider", "-k", "not compile and not export"]
        hypothesis.settings.register_profile("mutants", phases=["explicit", "generate"])  # no smallest example
        hypothesis.settings.load_profile("mutants")
        ended = pytest.main([*options, *files], [Watch(place, path, killers, chosen)])
        os._exit(0 if ended == pytest.ExitCode.NO_TESTS_COLLECTED else ended)
    finally:
        os._exit(1)


def choose(tree: ast.Module, line: int, calls: dict[str, list[int]]) -> list[str]:
    """The tests that call the function of a line, quick ones first; all of them for what happens at import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.lineno <= line <= node.end_lineno:
            first = min(
                one.lineno for one in (node, *node.decorator_list)
            )  # an outer function comes before an inner one
            return [
                name
                for name, lines in calls.items()
                if any(first <= one <= node.end_lineno or not one for one in lines)
            ]
    return list(calls)


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("modules", nargs="*", default=list(CHECKED_BY))
    parser.add_argument("--processes", type=int, default=2)
    sys.dont_write_bytecode = True
    options, results = parser.parse_args(), WORK / "results.json"
    known = json.loads(results.read_text()) if results.exists() else {}
    free, at_work, found = [WORK / f"tree-{number}" for number in range(options.processes)], {}, []
    killers: list[str] = []  # the last one first
    for place in free:
        shutil.rmtree(place, ignore_errors=True)
        for folder in ("src", "tests", "experiments"):
            shutil.copytree(ROOT / folder, place / folder, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", place)
    gc.freeze()  # or every process would search all of torch for garbage

    def wait() -> None:
        pid, status = os.wait()
        place, path, source, fault, keys = at_work.pop(pid)
        (place / path).write_text(source)
        free.append(place)
        known[keys[0] if status else keys[1]] = bool(status)
        if not (fault[1] or status):
            known[keys[1]] = json.loads((place / "calls").read_text())
        killer = (place / "killer").read_text() if (place / "killer").exists() else ""
        killers[:] = [killer, *(name for name in killers if name != killer)]
        results.write_text(json.dumps(known, indent=0))
        print("killed  " if status else "survived", *fault, flush=True)

    for module in options.modules:
        path, files = f"src/raytraced/{module}.py", [f"tests/{name}.py" for name in CHECKED_BY[module].split()]
        source, tests = (ROOT / path).read_text(), "".join((ROOT / file).read_text() for file in files)
        tree, calls = ast.parse(source), {}
        for line, what, text in [(0, "no fault at all", source), *faults(tree, tree)]:
            # A fault stays noticed; one that was not is tried again when its tests have changed.
            keys = [hashlib.sha256(one.encode()).hexdigest()[:20] for one in (text, text + tests)]
            found.append((module, line, what, keys))
            if known.keys().isdisjoint(keys):
                if not free:
                    wait()
                place, chosen = free.pop(), choose(tree, line, calls) if line else None
                (place / path).write_text(text)
                pid = start_tests(place, path, files, killers, chosen)
                at_work[pid] = place, path, source, (module, line, what), keys
            if not line:
                while at_work:
                    wait()
                if keys[0] in known:
                    sys.exit(f"the tests of {module} fail without any fault: its figures would mean nothing")
                calls = known[keys[1]]
    while at_work:
        wait()
    print(f"\n{'module':24}{'faults':>8}{'killed':>8}{'survived':>10}")
    for module in options.modules:
        killed = [keys[0] in known for name, line, _, keys in found if name == module and line]
        print(f"{module:24}{len(killed):8}{sum(killed):8}{len(killed) - sum(killed):10}")
    print(
        *(f"survived: {m}:{line}  {what}" for m, line, what, keys in found if line and keys[0] not in known), sep="\n"
    )


if __name__ == "__main__":
    main()
