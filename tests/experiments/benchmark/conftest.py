"""Timings begin with a collection of garbage, which takes long where other tests have left much behind."""

import gc

import pytest


@pytest.fixture(autouse=True, scope="module")
def _little_to_look_through():
    gc.collect()
    gc.freeze()
