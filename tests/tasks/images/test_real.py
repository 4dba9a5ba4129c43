"""The real data sets, from wherever this machine can get them; run by `make test-data`."""

import hashlib

import pytest

from raytraced.cli.data import get
from raytraced.data.cache import cache_root, entry_folder, obtain
from raytraced.tasks.images.catalog import CATALOG
from raytraced.tasks.images.loading import load


@pytest.mark.data
@pytest.mark.parametrize("name", [one.name for one in CATALOG["union"].parts])
def test_every_checksum_of_a_set_fetched_into_an_empty_cache(name, tmp_path, monkeypatch):
    monkeypatch.delenv("RAYTRACED_DATA", raising=False)
    monkeypatch.setenv("RAYTRACED_HOME", str(tmp_path))
    get([name])
    public_set = {one.name: one for one in CATALOG["union"].parts}[name]
    arrays = obtain(public_set, cache_root())
    found = {key: hashlib.sha256(array.tobytes()).hexdigest() for key, array in arrays.items()}
    assert found == {key: info.sha256 for key, info in public_set.arrays.items()}
    assert len(list(entry_folder(cache_root(), public_set).glob("*.npy"))) == 4
    dataset = load(name)
    num_training = public_set.arrays["train_labels"].shape[0]
    assert len(dataset.train) + len(dataset.validation) == num_training
    assert abs(len(dataset.validation) - num_training // 10) <= 5
    assert len(dataset.test) == 10000
