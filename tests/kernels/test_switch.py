"""The run-time switch: a context manager or an environment variable forces implementations; without the library all runs."""

import ctypes
import os
import subprocess
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from raytraced import kernels
from raytraced.experts import MLPExperts, ModuleExperts, Stream
from raytraced.kernels import Implementation, cpp_library, operation
from raytraced.routers.raytraced import RaytracedExperts
from raytraced.routing import RoutingNetwork

needs_library = pytest.mark.skipif(not kernels.available(), reason=f"compiled kernels {kernels.why_not()}")


def case(batch=6, **options):
    torch.manual_seed(1)
    options = {"stop": "drawn", "estimator": "reinmax", "temperature": 1.0, "num_steps": 12} | options
    routing, entry_BN = RoutingNetwork(3, 4), torch.rand(batch, 4).softmax(-1)
    return (routing, entry_BN), {**options, "seed": torch.tensor(2), "rows_B": None}


def grid(batch=6):
    torch.manual_seed(1)
    active_BLN = (torch.rand(batch, 3, 4) < 0.5).float()
    return MLPExperts(3, 4, 5), torch.randn(batch, 5), active_BLN, active_BLN, Stream.RESIDUAL


def chosen():
    (args, options), experts = case(), kernels.experts.explain(*grid())
    return kernels.sequence.explain(*args, **options).name, experts.name


@pytest.fixture(autouse=True)
def _free(monkeypatch):
    """Nothing forced, whatever this process was started with."""
    monkeypatch.delenv(operation.VARIABLE, raising=False)
    monkeypatch.setattr(operation, "_forced", None)
    monkeypatch.setattr(operation, "_uses", [])


@needs_library
def test_the_library_is_used_where_it_can_and_the_switch_forces_the_plain_path():
    assert chosen() == ("cpp", "cpp")
    with kernels.use("plain"):
        assert chosen() == ("plain", "dense")
        with kernels.use("cpp"):
            assert chosen() == ("cpp", "cpp")
        assert chosen() == ("plain", "dense")
    assert chosen() == ("cpp", "cpp")


@needs_library
def test_one_operation_can_be_forced_and_the_last_word_counts():
    with kernels.use(experts="sparse"):
        assert chosen() == ("cpp", "sparse")
        with kernels.use("plain", experts="cpp"):
            assert chosen() == ("plain", "cpp")
        with kernels.use("plain"):
            assert chosen() == ("plain", "dense")
        with kernels.use(sequence="plain"):
            assert chosen() == ("plain", "sparse")


def test_an_error_inside_gives_the_switch_back():
    with pytest.raises(ZeroDivisionError), kernels.use("plain"):
        1 / 0  # noqa: B018
    assert operation._forced == operation.Forced()


def test_uses_of_several_threads_leave_nothing_behind():
    first, second = kernels.use("plain"), kernels.use(experts="sparse")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert operation._forced == operation.Forced(single={"experts": "sparse"})
    second.__exit__(None, None, None)
    assert operation._forced == operation.Forced()


@needs_library
def test_the_environment_forces_too(monkeypatch):
    monkeypatch.setenv(operation.VARIABLE, "plain")
    assert chosen() == ("plain", "dense")
    with kernels.use("cpp"):
        assert chosen() == ("cpp", "cpp")


def test_a_word_in_the_environment_that_is_none_is_told(monkeypatch):
    monkeypatch.setenv(operation.VARIABLE, "quick")
    with pytest.raises(ValueError, match="RAYTRACED_KERNELS='quick': must be one of cpp, dense, grouped, plain"):
        kernels.experts(*grid())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"word": "quick"}, "use='quick': must be one of cpp, dense, grouped, plain, sharded, sparse"),
        ({"expert": "sparse"}, "expert='sparse': is no operation; must be one of sequence, experts"),
        ({"experts": "steps"}, "experts='steps': must be one of cpp, dense, grouped, plain, sharded, sparse, stored$"),
    ],
)
def test_a_mistake_in_the_switch_is_told(words, message):
    with pytest.raises(ValueError, match=message), kernels.use(**words):
        pass


def test_an_implementation_forced_on_what_it_cannot_run_says_so_in_one_line():
    args, options = case()
    with (
        kernels.use("cpp"),
        pytest.raises(ValueError, match=r"operation sequence cannot run as forced .not cpp: ") as e,
    ):
        kernels.sequence(args[0], args[1].bfloat16(), **options)
    assert "\n" not in str(e.value)
    experts = ModuleExperts(1, 2, lambda: torch.nn.Linear(3, 3))
    rows = torch.randn(4, 3), torch.ones(4, 1, 2), torch.ones(4, 1, 2), Stream.LAST
    with kernels.use(experts="cpp"), pytest.raises(ValueError, match="cpp: custom experts"):
        kernels.experts(experts, *rows)
    assert kernels.experts(experts, *rows).shape == (4, 3)


@needs_library
def test_a_composed_operation_obeys_in_its_parts():
    (routing, _), options = case()
    maps = torch.randn(4, 5), torch.randn(4)
    args = kernels.KernelArgs(routing, MLPExperts(3, 4, 5), maps, "rates", Stream.LAST), torch.randn(6, 5)
    with torch.no_grad():
        for word in ("plain", "cpp"):
            with kernels.use(word):
                name = kernels.raytrace.explain(*args, **options).name
                assert name == {"plain": "steps", "cpp": "cpp"}[word]
    with kernels.use("cpp"):  # gradients are wanted: its parts run in the library
        hidden_BD, route = kernels.raytrace(*args, **options)
    assert "_Raytrace" in type(route.active.grad_fn).__name__
    assert "_Raytrace" in type(hidden_BD.grad_fn).__name__


def test_explain_says_why_the_first_choice_is_not_taken():
    with kernels.use("plain"):
        name, reason = kernels.experts.explain(*grid())
    assert (name, reason[:25]) == ("dense", "not sparse: fewer than 20")


def test_a_new_implementation_is_one_line(monkeypatch):
    """As a GPU's would be: a file with `run` and `cannot`, and its line at the head of an operation's list."""
    ran = []

    def run(routing, entry_BN, **options):
        ran.append(len(entry_BN))
        with kernels.use("plain"):
            return kernels.sequence(routing, entry_BN, **options)

    def unsupported_reason(routing, entry_BN, **options):
        return None if len(entry_BN) > 4 else "made for more than 4 rows"

    lines = (Implementation("own", run, unsupported_reason=unsupported_reason), *kernels.sequence.implementations)
    monkeypatch.setattr(kernels.sequence, "implementations", lines)

    args, options = case(batch=6)
    assert kernels.sequence.explain(*args, **options).name == "own"
    found = kernels.sequence(*args, **options)
    assert ran == [6]
    with kernels.use("plain"):
        assert torch.equal(found.nodes, kernels.sequence(*args, **options).nodes)
    few, options = case(batch=3)
    kernels.sequence(*few, **options)
    assert ran == [6]
    assert "not own: made for more than 4 rows" in kernels.sequence.explain(*few, **options).reason or not (
        kernels.available()
    )
    with kernels.use(sequence="own"), pytest.raises(ValueError, match="own: made for more than 4 rows"):
        kernels.sequence(*few, **options)


@pytest.mark.parametrize("word", ["plain", "cpp"])
def test_compiled_code_obeys_the_switch(word):
    if word == "cpp" and not kernels.available():
        pytest.skip("no library")
    seen = []

    def backend(graph, inputs):
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    run = torch.compile(lambda x: kernels.experts(experts, x, *rest), backend=backend, fullgraph=True)
    experts, hidden_BD, *rest = grid()
    with kernels.use(word, experts={"plain": "dense", "cpp": "cpp"}[word]):
        expected, found = kernels.experts(experts, hidden_BD, *rest), run(hidden_BD)
    torch.testing.assert_close(found, expected)
    assert any("raytraced.experts" in target for target in seen) == (word == "cpp")


PROGRAM = """
import torch
from raytraced import kernels
from raytraced.routing import RoutingNetwork
torch.set_num_threads(1)
torch.manual_seed(1)
routing, entry = RoutingNetwork(3, 4), torch.rand(6, 4).softmax(-1)
options = {"stop": "drawn", "estimator": "reinmax", "temperature": 1.0, "num_steps": 12}
args, options = (routing, entry), {**options, "seed": torch.tensor(2), "rows_B": None}
for _ in range(2):
    route = kernels.sequence(*args, **options)
print(kernels.available(), kernels.why_not(), kernels.sequence.explain(*args, **options).name, sep="|", end="|")
print(route.nodes.tolist())
"""
NOT_BUILT = "import importlib.machinery; importlib.machinery.EXTENSION_SUFFIXES[:] = []\n"


def run_program(program, **environment):
    finished = subprocess.run(
        [sys.executable, "-W", "always", "-c", program],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    *answers, nodes = finished.stdout.strip().split("|")
    args, options = case()
    assert nodes == str(kernels.sequence(*args, **options).nodes.tolist())
    return answers, finished.stderr


@pytest.mark.slow  # test_not_built_and_turned_off_nothing_is_said is quick
def test_turned_off_the_plain_path_draws_the_same_and_nothing_is_said():
    answers, errors = run_program(PROGRAM, RAYTRACED_KERNELS="plain")
    assert answers == [str(kernels.available()), str(kernels.why_not()), "plain"]
    assert errors == ""


def test_not_built_the_plain_path_draws_the_same_and_says_once_what_to_do():
    answers, errors = run_program(NOT_BUILT + PROGRAM, RAYTRACED_KERNELS="")
    assert answers == ["False", "not built (no C++ compiler at install time?)", "plain"]
    assert errors.count("install g++ and reinstall to run about 20 times faster") == 1


def test_not_built_and_turned_off_nothing_is_said():
    answers, errors = run_program(NOT_BUILT + PROGRAM, RAYTRACED_KERNELS="plain")
    assert answers == ["False", "not built (no C++ compiler at install time?)", "plain"]
    assert errors == ""


@needs_library
def test_available_there_is_no_reason_why_not():
    assert kernels.why_not() is None
    assert cpp_library.cpu is not None


class DoubledExperts(MLPExperts):
    """Experts whose outputs count twice."""

    def run_expert(self, layer, expert, hidden_nD):
        return 2 * super().run_expert(layer, expert, hidden_nD)

    def run_layer(self, layer, hidden_BD):
        return 2 * super().run_layer(layer, hidden_BD)


class NamedExperts(MLPExperts):
    """Experts that compute nothing of their own."""


class UniformRouting(RoutingNetwork):
    """A routing network that ignores its gates."""

    def forward(self, entry_BN, active_BLN, input_logits_BLNO=None):
        rates = super().forward(entry_BN, active_BLN, input_logits_BLNO)
        return rates._replace(nodes=torch.ones_like(rates.nodes) / rates.nodes[0].numel())


@pytest.mark.parametrize("gradients", [False, True])
def test_a_subclass_that_overrides_a_method_never_runs_the_compiled_path(gradients):
    torch.manual_seed(0)
    hidden_BD = torch.randn(5, 16)
    for part, custom in (("experts", DoubledExperts(3, 4, 16)), ("routing", UniformRouting(3, 4))):
        layer = RaytracedExperts(16, 3, 4)
        if part == "experts":
            layer.experts = custom
        else:
            layer.router.routing = custom
        with torch.set_grad_enabled(gradients):
            found = layer(hidden_BD).hidden
            with kernels.use("plain"):
                expected = layer(hidden_BD).hidden
        torch.testing.assert_close(found, expected)


@needs_library
def test_a_subclass_that_overrides_nothing_runs_the_compiled_path():
    _, *rest = grid()
    assert kernels.experts.explain(NamedExperts(3, 4, 5), *rest).name == "cpp"


class Numbers(ctypes.Structure):
    """A struct of 24 bytes."""

    _fields_ = [("numbers", ctypes.c_longlong * 3)]


def library(size):
    """A library in which the struct has this size; None: one that is too old to report a size."""
    return SimpleNamespace() if size is None else SimpleNamespace(raytraced_size_of=Mock(return_value=size))


@pytest.mark.parametrize("size", [None, 0, 16])
def test_a_library_built_from_other_sources_is_not_used(size, monkeypatch):
    monkeypatch.setattr(cpp_library, "reason", None)
    monkeypatch.setattr(cpp_library, "cpu", library(size))
    with pytest.warns(RuntimeWarning, match=r"^the compiled kernels are built from other sources: reinstall"):
        cpp_library.mirrors(Numbers)
    assert cpp_library.cpu is None
    assert cpp_library.unfit_reason((torch.ones(2),)) == "the compiled kernels are built from other sources"


def test_a_library_with_the_same_structs_is_used(monkeypatch):
    same = library(24)
    monkeypatch.setattr(cpp_library, "cpu", same)
    assert cpp_library.mirrors(Numbers) is Numbers
    assert cpp_library.cpu is same
