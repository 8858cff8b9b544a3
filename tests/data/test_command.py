from __future__ import annotations

import json
from pathlib import Path

import pytest

from megabatch.cli import main
from megabatch.data.sources import open_pairs

from .samples import png, sample, write_tar


def test_glyphs(tmp_path: Path, capsys):
    output = tmp_path / "shards"
    arguments = ["--output", str(output), "--split", "characters", "--samples-per-shard", "2000"]
    assert main(["data", "glyphs", *arguments]) == 0
    assert "3,097 pairs in 2 shards" in capsys.readouterr().out
    assert len(open_pairs(str(output))) == 3_097
    assert main(["data", "glyphs", *arguments]) == 2
    assert "exists and is not an empty folder" in capsys.readouterr().err


def test_inspect(tmp_path: Path, capsys):
    members = [*sample("0", 1, "first caption"), ("1.png", png()), *sample("2", 1, " ")]
    write_tar(tmp_path / "a.tar", members)
    (tmp_path / "b.tar").write_bytes(b"garbage")
    assert main(["data", "inspect", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "3 samples, 3 of them read, 2 unusable" in out
    assert "damaged: " in out
    assert "skipped 1 x no caption" in out
    assert "skipped 1 x empty caption" in out
    assert "a.tar:0: 4 x 3 RGB: first caption" in out


def test_inspect_takes_columns_as_training_does(tmp_path: Path, capsys):
    (tmp_path / "a.jsonl").write_text('{"asked": "one", "said": "two"}\n')
    (tmp_path / "b.csv").write_text("query,other\nthree,four\n")
    spec = f"{tmp_path / 'a.jsonl'}::{tmp_path / 'b.csv'}"
    columns = ["--csv-query-key", "asked::query", "--csv-caption-key", "said::other"]
    assert main(["data", "inspect", spec, *columns]) == 0
    out = capsys.readouterr().out
    assert "2 samples" in out
    assert "a.jsonl:row 1: one: two" in out
    assert "b.csv:row 1: three: four" in out


def test_inspect_counts_negatives_and_repeated_captions(tmp_path: Path, capsys):
    rows = [("a", "p", "xy"), ("b", "p", "x"), ("c", "q", "y"), ("d", "r", "")]
    names = ("query", "positive", "hard")
    lines = [json.dumps(dict(zip(names, (q, p, [*n]), strict=True))) for q, p, n in rows]
    named, usual = tmp_path / "named.jsonl", tmp_path / "usual.jsonl"
    named.write_text("\n".join(lines))
    usual.write_text("\n".join(lines).replace("hard", "negatives"))
    for arguments in ([str(named), "--csv-negative-key", "hard"], [str(usual)]):
        assert main(["data", "inspect", *arguments]) == 0
        out = capsys.readouterr().out
        assert "hard negatives: 0 to 2 a sample\n" in out
        assert "2 of 4 captions (50.0%) occur more than once: false negatives without --dupl" in out
    assert f"note: {usual} has negatives ('negatives'), which are not used" in out
    assert main(["data", "inspect", str(named), "--limit", "2"]) == 0  # rows 1 and 4
    out = capsys.readouterr().out
    assert "hard negatives" not in out
    assert (
        "0 of 2 captions (0.0%) occur more than once among those read (--limit 0: among all)\n"
        in out
    )


def test_inspect_reads_a_part(capsys):
    assert main(["data", "inspect", "glyphs", "--split", "faces", "--limit", "20"]) == 0
    assert "5,804 samples, 20 of them read, 0 unusable" in capsys.readouterr().out


def test_nothing_usable_is_a_failure(tmp_path: Path, capsys):
    write_tar(tmp_path / "a.tar", [("1.png", png())])
    assert main(["data", "inspect", str(tmp_path)]) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["inspect", "nowhere"], "megabatch data inspect: nothing matches nowhere"),
        (["inspect", "glyphs", "--limit", "-1"], "--limit -1: expected at least 0"),
        (["glyphs", "--output", "x", "--samples-per-shard", "0"], "expected at least 1"),
    ],
)
def test_mistakes_are_one_line(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert main(["data", *arguments]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
