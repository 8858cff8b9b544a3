"""A small package of icon sets, made up."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

PATH = '<path fill="currentColor" d="M2 2h20v20H2z"/>'
CORNER = '<path fill="red" d="M0 0h12v6H0z"/>'


def icon_set(prefix: str, category: str = "UI 24px", **parts: Any) -> dict[str, Any]:
    license = {"title": "Apache 2.0", "spdx": "Apache-2.0", "url": "https://example.com"}
    info = {"name": prefix.title() + " Set", "author": {"name": "Ann"}, "license": license}
    return {
        "prefix": prefix,
        "info": {**info, "category": category},
        "icons": {},
        "width": 24,
        "height": 24,
        **parts,
    }


def sets() -> dict[str, dict[str, Any]]:
    plain = icon_set(
        "plain",
        icons={
            "home-outline": {"body": PATH},
            "wide": {"body": CORNER, "width": 24, "height": 12, "top": 0},
            "gone": {"body": PATH, "hidden": True},
            "spinner": {"body": f"<g>{PATH}<animate/></g>"},
            "offset": {"body": CORNER, "left": -6, "top": -9.5},
        },
        aliases={
            "house-outline": {"parent": "home-outline"},
            "hut": {"parent": "house-outline"},
            "old-hut": {"parent": "home-outline", "hidden": True},
            "wide-left": {"parent": "wide", "hFlip": True},
            "wide-up": {"parent": "wide-left", "rotate": 1},
            "wide-again": {"parent": "wide-left", "hFlip": True},
            "nowhere": {"parent": "missing"},
            "gone-left": {"parent": "gone", "hFlip": True},
            "circle-a": {"parent": "circle-b", "vFlip": True},
            "circle-b": {"parent": "circle-a", "vFlip": True},
        },
        categories={"Buildings & Places": ["home-outline"], "Home Outline": ["home-outline"]},
    )
    logos = icon_set("brands", "Logos", icons={"acme": {"body": CORNER}, "home": {"body": PATH}})
    held_out = icon_set("bi2-solid", icons={"home-outline": {"body": PATH, "height": 12}})
    return {"plain": plain, "brands": logos, "bi2-solid": held_out}


def files() -> dict[str, bytes]:
    documents: dict[str, Any] = {
        "package.json": {"name": "@iconify/json", "version": "1.2.3"},
        "collections.json": {prefix: each["info"] for prefix, each in sets().items()},
        "json/unlisted.json": {"broken": True},
    }
    documents |= {f"json/{prefix}.json": each for prefix, each in sets().items()}
    return {name: json.dumps(document).encode() for name, document in documents.items()}


def write_folder(folder: Path) -> Path:
    for name, data in files().items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


def write_tarball(path: Path) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, data in files().items():
            info = tarfile.TarInfo(f"package/{name}")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path
