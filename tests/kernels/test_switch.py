"""With the kernels turned off, or not built, everything runs on the plain path, and only the latter is worth a word."""

import subprocess
import sys

import pytest
import torch

from raytraced import RoutingNetwork, activation_sequence, kernels

PROGRAM = """
import torch
from raytraced import RoutingNetwork, activation_sequence, kernels
torch.set_num_threads(1)
torch.manual_seed(1)
routing, entry = RoutingNetwork(3, 4), torch.rand(6, 4).softmax(-1)
sequence = activation_sequence(routing, entry, generator=torch.Generator().manual_seed(2))
print(kernels.available(), kernels.why_not(), sequence.nodes.tolist(), sep="|")
"""
NOT_BUILT = "import importlib.machinery; importlib.machinery.EXTENSION_SUFFIXES[:] = []\n"


def run(program, **environment):
    import os

    finished = subprocess.run(
        [sys.executable, "-W", "always", "-c", program],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    *answers, nodes = finished.stdout.strip().split("|")
    return answers, nodes, finished.stderr


def expected_nodes():
    torch.manual_seed(1)
    routing, entry = RoutingNetwork(3, 4), torch.rand(6, 4).softmax(-1)
    return str(activation_sequence(routing, entry, generator=torch.Generator().manual_seed(2)).nodes.tolist())


def test_turned_off_the_plain_path_draws_the_same_and_nothing_is_said():
    answers, nodes, errors = run(PROGRAM, RAYTRACED_KERNELS="off")
    assert answers == ["False", "turned off by RAYTRACED_KERNELS"]
    assert nodes == expected_nodes()
    assert "kernels" not in errors


def test_not_built_the_plain_path_draws_the_same_and_says_so_once():
    answers, nodes, errors = run(NOT_BUILT + PROGRAM, RAYTRACED_KERNELS="on")
    assert answers == ["False", "not built (no C++ compiler at install time?)"]
    assert nodes == expected_nodes()
    assert errors.count("the slower plain path is used") == 1


@pytest.mark.skipif(not kernels.available(), reason=f"kernels {kernels.why_not()}")
def test_available_there_is_no_reason_why_not():
    assert kernels.why_not() is None
