"""Accuracy: the same with every loss, by batch size, and of the models that come along."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from megabatch.benchmarking.report.page import Part, Section
from megabatch.benchmarking.report.record_files import RecordFile
from megabatch.benchmarking.report.tables import (
    NONE,
    count,
    error,
    grouped,
    markdown,
    seconds,
    share,
)

#: Runs of batch_study.py with this seed chose learning rates.
TUNING_SEED = 100


def same_accuracy(files: Sequence[RecordFile]) -> Iterator[str]:
    """The same training with the dense loss, the tiled one, and gradient caching."""
    rows = []
    for file in files:
        for one in file.content["comparison"]:
            recalls = [
                f"{name.partition('/')[0]} {_spread(figure, 100, '%')}"
                for name, figure in one["figures"].items()
                if name.endswith("image_to_text/recall@1")
            ]
            rows.append(
                (
                    f"{one['data']}, {one['precision']}, {one['b']:,} pairs: {one['contender']}, "
                    f"{one['n_devices']} rank{'s' if one['n_devices'] > 1 else ''}",
                    count(one["seeds"]),
                    error(one["largest_difference"]),
                    error(one["largest_difference_of_seeds"]),
                    _spread(one["last_loss"]),
                    ", ".join(recalls),
                )
            )
    head = "training", "seeds", "losses differ from dense by", "two seeds by"
    yield from markdown((*head, "last loss", "image to text, recall@1"), rows)


def batch_sizes(files: Sequence[RecordFile]) -> Iterator[str]:
    """Recall by the number of pairs that meet in the loss: means and deviations over seeds."""
    names = "data", "loss", "batch", "group", "steps", "lr"
    rows = []
    for file in files:
        runs = [r for r in file.measured if r["seed"] != TUNING_SEED and "tests" in r]
        runs.sort(key=lambda r: [r[name] for name in names])
        for (data, loss, batch, group, steps, lr), seeds in grouped(runs, *names):
            tests = [test for test in seeds[0]["tests"] if test != "validation"]
            recalls = (
                f"{test.replace('_', ' ')} "
                + _spread(_over([r["tests"][test]["recall@10"] for r in seeds]), 100, "%")
                for test in tests
            )
            rows.append(
                (
                    f"{data}, {loss}",
                    f"{batch:,}",
                    f"{group:,}",
                    f"{steps:,}",
                    f"{lr:g}",
                    count(len(seeds)),
                    ", ".join(recalls),
                    _spread(_over([r["losses"][-1] for r in seeds])),
                )
            )
    head = "data, loss", "batch", "pairs that meet", "steps", "learning rate", "seeds"
    yield from markdown((*head, "recall@10", "training loss"), rows)


def _over(values: Sequence[float]) -> dict[str, float]:
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return {"mean": statistics.fmean(values), "deviation": deviation}


def _spread(figure: dict[str, float], factor: float = 1.0, unit: str = "") -> str:
    """A mean and a deviation, two digits after the point in per cent."""
    mean, deviation = (factor * figure[name] for name in ("mean", "deviation"))
    precision = 2 if unit else 4
    return f"{mean:.{precision}f} ± {deviation:.{precision}f}{unit}"


def quickstart(files: Sequence[RecordFile]) -> Iterator[str]:
    """The quickstart's retrieval, with its baseline and chance."""
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


ACCURACY = Section(
    "Is the accuracy the same, and does the batch size matter?",
    (
        Part(
            "The same training with each loss",
            ("same-accuracy*",),
            same_accuracy,
            """Means and standard deviations over seeds. With one seed all runs have the same
            weights and batches. The table gives the largest difference of a step's loss from the
            dense loss on one rank and, for comparison, the largest difference between two seeds of
            the dense loss itself.""",
            (("same-accuracy*.png", "The same training with each loss"),),
        ),
        Part(
            "By batch size",
            ("batch-study*",),
            batch_sizes,
            """Means and standard deviations over seeds, in both directions. If fewer pairs meet
            than the batch has, the loss is the mean over groups of the batch.""",
            (("batch-study*.png", "Recall by batch size"),),
        ),
    ),
)
SECTION = Section(
    "What do the trained models reach?",
    (
        Part(
            "The quickstart",
            ("quickstart-cpu",),
            quickstart,
            "`make quickstart`: pictures of characters and their Unicode names, on two CPU cores.",
        ),
        Part("The icons", ("icons",), icons, "Held-out icon families, one GPU."),
        Part("The icons' learning rate", ("icons-rates",), rates),
    ),
)
