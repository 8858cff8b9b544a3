"""The settings of a training run: types, ranges, defaults, help, and what contradicts another."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from megabatch.errors import UsageError, did_you_mean, plural
from megabatch.losses.registry import TRAINABLE, describe_losses, losses_with
from megabatch.options import CONFIG, is_reference, option, parse_bytes

if TYPE_CHECKING:
    import torch

MAY_CHANGE = "may change when a run is resumed, as its length: schedules follow"

_LOSSES = f"One of these, or module:Class, your own (docs/recipes.md). {describe_losses()}"
Device = Annotated[str, Field(pattern=r"^(auto|cpu|cuda|cuda:\d+)$")]
Share = Annotated[float, Field(ge=0, lt=1)]
Size = Annotated[int, BeforeValidator(parse_bytes)]
Tracker = Literal["tensorboard", "wandb", "mlflow"]
Batches = Literal["mixed", "one-source", "in-turn"]


@dataclass(frozen=True, config=CONFIG)
class TrainConfig:
    """Train two towers on pairs with one contrastive loss over the whole global batch."""

    model: str = ""
    """Required: an open_clip architecture such as ViT-B-32; local-dir:PATH, a folder that open_clip
    saved for the hub; hf:PATH, a folder that transformers saved, with a model of images and texts
    or a text encoder; glyph-small; or module:function, your own (`megabatch models` lists all)."""
    pretrained: Path | None = None
    """Initial weights: a .safetensors file, a .pt file of OpenCLIP, or a run's folder."""
    force_patch_dropout: Share | None = None
    """Share of an image's patches that training drops. Default: the model's own."""
    force_image_size: PositiveInt | None = None
    """Height and width of images in pixels. Default: the model's own."""
    image_seq_len: PositiveInt | None = None
    """The most patches of an image, which keeps its aspect ratio, for towers of timm's NaFlexVit
    (docs/data.md). Default: images of one size."""
    force_context_length: PositiveInt | None = None
    """Tokens per text. Default: the model's own."""
    init_logit_scale: float | None = None
    """Initial log of the scale, without --pretrained. Default: the model's; siglip: log 10."""
    init_logit_bias: float | None = None
    """Initial logit bias, also of a model without one. Default: the model's; siglip: -10."""
    hf_pooling: Literal["mean", "cls", "last"] | None = None
    """Feature of a text, with hf: models for pairs of texts: the mean over its tokens, the first or
    the last. Default: that of the folder if sentence-transformers saved it, or mean."""
    hf_share: bool = True
    """One encoder for both sides of hf: models for pairs of texts, or two that start equal."""
    maxsim_dim: PositiveInt | None = None
    """With --loss maxsim: width of a token's feature. Default: 128."""
    lock_image: bool = False
    """Freeze the image tower (LiT). A tower that is all frozen runs once, in evaluation mode."""
    lock_image_unlocked_groups: NonNegativeInt = 0
    """Last groups of layers of the locked image tower that are trained (models of OpenCLIP)."""
    lock_text: bool = False
    """Freeze the text tower."""
    lock_text_unlocked_layers: NonNegativeInt = 0
    """Last groups of layers of the locked text tower that are trained (models of OpenCLIP)."""
    train_data: str = ""
    """Required: .tar shards (WebDataset), or .csv, .tsv, .parquet, .jsonl, .jsonl.gz or .arrow
    tables: a path, a pattern such as 'shards/{00000..00099}.tar' or a folder, also one that Hugging
    Face's datasets saved; "glyphs", which come with the library; or several, joined by '::'. A URL
    (s3://, gs://, https://) or 'pipe:COMMAND', which prints a shard, is first copied to a cache."""
    train_data_upsampling_factors: str | None = None
    """How often an epoch uses each sample, one number per source: with '1::2' the second source's
    samples come twice, with '1::0.5' every other one in turn."""
    train_data_temperature: PositiveFloat | None = None
    """T: draw from sources in proportion to (size x factor) ** (1 / T), as many pairs an epoch in
    all. Above 1 small sources come more often; a large T draws equally from all."""
    train_data_batches: Batches = "mixed"
    """one-source: each global batch is from one source, at random in proportion to their draws;
    in-turn: likewise, but equally many batches of each source, in turn."""
    query_prefix: str | None = None
    """The prefix of each first text, for pairs of texts: one for all, or one per source, as in
    'query: ::Instruct: Summarise.\\nQuery: '; \\n is a newline. Evaluation takes the first one."""
    caption_prefix: str | None = None
    """The prefix of each caption or second text, and of each hard negative; likewise."""
    csv_img_key: str | None = None
    """Column of image paths (or bytes) in a table. Default: filepath, image, image_path or
    file_name. This and the next three are the same for all sources."""
    csv_query_key: str | None = None
    """Column of first texts, for pairs of texts. Default: query, anchor, question or sentence1."""
    csv_caption_key: str | None = None
    """Column of captions, or of second texts. Default: title, caption or text; for pairs of texts
    preferably positive, answer or sentence2."""
    csv_negative_key: str | None = None
    """Columns of hard negatives in a table, joined by commas; they may also hold lists of texts,
    except in CSV. Default: all of negative, negatives, negative_1, negative_2 and so on."""
    csv_separator: str | None = None
    """Separator of a text table. Default: a tab if the header has one, else a comma."""
    output: Annotated[Path, MAY_CHANGE] = Path("runs/train")
    """Folder of the run: configuration, logs, checkpoints, weights."""
    resume: bool = False
    """Continue the run in --output from its newest checkpoint, or from step 0 if it has none."""

    global_batch_size: PositiveInt = 4096
    """Pairs that the loss of one step contrasts with each other, over all processes."""
    micro_batch_size: Annotated[PositiveInt | Literal["auto"], MAY_CHANGE] = "auto"
    """Pairs that go through the towers at a time, per process. It bounds memory and changes no
    gradient, except in models with batch normalisation. Towers run twice per step, or once if a
    process has no more pairs than this, and for pairs within --activation-memory. auto: on GPUs the
    fastest, measured within 2 minutes; on the CPU, with batch normalisation and with --loss maxsim,
    512."""
    micro_batch_tokens: Annotated[PositiveInt | None, MAY_CHANGE] = None
    """Instead: tokens or patches that go through a tower at a time, at most, with their padding; a
    longer text does alone. --micro-batch-size is then a number of images. Texts must be trimmed: it
    needs --trim-texts and a model whose features do not depend on padding. No sizes are measured
    and no activations kept; towers run once only if a process has a single micro-batch."""
    epochs: Annotated[PositiveInt, MAY_CHANGE] = 16
    """Passes over the data."""
    steps: Annotated[PositiveInt | None, MAY_CHANGE] = None
    """Optimizer steps, instead of epochs. As an option, either replaces the configuration's."""

    loss: Annotated[str, Field(description=_LOSSES)] = "clip"
    duplicates: Literal["negatives", "positives", "ignored"] = "negatives"
    """Pairs of one caption; positives: clip and siglip only, ignored: clip, infonce and maxsim
    only."""
    label_smoothing: Share = 0.0
    """For the clip loss: share of each target that is spread evenly over all columns."""
    infonce_margin: float | None = None
    """For the infonce loss: ignore negatives that are more similar than the positive by this."""
    hard_negatives: NonNegativeInt = 0
    """Hard negatives of each pair, from the table's columns (--csv-negative-key): wrong answers for
    every first input in the batch. From a row with more, each epoch draws others; a row with fewer
    is left out and counted. For the infonce and maxsim losses."""
    matryoshka_dims: tuple[PositiveInt, ...] = ()
    """Widths of prefixes of the features; the loss is the sum over them."""

    opt: Literal["adamw", "lamb", "lars", "adafactor", "lion", "sgd"] = "adamw"
    """The optimizer."""
    lr: PositiveFloat = 1e-3
    """Peak learning rate. For a pretrained text encoder (hf:) the default is 2e-5."""
    lr_scheduler: Literal["cosine", "const", "const-cooldown", "wsd"] = "cosine"
    """After the warm-up: decay to zero along half a cosine; stay constant; or stay constant and
    decay linearly to zero at the end (const-cooldown, also called wsd)."""
    lr_cooldown: Annotated[PositiveInt | None, MAY_CHANGE] = None
    """Steps of the decay at the end of const-cooldown. Default: a fifth of the run."""
    warmup: Annotated[NonNegativeInt | None, MAY_CHANGE] = None
    """Steps of linear warm-up to the peak rate. Default: 20, at most a fifth of the run."""
    beta1: Share = 0.9
    """Decay of the first moment: adamw, lamb, lion and adafactor."""
    beta2: Share = 0.98
    """Decay of the second moment: adamw and lamb; the second decay of lion."""
    eps: PositiveFloat = 1e-6
    """Epsilon of adamw and lamb."""
    momentum: Share = 0.9
    """Momentum of lars and sgd."""
    ema_decay: Share | None = None
    """Also keep an exponential moving average of the weights, exported as model-ema.safetensors."""
    wd: Annotated[float, Field(ge=0)] = 0.2
    """Weight decay of matrices. For a pretrained text encoder (hf:) the default is 0.01."""
    grad_clip_norm: PositiveFloat | None = None
    """Clip the gradient to this norm."""
    max_logit_scale: Annotated[float, Field(ge=1)] = 100.0
    """Upper bound of the logit scale (1 / temperature), enforced after each step."""
    precision: Literal["auto", "fp32", "bf16", "fp16", "fp8"] = "auto"
    """Autocast dtype of towers and loss (OpenCLIP's amp_bf16 and amp); weights stay in fp32. auto:
    bf16, but fp32 on a CPU without fast bf16 products. fp8: bf16, but with the blocks' products in
    float8, for models of ViT-bigG/14's size (docs/recipes.md). Needs torchao."""
    device: Annotated[Device, MAY_CHANGE] = "auto"
    """cpu, cuda, cuda:1 ...; auto: CUDA if available. Each of several processes has its own GPU."""
    parallel: Annotated[Literal["ddp", "fsdp"], MAY_CHANGE] = "ddp"
    """With several processes (torchrun, srun): ddp replicates the model, fsdp (FSDP2) shards it."""
    dist_timeout: Annotated[PositiveInt, Field(le=10**8), MAY_CHANGE] = 600
    """Seconds that processes wait for one another; more than a checkpoint takes."""
    grad_checkpointing: Annotated[bool, MAY_CHANGE] = False
    """Recompute activations inside the towers' blocks in the backward pass, to save memory."""
    trim_texts: Annotated[bool, MAY_CHANGE] = True
    """Do not compute on the padding of texts and patches if features do not depend on it: each
    micro-batch has some of similar lengths, cut to the longest. Features change only by rounding.
    """
    activation_memory: Annotated[Size | Literal["auto"], MAY_CHANGE] = "auto"
    """Memory of each device, such as 20GiB, for activations that wait for the backward pass, whose
    micro-batches run once; auto: all that the first steps leave free on GPUs, 0 on the CPU and with
    --loss maxsim."""
    torchcompile: Annotated[bool | None, MAY_CHANGE] = None
    """Compile the towers' blocks with torch.compile: minutes at the start, then faster steps.
    Needs Triton and a C compiler. Default: on GPUs, but not on the CPU."""

    plan: Annotated[Literal["refuse", "warn", "off"] | None, MAY_CHANGE] = None
    """If the memory of a step cannot fit, refuse or warn. Default: refuse on GPUs, else warn."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Random seed of initial weights, data order, augmentation and dropout."""
    workers: Annotated[NonNegativeInt, MAY_CHANGE] = 0
    """Processes that read and transform data, with no effect on results; 0: the trainer's own.
    Images that only need copying (glyphs) use one thread."""
    decode: Annotated[Literal["early", "late"], MAY_CHANGE] = "early"
    """late: a batch waits on the host as image files, not as decoded images; workers (a second set
    of as many) decode two micro-batches ahead, in each of a step's two passes."""
    image_resize: Literal["pillow", "torch"] = "pillow"
    """pillow resizes training images as OpenCLIP, bit for bit; torch in less than half of the time,
    with the same crops; few values differ, by at most 3 of 255. For OpenCLIP's transforms."""
    data_timeout: Annotated[NonNegativeInt, MAY_CHANGE] = 600
    """Seconds to wait for a worker's data before the run stops; 0: no limit."""
    log_every: Annotated[PositiveInt, MAY_CHANGE] = 1
    """Steps between two records in metrics.jsonl and in what --report-to names."""
    report_to: Annotated[tuple[Tracker, ...], MAY_CHANGE] = ("tensorboard",)
    """Where to show curves, in addition to metrics.jsonl; wandb (Weights & Biases) and mlflow are
    set up by their own environment variables (docs/tracking.md)."""
    checkpoint_every: Annotated[NonNegativeInt, MAY_CHANGE] = 100
    """Steps between two checkpoints; 0: only at the end and on a signal."""
    keep_checkpoints: Annotated[PositiveInt, MAY_CHANGE] = 2
    """Number of checkpoints to keep, the newest ones."""
    val_data: Annotated[str | None, MAY_CHANGE] = None
    """Held-out pairs to evaluate on at the end, as `megabatch eval --val-data` does, with the
    columns of --train-data. All processes must be able to read the output folder."""
    val_frequency: Annotated[NonNegativeInt, MAY_CHANGE] = 0
    """Also save and evaluate a checkpoint every so many steps (OpenCLIP counts epochs); 0: only at
    the end."""


#: Settings without effect unless another one has one of some values, or any that is on.
_USED_WITH = (
    ("csv_negative_key", "hard_negatives", ()),
    ("val_frequency", "val_data", ()),
    ("lock_image_unlocked_groups", "lock_image", ()),
    ("lock_text_unlocked_layers", "lock_text", ()),
    ("beta1", "opt", ("adamw", "lamb", "lion", "adafactor")),
    ("beta2", "opt", ("adamw", "lamb", "lion")),
    ("eps", "opt", ("adamw", "lamb")),
    ("momentum", "opt", ("lars", "sgd")),
    ("lr_cooldown", "lr_scheduler", ("const-cooldown", "wsd")),
    ("label_smoothing", "loss", losses_with("label_smoothing")),
    ("infonce_margin", "loss", losses_with("infonce_margin")),
    ("maxsim_dim", "loss", ("maxsim",)),
)


def problems(config: TrainConfig, *needed: str) -> list[str]:
    """The reasons why a configuration is refused; settings that are `needed` may not be empty."""
    missing = [option(name) for name in needed if not getattr(config, name)]
    reasons = [f"{name}: needed, as an option or in a --config" for name in missing]
    for name, other, users in _USED_WITH:
        value, choice = getattr(config, name), getattr(config, other)
        if value != getattr(TrainConfig, name) and not (choice in users if users else choice):
            expected = f"{option(other)} {' or '.join(users)}".strip()
            got = f"{option(other)} {choice}"
            reasons.append(f"{option(name)} {value}: expected with {expected}, got {got}")
    return [*reasons, *_conflicts(config)]


def schedule_problems(config: TrainConfig, total_steps: int) -> list[str]:
    """Reasons why the learning rate's schedule does not fit into a run of so many steps."""
    cooldown, warmup = config.lr_cooldown or 0, config.warmup or 0
    if cooldown + warmup <= total_steps:
        return []
    steps = plural(total_steps, "step")
    return [f"--warmup {warmup} and --lr-cooldown {cooldown}: the run has only {steps}"]


def _conflicts(config: TrainConfig) -> Iterator[str]:
    """Settings that contradict each other."""
    if config.micro_batch_tokens and config.activation_memory not in ("auto", 0):
        given = f"--activation-memory {config.activation_memory}"
        yield f"{given}: expected auto with --micro-batch-tokens {config.micro_batch_tokens}"
    if config.precision == "fp8" and config.torchcompile is False:
        yield "--no-torchcompile: expected compiled blocks with --precision fp8, slow without"
    if config.decode == "late" and config.workers == 0:
        yield "--workers 0: expected at least 1 with --decode late, which is their work"
    if config.image_seq_len and config.force_image_size:
        yield f"--force-image-size {config.force_image_size}: expected without --image-seq-len"
    if config.csv_img_key is not None and config.csv_query_key is not None:
        yield f"--csv-query-key {config.csv_query_key}: expected without --csv-img-key"
    loss = TRAINABLE.get(config.loss)  # none: the user's own
    if loss is None and not is_reference(config.loss):
        known = f"{', '.join(TRAINABLE)} or module:Class{did_you_mean(config.loss, TRAINABLE)}"
        yield f"--loss {config.loss}: expected {known}"
    supported = list(loss.duplicates) if loss else ["negatives"]
    if config.duplicates not in supported:
        given = f"--duplicates {config.duplicates}"
        yield f"{given}: expected {' or '.join(supported)} with --loss {config.loss}"
    if config.hard_negatives and loss and loss.negatives is None:
        yield f"--hard-negatives {config.hard_negatives}: expected 0 with --loss {config.loss}"
    if loss and loss.multi_vector:
        for name in ("matryoshka_dims", "lock_image", "lock_text"):
            if getattr(config, name):
                yield f"{option(name)}: expected without --loss {config.loss}"
    if config.label_smoothing and config.duplicates == "ignored":
        yield f"--label-smoothing {config.label_smoothing}: expected 0 with --duplicates ignored"
    text = config.lock_text and not config.lock_text_unlocked_layers
    if text and config.lock_image and not config.lock_image_unlocked_groups:
        yield "--lock-image --lock-text: both towers locked leave nothing to train"
    if config.hard_negatives and text:
        yield f"--hard-negatives {config.hard_negatives}: expected 0 with --lock-text"
    start, highest = config.init_logit_scale, math.log(config.max_logit_scale)
    # A hundredth more is a rounded logarithm, such as 4.61 of 100.
    if start is not None and not 0 <= start <= highest + 0.01:
        yield f"--init-logit-scale {start}: expected 0 to {highest:.3g}, log of --max-logit-scale"


def with_precision(config: TrainConfig, device_type: str) -> TrainConfig:
    """The configuration with the precision that "auto" means on this kind of device."""
    if config.precision != "auto":
        return config
    from megabatch.torch_internals import cpu_multiplies_bf16  # --help does not need torch

    slow = device_type == "cpu" and not cpu_multiplies_bf16()
    return replace(config, precision="fp32" if slow else "bf16")


def unmeasured_micro_batch(config: TrainConfig) -> int:
    """Rows of a micro-batch where sizes are not, or not yet, measured."""
    size = config.micro_batch_size
    return size if isinstance(size, int) else 512


def activation_bytes(config: TrainConfig, device_type: str) -> int | None:
    """Bytes for activations that wait for the backward pass; None: all that is free there."""
    if config.activation_memory == "auto":
        # Of tokens' features the longest text decides, and a later batch may have a longer one.
        known = config.loss != "maxsim" and config.micro_batch_tokens is None
        return None if device_type == "cuda" and known else 0
    return config.activation_memory


def resolve_device(name: str, local_rank: int | None = None) -> torch.device:
    """The device of this machine that a configuration's `device` selects.

    `local_rank` is that of a process among several, which take a GPU each.

    Raises:
        UsageError: there is none.
    """
    import torch  # which --help does not need

    count = torch.cuda.device_count()
    device = torch.device(("cuda" if count else "cpu") if name == "auto" else name)
    if device.type == "cpu":
        return device
    if local_rank is not None and device.index is not None:
        raise UsageError(f"--device {name}: expected cuda or auto, as each process takes its own")
    # A launcher may make one device visible to each process.
    index = (device.index or 0) if local_rank is None else local_rank * (count > 1)
    if index >= count:
        raise UsageError(f"--device {name}: this machine has {plural(count, 'CUDA device')}")
    return device if local_rank is None else torch.device("cuda", index)
