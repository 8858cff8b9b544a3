"""Which weights are exported, what is refused, and the folder that is left."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from megabatch.cli import main
from megabatch.errors import UsageError
from megabatch.export import export_run
from megabatch.export.command import Target
from megabatch.training.checkpoint import save_tensors
from tests.docs.pages import blocks
from tests.export.runs import assert_near, change_json, own_model, write_run
from tests.models.tiny import TINY
from tests.models.tiny_bert import save_tiny_bert
from tests.models.tiny_clip import save_tiny_clip


def test_the_moving_average_where_asked_for(tmp_path: Path) -> None:
    run = tmp_path / "run"
    state = write_run(run, TINY).module.state_dict()
    with pytest.raises(UsageError, match=r"no model-ema\.safetensors"):
        export_run(run, to="openclip", output=tmp_path / "out", weights="ema")
    averages = {name: value + 1 for name, value in state.items()}
    save_tensors(averages, run / "model-ema.safetensors")
    words = ["export", str(run), "--to", "openclip"]
    for more, expected in ((["--weights", "ema"], averages), ([], state)):
        output = tmp_path / f"out-{len(more)}"
        assert main([*words, *more, "--output", str(output)]) == 0
        found = load_file(output / "open_clip_model.safetensors")
        torch.testing.assert_close(found, dict(expected), rtol=0, atol=0)


def test_what_a_model_cannot_become_is_refused_with_what_it_can(tmp_path: Path) -> None:
    clip = f"hf:{save_tiny_clip(tmp_path / 'clip', 'clip')}"
    bert = f"hf:{save_tiny_bert(tmp_path / 'bert')}"
    both = "sentence-transformers or huggingface"
    cases: list[tuple[str, dict[str, Any], str]] = [
        (TINY, {}, "an OpenCLIP model, .* expected --to openclip or huggingface"),
        (clip, {}, "a Hugging Face model of images and texts, .* expected --to huggingface"),
        (bert, {}, f"a Hugging Face text encoder, .* expected --to {both}"),
        (bert, {"hf_share": False}, "two text encoders, .* expected --to sentence-transformers"),
        (bert, {"loss": "maxsim"}, "for each token, .* expected --to sentence-transformers"),
        ("glyph-small", {}, r"megabatch's own, .*models\.create\('glyph-small'"),
        (f"{own_model.__module__}:own_model", {}, r"a model of your own, .*create\('tests"),
    ]
    targets: tuple[Target, ...] = ("openclip", "huggingface", "sentence-transformers")
    for i, (model, settings, sentence) in enumerate(cases):
        run = tmp_path / f"run-{i}"
        write_run(run, model, **settings)
        for to in targets:
            if to in sentence.partition("expected")[2]:
                continue
            with pytest.raises(UsageError, match=sentence) as refused:
                export_run(run, to=to, output=tmp_path / "out", trust=True)
            assert str(refused.value).startswith(f"--to {to}: {model} is ")
    assert not list(tmp_path.glob("*out*"))


def test_an_output_that_is_in_use_is_refused_and_stays(tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    (output / "mine").write_text("")
    with pytest.raises(UsageError, match="not an empty folder"):  # before the run is read
        export_run(tmp_path / "nowhere", to="openclip", output=output)
    assert [path.name for path in output.iterdir()] == ["mine"]


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), SafetensorError("No space left on device")]
)
def test_a_folder_that_could_not_be_completed_does_not_appear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    write_run(tmp_path / "run", TINY)

    def full(*_: object) -> None:
        raise error

    monkeypatch.setattr("megabatch.export.openclip.save_tensors", full)
    with pytest.raises(UsageError, match=r"cannot write .*out: No space left on device"):
        export_run(tmp_path / "run", to="openclip", output=tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_the_commands_and_blocks_of_the_page_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("sentence_transformers", minversion="6.2")
    monkeypatch.chdir(tmp_path)
    write_run(Path("runs/vit"), TINY)
    shutil.copyfile("runs/vit/model.safetensors", "runs/vit/model-ema.safetensors")
    clip = save_tiny_clip(tmp_path / "clip", "clip")
    change_json(clip / "tokenizer_config.json", model_input_names=["input_ids", "attention_mask"])
    write_run(Path("runs/clip"), f"hf:{clip}")
    retriever = write_run(Path("runs/retriever"), f"hf:{save_tiny_bert(tmp_path / 'bert')}")
    write_run(Path("runs/colbert"), f"hf:{tmp_path / 'bert'}", loss="maxsim")
    [commands] = blocks("docs/export.md", "bash")
    for command in commands.splitlines():
        assert main(shlex.split(command, comments=True)[1:]) == 0
    told = capsys.readouterr().out
    assert "\nexported/clip: load it with transformers.AutoModel.from_pretrained('exp" in told
    assert "\nnote: OpenCLIP's tokenizer also repairs texts" in told
    assert "load it with sentence_transformers.MultiVectorEncoder('exported/colbert')" in told
    assert Path("exported/vit-ema/open_clip_model.safetensors").is_file()
    names: dict[str, Any] = {}
    for block in blocks("docs/export.md", "python"):
        exec(block, names)
    assert names["outputs"].text_embeds.shape == names["outputs"].image_embeds.shape == (1, 8)
    expected = retriever.module.encode_text(retriever.tokenizer(["a b c", "d e"]), normalize=True)
    assert_near(torch.from_numpy(names["embeddings"]), expected.detach())
    assert (names["query"].shape, names["document"].shape) == ((5, 128), (4, 128))
