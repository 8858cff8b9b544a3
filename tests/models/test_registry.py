"""Models by name, and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path

import open_clip
import pytest
import torch
from safetensors.torch import save_file

from megabatch.cli import main
from megabatch.errors import UsageError
from megabatch.models import available, create, names


def test_every_open_clip_architecture_is_available() -> None:
    assert available() == ["glyph-small", "icon-small", *open_clip.list_models()]
    assert list(names.OWN) == available()[:2]


def test_the_same_names_are_found_without_importing_open_clip(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = names.openclip_names()
    own = [name for name in known if not name.startswith("megabatch-test")]  # of other tests
    monkeypatch.delitem(sys.modules, "open_clip")
    assert names.openclip_names() == own
    assert "open_clip" not in sys.modules
    assert main(["models"]) == 0
    listed = capsys.readouterr().out.split()
    captioning = {n for n in own if "multimodal_cfg" in open_clip.get_model_config(n)}
    assert set(own) - set(listed) == captioning  # which cannot be trained
    assert {"glyph-small", "icon-small", "hf:PATH", "local-dir:PATH"} <= set(listed)


@pytest.mark.parametrize(
    ("name", "meant"), [("glyph_small", "glyph-small"), ("vit-b-32", "ViT-B-32"), ("RN-50", "RN50")]
)
def test_an_unknown_name_is_refused_with_names_close_to_it(name: str, meant: str) -> None:
    with pytest.raises(UsageError, match=f"{name}.*did you mean.*{meant}"):
        create(name)


def test_a_name_close_to_nothing_is_refused_too() -> None:
    with pytest.raises(UsageError, match="'qqqqqqqq' is not known"):
        create("qqqqqqqq")


def test_a_name_on_a_hub_is_not_downloaded() -> None:
    with pytest.raises(UsageError, match="not known"):
        create("hf-hub:timm/ViT-B-16-SigLIP")


def test_a_format_that_is_not_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights.npz"
    path.write_bytes(b"")
    with pytest.raises(UsageError, match=r"expected a local \.safetensors or \.pt"):
        create("glyph-small", pretrained=path)


def test_a_name_of_published_weights_is_refused() -> None:
    with pytest.raises(UsageError, match="nothing is downloaded"):
        create("ViT-B-32", pretrained="laion2b_s34b_b79k")


def test_missing_weights_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no file .*absent\.safetensors"):
        create("glyph-small", pretrained=tmp_path / "absent.safetensors")


def test_damaged_weights_are_named(tmp_path: Path) -> None:
    path = tmp_path / "half.safetensors"
    save_file({"a": torch.zeros(1000)}, path)
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(UsageError, match=r"half\.safetensors is damaged"):
        create("glyph-small", pretrained=path)
