"""The real public texts, from wherever this machine can get them; run by `make test-data`."""

import hashlib

import pytest

from raytraced.cli.data import get
from raytraced.data.cache import cache_root, obtain
from raytraced.tasks.text.catalog import CATALOG, ENWIK8
from raytraced.tasks.text.loading import load


@pytest.mark.data
def test_every_checksum_of_the_texts_fetched_into_an_empty_cache(tmp_path, monkeypatch):
    monkeypatch.delenv("RAYTRACED_DATA", raising=False)
    monkeypatch.setenv("RAYTRACED_HOME", str(tmp_path))
    get(["mix"])
    for part in CATALOG["mix"].parts:
        found = {key: hashlib.sha256(array).hexdigest() for key, array in obtain(part, cache_root()).items()}
        assert found == {key: info.sha256 for key, info in part.arrays.items()}, part.name
    whole = hashlib.sha256()
    for array in obtain(ENWIK8, cache_root()).values():
        whole.update(array)
    assert whole.hexdigest() == "2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8"
    data = load("mix")
    assert data.domain_names == ("enwik8", "plays", "bible", "speeches", "python")
    assert len({len(data.test.windows[data.test.windows[:, 0] == number]) for number in range(5)}) == 1
    assert len(load("enwik8", eval_tokens=None).test) == -(-4_999_999 // 128)
