from __future__ import annotations

import io
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from megabatch.data.images import ImageFiles, transformed
from megabatch.data.pairs import BadSample, EncodedImage, check_usable
from megabatch.errors import UsageError

from .samples import Numbers, jpeg, png

UNDECODABLE = [b"", b"no image", png()[:40], png(0, (99, 99))[:60], b"\x89PNG\r\n\x1a\n"]


@pytest.mark.parametrize("data", UNDECODABLE, ids=len)
def test_undecodable_images_have_one_reason(data: bytes):
    with pytest.raises(BadSample) as caught:
        EncodedImage(data, "key 7").decode()
    assert (caught.value.reason, caught.value.key) == ("undecodable image", "key 7")


@pytest.mark.parametrize(("kind", "order"), [("PNG", "<"), ("TIFF", "<"), ("TIFF", ">")])
def test_grey_images_of_16_bits_are_scaled_to_8(kind: str, order: str):
    values = (np.arange(64) * 1000).astype(f"{order}u2").reshape(8, 8)
    file = io.BytesIO()
    Image.fromarray(values).save(file, kind)
    decoded = np.asarray(EncodedImage(file.getvalue(), "k").decode().convert("RGB"))
    assert (decoded == (values // 256)[..., None]).all()


def test_an_image_above_pillow_s_limit_is_no_undecodable_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(BadSample) as caught:
        EncodedImage(png(0, (15, 15)), "k").decode()
    assert caught.value.reason == "image of more than 200 pixels, Pillow's limit"


def test_a_source_of_nothing_but_bad_samples_is_refused():
    check_usable(Numbers(1000, bad=range(990)), "a.tar")
    with pytest.raises(UsageError, match=r"a\.tar: none of 100 samples .*; the first: even: 0"):
        check_usable(Numbers(1000, bad=range(1000)), "a.tar")


def test_a_bad_sample_survives_its_way_between_processes():
    again = pickle.loads(pickle.dumps(BadSample("reason", "key")))
    assert (again.reason, again.key) == ("reason", "key")


class AsBytes:
    """A transform that also takes arrays."""

    def __call__(self, image: Image.Image) -> torch.Tensor:
        return torch.tensor(np.asarray(image.convert("RGB")))

    def pixels(self, pixels: np.ndarray) -> torch.Tensor:
        return torch.tensor(pixels)


sizes = st.integers(1, 40)


@given(
    size=st.tuples(sizes, sizes),
    quality=st.integers(1, 100),
    subsampling=st.sampled_from(["4:4:4", "4:2:2", "4:2:0"]),
    progressive=st.booleans(),
)
def test_pixels_of_jpeg_files_are_pillows(
    size: tuple[int, int], quality: int, subsampling: str, progressive: bool
) -> None:
    data = jpeg(size, quality=quality, subsampling=subsampling, progressive=progressive)
    file = EncodedImage(data, "k")
    assert np.array_equal(file.pixels(), np.asarray(file.decode()))


@given(place=st.floats(0, 1), value=st.integers(0, 255), length=st.floats(0.5, 1))
def test_damaged_jpeg_files_are_what_pillow_makes_of_them(
    place: float, value: int, length: float
) -> None:
    whole = jpeg((33, 21), quality=80)
    data = bytearray(whole[: round(length * len(whole))])
    data[int(place * (len(data) - 1))] = value
    file = EncodedImage(bytes(data), "k")
    try:
        expected = AsBytes()(file.decode())
    except BadSample:
        with pytest.raises(BadSample, match="undecodable image: k"):
            transformed(AsBytes(), file)
    else:
        assert torch.equal(transformed(AsBytes(), file), expected)


@pytest.mark.parametrize(
    "data",
    [jpeg((9, 7), mode="L"), jpeg((9, 7), mode="CMYK"), png(), b"", b"no image"],
    ids=["grey", "CMYK", "PNG", "empty", "none"],
)
def test_other_files_are_left_to_pillow(data: bytes) -> None:
    assert EncodedImage(data, "k").pixels() is None


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ImageFiles:
    """Beside tables/a.csv, with home as the working directory; 1 is in both, 2 and 3 in one."""
    for folder, names in (("tables", "12"), ("home", "13")):
        (tmp_path / folder).mkdir()
        for name in names:
            (tmp_path / folder / name).write_text(f"{folder} {name}")
    monkeypatch.chdir(tmp_path / "home")
    found = ImageFiles.beside(tmp_path / "tables" / "a.csv")
    monkeypatch.chdir(tmp_path)  # the working directory of the beginning counts
    return found


def test_the_tables_folder_comes_before_the_working_directory(files: ImageFiles, tmp_path: Path):
    assert [files.read(name, "") for name in "123"] == [b"tables 1", b"tables 2", b"home 3"]
    assert files.read(str(tmp_path / "home" / "1"), "") == b"home 1"
    assert files.read(b"data", "") == b"data"
    assert files.read({"bytes": b"data", "path": "1"}, "") == b"data"
    assert files.read({"bytes": None, "path": "2"}, "") == b"tables 2"


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (None, "no image: a.csv:row 4"),
        ({"bytes": None, "path": ""}, "no image: a.csv:row 4"),
        (3, "no image: a.csv:row 4"),
        ("9", "missing or unreadable image file: a.csv:row 4, tried {0}/tables/9 and {0}/home/9"),
        ("/elsewhere/9", "missing or unreadable image file: a.csv:row 4, tried /elsewhere/9"),
        ("a\0b", "missing or unreadable image file: a.csv:row 4, tried {0}/tables/a\0b and {0}"),
        ("x" * 300, "missing or unreadable image file: a.csv:row 4, tried {0}/tables/xxx"),
        ("..", "missing or unreadable image file: a.csv:row 4, tried {0}/tables/.."),
        ("empty", "empty image file: a.csv:row 4"),
    ],
)
def test_what_cannot_be_read_names_the_row_and_what_was_tried(
    files: ImageFiles, tmp_path: Path, value: object, told: str
):
    (tmp_path / "tables" / "empty").write_bytes(b"")
    with pytest.raises(BadSample) as caught:
        files.read(value, "a.csv:row 4")
    assert str(caught.value).startswith(told.format(tmp_path))
