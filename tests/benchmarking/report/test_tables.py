import pytest

from megabatch.benchmarking.report import tables


def test_a_table() -> None:
    lines = tables.markdown(("a", "b"), [("1", "2")])
    assert lines == ["| a | b |", "| --- | --- |", "| 1 | 2 |", ""]


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (tables.milliseconds(0.80361), "0.804 ms"),
        (tables.milliseconds(44.02), "44.0 ms"),
        (tables.milliseconds(706.5), "706 ms"),
        (tables.milliseconds(999.6), "1.00 s"),
        (tables.milliseconds(45_951.0), "46.0 s"),
        (tables.seconds(0.5262), "526 ms"),
        (tables.seconds(12.234), "12.2 s"),
        (tables.seconds(None), "-"),
        (tables.gib(796_408_828), "0.742 GiB"),
        (tables.gib(68_720_003_580), "64.0 GiB"),
        (tables.share(0.88824), "88.8%"),
        (tables.count(6654.48, "pairs/s"), "6,654 pairs/s"),
        (tables.times(1.802), "1.80 times"),
        (tables.error(0.002886), "2.9e-3"),
        (tables.error(2.46e-7), "2.5e-7"),
        (tables.error(0.0999), "1.0e-1"),
        (tables.error(1.189), "1.2"),
        (tables.error(0.0), "0"),
        (tables.error(None), "-"),
    ],
)
def test_numbers_have_three_digits_and_their_unit(shown: str, expected: str) -> None:
    assert shown == expected


def test_records_are_picked_by_their_fields() -> None:
    records = [{"b": 1, "ms": 2.0}, {"b": 2, "ms": 3.0}, {"b": 2, "ms": 4.0}]
    assert tables.pick(records, b=2) == {"b": 2, "ms": 3.0}
    assert tables.value(records, "ms", b=2) == 3.0
    assert tables.value(records, "ms", b=3) is None
    assert tables.value(records, "bytes", b=1) is None
    groups = [(key, len(group)) for key, group in tables.grouped(records, "b")]
    assert groups == [((1,), 1), ((2,), 2)]
