"""A server with the files of the tiny set, and none of the user's settings."""

import pytest

from data.originals import FILES, FileServer


@pytest.fixture
def server():
    running = FileServer(dict(FILES))
    yield running
    running.close()


@pytest.fixture(autouse=True)
def _no_settings_of_the_user(monkeypatch, tmp_path):
    monkeypatch.delenv("RAYTRACED_DATA", raising=False)
    monkeypatch.setenv("RAYTRACED_HOME", str(tmp_path / "home"))
