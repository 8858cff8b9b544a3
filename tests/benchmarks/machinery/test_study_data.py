from __future__ import annotations

from pathlib import Path

import pytest
import torch

from machinery.study_data import MODELS, Synset, load, read_synsets
from megabatch.models import create
from tests.benchmarks.study_files import write_icons, write_wordnet

CPU = torch.device("cpu")


def test_synsets_are_read_without_examples_and_markers(tmp_path: Path) -> None:
    folder = write_wordnet(tmp_path / "wordnet", 20)
    nouns = [*read_synsets(folder / "data.noun")]
    assert len(nouns) == 20
    assert nouns[3] == Synset(["thing 3", "object3"], "number 3 of the things; counted", 3)
    assert nouns[10].file == 8
    assert [*read_synsets(folder / "data.adj")] == [Synset(["awake", "up"], "not asleep", 0)]


def test_wordnet_is_divided_by_gloss_and_file(tmp_path: Path) -> None:
    data = load("wordnet", write_wordnet(tmp_path / "wordnet"), CPU)
    unseen = data.tests["unseen"]
    assert len(unseen.ids) == 2 * 20 + 1  # of noun.body and verb.motion
    assert len(unseen.ids.unique()) == 21
    held_out = [data.tests[name].ids for name in ("validation", "in_domain")]
    assert len(data.train.ids) + sum(map(len, held_out)) == 2 * 180 + 2
    for ids in (*held_out, unseen.ids):
        assert len(ids)
        assert not torch.isin(ids, data.train.ids).any()  # all words of a gloss are on one side
    assert torch.isin(data.tests["seen"].ids, data.train.ids).all()


def test_icons_are_white_on_black_with_their_own_captions(tmp_path: Path) -> None:
    folder = write_icons(tmp_path / "icons")
    data = load("icons", folder, CPU)
    parts = [data.train, data.tests["validation"], data.tests["in_domain"]]
    assert [len(part.ids) for part in parts] == [185, 5, 10]  # the hash's, for these keys
    assert len(data.tests["unseen"].ids) == 20
    images = torch.cat([part.first for part in parts])
    assert images.shape == (200, 1, 32, 32)
    assert len(images.flatten(1).unique(dim=0)) == 200  # none is in two parts
    same = data.train.ids[:, None] == data.train.ids
    assert torch.equal((data.train.texts[:, None] == data.train.texts).all(2), same)


def test_icons_of_another_size_are_refused(tmp_path: Path) -> None:
    folder = write_icons(tmp_path / "icons", 4, 2, size=64)
    with pytest.raises(ValueError, match="icons of 64 pixels, expected 32"):
        load("icons", folder, CPU)


@pytest.mark.parametrize("name", ["icons", "wordnet"])
def test_training_sees_another_form_of_each_pair(name: str) -> None:
    towers = create(MODELS[name])
    tokens = towers.tokenizer(["a thing with a long name", "another one"])
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (2, 1, 32, 32), dtype=torch.uint8, generator=generator)
    first = tokens if towers.first == "text" else images
    module = towers.module.train()
    for encode, inputs in ((module.encode_image, first), (module.encode_text, tokens)):
        module.train()
        assert not torch.equal(encode(inputs), encode(inputs))
        module.eval()
        assert torch.equal(encode(inputs), encode(inputs))
