from __future__ import annotations

import pickle

import pytest

from megabatch.data.pairs import BadSample, clean_caption, decode_image

from .samples import png


def test_decode_image():
    assert decode_image(png(7, (4, 3)), "k").size == (4, 3)


UNDECODABLE = [b"", b"no image", png()[:40], png(0, (99, 99))[:60], b"\x89PNG\r\n\x1a\n"]


@pytest.mark.parametrize("data", UNDECODABLE, ids=len)
def test_undecodable_images_have_one_reason(data: bytes):
    with pytest.raises(BadSample) as caught:
        decode_image(data, "key 7")
    assert (caught.value.reason, caught.value.key) == ("undecodable image", "key 7")


@pytest.mark.parametrize("caption", ["", " \n\t", None])
def test_empty_captions(caption):
    with pytest.raises(BadSample, match="empty caption: k"):
        clean_caption(caption, "k")


@pytest.mark.parametrize("caption", [7, ["a"], {"a": "b"}, b"a"])
def test_captions_that_are_no_text(caption):
    with pytest.raises(BadSample, match="caption is not text: k"):
        clean_caption(caption, "k")


def test_captions_lose_the_space_around_them():
    assert clean_caption(" two words\n", "k") == "two words"


def test_a_bad_sample_survives_its_way_between_processes():
    again = pickle.loads(pickle.dumps(BadSample("reason", "key")))
    assert (again.reason, again.key) == ("reason", "key")
