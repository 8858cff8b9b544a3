"""The time of a step from its work."""

from dataclasses import replace

import pytest
import torch

from megabatch.config.settings import TrainConfig
from megabatch.planning.machine import DATASHEETS, Speeds, datasheet, other_machine, speeds_of
from megabatch.planning.micro_batches import MicroBatches
from megabatch.planning.seconds import (
    CONVOLUTIONS,
    FUSED,
    KERNEL,
    PRODUCTS,
    SEPARATE,
    loss_seconds,
    loss_transfers,
    step_seconds,
    work_seconds,
)
from megabatch.planning.towers import MicroBatch, Work

CONFIG = TrainConfig(global_batch_size=4096, micro_batch_size=1024)
FORWARD, BACKWARD = Work(10**14, 0, 10**11, 1000), Work(2 * 10**14, 0, 2 * 10**11, 2000)
ONE = MicroBatch(0, 1, 1, 1, FORWARD, FORWARD, BACKWARD, torch.bfloat16)


def seconds(count=4, kept=0, config=CONFIG, gpus=1, speeds=None):
    machine = replace(other_machine(gpus, 80 << 30), speeds=speeds or Speeds())
    micro = MicroBatches(ONE, ONE, count)
    return step_seconds(config, machine, micro, kept, 512, gradients=10**9, compiled=True)


def test_kernels_take_their_operations_their_bytes_and_a_constant():
    speeds = Speeds()

    def of(work, compiled=True):
        return work_seconds(work, speeds, compiled=compiled)

    assert of(Work(flops=10**15)) == pytest.approx(1e15 / PRODUCTS / speeds.products)
    convolved = 1e15 / CONVOLUTIONS / speeds.products
    assert of(Work(convolved=10**15)) == pytest.approx(convolved)
    assert of(Work(nbytes=10**12)) == 1e12 / speeds.memory
    assert of(Work(kernels=1000)) == 1000 * KERNEL
    assert of(FORWARD.plus(BACKWARD)) == pytest.approx(of(FORWARD) + of(BACKWARD))
    fused, apart = (of(Work(nbytes=10**12), compiled) for compiled in (True, False))
    assert apart == pytest.approx(fused / SEPARATE)
    other = Work(other_bytes=10**12, other_kernels=1000)
    assert of(other) == pytest.approx(FUSED[0] * fused + FUSED[1] * 1000 * KERNEL)
    assert of(other, compiled=False) == pytest.approx(apart + 1000 * KERNEL)


def test_what_is_kept_is_encoded_once():
    none, some, every = (seconds(kept=kept) for kept in (0, 1, 4))
    assert none["first pass"] == some["first pass"] == every["first pass"]
    assert none["second pass"] == pytest.approx(none["first pass"])
    assert some["second pass"] == pytest.approx(3 / 4 * none["second pass"])
    assert every["second pass"] == 0
    assert none["backward pass"] == pytest.approx(2 * none["first pass"])
    assert seconds(count=1)["second pass"] == 0  # without a number: it is encoded once anyway


def test_gpus_share_the_loss_and_average_gradients_beside_the_last_backward_pass():
    wide = replace(CONFIG, global_batch_size=1 << 18)
    alone, four = seconds(config=wide), seconds(config=wide, gpus=4)
    assert four["loss"] == alone["loss"] / 4
    assert alone["transfers"] == 0 < four["transfers"] < 0.1 * four["loss"]
    slow = seconds(config=wide, gpus=4, speeds=Speeds()._replace(nvlink=1e9))
    assert slow["transfers"] > 2 * 3 / 4 * 1 - slow["backward pass"] / 4 > 0
    assert seconds(config=replace(CONFIG, precision="fp32")) is None


def test_hard_negatives_count_on_several_gpus_too():
    negatives = replace(CONFIG, loss="infonce", hard_negatives=3, global_batch_size=1 << 18)
    alone, two = seconds(config=negatives), seconds(config=negatives, gpus=2)
    assert two["loss"] == alone["loss"] / 2


def test_transfers_of_the_loss_are_those_that_no_computation_hides():
    speeds, width, item = Speeds(), 768, 2

    def of(rows, gpus, computing=1e9, **more):
        config = replace(CONFIG, global_batch_size=rows * gpus, **more)
        return loss_transfers(config, width, other_machine(gpus, 80 << 30, "H200"), computing)

    at_once = 3 * 16_384 * width * (item + 4) / speeds.nvlink
    assert of(16_384, 4) == pytest.approx(at_once)
    assert of(1 << 18, 4) < of(1 << 18, 4, computing=0.0) / 2  # all rounds but one are hidden
    assert of(16_384, 1) == 0
    assert of(16_384, 4, loss="ntxent") == pytest.approx(2 * at_once)  # both views' columns
    negatives = of(16_384, 4, loss="infonce", hard_negatives=2)
    assert negatives == pytest.approx(3 * at_once)
    assert of(1024, 16) == pytest.approx(15 * 1024 * width * (item + 4) / speeds.nvlink)
    slow = replace(other_machine(16, 80 << 30), speeds=speeds._replace(network=1e9))
    config = replace(CONFIG, global_batch_size=1024 * 16)
    assert loss_transfers(config, width, slow, 0) > 30 * of(1024, 16)  # eight cards of a host


#: Milliseconds of CLIP's loss, d = 768, with 1,024, 8,192 and 32,768 rows on each of so many H200s
#: in nodes of 8: by a simulation of every computation and transfer, which agreed with 288 records
#: of one to four GPUs within 4.5%.
SIMULATED = {
    2: (0.277, 1.714, 23.176),
    4: (0.367, 3.366, 46.786),
    16: (0.883, 13.269, 188.578),
    64: (1.920, 50.977, 752.464),
    1024: (16.151, 770.518, 12_039.216),
}


@pytest.mark.parametrize("gpus", SIMULATED)
def test_transfers_are_about_those_of_a_simulation(gpus):
    for rows, simulated in zip((1024, 8192, 32_768), SIMULATED[gpus], strict=True):
        config = replace(CONFIG, global_batch_size=rows * gpus)
        loss = loss_seconds(config, 768, Speeds(), gpus)
        transfers = loss_transfers(config, 768, other_machine(gpus, 80 << 30, "H200"), loss)
        # Latencies, the host, slow GPUs and a grid of ranks, which it has: up to 4 ms, and 7%.
        assert abs(1e3 * (loss + transfers) - simulated) < 0.07 * simulated + 4.0


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
