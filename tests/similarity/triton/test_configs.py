from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megabatch.similarity.triton import configs
from megabatch.similarity.triton.configs import Config, Key

KEY = Key("forward", "Some GPU", "3.6.0", "bfloat16", 768, False)
BEST = Config(rows=16, group=4, stages=4)


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("MEGABATCH_CACHE", str(tmp_path))
    configs._table.cache_clear()
    yield
    configs._table.cache_clear()


class Features:
    """The attributes of a GPU tensor that `configs` reads."""

    is_cuda, dtype, device = True, torch.bfloat16, torch.device("cuda", 0)

    def __init__(self, rows: int, width: int) -> None:
        self.shape = (rows, width)

    def __len__(self) -> int:
        return self.shape[0]

    def element_size(self) -> int:
        return 2


@pytest.fixture
def _on_some_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configs, "_gpu_name", lambda index: "Some GPU")
    monkeypatch.setattr(configs, "_triton_version", lambda: "3.6.0")
    monkeypatch.setattr(configs, "capability", lambda device: (9, 0))


@pytest.mark.usefixtures("_on_some_gpu")
def test_a_tuned_config_takes_precedence_for_its_own_key_only() -> None:
    x = Features(10_000, 768)
    packaged = configs.launch_config("forward", x)  # type: ignore[arg-type]
    assert packaged != BEST
    configs.write(configs.path(), {KEY: BEST})
    assert configs.launch_config("forward", x) == BEST  # type: ignore[arg-type]
    assert configs.packaged("forward", x) == packaged  # type: ignore[arg-type]
    for other in (Features(10_000, 512), Features(100, 768)):
        assert configs.launch_config("forward", other) == configs.packaged("forward", other)  # type: ignore[arg-type]
    assert configs.launch_config("backward", x) == configs.packaged("backward", x)  # type: ignore[arg-type]


def test_cpu_tensors_have_no_tuned_config() -> None:
    configs.write(configs.path(), {KEY: BEST})
    x = torch.empty(10_000, 768, dtype=torch.bfloat16)
    assert configs.launch_config("forward", x) == configs.packaged("forward", x)


def test_a_config_on_trial_takes_precedence() -> None:
    x = torch.empty(10, 768)
    before = configs.launch_config("forward", x), configs.launch_config("backward", x)
    with configs.override({"forward": BEST}):
        assert configs.launch_config("forward", x) == BEST
        assert configs.launch_config("backward", x) == before[1]
    assert configs.launch_config("forward", x) == before[0]


def test_entries_are_added_and_replaced() -> None:
    other = replace(KEY, width=512)
    configs.write(configs.path(), {KEY: Config(), other: Config(rows=2)})
    configs.write(configs.path(), {KEY: BEST})
    assert configs.read(configs.path()) == {KEY: BEST, other: Config(rows=2)}
    assert [path.name for path in configs.path().parent.iterdir()] == ["kernels.json"]


def test_no_file_is_an_empty_table() -> None:
    assert configs.read(configs.path()) == {}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("no json", "JSONDecodeError"),
        ("[]", "TypeError"),
        ('{"format": 7, "kernels": []}', "expected 1, got 7"),
        ('{"format": 1, "kernels": [{}]}', "KeyError: 'config'"),
        ('{"format": 1, "kernels": [{"config": {"speed": 1}}]}', "speed"),
        (
            '{"format": 1, "kernels": [{"config": {"rows": 3}}]}',
            "rows: expected one of (1, 2",
        ),
        ('{"format": 1, "kernels": [{"config": {"rows": "3"}}]}', "got '3'"),
        ('{"format": 1, "kernels": [{"config": {}}]}', "missing 6 required"),
    ],
)
def test_an_unreadable_file_is_ignored_with_a_warning(text: str, reason: str) -> None:
    configs.path().write_text(text)
    with pytest.warns(UserWarning, match="tuned kernels are not used") as caught:
        assert configs.read(configs.path()) == {}
    assert reason in str(caught[0].message)


def test_the_file_is_json_with_every_field_of_the_key() -> None:
    configs.write(configs.path(), {KEY: BEST})
    (entry,) = json.loads(configs.path().read_text())["kernels"]
    assert entry.pop("config") == vars(BEST)
    assert entry == vars(KEY)


@pytest.mark.parametrize(("generation", "warps"), [(8, 8), (9, 4), (10, 4)])
def test_warps_by_generation(generation: int, warps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`compiling` assumes these numbers; before sm_90, 4 warps would spill registers."""
    monkeypatch.setattr(configs, "capability", lambda device: (generation, 0))
    x: Any = Features(4, 768)
    for kernel in ("forward", "backward", "sigmoid"):
        assert configs.packaged(kernel, x).warps == warps
        assert configs.packaged(kernel, x).stages == (3 if generation == 9 else 2)


def test_packaged_configs_by_rows_and_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configs, "capability", lambda device: (9, 0))

    def packaged(kernel: str, rows: int, width: int) -> Config:
        return configs.packaged(kernel, Features(rows, width))  # type: ignore[arg-type]

    assert packaged("forward", 8192, 512) == Config(rows=8, group=2)
    assert packaged("forward", 8191, 512) == Config(rows=4, group=4)
    assert packaged("backward", 4, 640) == Config(rows=8, group=2, split=2)
    assert packaged("backward", 4, 641) == Config(group=32)
    assert packaged("sigmoid", 4, 8) == Config(group=32)
    assert packaged("soft_targets", 4, 8) == Config(group=32, warps=8)
    assert packaged("soft_targets_backward", 4, 8) == Config(group=32, warps=8, stages=4)
