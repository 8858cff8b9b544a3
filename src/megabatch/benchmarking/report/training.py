"""Trained models: what they reach."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megabatch.benchmarking.report.page import Part, Section
from megabatch.benchmarking.report.record_files import RecordFile
from megabatch.benchmarking.report.tables import NONE, count, markdown, seconds, share


def quickstart(files: Sequence[RecordFile]) -> Iterator[str]:
    """The quickstart's retrieval beside its baseline and chance."""
    for file in files:
        yield f"Training and evaluation take {seconds(file.content['seconds_in_all'])}."
        yield ""
        rows = []
        evaluation = file.content["evaluation"]
        for one in evaluation["retrieval"].values():
            name = "image_to_text/recall@1"
            cells = (share(one[who].get(name)) for who in ("model", "baseline"))
            among = f"{one['title']}: {one['images']:,} images among {one['texts']:,} names"
            rows.append((f"{among}, recall@1", *cells, f"{one['chance'][name]:.2%}"))
        for one in evaluation["zero_shot"].values():
            cells = (share(one[who]["top1"]) for who in ("model", "baseline"))
            title = f"{one['title']}: {one['images']:,} images, zero-shot top-1"
            rows.append((title, *cells, f"{one['chance']['top1']:.2%}"))
        yield from markdown(("", "model", "nearest training image by pixels", "chance"), rows)


def icons(files: Sequence[RecordFile]) -> Iterator[str]:
    """Models of the icons, by what pairs with the same caption are."""
    rows = []
    for file in files:
        for r in file.measured:
            if "recall" not in r:
                continue
            recalls = (
                share(r["recall"][f"{way}/recall@10"]) for way in ("image_to_text", "text_to_image")
            )
            rows.append(
                (
                    f"{r['model']}, {r['b']:,} pairs, {r['steps']:,} steps, same captions "
                    f"{r['duplicates']}",
                    *recalls,
                    f"{r['chance']['image_to_text/recall@10']:.2%}",
                    seconds(r["training_seconds"]),
                    count(r["pairs_per_second"], "pairs/s"),
                )
            )
    head = "run", "image to text, recall@10", "text to image", "chance", "training", "rate"
    yield from markdown(head, rows)


def rates(files: Sequence[RecordFile]) -> Iterator[str]:
    """Short runs that chose the icons' learning rate."""
    rows = [
        (
            r["set"],
            NONE if r.get("loss") is None else f"{r['loss']:.3f}",
            "" if r["status"] == "ok" else r["status"].partition("(")[0],
        )
        for file in files
        for r in file.records
    ]
    yield from markdown(("settings", "loss after 66 steps", ""), rows)


SECTION = Section(
    "What do the trained models reach?",
    (
        Part(
            "The quickstart",
            ("quickstart-cpu",),
            quickstart,
            "`make quickstart`: pictures of characters and their Unicode names, on two CPU cores.",
        ),
        Part("The icons", ("icons",), icons, "Icon families that were held out, one GPU."),
        Part("The icons' learning rate", ("icons-rates",), rates),
    ),
)
