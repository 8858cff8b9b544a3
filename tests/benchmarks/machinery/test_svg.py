from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from machinery.svg import BadSvg, draw_svg
from tests.data.samples import png

NAMESPACE = 'xmlns="http://www.w3.org/2000/svg"'
WHITE, BLACK = (255, 255, 255), (0, 0, 0)


def document(body: str, size: str = 'width="20" height="10"') -> bytes:
    return f"<svg {NAMESPACE} {size}>{body}</svg>".encode()


def test_the_longer_side_has_the_size_asked_for():
    data = document('<rect width="10" height="10" fill="currentColor"/>')
    image = draw_svg(data, 64)
    assert (image.mode, image.size) == ("RGB", (64, 32))
    assert (image.getpixel((5, 5)), image.getpixel((60, 5))) == (BLACK, WHITE)
    assert draw_svg(document("", 'width="1" height="4"'), 8).size == (2, 8)


def test_text_is_left_out():
    image = draw_svg(document('<text x="2" y="9" font-size="9">mmm</text>'), 224)
    assert image.getcolors() == [(224 * 112, WHITE)]


@pytest.mark.parametrize("name", ["image", "feImage", "s:image"])
@pytest.mark.parametrize("attribute", ["href", "xlink:href"])
def test_no_file_is_read(tmp_path: Path, name: str, attribute: str):
    (tmp_path / "secret.png").write_bytes(png(255, (20, 10)))
    link = f'{attribute}="{tmp_path}/secret.png"'
    spaces = 'xmlns:s="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    body = f'<g {spaces}><{name} width="20" height="10" {link}/></g>'
    with pytest.raises(BadSvg, match="svg with an image inside"):
        draw_svg(document(body), 224)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"<svg", "undecodable image"),
        (b"<p/>", "undecodable image"),
        (document("<g>"), "undecodable image"),
        (document("\x00"), "undecodable image"),
        (document("<g/>", 'width="0" height="0"'), "undecodable image"),
        (document("").decode().encode("utf-16"), "undecodable image"),
        (b'<!DOCTYPE svg [<!ENTITY a "b">]>' + document("&a;"), "svg with entities"),
        (document("<g>" * 100_000 + "</g>" * 100_000), "svg nested too deeply"),
    ],
)
def test_what_cannot_be_drawn_is_refused(data: bytes, reason: str):
    with pytest.raises(BadSvg, match=f"^{reason}$"):
        draw_svg(data, 224)


@pytest.mark.parametrize(("levels", "uses"), [(127, 0), (6, 16)])
def test_what_is_just_not_too_deep_is_drawn(levels: int, uses: int):
    # In another process: a stack overflow would end this one.
    groups = levels - 2 - (uses > 0)
    inner = '<g opacity=".9">' * groups + "{}" + "</g>" * groups
    body = inner.format('<rect width="5" height="5"/>')
    for i in range(uses):
        body = f'<g id="u{i}">{inner.format(f"""<use href="#u{i - 1}"/>""")}</g>' + body
    with ProcessPoolExecutor(1, get_context("fork")) as pool:
        assert pool.submit(draw_svg, document(body), 224).result().mode == "RGB"


def test_what_draws_itself_many_times_over_is_refused():
    body = '<rect id="u0" width="5" height="5"/>'
    for i in range(7):
        body += f'<g id="u{i + 1}">' + f'<use href="#u{i}"/>' * 10 + "</g>"
    with pytest.raises(BadSvg, match="nested too deeply"):
        draw_svg(document(body), 224)
    chain = "".join(
        f'<pattern id="p{i}" width="1" height="1"><rect width="9" fill="url(#p{i - 1})"/></pattern>'
        for i in range(300)
    )
    with pytest.raises(BadSvg, match="nested too deeply"):
        draw_svg(document(chain + '<rect width="9" height="9" fill="url(#p299)"/>'), 224)
    once = draw_svg(document('<rect id="a" width="5" height="5"/>' + '<use href="#a"/>' * 50), 224)
    assert once.getpixel((5, 5)) == BLACK
