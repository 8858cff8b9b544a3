"""The time of a step from its work."""

from dataclasses import replace

import pytest

from megabatch.config.settings import TrainConfig
from megabatch.planning.machine import DATASHEETS, Speeds, datasheet, other_machine, speeds_of
from megabatch.planning.micro_batches import MicroBatches
from megabatch.planning.seconds import loss_transfers, step_seconds
from megabatch.planning.towers import MicroBatch, Work

CONFIG = TrainConfig(global_batch_size=4096, micro_batch_size=1024, torchcompile=True)
FORWARD, BACKWARD = Work(10**14, 0, 10**11, 1000), Work(2 * 10**14, 0, 2 * 10**11, 2000)
ONE = MicroBatch(0, 1, 1, 1, FORWARD, FORWARD, BACKWARD)


def seconds(count=4, kept=0, config=CONFIG, gpus=1):
    machine, micro = other_machine(gpus, 80 << 30, "H200"), MicroBatches(ONE, ONE, count)
    return step_seconds(config, machine, micro, kept, 512)


def test_what_is_kept_is_encoded_once():
    none, some, every = (seconds(kept=kept) for kept in (0, 1, 4))
    assert none["first pass"] == some["first pass"] == every["first pass"]
    assert none["second pass"] == pytest.approx(none["first pass"])
    assert some["second pass"] == pytest.approx(3 / 4 * none["second pass"])
    assert every["second pass"] == 0
    assert seconds(count=1)["second pass"] == 0  # without a number: it is encoded once anyway


def test_gpus_share_the_loss_also_with_hard_negatives():
    negatives = {"loss": "infonce", "hard_negatives": 3}
    for config in (replace(CONFIG, global_batch_size=1 << 18), replace(CONFIG, **negatives)):
        alone, four = seconds(config=config), seconds(config=config, gpus=4)
        assert 0 == alone.pop("transfers") < four.pop("transfers") < 0.1 * sum(four.values())
        assert four == {**alone, "loss": alone["loss"] / 4}
    assert seconds(config=replace(CONFIG, precision="fp32")) is None


def test_transfers_are_those_of_a_round():
    def of(rows, gpus, **more):
        config = replace(CONFIG, global_batch_size=rows * gpus, **more)
        return loss_transfers(config, 768, Speeds(), gpus)

    at_once = 3 * 16_384 * 768 * (2 + 4) / Speeds().nvlink
    assert of(16_384, 1) == 0
    assert of(16_384, 4) == pytest.approx(at_once)
    assert of(1 << 22, 4) == of(1 << 20, 4) <= 2 * at_once  # in rounds
    assert of(16_384, 4, loss="ntxent") == pytest.approx(2 * at_once)  # both views' columns
    negatives = of(16_384, 4, loss="infonce", hard_negatives=2)
    assert negatives == pytest.approx(3 * at_once)


def test_gpus_by_name():
    assert speeds_of("NVIDIA H200") == Speeds()
    assert speeds_of("Tesla T4") is None
    assert datasheet("H100x") is datasheet("NVIDIA GH200 480GB") is datasheet("h100") is None
    assert datasheet("NVIDIA H100 PCIe") is datasheet("NVIDIA A100-PCIE-40GB") is None
    assert datasheet("NVIDIA A100-SXM4-80GB") is DATASHEETS["A100"]
    for name, sheet in DATASHEETS.items():
        speeds, own = speeds_of(f"NVIDIA {name}"), DATASHEETS["H200"]
        assert datasheet(name) is sheet
        assert speeds.products / Speeds().products == pytest.approx(sheet.products / own.products)
        for rate in ("products", "memory", "nvlink"):
            assert getattr(speeds, rate) < getattr(sheet, rate)
