"""Another kind of data, from another kind of source: what a new task brings, and no line elsewhere."""

import gzip
import io
import sys
import tarfile
import types
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.originals import info_of
from raytraced.cli.data import get, list_data
from raytraced.data.cache import cache_root, obtain
from raytraced.data.sources import Entry, PublicSet, read_tar
from raytraced.tasks import registry

TEXT = np.frombuffer(b"in the beginning was the word " * 40, dtype=np.uint8)


@dataclass(frozen=True)
class SourceArchive:
    """A new kind of source: an archive of a programme's source, with the text among its files."""

    archive: Path

    def __str__(self):
        return f"archive {self.archive.name}"

    def fetch(self, file_names, folder, report):
        report(0, None)
        return read_tar(self.archive, file_names)


def decode(files):
    return {"text": np.frombuffer(gzip.decompress(files["text.gz"]), dtype=np.uint8)}


def write_archive(path):
    content = gzip.compress(TEXT.tobytes())
    with tarfile.open(path, "w:gz") as archive:
        member = tarfile.TarInfo("programme-1.0/data/text.gz")
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))
    return path


def text_set(*sources):
    return PublicSet(
        name="words",
        arrays={"text": info_of(TEXT)},
        file_names=frozenset({"text.gz"}),
        decode=decode,
        sources=sources,
        folders=("words",),
    )


def test_text_from_an_archive_is_verified_and_cached(tmp_path, capsys):
    source = SourceArchive(write_archive(tmp_path / "programme-1.0.tar.gz"))
    missing = SourceArchive(tmp_path / "missing.tar.gz")
    for sources in ((missing, source), ()):  # the second time it is in the cache
        arrays = obtain(text_set(*sources), tmp_path / "root")
        np.testing.assert_array_equal(arrays["text"], TEXT)
    assert "words: taken from archive programme-1.0.tar.gz, every checksum matches" in capsys.readouterr().err


def test_commands_know_the_sets_of_every_task(tmp_path, monkeypatch, capsys):
    source = SourceArchive(write_archive(tmp_path / "programme-1.0.tar.gz"))
    catalog = types.ModuleType("raytraced.tasks.letters.catalog")
    catalog.CATALOG = {"words": Entry("1,200 letters", (text_set(source),))}
    monkeypatch.setitem(sys.modules, catalog.__name__, catalog)
    images = registry.TASKS["images"]
    monkeypatch.setattr(
        registry, "TASKS", registry.TASKS | {"letters": images._replace(names="letters.catalog:CATALOG")}
    )
    get(["words"])
    list_data()
    output = capsys.readouterr().out
    assert f"words: 1 arrays verified, 0 MB in {cache_root()}" in output
    assert "1,200 letters" in output
    assert "archive programme-1.0.tar.gz" in output
    assert "fashion-mnist" in output
