from __future__ import annotations

from pathlib import Path

from megabatch.evaluation.report.comparison import make_comparison
from tests.evaluation.page import Page
from tests.evaluation.report.conftest import HOSTILE, write_evaluation, write_run

LOGGED = {"loss": 6.0, "lr": 1e-3, "grad_norm": 1.0, "logit_scale": 9.0, "pairs_per_second": 5.0}


def compared(*runs: Path) -> tuple[str, Page]:
    html = make_comparison(runs)
    return html, Page(html)


def rows(html: str) -> list[str]:
    """The text of each table row, cells separated by spaces."""
    found = []
    for row in html.split("<tr")[1:]:
        page = Page("<tr" + row.split("</tr>")[0].replace("><", "> <"))
        found.append(" ".join(page.text.split()))
    return found


def test_curves_figures_and_settings_are_compared(tmp_path: Path) -> None:
    settings = 'model = "m"\noutput = "{}"\nlr = {}\nlock_image = {}\nglobal_batch_size = 64\n'
    a = write_run(tmp_path / "a", settings=settings.format("a", 0.1, "true"), **LOGGED)
    b = write_run(tmp_path / "b", settings=settings.format("b", 0.2, "false"), **LOGGED)
    write_evaluation(a, recall=0.25, title="held-out", step=2)
    write_evaluation(b, recall=0.75, title="held-out")
    html, page = compared(a, b)
    assert page.open == []
    labels = [label for label in page.attributes["aria-label"] if label]
    assert "loss, from 6 to 2; from 6 to 2" in labels
    assert len(labels) == 5
    assert page.text.count("pairs seen") == 1  # a column; the curves are over steps
    got = rows(html)
    assert "a 3 192 2.0000 – 2" in got
    assert "lr 0.1 0.2" in got
    assert "lock_image true false" in got
    assert not any(row.startswith(("output", "model", "global_batch_size")) for row in got)
    assert "held-out, image → text: 8 among 8" in got
    assert "a (evaluated at step 2, trained to step 3) 25.00% 25.00% 25.00% 3.8" in got
    assert "b 75.00% 75.00% 75.00% 3.2" in got
    best = [part.split("<")[0] for part in html.split('<td class="best">')[1:]]
    # Both directions, then the accuracies, whose top-5 does not differ.
    assert best == [*(["75.00%"] * 3 + ["3.2"]) * 2, "75.00%", "75.00%"]


def test_runs_of_different_batch_sizes_are_compared_by_pairs_seen(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", settings="global_batch_size = 64\n", loss=6)
    b = write_run(tmp_path / "b", settings="global_batch_size = 128\n", loss=5)
    (b / "validation.jsonl").write_text('{"step": 2, "digits/top1": 0.5}\n')
    html, page = compared(a, b)
    assert html.count(">pairs seen</text>") == 1  # the loss's
    assert "validation: digits, top1, from 0.5 to 0.5" in page.attributes["aria-label"]


def test_missing_logs_values_and_evaluations_are_named(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", loss=6, lr=1)
    b = write_run(tmp_path / "b", loss=5)
    c = write_run(tmp_path / "c", loss=5)
    (c / "metrics.jsonl").unlink()
    write_evaluation(c)
    _, page = compared(a, b, c)
    assert "Without learning rate in the log: b." in page.text
    assert "Without gradient norm in the log: a, b." in page.text
    assert "Without a log of training (metrics.jsonl): c." in page.text
    assert "a has not been evaluated (megabatch eval)." in page.text
    assert "None, apart from the output folder." in page.text


def test_runs_of_one_name_are_told_apart_and_names_are_escaped(tmp_path: Path) -> None:
    name = "<script>alert(1)"
    folders = [tmp_path / part / name for part in ("x", "y")] + [tmp_path / "$\\frac"]
    for folder in folders:
        write_run(folder, settings=f'train_data = "<script>{folder.parent.name}"\n', loss=1)
        write_evaluation(folder)
    html, page = compared(*folders)
    assert "<script" not in html
    for text in (f"x/{name}", f"y/{name}", "$\\frac", "<script>x", HOSTILE):
        assert text in page.text
