"""The sub-commands of `raytraced data`."""

import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from data.originals import tiny_set
from raytraced.cli.data import get, list_data, show
from raytraced.data.sources import Entry
from raytraced.tasks.images import catalog
from raytraced.tasks.images.sheet import contact_sheet
from raytraced.tasks.text import catalog as texts


@pytest.fixture
def tiny_catalog(server, monkeypatch):
    """The tiny set in place of the public ones."""
    tiny = tiny_set(server.address)
    entries = {"digits": catalog.CATALOG["digits"], "tiny": Entry("bytes", (tiny,)), "union": Entry("all", (tiny,))}
    monkeypatch.setattr(catalog, "CATALOG", entries)
    monkeypatch.setattr(texts, "CATALOG", {})
    return tiny


def test_commands_are_imported_without_torch_and_numpy():
    code = "import sys, raytraced.cli.data; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=100).returncode == 0


def test_list_shows_what_is_cached(tiny_catalog, tmp_path, capsys):
    list_data(data_root=str(tmp_path))
    assert "not cached" in capsys.readouterr().out
    get(["tiny"], data_root=str(tmp_path))
    list_data(data_root=str(tmp_path))
    output = capsys.readouterr().out
    assert "cached" in output
    assert "not cached" not in output
    assert f"Cache: {tmp_path}" in output
    assert str(tiny_catalog.sources[0]) in output


def test_get_verifies_what_is_cached_already(tiny_catalog, tmp_path, capsys):
    get(["tiny", "digits", "union"], data_root=str(tmp_path))
    get(["tiny"], data_root=str(tmp_path))
    output = capsys.readouterr().out
    assert output.count(f"tiny: 4 arrays verified, 0 MB in {tmp_path}") == 2
    assert "digits: in the package, nothing to get" in output


def test_get_of_an_unknown_name_fetches_nothing(tiny_catalog, server, tmp_path):
    with pytest.raises(ValueError, match=r"data set 'tinny': unknown; did you mean tiny\?"):
        get(["tiny", "tinny"], data_root=str(tmp_path))
    with pytest.raises(ValueError, match="data set 'photos': unknown; must be one of digits, tiny, union"):
        get(["tiny", "photos"], data_root=str(tmp_path))
    assert server.requests == []


def test_show_writes_a_sheet_and_counts_classes(tmp_path, capsys):
    path = tmp_path / "sheet.png"
    show("digits", output=str(path))
    with Image.open(path) as sheet:
        assert sheet.format == "PNG"
        assert sheet.height == 10 * (56 + 4) + 4
    output = capsys.readouterr().out
    assert "1,293" in output
    assert f"Contact sheet: {path}" in output


def test_show_refuses_an_output_that_it_cannot_write_before_it_loads(tmp_path):
    with pytest.raises(ValueError, match=r"sheet.jpg': must end in .png"):
        show("no such set", output=str(tmp_path / "sheet.jpg"))
    with pytest.raises(ValueError, match="missing' does not exist"):
        show("no such set", output=str(tmp_path / "missing" / "sheet.png"))


def test_sheet_has_each_class_in_its_own_row_with_pixels_unchanged():
    images = np.zeros((4, 3, 2, 2), dtype=np.uint8)
    labels = np.array([1, 0, 1, 0])
    images[labels == 0] = np.array([200, 10, 20]).reshape(3, 1, 1)
    images[labels == 1] = np.array([10, 200, 20]).reshape(3, 1, 1)
    pixels = np.asarray(contact_sheet(images, labels, ("a", "b")))
    top, bottom = pixels[4:60], pixels[64:120]
    assert (top == [200, 10, 20]).all(-1).sum() == (bottom == [10, 200, 20]).all(-1).sum() == 2 * 56 * 56
    assert (top == [10, 200, 20]).all(-1).sum() == 0
