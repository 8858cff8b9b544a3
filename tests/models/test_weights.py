"""Which files of weights are read, and what is refused unread."""

from __future__ import annotations

import json
from pathlib import Path

import open_clip
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from megabatch.errors import UsageError
from megabatch.models import ModelOptions, create, weights
from tests.models.tiny import CONFIG, TINY


@pytest.fixture(scope="module")
def theirs() -> dict[str, Tensor]:
    torch.manual_seed(1)
    state: dict[str, Tensor] = open_clip.create_model(TINY).state_dict()
    return state


def assert_holds(module: nn.Module, state: dict[str, Tensor]) -> None:
    found = module.state_dict()
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], value) for name, value in state.items())


def saved_for_the_hub(folder: Path, state: dict[str, Tensor]) -> Path:
    """As open_clip.push_to_hf_hub writes it, but for the tokenizer, which is open_clip's own."""
    folder.mkdir()
    config = {"model_cfg": json.loads(CONFIG.read_text()), "preprocess_cfg": {"size": 32}}
    (folder / "open_clip_config.json").write_text(json.dumps(config))
    save_file(state, folder / "open_clip_model.safetensors")
    return folder


@pytest.mark.parametrize("prefix", ["", "module."])
def test_a_checkpoint_of_open_clips_trainer(
    prefix: str, theirs: dict[str, Tensor], tmp_path: Path
) -> None:
    path = tmp_path / "epoch_32.pt"
    state = {prefix + name: value for name, value in theirs.items()}
    torch.save({"epoch": 32, "name": "x", "state_dict": state, "optimizer": {"state": {}}}, path)
    assert weights.names(path) == theirs.keys()
    assert_holds(create(TINY, pretrained=path).module, theirs)


def test_a_folder_that_open_clip_saved(theirs: dict[str, Tensor], tmp_path: Path) -> None:
    folder = saved_for_the_hub(tmp_path / "hub", theirs)
    assert_holds(create(TINY, pretrained=folder).module, theirs)
    towers = create(f"local-dir:{folder}")  # its architecture too
    assert_holds(towers.module, theirs)
    assert towers.embed_dim == 16
    assert towers.tokenizer("a text").shape == (1, 16)
    with pytest.raises(UsageError, match="brings its own weights"):
        create(f"local-dir:{folder}", pretrained=folder)


def test_a_folder_of_a_run(theirs: dict[str, Tensor], tmp_path: Path) -> None:
    save_file(theirs, tmp_path / "model.safetensors")
    (tmp_path / "config.toml").write_text("")
    assert_holds(create(TINY, pretrained=tmp_path).module, theirs)


def test_glyph_small_from_a_torch_file(tmp_path: Path) -> None:
    state = create("glyph-small").module.state_dict()
    torch.save(state, tmp_path / "weights.pt")
    assert_holds(create("glyph-small", pretrained=tmp_path / "weights.pt").module, state)


def test_other_sizes_resize_the_positions(theirs: dict[str, Tensor], tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_file(theirs, path)
    options = ModelOptions(
        force_image_size=64, force_context_length=8, force_patch_dropout=0.0, init_logit_scale=1.0
    )
    towers = create(TINY, pretrained=path, options=options)
    state = towers.module.state_dict()
    assert state["visual.positional_embedding"].shape == (1 + (64 // 8) ** 2, 16)
    assert state["positional_embedding"].shape == (8, 16)
    assert torch.equal(state["visual.proj"], theirs["visual.proj"])
    assert state["logit_scale"] == theirs["logit_scale"]  # a start is no override
    assert isinstance(towers.module.visual.patch_dropout, nn.Identity)
    assert towers.tokenizer("a text").shape == (1, 8)
    images = torch.zeros(2, 3, 64, 64)
    assert towers.module(images, towers.tokenizer(["a", "b"]))["image_features"].shape == (2, 16)


@pytest.mark.parametrize("name", [TINY, "glyph-small"])
def test_the_bias_of_a_sigmoid_loss(name: str, tmp_path: Path) -> None:
    without, with_bias = tmp_path / "clip.safetensors", tmp_path / "siglip.safetensors"
    state = create(name).module.state_dict()
    save_file(state, without)
    save_file({**state, "logit_bias": torch.tensor(-7.0)}, with_bias)
    siglip = ModelOptions.of({"loss": "siglip"})
    assert create(name, pretrained=without, options=siglip).module.logit_bias.item() == -10
    assert create(name, pretrained=with_bias, options=siglip).module.logit_bias.item() == -7
    assert create(name, pretrained=with_bias).module.logit_bias.item() == -7  # nothing is lost


class Anything:
    """Something that is no tensor."""


def test_a_pickle_that_would_run_code_is_not_run(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    torch.save({"state_dict": {"a": torch.zeros(1)}, "args": Anything()}, path)
    with pytest.raises(UsageError, match=r"weights\.pt holds more than tensors"):
        create(TINY, pretrained=path)


def test_a_torch_file_without_tensors_is_refused(tmp_path: Path) -> None:
    for value in ({"epoch": 3}, torch.zeros(2)):
        torch.save(value, tmp_path / "weights.pt")
        with pytest.raises(UsageError, match="no tensors by name"):
            create(TINY, pretrained=tmp_path / "weights.pt")


def test_a_damaged_torch_file_is_named(theirs: dict[str, Tensor], tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    torch.save(theirs, path)
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(UsageError, match=r"weights\.pt is damaged"):
        create(TINY, pretrained=path)


def test_folders_without_weights_of_ours(theirs: dict[str, Tensor], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has none of open_clip_model"):
        create(TINY, pretrained=tmp_path)
    (tmp_path / "config.json").write_text("{}")
    save_file(theirs, tmp_path / "model.safetensors")
    with pytest.raises(UsageError, match="folder of Hugging Face transformers"):
        create(TINY, pretrained=tmp_path)
    with pytest.raises(UsageError, match=r"open_clip_config\.json cannot be used"):
        create(f"local-dir:{tmp_path}")
