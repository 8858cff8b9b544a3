"""The time of a step from its work."""

from dataclasses import replace

import pytest
import torch

from megabatch.config.settings import TrainConfig
from megabatch.planning.micro_batches import MicroBatches
from megabatch.planning.seconds import step_seconds, work_seconds
from megabatch.planning.simulation.hardware import (
    DATASHEETS,
    Cluster,
    Encoding,
    Gpu,
    datasheet,
    encoding_named,
    gpu_named,
    usual_cluster,
)
from megabatch.planning.state import State
from megabatch.planning.towers import MicroBatch
from megabatch.planning.work import Work

CONFIG = TrainConfig(global_batch_size=4096, micro_batch_size=1024)
STATE = State(10**9, 10**9, 2 * 10**9, 0, 0, 0, 0)
FORWARD, BACKWARD = Work(10**14, 0, 10**11, 1000), Work(2 * 10**14, 0, 2 * 10**11, 2000)
ONE = MicroBatch(0, 1, 1, torch.bfloat16, 1, FORWARD, FORWARD, BACKWARD)


def seconds(count=4, kept=0, config=CONFIG, cluster=None, encoding=None, pair_bytes=1000):
    return step_seconds(
        *(config, MicroBatches(((ONE, count),), 1024), kept),
        width=512,
        state=STATE,
        cluster=cluster or Cluster(1),
        encoding=encoding or Encoding(),
        pair_bytes=pair_bytes,
        compiled=True,
    )


def test_kernels_take_their_operations_their_bytes_and_a_constant():
    gpu, encoding = Gpu(), Encoding()

    def of(work, compiled=True):
        return work_seconds(work, gpu, encoding, compiled=compiled)

    assert of(Work(flops=10**15)) == pytest.approx(1e15 / encoding.products / gpu.product_rate)
    convolved = 1e15 / encoding.convolutions / gpu.product_rate
    assert of(Work(convolved=10**15)) == pytest.approx(convolved)
    assert of(Work(nbytes=10**12)) == 1e12 / gpu.memory_rate
    assert of(Work(kernels=1000)) == 1000 * encoding.kernel
    assert of(FORWARD + BACKWARD) == pytest.approx(of(FORWARD) + of(BACKWARD))
    fused, apart = (of(Work(nbytes=10**12), compiled) for compiled in (True, False))
    assert apart == pytest.approx(fused / encoding.separate)


def test_what_is_kept_is_encoded_once():
    none, some, every = (seconds(kept=kept) for kept in (0, 1, 4))
    assert none.first_pass == some.first_pass == every.first_pass
    assert none.second_pass == pytest.approx(none.first_pass)
    assert some.second_pass == pytest.approx(3 / 4 * none.second_pass)
    assert every.second_pass == 0
    assert none.backward_pass == pytest.approx(2 * none.first_pass)
    assert seconds(count=1).second_pass == 0  # without a number: it is encoded once anyway
    assert none.total == pytest.approx(sum(vars(none).values()))


def test_inputs_count_as_far_as_the_gpu_waits_for_them():
    quick, slow = seconds(), seconds(pair_bytes=10**9)
    link = Encoding().host_link
    assert quick.inputs == pytest.approx(1024 * 1000 / link)  # the first micro-batch's
    copies = 2 * 4 * 1024 * 1e9 / link
    assert slow.inputs == pytest.approx(1024 * 1e9 / link + copies - slow.encoders)


def test_gpus_share_the_loss_and_average_gradients_beside_the_last_backward_pass():
    wide = replace(CONFIG, global_batch_size=1 << 18)
    alone, four = seconds(config=wide), seconds(config=wide, cluster=Cluster(4))
    assert alone.loss / 5 < four.loss < alone.loss / 3
    assert alone.transfers == 0 < four.transfers < 0.1 * four.loss
    slow = seconds(config=wide, cluster=Cluster(4, nvlink=1e9))
    assert slow.transfers > 2 * 3 / 4 * 1 - slow.backward_pass / 4 > 0
    assert seconds(config=replace(CONFIG, precision="fp32")) is None


def test_hard_negatives_count_on_several_gpus_too():
    negatives = replace(CONFIG, loss="infonce", hard_negatives=3, global_batch_size=1 << 18)
    alone, two = seconds(config=negatives), seconds(config=negatives, cluster=Cluster(2))
    assert alone.loss / 2.2 < two.loss < alone.loss / 1.8


def test_gpus_by_name():
    assert gpu_named("NVIDIA H200") == Gpu()
    assert encoding_named("NVIDIA H200") == encoding_named("") == Encoding()
    assert gpu_named("Tesla T4") is usual_cluster("Tesla T4", 1) is None
    assert datasheet("H100x") is datasheet("NVIDIA GH200 480GB") is datasheet("h100") is None
    assert datasheet("NVIDIA H100 PCIe") is datasheet("NVIDIA A100-PCIE-40GB") is None
    assert datasheet("NVIDIA A100-SXM4-80GB") is DATASHEETS["A100"]
    assert usual_cluster("H200", 8) == Cluster(8)
    assert usual_cluster("H200", 12) is None  # no whole nodes
    for name, sheet in DATASHEETS.items():
        gpu, own = gpu_named(f"NVIDIA {name}"), DATASHEETS["H200"]
        assert datasheet(name) is sheet
        assert gpu.product_rate / Gpu().product_rate == pytest.approx(sheet.tflops / own.tflops)
        assert gpu.product_rate < 1e12 * sheet.tflops
        assert gpu.memory_rate < sheet.memory_rate
        assert usual_cluster(name, 2).nvlink < sheet.nvlink
