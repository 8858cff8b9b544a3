"""Rasterising vector images (SVG) with resvg."""

from __future__ import annotations

import io
from xml.parsers import expat

import resvg_py
from PIL import Image

# resvg overflows its stack, which ends the process, somewhere between 200 and 256 nested groups.
_MAX_DEPTH = 128  # of elements, counted again for each nested reference
_MAX_NESTED = 16  # references inside referenced elements: three at a time make 3^5 copies


class BadSvg(ValueError):
    """An SVG that is refused; the message is short and the same for the same fault."""


def draw_svg(data: bytes, size: int) -> Image.Image:
    """Draw an SVG on white, RGB, the longer side `size` pixels; `currentColor` is black.

    The drawing depends on the file alone: texts are left out, since fonts differ between machines,
    and a file that embeds or names an image is refused, since resvg would read any path.

    Raises:
        BadSvg: the file is not an SVG, embeds images, declares entities, or is nested so deeply
            that drawing it would crash the process or never end.
    """
    _check(data)
    try:
        png = resvg_py.svg_to_bytes(
            svg_string=data.decode("utf-8-sig"),
            width=size,
            height=size,  # with both given, the drawing fits within
            background="white",
            skip_system_fonts=True,
        )
        return Image.open(io.BytesIO(png)).convert("RGB")
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic in Rust is no Exception
        raise BadSvg("undecodable image") from error


class _Structure:
    """Follows a document's elements and raises BadSvg at the first one that must not be drawn."""

    def __init__(self) -> None:
        self.named: list[bool] = []  # for each open element: whether it or an ancestor has an id
        self.nested = 0
        self.deepest = 0

    def start(self, name: str, attributes: dict[str, str]) -> None:
        kind = name.rpartition(" ")[2]  # without its namespace
        if not self.named and kind != "svg":
            raise BadSvg("undecodable image")
        if kind in ("image", "feImage"):
            raise BadSvg("svg with an image inside")
        inside = len(self.named) > 1 and self.named[-1]  # the root's id repeats nothing
        self.nested += (kind == "use" and inside) or kind in ("pattern", "marker")
        self.named.append(inside or ("id" in attributes and bool(self.named)))
        self.deepest = max(self.deepest, len(self.named))
        if self.nested > _MAX_NESTED or self.deepest * (1 + self.nested) > _MAX_DEPTH:
            raise BadSvg("svg nested too deeply")

    def end(self, name: str) -> None:
        self.named.pop()

    def entity(self, *declaration: object) -> None:
        raise BadSvg("svg with entities")


def _check(data: bytes) -> None:
    """Refuse files that resvg must not get: it reads files that they name, and may overflow."""
    structure = _Structure()
    # As UTF-8, like resvg, whatever encoding the file declares.
    parser = expat.ParserCreate("utf-8", namespace_separator=" ")
    parser.StartElementHandler = structure.start
    parser.EndElementHandler = structure.end
    parser.EntityDeclHandler = structure.entity
    try:
        parser.Parse(data, True)
    except (expat.ExpatError, ValueError) as error:
        if isinstance(error, BadSvg):
            raise
        raise BadSvg("undecodable image") from error
