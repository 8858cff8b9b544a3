"""Hugging Face models of images and texts; tests/export compares features with transformers'."""

from __future__ import annotations

import json
import math
import pickle
from pathlib import Path

import pytest
import torch
import transformers
from PIL import Image

from megabatch.errors import UsageError
from megabatch.models import ModelOptions, create
from megabatch.models.blocks import blocks
from megabatch.models.hf_images import KINDS
from megabatch.models.towers import lock, locked_towers
from tests.export.runs import change_json
from tests.models.tiny_bert import made
from tests.models.tiny_clip import save_tiny_clip


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_clip(tmp_path_factory.mktemp("clip"), request.param)


@pytest.fixture
def clip(tmp_path: Path) -> Path:
    return save_tiny_clip(tmp_path, "clip")


def test_a_model_is_ready_for_training(folder: Path) -> None:
    towers = made(folder)
    pictures = [Image.new("RGB", size) for size in ((72, 48), (32, 32), (9, 40))]
    images = torch.stack([towers.train_transform(picture) for picture in pictures])
    outputs = towers.module(images, towers.tokenizer(["a b c", "d", "e f"]))
    siglip = "logit_bias" in outputs
    assert siglip == ("siglip" in towers.module.visual.vision_model.config.model_type)
    assert siglip == ("text" not in towers.lengths)
    for name in ("image_features", "text_features"):
        assert outputs[name].shape == (3, towers.embed_dim)
        torch.testing.assert_close(outputs[name].norm(dim=-1), torch.ones(3))
    (outputs["image_features"] * outputs["text_features"] * outputs["logit_scale"]).sum().backward()
    without = {name for name, p in towers.module.named_parameters() if p.grad is None}
    assert without <= {"logit_bias"}  # DDP would wait for others
    for part in (towers.train_transform, towers.eval_transform, towers.tokenizer):
        pickle.loads(pickle.dumps(part))
    assert len(blocks(towers.module)) == 4
    lock(towers.module, "image")
    assert locked_towers(towers.module) == {"image"}
    lock(towers.module, "text")
    trained = {name for name, p in towers.module.named_parameters() if p.requires_grad}
    assert trained <= {"logit_scale", "logit_bias"}


def test_without_weights_it_starts_at_random_where_told(folder: Path, tmp_path: Path) -> None:
    for path in folder.iterdir():
        if path.suffix != ".safetensors":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    module = made(tmp_path, init_logit_scale=math.log(10), init_logit_bias=-10.0).module
    assert module.logit_scale.item() == pytest.approx(math.log(10))
    assert module.logit_bias.item() == -10
    own = made(folder).module
    stored = create(f"hf:{folder}", options=ModelOptions.of({"loss": "siglip"})).module
    assert stored.logit_scale.item() == own.logit_scale.item()  # what weights say wins
    assert stored.logit_bias.item() == (-10 if own.logit_bias is None else own.logit_bias.item())


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("config.json", {"model_type": "clipseg"}, "of type 'clipseg', expected one of clip, "),
        ("preprocessor_config.json", {"image_mean": 0.5}, "cannot be read: TypeError: "),
        ("preprocessor_config.json", {"resample": 0}, "pixels, by a bilinear or bicubic filter"),
        ("preprocessor_config.json", {"size": {"shortest_edge": 36}}, "resize to 32 x 32 pixels"),
        ("preprocessor_config.json", {"crop_size": 24}, "does not only resize"),
        ("preprocessor_config.json", {"do_normalize": False}, "does not only resize"),
    ],
)
def test_other_kinds_processors_and_options_are_refused(
    clip: Path, file: str, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(UsageError, match=r"--hf-pooling, --force-image-size: hf:.* no such option"):
        made(clip, hf_pooling="cls", force_image_size=64)
    change_json(clip / file, **changes)
    with pytest.raises(UsageError, match=message):
        made(clip)


def test_newer_folders_keep_it_with_the_other_processors(clip: Path) -> None:
    path = clip / "preprocessor_config.json"
    other = clip / "processor_config.json"
    other.write_text(json.dumps({"image_processor": json.loads(path.read_text())}))
    picture = Image.new("RGB", (40, 50), (3, 200, 90))
    expected = made(clip).eval_transform(picture)
    path.unlink()
    if int(transformers.__version__.split(".")[0]) < 5:  # it does not know such folders
        with pytest.raises(UsageError, match=r"cannot be read: .* preprocessor_config\.json"):
            made(clip)
        return
    assert torch.equal(made(clip).eval_transform(picture), expected)
