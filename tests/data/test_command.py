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
    assert "a.tar:0: 4 x 3: first caption" in out


def test_inspect_takes_columns_as_training_does(tmp_path: Path, capsys):
    rows = [("a", "p", "xy"), ("b", "p", "x"), ("c", "q", "y"), ("d", "r", "")]
    names = ("asked", "said", "hard")
    lines = [json.dumps(dict(zip(names, (q, p, [*n]), strict=True))) for q, p, n in rows]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    columns = ["--csv-query-key=asked", "--csv-caption-key=said", "--csv-negative-key=hard"]
    assert main(["data", "inspect", str(tmp_path / "a.jsonl"), *columns]) == 0
    out = capsys.readouterr().out
    assert "a.jsonl:row 1: a: p | x | y\n" in out
    assert "2 of 4 captions read occur more than once: false negatives without --dupl" in out
    (tmp_path / "b.csv").write_text("query;text;negative\na;b;c\n")
    arguments = [str(tmp_path / "b.csv"), "--csv-separator", ";"]
    assert main(["data", "inspect", *arguments]) == 0
    out = capsys.readouterr().out
    assert "b.csv:row 1: a: b\n" in out
    assert "more than once" not in out


def test_inspect_shows_shares_of_sources_and_prefixes(tmp_path: Path, capsys):
    for name, rows in (("a", 3), ("b", 1)):
        (tmp_path / f"{name}.csv").write_text("query,text\n" + f"{name}?,yes\n" * rows)
    data = ["data", "inspect", f"{tmp_path}/a.csv::{tmp_path}/b.csv", "--query-prefix", "q: ::Q: "]
    assert main([*data, "--train-data-batches", "one-source"]) == 0
    out = capsys.readouterr().out
    assert f"{tmp_path}/a.csv: 3 pairs, of which an epoch draws 3 (75.0%)\n" in out
    assert f"{tmp_path}/b.csv: 1 pair, of which an epoch draws 1 (25.0%)\n" in out
    assert "b.csv:row 1: Q: b?: yes\n" in out


def test_inspect_reads_a_part(capsys):
    assert main(["data", "inspect", "glyphs", "--limit", "20"]) == 0
    assert "36,098 samples, 20 of them read, 0 unusable" in capsys.readouterr().out


def test_nothing_usable_is_a_failure(tmp_path: Path, capsys):
    write_tar(tmp_path / "a.tar", [("1.png", b"no picture"), ("1.txt", b"a")])
    assert main(["data", "inspect", str(tmp_path)]) == 1
    assert "skipped 1 x undecodable image (first: a.tar:1)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["inspect", "nowhere"], "nothing matches nowhere"),
        (["inspect", "glyphs", "--limit", "-1"], "--limit -1: expected greater than or equal to 0"),
        (["glyphs", "--output", "x", "--samples-per-shard", "0"], "expected greater than 0"),
    ],
)
def test_mistakes_are_one_line(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert main(["data", *arguments]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
