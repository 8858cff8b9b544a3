"""Plans against real steps; what does not fit, and what is suggested instead."""

from dataclasses import replace

import pytest
import torch
from PIL import Image

from megabatch.config.settings import TrainConfig
from megabatch.data import Batch
from megabatch.models import create
from megabatch.models.towers import lock
from megabatch.planning import Machine, make_plan
from megabatch.planning.machine import other_machine
from megabatch.planning.memory import state_bytes
from megabatch.planning.micro_batches import TextLengths
from megabatch.planning.plan import GAIN, PHASES, Planner
from megabatch.training.optimizer import create_optimizer
from megabatch.training.trainer import Trainer
from tests.models.tiny import TINY
from tests.planning.allocator import peak_bytes

pytestmark = pytest.mark.usefixtures("counted_once")

CONFIG = replace(
    TrainConfig(),
    global_batch_size=256,
    micro_batch_size=64,
    warmup=1,
    activation_memory="0",
    precision="bf16",
    torchcompile=False,
)
CPU = Machine("cpu", 1, 1 << 40)


def gpus(count, gib, **more):
    return Machine("cuda", count, int(gib * 2**30), **more)


def texts_of(tokens):
    """Texts of one length."""
    return TextLengths({"text": (tokens,)})


def part(plan, name):
    return next((part.nbytes for part in plan.parts if part.name == name), {})


def graph_of(config, towers, machine):
    """Bytes of a micro-batch's graph beside another one."""
    plan = make_plan(replace(config, activation_memory="1TiB"), towers, machine)
    return part(plan, "activations")["loss"] // max(1, plan.kept)


def compare(plan, trainer, batch, least, most):
    """What a step is planned to take beside weights and data, to what the second one takes."""
    trainer.train_step(batch)  # the optimizer's state is there then
    actual = peak_bytes(lambda: trainer.train_step(batch))
    there = ("weights", "optimizer state", "raw inputs")
    planned = plan.peak - sum(part(plan, name)["loss"] for name in there)
    assert least < planned / actual < most


@pytest.mark.parametrize(
    ("pairs", "micro_batch_size", "precision", "kept", "least", "most"),
    [
        (128, 32, "bf16", 0, 0.97, 1.03),
        (128, 32, "bf16", 3, 0.97, 1.07),
        (1024, 1024, "fp32", 0, 0.9, 1.05),
    ],
)
def test_the_peak_of_a_real_step(pairs, micro_batch_size, precision, kept, least, most):
    sizes = {"global_batch_size": pairs, "micro_batch_size": micro_batch_size}
    config = replace(CONFIG, precision=precision, **sizes)
    towers = create("glyph-small")
    graph = graph_of(config, towers, CPU)
    config = replace(config, activation_memory=str(kept * graph))
    plan = make_plan(config, towers, CPU)
    trainer = Trainer(config, towers.module, torch.device("cpu"), 10)
    if kept:
        assert (plan.kept, part(plan, "activations")["loss"]) == (kept, kept * graph)
        trainer.division.kept = kept
    images, texts = torch.zeros(pairs, 1, 32, 32, dtype=torch.uint8), torch.ones(pairs, 64).long()
    compare(plan, trainer, Batch(images, texts, torch.arange(pairs)), least, most)


def test_the_peak_of_a_real_step_with_trimmed_texts():
    towers = create(TINY)
    config = replace(CONFIG, model=TINY, precision="fp32")
    whole = make_plan(config, towers, CPU)
    texts = torch.zeros(256, towers.tokenizer(["a"]).shape[1], dtype=torch.int64)
    texts[:, 0], texts[:, 1] = 49406, 49407  # begin and end, so that two tokens count
    images = torch.zeros(256, *towers.train_transform(Image.new("RGB", (32, 32))).shape).byte()
    short = make_plan(config, towers, CPU, lengths=texts_of(2))
    assert short.notes == ("texts in order of length are cut to 8 tokens on average",)
    assert short.peak < whole.peak
    assert whole.notes == ("texts count with all of their tokens: at most what trimmed ones take",)
    padded = make_plan(replace(config, trim_texts=False), towers, CPU, lengths=texts_of(2))
    assert (padded.notes, padded.peak) == ((), whole.peak)
    keeping = replace(config, activation_memory="1TiB")
    waiting = part(make_plan(keeping, towers, CPU, lengths=texts_of(2)), "activations")
    graph = waiting["loss"] // 4
    config = replace(config, activation_memory=str(3 * graph))
    plan = make_plan(config, towers, CPU, lengths=texts_of(2))
    trainer = Trainer(config, towers.module, torch.device("cpu"), 10, lengths=towers.lengths)
    trainer.division.kept = 3
    compare(plan, trainer, Batch(images, texts, torch.arange(256)), 0.97, 1.03)


def test_a_gpu_keeps_what_fits(glyph):
    config = replace(CONFIG, global_batch_size=1024, activation_memory="auto")
    none = make_plan(replace(config, activation_memory="0"), glyph, gpus(1, 80))
    graph = graph_of(config, glyph, gpus(1, 80))
    assert (none.kept, part(none, "activations")["loss"]) == (0, 0)
    everything = make_plan(config, glyph, gpus(1, 80))
    assert (everything.kept, part(everything, "activations")["loss"]) == (16, 16 * graph)
    assert make_plan(config, glyph, gpus(4, 80)).kept == 3  # one synchronises
    limit = none.peak + 5 * graph
    tight = make_plan(config, glyph, Machine("cuda", 1, limit))
    assert tight.fits
    assert limit - 2 * graph < tight.peak <= limit


@pytest.mark.parametrize("opt", ["adamw", "lamb", "lars", "adafactor", "lion", "sgd"])
def test_the_state_of_each_optimizer(opt, glyph):
    config = replace(CONFIG, opt=opt, ema_decay=0.9)
    optimizer = create_optimizer(glyph.module, config)
    for parameter in glyph.module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    weights = {name: value.clone() for name, value in glyph.module.state_dict().items()}
    optimizer.step()
    glyph.module.load_state_dict(weights)
    glyph.module.zero_grad()
    held = sum(
        value.nbytes
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )
    planned = state_bytes(glyph.module, config, 1)
    assert abs(planned.optimizer - held) <= 0.01 * held
    assert planned.average == planned.weights


def test_shards_and_replicas(glyph):
    one = state_bytes(glyph.module, CONFIG, 1)
    ddp = state_bytes(glyph.module, CONFIG, 4)
    fsdp = state_bytes(glyph.module, replace(CONFIG, parallel="fsdp"), 4)
    assert ddp == one
    assert fsdp.optimizer == -(-one.optimizer // 4)
    assert fsdp.whole_weights == one.weights
    plan = make_plan(CONFIG, glyph, gpus(4, 80))
    assert set(part(plan, "gradients")) == set(PHASES)  # the buckets stay
    assert part(plan, "features")["loss"] == 2 * 64 * 256 * 2


def test_a_locked_tower_has_no_gradients_and_no_graph():
    towers = create("glyph-small")
    free, graph = make_plan(CONFIG, towers, gpus(1, 80)), graph_of(CONFIG, towers, gpus(1, 80))
    lock(towers.module, "image")
    locked = make_plan(CONFIG, towers, gpus(1, 80))
    assert part(locked, "weights") == part(free, "weights")
    assert part(locked, "optimizer state")["loss"] < part(free, "optimizer state")["loss"]
    waiting, both = (part(plan, "feature gradients")["second pass"] for plan in (locked, free))
    assert 2 * waiting == both
    # The convolutions' activations are most of a graph.
    assert graph_of(CONFIG, towers, gpus(1, 80)) < 0.2 * graph


def test_checkpointing_is_planned_and_leaves_the_module_as_it_was(glyph):
    from megabatch.models.blocks import blocks

    config = replace(CONFIG, grad_checkpointing=True)
    fewer = make_plan(config, glyph, gpus(1, 80))
    assert fewer.total("second pass") <= make_plan(CONFIG, glyph, gpus(1, 80)).total("second pass")
    assert all("forward" not in vars(block) for block in blocks(glyph.module))


def suggested(text, option):
    words = text.split()
    return int(words[words.index(option) + 1])


def test_a_smaller_micro_batch_is_suggested_and_fits(glyph):
    config = replace(CONFIG, global_batch_size=65536, micro_batch_size=32768)
    plan = make_plan(config, glyph, gpus(1, 2))
    assert not plan.fits
    assert "in the phase 'second pass'" in plan.problem
    size = suggested(plan.problem, "--micro-batch-size")
    assert 1024 < size < 32768
    assert make_plan(replace(config, micro_batch_size=size), glyph, gpus(1, 2)).fits
    assert not make_plan(replace(config, micro_batch_size=2 * size), glyph, gpus(1, 2)).fits


def test_where_the_loss_is_too_large_a_smaller_batch_is(glyph):
    config = replace(CONFIG, global_batch_size=1 << 22)
    plan = make_plan(config, glyph, gpus(1, 4))
    assert "in the phase 'loss'" in plan.problem
    size = suggested(plan.problem, "--global-batch-size")
    smaller = replace(config, global_batch_size=size, micro_batch_size=64)
    assert make_plan(smaller, glyph, gpus(1, 4)).fits
    never = "no batch fits: a smaller model, --grad-checkpointing or --parallel fsdp"
    for size in (64, "auto"):
        nothing = replace(CONFIG, micro_batch_size=size)
        assert never in make_plan(nothing, glyph, gpus(1, 0.05)).problem


def test_a_host_that_cannot_hold_the_batch(glyph):
    config = replace(CONFIG, global_batch_size=1 << 20, micro_batch_size=64)
    plan = make_plan(config, glyph, gpus(1, 80, host=2**30))
    assert "of the host's 1.00 GiB" in plan.problem
    size = suggested(plan.problem, "--global-batch-size")
    assert 2 * size * 1536 <= 2**30 < 4 * size * 1536


def test_compiled_blocks_keep_less_but_for_checkpoints(glyph):
    whole, compiled = (
        part(make_plan(replace(CONFIG, torchcompile=on), glyph, CPU), "activations")["second pass"]
        for on in (False, True)
    )
    assert 0.9 * whole < compiled < whole
    checkpointed = [
        make_plan(replace(CONFIG, torchcompile=on, grad_checkpointing=True), glyph, CPU).parts
        for on in (False, True)
    ]
    assert checkpointed[0] == checkpointed[1]


def test_compiled_blocks_of_open_clip_are_planned_as_they_run():
    towers = create(TINY)
    kinds = [type(module) for module in towers.module.modules()]
    micro = {
        (machine.device, on): Planner(replace(CONFIG, torchcompile=on), towers, machine)
        .micro_batches(64, 64).mean
        for machine in (CPU, gpus(1, 80)) for on in (False, True)
    }  # fmt: skip
    for device in ("cpu", "cuda"):
        for of_pass in ("encode", "record", "backward"):
            own, fast = (getattr(micro[device, on], of_pass) for on in (False, True))
            assert fast.flops < 0.9 * own.flops  # the last block's other tokens
            assert fast.other_bytes < own.other_bytes  # copies of queries, keys and values
    assert [type(module) for module in towers.module.modules()] == kinds


def test_images_that_are_decoded_late_wait_as_files(glyph):
    config = replace(CONFIG, global_batch_size=1 << 20, micro_batch_size=64, decode="late")
    host = 2**32
    plan = make_plan(config, glyph, gpus(1, 80, host=host), file_bytes=200.0)
    decoded, files = plan.host
    assert files.nbytes["loss"] == 3 * (200 + 500 + 512) << 20  # file, objects, text
    assert decoded.nbytes["loss"] == 5 * 64 * 1024
    assert plan.fits
    early = make_plan(config, glyph, gpus(1, 80, host=2**30))
    assert "--decode late would keep image files there" in early.problem
    on_cpu = make_plan(config, glyph, CPU, file_bytes=200.0)
    assert part(on_cpu, "image files and texts")["loss"] == files.nbytes["loss"]


def test_large_gradients_of_features_wait_on_the_host(glyph):
    config = replace(CONFIG, micro_batch_size=8192)
    for pairs, waiting in ((1 << 16, 2 * 2 * 256 << 16), (1 << 17, 0)):
        plan = make_plan(replace(config, global_batch_size=pairs), glyph, gpus(1, 80))
        assert part(plan, "feature gradients")["second pass"] == waiting


def test_auto_is_a_size_that_fits(glyph):
    config = replace(CONFIG, global_batch_size=2048, micro_batch_size="auto")
    plan = make_plan(config, glyph, gpus(1, 80))
    given = make_plan(replace(config, micro_batch_size=512), glyph, gpus(1, 80))
    assert plan == replace(given, notes=plan.notes)  # without times
    assert plan.notes[0] == (
        "micro-batch size auto: a run takes the fastest that fits, up to 2,048"
    )
    memory = make_plan(replace(config, micro_batch_size=1024), glyph, gpus(1, 80)).peak
    some = make_plan(config, glyph, Machine("cuda", 1, memory + (1 << 20)))
    assert "up to 1,024" in some.notes[0]
    memory = make_plan(replace(config, micro_batch_size=300), glyph, gpus(1, 80)).peak
    little = make_plan(config, glyph, Machine("cuda", 1, memory))
    assert little.fits
    assert little.config.micro_batch_size == 256
    on_cpu = make_plan(config, glyph, CPU)
    assert on_cpu.config.micro_batch_size == 512


def test_auto_is_the_largest_of_the_fastest_by_known_times(glyph):
    config = replace(CONFIG, global_batch_size=2048, micro_batch_size="auto")
    machine = other_machine(1, 80 << 30, "NVIDIA H200")
    plan = make_plan(config, glyph, machine)
    given = {n: replace(config, micro_batch_size=n) for n in (512, 1024, 2048)}
    seconds = {n: make_plan(one, glyph, machine).seconds for n, one in given.items()}
    as_fast = [n for n, taken in seconds.items() if taken <= (1 + GAIN) * min(seconds.values())]
    assert plan.config.micro_batch_size == max(as_fast)
    assert plan.notes[0].startswith("micro-batch size auto: ")
    assert "(planned pairs/s with 512: " in plan.notes[0]


def test_the_largest_batch_fits_and_one_that_is_larger_does_not(glyph):
    config = replace(CONFIG, global_batch_size=2048, micro_batch_size=256)
    planner = Planner(config, glyph, other_machine(2, 4 << 30))
    most = planner.largest_batch()
    assert most > 1 << 18
    assert planner.plan(global_batch_size=most).fits
    assert not planner.plan(global_batch_size=int(1.1 * most)).fits
