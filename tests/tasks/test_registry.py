"""Which task a data set belongs to, and which data a model's card may name."""

import pytest

from raytraced.data.sources import Entry
from raytraced.models.card import ModelCard
from raytraced.tasks.images import catalog as images
from raytraced.tasks.registry import catalogued_data, takes_entry
from raytraced.tasks.text import catalog as texts


@pytest.mark.parametrize("data", ["digits", "union", "shakespeare"])
def test_a_card_may_name_a_data_set_of_the_catalogue(data):
    assert catalogued_data(ModelCard("mre", {}, {}, data=data)) == data


@pytest.mark.parametrize("data", [None, "", ".", "/dev/zero", "~", "private", "../digits", "./digits"])
def test_what_else_a_card_names_is_never_opened(data, tmp_path, monkeypatch):
    (tmp_path / "private").mkdir()
    monkeypatch.chdir(tmp_path)
    assert catalogued_data(ModelCard("mre", {}, {}, data=data)) is None


def test_a_data_set_of_a_subclass_belongs_to_its_task_alone():
    class Photos(images.ImageSet):
        """A plugin's image sets."""

    photos = Entry("photos", (Photos(**vars(images.MNIST)),))
    text = Entry("a text", (texts.ENWIK8,))
    assert (takes_entry(images.CATALOG, photos), takes_entry(texts.CATALOG, photos)) == (True, False)
    assert (takes_entry(images.CATALOG, text), takes_entry(texts.CATALOG, text)) == (False, True)
