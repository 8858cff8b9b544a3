"""Batches on the host are moved or decoded one micro-batch ahead, in order, once per pass."""

import signal
import threading
import time
import traceback
from unittest import mock

import pytest
import torch
from torch import nn

from megabatch.gradient_cache import GradientCache
from tests.gradient_cache.towers import (
    BATCH,
    WIDTH,
    Tower,
    TwoTowers,
    assert_same,
    assert_same_gradients,
    biased_loss,
    clip_loss,
    gradients,
    pairs,
)

FEED = "megabatch-feed_0"


class Compressed:
    """Rows stored as bytes and decoded on access; records the accesses and their threads."""

    def __init__(self, rows, before=lambda rows: None):
        self.data = [row.numpy().tobytes() for row in rows]
        self.before = before
        self.decoded, self.threads = [], set()

    def __len__(self):
        return len(self.data)

    def __getitem__(self, rows):
        self.before(rows)
        self.decoded.append((rows.start, rows.stop))
        self.threads.add(threading.current_thread().name)
        parts = [torch.frombuffer(bytearray(d), dtype=torch.float64) for d in self.data[rows]]
        return torch.stack(parts) if parts else torch.empty(0, WIDTH)


def feeding():
    return [thread for thread in threading.enumerate() if thread.name == FEED]


@pytest.mark.parametrize("device", ["cpu", None])
def test_compressed_rows_are_decoded_once_per_pass(device):
    model, (images, texts) = TwoTowers(), pairs()
    packed = Compressed(images)
    step = GradientCache(lambda x, y: model(x["pixels"], y), biased_loss, 3, device=device)
    assert_same(
        lambda: step({"pixels": packed}, texts), lambda: biased_loss(*model(images, texts)), model
    )
    assert packed.decoded == [(0, 3), (3, 6), (6, 7)] * 2
    assert packed.threads == {FEED if device else threading.main_thread().name}
    assert not feeding()


def test_the_next_rows_are_decoded_while_a_micro_batch_is_encoded():
    events = []
    decoded = [threading.Event() for _ in range(BATCH)]

    def before(rows):
        events.append(f"decode {rows.start}")
        decoded[rows.start].set()

    def encode(x):
        row = next(i for i, other in enumerate(images) if torch.equal(other, x[0]))
        if row + 1 < BATCH:
            assert decoded[row + 1].wait(10)  # while this one is encoded
        if row + 2 < BATCH and "second pass" not in events:
            assert not decoded[row + 2].wait(0.02)  # but no more than one ahead
        return tower(x)

    tower, (images, texts) = Tower(), pairs()
    step = GradientCache((encode, Tower()), lambda x, y: loss(x, y), 1, device="cpu")

    def loss(x, y):
        events.append("second pass")
        for event in decoded:
            event.clear()
        return clip_loss(x, y)

    step(Compressed(images, before), texts).backward()
    assert [e for e in events if e != "second pass"] == [f"decode {i}" for i in range(BATCH)] * 2


def test_plain_host_tensors_need_no_thread_on_the_cpu():
    with mock.patch.object(threading.Thread, "start") as start:
        GradientCache((Tower(), Tower()), clip_loss, 3, device="cpu")(*pairs()).backward()
    assert not start.called


@pytest.mark.parametrize("second_pass", [False, True])
def test_an_error_in_the_thread_surfaces_with_its_traceback(second_pass):
    images, texts = pairs()
    packed = Compressed(images)

    def spoil(rows):
        if rows.start == 3 and (len(packed.decoded) > 3) == second_pass:
            raise OSError("image 3 is truncated")

    packed.before = spoil
    towers = (Tower(), Tower())
    with pytest.raises(OSError, match="image 3 is truncated") as caught:
        GradientCache(towers, clip_loss, 3, device="cpu")(packed, texts).backward()
    assert "spoil" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert not feeding()
    if not second_pass:
        assert all(gradient is None for gradient in gradients(*towers))


def test_ctrl_c_in_an_encoder_ends_the_thread():
    def encode(x):
        signal.raise_signal(signal.SIGINT)
        return x

    packed = Compressed(pairs()[0], before=lambda rows: time.sleep(0.05))
    with pytest.raises(KeyboardInterrupt):
        GradientCache((encode, Tower()), clip_loss, 1, device="cpu")(packed, pairs()[1]).backward()
    assert not feeding()
    assert len(packed.decoded) == 2  # the one in use and the next one


@pytest.mark.parametrize(
    ("made", "got"), [([1.0], "list"), (torch.ones(2, WIDTH), r"shape \(2, 5\)")]
)
def test_rows_of_a_wrong_type_or_shape(made, got):
    class Rows(Compressed):
        def __getitem__(self, rows):
            return made

    images, texts = pairs()
    with pytest.raises(ValueError, match=rf"Rows\[0:3\] to be a tensor of 3 rows, got {got}"):
        GradientCache((Tower(), Tower()), clip_loss, 3, device="cpu")(Rows(images), texts)
    assert not feeding()


def test_feature_dtype_rounds_features_as_autocast_does():
    towers, batches = nn.ModuleList([Tower(), Tower()]).float(), [x.float() for x in pairs()]
    seen = []

    def loss(x, y):
        seen.append(x.dtype)
        return clip_loss(x.bfloat16(), y.bfloat16()).float()

    values = {}
    for dtype in (None, torch.bfloat16):
        towers.zero_grad()
        value = GradientCache(tuple(towers), loss, 3, feature_dtype=dtype)(*batches)
        value.backward()
        values[dtype] = [value, *gradients(towers)]
    assert seen == [torch.float32, torch.bfloat16]
    assert all(torch.equal(a, b) for a, b in zip(*values.values(), strict=True))


@pytest.mark.gpu
def test_from_the_host_to_a_gpu():
    towers = nn.ModuleList([Tower(dropout=0.5), Tower()]).cuda()
    host = pairs(64)
    results = []
    for batches, device in (
        ([batch.cuda() for batch in host], None),
        (list(host), "cuda"),
        ([host[0].pin_memory(), Compressed(host[1])], "cuda"),
    ):
        torch.manual_seed(1)
        towers.zero_grad()
        step = GradientCache(tuple(towers), clip_loss, 3, device=device, gradients_on_host=True)
        step(*batches).backward()
        results.append(gradients(towers))
    for other in results[1:]:
        assert_same_gradients(other, results[0])


@pytest.mark.gpu
def test_inputs_on_the_gpu_do_not_grow_with_the_batch():
    peaks = []
    for rows in (64, 512):
        towers = [nn.Linear(1 << 16, 4, dtype=torch.float32, device="cuda") for _ in range(2)]
        batches = [torch.ones(rows, 1 << 16).float()] * 2
        torch.cuda.reset_peak_memory_stats()
        GradientCache(towers, clip_loss, 16, device="cuda")(*batches).backward()
        peaks.append(torch.cuda.max_memory_allocated())
    # All inputs take 112 MiB more; the loss of 512 pairs takes three matrices of 1 MiB and vectors.
    assert peaks[1] - peaks[0] < 8 << 20
