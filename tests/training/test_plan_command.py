"""`megabatch plan`."""

import re

import pytest

from megabatch import cli
from tests.training.synthetic import write_shard

pytestmark = pytest.mark.usefixtures("counted_once")


@pytest.fixture(scope="module")
def shard(tmp_path_factory):
    """One for all tests: texts of the same lengths make micro-batches that are counted once."""
    return str(write_shard(tmp_path_factory.mktemp("shards") / "pairs.tar", 20))


SIZES = ["--global-batch-size", "512", "--micro-batch-size", "64"]
SMALL = ["plan", "--model", "glyph-small", "--no-torchcompile", *SIZES]


def test_a_table_of_what_fits_here_and_a_suggestion_where_it_does_not(capsys):
    assert cli.main([*SMALL, "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    for words in ("glyph-small", "512 pairs a step", "optimizer state", "second pass", "free"):
        assert words in out
    options = ["--global-batch-size", "65536", "--micro-batch-size", "65536"]
    assert cli.main([*SMALL, *options, "--gpu-memory", "4GiB"]) == 1
    out = capsys.readouterr().out
    assert "does not fit" in out
    assert "--micro-batch-size" in out


def test_several_gpus_of_another_machine_with_times(capsys):
    options = ["--gpus", "8", "--gpu-memory", "80GiB", "--gpu-name", "NVIDIA H200"]
    assert cli.main([*SMALL, *options]) == 0
    out = capsys.readouterr().out
    assert "512 pairs a step, 64 on each of 8 (NVIDIA H200), 64 at a time" in out
    assert f"of {79 * 1024 * 0.95:,.0f} free" in out
    assert re.search(r"a step takes about .* pairs/s \(first pass .*, loss .*, transfers ", out)
    assert "the largest batch that fits has about " in out
    assert cli.main([*SMALL, "--gpu-name", "A100", "--micro-batch-size", "auto"]) == 0
    out = capsys.readouterr().out
    assert "pairs/s, by its datasheet (first pass " in out
    assert "(planned pairs/s with 512: " in out
    assert "of 76,8" in out  # MiB
    assert cli.main([*SMALL, "--gpu-memory", "8GiB"]) == 0
    assert "the time of a step is not known on this GPU, only on H200, " in capsys.readouterr().out


def test_texts_of_the_training_data_count_with_their_lengths(shard, tmp_path, capsys):
    here = ["--gpu-name", "H200", "--train-data"]
    assert cli.main([*SMALL, *here, shard]) == 0
    words = r"texts (count with|in order of length are cut to) \d+ tokens"
    assert re.search(words, capsys.readouterr().out)
    assert cli.main([*SMALL, *here, str(tmp_path / "absent.tar")]) == 0
    captured = capsys.readouterr()
    assert "the lengths of texts are not known: --train-data: " in captured.err
    assert "texts count with all of their tokens: at most" in captured.out


def test_late_decoding_is_planned_by_the_images_that_there_are(shard, capsys):
    options = ["--train-data", shard, "--decode", "late", "--workers", "2"]
    assert cli.main([*SMALL, "--gpu-memory", "80GiB", *options]) == 0
    out = capsys.readouterr().out
    assert "on the host: image files and texts" in out
    assert "on the host: decoded images" in out
    assert cli.main([*SMALL, *options, "--train-data", "nowhere"]) == 2
    assert "nowhere" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gpus", "0"], "--gpus 0: expected"),
        # Not a plan for this machine.
        (["--gpu-name", "H100 PCIe"], "or its --gpu-memory too; did you mean H100?"),
        (["--gpu-memory", "lots"], "--gpu-memory lots: expected a size such as 20GiB"),
        (["--model", "no-such"], "--model: 'no-such' is not known"),
    ],
)
def test_mistakes_are_one_line(options, message, capsys):
    assert cli.main([*SMALL, *options]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert "Traceback" not in err
