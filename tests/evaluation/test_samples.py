from __future__ import annotations

import os
from pathlib import Path

import pytest

from megabatch.data.pairs import BadSample
from megabatch.errors import UsageError
from megabatch.evaluation.samples import open_labelled
from tests.evaluation.material import NAMES, class_shards, image_folder, picture, png, shard


def test_a_folder_has_a_class_for_each_folder(tmp_path: Path) -> None:
    folder = image_folder(tmp_path / "data", 3)
    (folder / "digit_one" / "notes.txt").write_text("no image")
    (folder / "digit_two" / "1.png").write_bytes(b"broken")
    data = open_labelled(str(folder))
    assert data.classes == sorted(NAMES)
    assert data.n_classes == 4
    assert len(data) == 12
    places = [(name, i) for name in data.classes for i in range(3)]
    bad = places.index(("digit_two", 1))
    for index in {*range(12)} - {bad}:
        (name, i), sample = places[index], data[index]
        assert (sample.key, data.classes[sample.target]) == (f"{name}/{i}.png", name)
        kind = NAMES.index(name)
        assert sample.image.tobytes() == picture(kind, 1000 * kind + i).tobytes()
    with pytest.raises(BadSample, match=r"undecodable image: digit_two/1\.png"):
        data[bad]


def test_names_that_are_not_utf_8_are_escaped(tmp_path: Path) -> None:
    odd = os.fsdecode(b"gr\xfcn")
    (tmp_path / "green").mkdir()
    (tmp_path / "green" / f"{odd}.png").write_bytes(b"broken")
    with pytest.raises(BadSample) as caught:
        open_labelled(str(tmp_path))[0]
    assert caught.value.key == r"green/gr\udcfcn.png"
    (tmp_path / "green").rename(tmp_path / odd)
    assert open_labelled(str(tmp_path)).classes == [r"gr\udcfcn"]


def test_shards_have_a_class_index_and_bring_names_and_templates(tmp_path: Path) -> None:
    folder = class_shards(tmp_path / "wds", 3)
    for spec in (folder, folder / "test", f"{folder}/test/{{0..1}}.tar"):
        data = open_labelled(str(spec))
        assert data.classes == ["zero", "one", "two", "three"]
        assert data.templates is not None
        assert data.templates.read_text() == "digit {c}\na {c}.\n"
        assert [data[i].target for i in range(12)] == [i // 3 for i in range(12)]
        assert data[5].image.tobytes() == picture(1, 1002).tobytes()
        assert data[7].key == "1.tar:0001"


def test_samples_without_a_usable_class_are_bad(tmp_path: Path) -> None:
    image = png(picture(0, 0))
    path = shard(
        tmp_path / "0.tar",
        [{"png": image, "cls": b"1"}, {"png": image}, {"png": image, "cls": b"x"}, {"cls": b"0"}],
    )
    data = open_labelled(str(path))
    assert data.classes is None
    assert data.n_classes == 2
    assert data[0].target == 1
    for index, reason in ((1, "no cls"), (2, "class index is not a number"), (3, "no image")):
        with pytest.raises(BadSample) as caught:
            data[index]
        assert caught.value.reason == reason
    (tmp_path / "classnames.txt").write_text("only one\n")
    with pytest.raises(BadSample, match="beyond the class names"):
        open_labelled(str(path))[0]


def test_what_is_no_labelled_data_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "hollow" / "a class").mkdir(parents=True)
    shard(tmp_path / "pairs.tar", [{"png": png(picture(0, 0)), "txt": b"caption"}])
    (tmp_path / "table.csv").write_text("filepath,title\n")
    for name, message in (
        ("missing", "nothing matches"),
        ("empty", "find any class folder"),
        ("hollow", "no valid file for the classes a class"),
        ("pairs.tar", r"no sample has a member \.cls"),
        ("table.csv", r"expected shards \(\.tar\) or a folder"),
    ):
        with pytest.raises(UsageError, match=message) as caught:
            open_labelled(str(tmp_path / name))
        assert "\n" not in str(caught.value)
