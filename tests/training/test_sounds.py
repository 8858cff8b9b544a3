"""Pairs of sounds and captions, for a model of the user's own, whose transform reads the files."""

from __future__ import annotations

import io
import json
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from megabatch.cli import main
from megabatch.errors import UsageError
from megabatch.models import ModelOptions, Towers, TwoTowers
from megabatch.training import train
from tests.data.samples import write_tar
from tests.training.conftest import MakeConfig
from tests.training.runs import losses

MODEL = f"{__name__}:towers"
FRAMES, SAMPLES = 16, 40  # most frames of a sound; samples of a frame


class Frames:
    def from_bytes(self, data: bytes) -> dict[str, Tensor]:
        with wave.open(io.BytesIO(data)) as file:
            samples = np.frombuffer(file.readframes(FRAMES * SAMPLES), np.int16)
        frames = torch.from_numpy(samples.astype(np.float32) / 2**15).view(-1, SAMPLES)
        return {"frames": frames, "valid": torch.ones(len(frames), dtype=torch.bool)}

    def collate(self, sounds: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        made = {"frames": torch.zeros(len(sounds), FRAMES, SAMPLES)}
        made["valid"] = torch.zeros(len(sounds), FRAMES, dtype=torch.bool)
        for row, sound in enumerate(sounds):
            for name, tensor in sound.items():
                made[name][row, : len(tensor)] = tensor
        return made


class SoundTower(nn.Module):
    widths: set[int] = set()  # noqa: RUF012, those of all calls

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(SAMPLES, 8)

    def forward(self, sounds: dict[str, Tensor]) -> Tensor:
        self.widths.add(sounds["valid"].shape[1])
        mask = sounds["valid"][..., None]
        return (self.project(sounds["frames"]).tanh() * mask).sum(1) / mask.sum(1)


def towers(options: ModelOptions) -> Towers:
    text = nn.EmbeddingBag(64, 8, padding_idx=0)
    module = TwoTowers(SoundTower(), text, options)
    tokenizer: Any = Tokens()
    lengths: Any = {"image": lambda sounds: sounds["valid"].sum(1)}
    frames: Any = Frames()
    return Towers("sounds", module, frames, frames, tokenizer, 8, lengths=lengths)


class Tokens:
    def __call__(self, texts: list[str]) -> Tensor:
        return torch.tensor([[1 + sum(text.encode()) % 63] for text in texts])


def sound(frames: int, pitch: int) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((1, 2, 8000, 0, "NONE", ""))
        wanted = 2**14 * np.sin(np.arange(frames * SAMPLES) * pitch / 10)
        writer.writeframes(wanted.astype(np.int16).tobytes())
    return file.getvalue()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A shard and a table with the same 16 sounds, of which the last one is damaged."""
    sounds = [sound(1 + i % 8, i) for i in range(15)] + [b"RIFF"]
    members = []
    rows = ["filepath,title"]
    for i, one in enumerate(sounds):
        (tmp_path / f"{i}.wav").write_bytes(one)
        members += [(f"{i}.wav", one), (f"{i}.txt", f"pitch {i}".encode())]
        rows.append(f"{i}.wav,pitch {i}")
    (tmp_path / "sounds.csv").write_text("\n".join(rows))
    return write_tar(tmp_path / "sounds.tar", members)


def test_sounds_are_learnt_and_evaluated(
    make_config: MakeConfig,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("megabatch.evaluation.run.make_page", lambda _: "")  # its charts take long
    options: dict[str, Any] = {"model": MODEL, "lr": 0.05, "steps": 20, "global_batch_size": 15}
    config = make_config(tmp_path / "run", train_data=str(data), **options)
    assert train(config) == 0
    assert (
        "skipped 1 x unreadable file (EOFError) (first: sounds.tar:15)" in capsys.readouterr().out
    )
    assert SoundTower.widths == {8}
    found = losses(config.output)
    assert found[-1] < 0.8 * found[0]
    names = ["--val-data", str(data.with_suffix(".csv")), "--device", "cpu"]
    assert main(["eval", str(config.output), "--trust", *names]) == 0
    task = json.loads((config.output / "evaluation.json").read_text())["retrieval"]["pairs"]
    assert task["images"] == 15
    assert task["skipped"] == {"unreadable file (EOFError)": 1}
    (shown,) = json.loads((config.output / "report.json").read_text())["tasks"]
    assert {one["picture"] for gallery in shown["galleries"] for one in gallery["examples"]} == {
        None
    }
    assert task["model"]["image_to_text/recall@1"] > 2 * task["chance"]["image_to_text/recall@1"]


def test_a_sound_is_no_image_and_is_not_decoded_late(
    make_config: MakeConfig, data: Path, tmp_path: Path
) -> None:
    config = make_config(
        tmp_path / "run", train_data=str(data), model=MODEL, decode="late", workers=1
    )
    with pytest.raises(UsageError, match="or sounds; expected early"):
        train(config)
    config = make_config(tmp_path / "run", train_data=str(data), model="glyph-small")
    with pytest.raises(UsageError, match=r"no sample of a batch can be used.*undecodable image"):
        train(config)
