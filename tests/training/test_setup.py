"""What is refused before anything starts; the model of a run."""

from __future__ import annotations

import math
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from open_clip.hf_model import HFTextEncoder
from torch import nn

from megabatch.errors import UsageError
from megabatch.models import Towers, create
from megabatch.models.images import TorchResize
from megabatch.models.towers import lock
from megabatch.options import option
from megabatch.training import TrainConfig, save_config, train
from megabatch.training.setup import (
    build_towers,
    check_micro_batches,
    model_notes,
    prepare,
    train_transform,
)
from megabatch.training.world import World
from tests.models.tiny import TINY, TINY_UNMASKED
from tests.models.tiny_bert import save_tiny_bert
from tests.similarity.distributed.processes import World as Processes
from tests.similarity.distributed.processes import on_processes
from tests.training.conftest import MakeConfig


def refused(config: Any) -> str:
    with pytest.raises(UsageError) as caught:
        train(config)
    return str(caught.value)


def test_what_is_wrong_is_said_and_nothing_is_written(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    for name, value in {"momentum": 0.5, "train_data": "no.tar", "model": "ViT-B32"}.items():
        assert refused(make_config(tmp_path / "run", **{name: value})).startswith(f"{option(name)}")
    assert list(tmp_path.iterdir()) == []


def test_batch_normalisation_and_weights_that_openclip_would_download_are_notes(
    tmp_path: Path,
) -> None:
    towers = create("RN50")
    config = TrainConfig(model="RN50", global_batch_size=4096, micro_batch_size=512)
    for ranks, said in ((1, "512 pairs at a time: --micro"), (16, "256 pairs at a time on each")):
        (note,) = model_notes(config, towers, ranks)
        assert note.startswith("warning: RN50 has batch normalisation (55 layers). It normalises ")
        assert said in note
    lock(towers.module, "image")
    assert model_notes(config, towers, 1) == []

    bert, towers.module = save_tiny_bert(tmp_path), nn.Module()
    towers.module.text = HFTextEncoder(str(bert), output_dim=8, pretrained=False)
    config = TrainConfig(model="roberta-ViT-B-32", lr=1e-4)
    [note] = model_notes(config, towers)
    assert note.startswith(f"the text tower starts with random weights: those of {bert}, which")
    assert model_notes(replace(config, pretrained=bert), towers) == []


@on_processes(2)
def test_ranks_with_other_settings_or_data_than_rank_0s_are_refused(processes: Processes) -> None:
    world = World(torch.device("cpu"), processes.rank, processes.size)
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder, "pairs.csv")  # of each rank's own machine
        Path(folder, "a.png").write_bytes(b"a file")
        config = TrainConfig(model=TINY, train_data=str(table), output=Path(folder, "run"))
        config = replace(config, global_batch_size=8, steps=10, warmup=1, device="cpu", plan="off")

        def told(rows: int, **changes: Any) -> str:
            table.write_text("filepath,title\n" + "a.png,a picture\n" * rows)
            try:
                prepare(replace(config, **changes), world)
            except UsageError as error:
                return str(error)
            return ""

        rank = processes.rank
        assert told(20, workers=rank, micro_batch_size=4 + rank) == ""
        pairs = "the processes differ: number of pairs is 19 on rank 1, 20 on rank 0; expected the"
        assert told(20 - rank).startswith(pairs)
        settings = "the processes differ: --lr is 0.2 on rank 1, 0.1 on rank 0; expected the same"
        assert told(20, lr=(0.1, 0.2)[rank]).startswith(settings)


def test_texts_that_keep_their_padding_are_a_note_and_nothing_is_compiled_on_the_cpu(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(tmp_path / "run", model=TINY_UNMASKED)
    setup = prepare(config)
    note = f"texts keep their padding: features of {TINY_UNMASKED} may depend on it"
    assert (setup.notes, setup.config.torchcompile) == ([note], False)
    assert prepare(replace(config, trim_texts=False)).notes == []
    assert prepare(make_config(tmp_path / "run")).notes == []


@pytest.mark.parametrize("fast", [True, False])
def test_the_precision_is_chosen_before_the_first_step(
    fast: bool, make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megabatch.torch_internals.cpu_multiplies_bf16", lambda: fast)
    setup = prepare(make_config(tmp_path / "run", precision="auto"))
    note = "--precision auto: fp32, as this CPU has no fast bf16 products"
    assert [setup.config.precision, *setup.notes] == (["bf16"] if fast else ["fp32", note])


def test_the_resize_is_chosen_for_openclips_transforms_only(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(tmp_path / "run", model="glyph-small", image_resize="torch")
    assert refused(config).startswith("--image-resize torch: the transform of glyph-small is not")
    towers = build_towers(replace(config, model=TINY))
    assert isinstance(train_transform(replace(config, model=TINY), towers), TorchResize)
    pillow = replace(config, image_resize="pillow")
    assert train_transform(pillow, towers) is towers.train_transform


def test_a_folder_that_cannot_be_a_new_runs(make_config: MakeConfig, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    assert refused(make_config(file)) == f"--output {file}: {file} is not a folder"
    assert refused(make_config(file / "run")).endswith(f"{file / 'run'}: {file} is not a folder")
    assert refused(make_config("/proc/run")).startswith(
        "--output /proc/run: /proc cannot be written to: "
    )
    (tmp_path / "checkpoints").mkdir()
    message = refused(make_config(tmp_path, resume=True))
    assert message == f"--resume: {tmp_path} has checkpoints but no config.toml"
    config = make_config(tmp_path)
    save_config(config, tmp_path / "config.toml")
    assert "holds a run already; continue it with --resume" in refused(config)
    (tmp_path / "config.toml").write_text("lr = ")
    assert "config.toml: cannot be read: " in refused(make_config(tmp_path, resume=True))


def test_a_run_is_not_resumed_with_other_settings_but_those_that_change_no_result(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    (tmp_path / "notes.txt").write_text("mine")  # other things are no hindrance
    save_config(make_config(tmp_path), tmp_path / "config.toml")
    message = refused(make_config(tmp_path, resume=True, lr=0.5, seed=3, log_every=7))
    assert message == (
        f"--resume: {tmp_path} is a run with other settings: "
        "--lr was 0.001, is 0.5, --seed was 0, is 3"
    )

    changes = {"workers": 1, "log_every": 2, "checkpoint_every": 1, "keep_checkpoints": 5}
    prepare(make_config(tmp_path, resume=True, steps=20, device="auto", **changes))


def built(**changes: Any) -> Any:
    return build_towers(TrainConfig(**{"model": TINY, **changes})).module


@pytest.mark.parametrize("model", [TINY, "glyph-small"])
def test_scale_and_bias_start_as_the_loss_wants_and_a_bias_that_it_ignores_is_not_trained(
    model: str,
) -> None:
    module = built(model=model, loss="siglip")
    assert module.logit_scale.item() == pytest.approx(math.log(10))
    assert (module.logit_bias.item(), module.logit_bias.requires_grad) == (-10, True)
    module = built(model=model, loss="siglip", init_logit_scale=1, init_logit_bias=-2)
    assert (module.logit_scale.item(), module.logit_bias.item()) == (1, -2)
    assert not built(model=model, init_logit_bias=-10.0).logit_bias.requires_grad
    assert built(model=model).logit_bias is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"micro_batch_size": "auto"},
            "--micro-batch-size auto: expected a number of images, with",
        ),
        ({"trim_texts": False}, "--micro-batch-tokens 64: texts of .* keep their padding"),
        (
            {"activation_memory": 9},
            "--activation-memory 9: expected auto with --micro-batch-tokens",
        ),
    ],
)
def test_micro_batches_by_tokens_need_trimmed_texts_and_a_number_of_images(
    changes: dict[str, Any], reason: str, make_config: MakeConfig, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=reason):
        train(make_config(tmp_path / "run", **{"micro_batch_tokens": 64, **changes}))


def test_micro_batches_by_tokens_of_texts_alone_take_no_number_of_pairs(tmp_path: Path) -> None:
    config = TrainConfig(micro_batch_tokens=64, micro_batch_size=8, model="hf:bert")
    towers = Towers("bert", nn.Module(), *[None] * 3, 8, "text", {"text": len})  # type: ignore
    reason = "--micro-batch-size 8: expected auto, as all inputs have tokens, with --micro-batch"
    with pytest.raises(UsageError, match=reason):
        check_micro_batches(config, towers)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"matryoshka_dims": (8, 17)}, "--matryoshka-dims 17: the features of .* only 16"),
        (
            {"lock_image": True, "lock_image_unlocked_groups": 50},
            "--lock-image: with 50 groups unlocked nothing of the image tower stays locked",
        ),
        ({"hf_pooling": "cls"}, "--hf-pooling: .*has no such option"),
        ({"loss": "maxsim"}, "--loss maxsim: expected a text encoder .hf:PATH., got --model "),
    ],
)
def test_what_a_model_cannot_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        built(**changes)
