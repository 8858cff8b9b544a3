"""The settings of a training run: names, types, ranges, defaults and help."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from megabatch.errors import plural
from megabatch.hints import Details, Interval, Reference, parse_bytes
from megabatch.losses.registry import LossName, describe_duplicates, describe_losses

if TYPE_CHECKING:
    import torch

#: Headings of `--help`, each by the first setting below it.
GROUPS = {
    "model": "model",
    "hf_pooling": "text encoders of Hugging Face (hf: models)",
    "lock_image": "locked towers",
    "train_data": "data",
    "output": "the run's folder",
    "global_batch_size": "batch and length",
    "loss": "loss",
    "opt": "optimizer",
    "lr": "learning rate",
    "beta1": "the optimizer's constants",
    "precision": "precision",
    "device": "devices and processes",
    "grad_checkpointing": "memory and speed",
    "plan": "checks",
    "seed": "reading data",
    "log_every": "logs and checkpoints",
    "evaluate": "evaluation",
}

#: Settings that `--help` lists; `--help-all` lists all.
COMMON = (
    *("model", "pretrained", "train_data", "output", "resume", "global_batch_size"),
    *("micro_batch_size", "epochs", "steps", "loss", "lr", "precision", "val_data"),
)

AT_LEAST_0, AT_LEAST_1 = Interval(at_least=0), Interval(at_least=1)
ABOVE_0, SHARE, FINITE = Interval(above=0), Interval(at_least=0, below=1), Interval()


class MayChange:
    """Marks a setting that may change when a run is resumed.

    Steps and epochs may: the schedule then ends at the new length, and the remaining steps follow
    it.
    """


MAY_CHANGE = MayChange()


@dataclass(frozen=True)
class TrainConfig:
    """Train two towers on pairs with one contrastive loss over the whole global batch."""

    model: str = ""
    """Required: the name of an open_clip architecture such as ViT-B-32; local-dir:PATH, a folder
    that open_clip saved for the hub; hf:PATH, a folder that transformers saved, with a model of
    images and texts (CLIP, SigLIP) or a text encoder for pairs of texts; glyph-small; or
    module:function, your own (docs/recipes.md). `megabatch models` lists all names."""
    pretrained: Path | None = None
    """Initial weights: a local .safetensors file, a .pt file of OpenCLIP's trainer, or a folder
    that open_clip or a run wrote."""
    pretrained_image_path: Path | None = None
    """Initial weights of the image tower, loaded after pretrained: the file of a whole model, of a
    tower or of a timm trunk."""
    pretrained_text_path: Path | None = None
    """Initial weights of the text tower, likewise."""
    force_patch_dropout: Annotated[float | None, SHARE] = None
    """Share of an image's patches that training drops. Default: the model's own."""
    force_image_size: Annotated[int | None, AT_LEAST_1] = None
    """Height and width of images in pixels. Default: the model's own."""
    force_context_length: Annotated[int | None, AT_LEAST_1] = None
    """Tokens per text. Default: the model's own."""
    init_logit_scale: Annotated[float | None, FINITE] = None
    """Initial value of the log of the logit scale, unless loaded weights have one. Default: the
    model's own; with the siglip loss log 10."""
    init_logit_bias: Annotated[float | None, FINITE] = None
    """Initial value of the logit bias; a model without one gets one. Default: the model's own; with
    the siglip loss -10."""
    hf_pooling: Literal["mean", "cls", "last"] = "mean"
    """With hf: models, the feature of a text: the mean over its tokens, the first token or the
    last."""
    hf_share: bool = True
    """With hf: models for pairs of texts, use one encoder for both sides; otherwise two encoders
    that start with the same weights."""
    lock_image: bool = False
    """Freeze the image tower (LiT). A tower that is frozen as a whole runs once per step, in
    evaluation mode."""
    lock_image_unlocked_groups: Annotated[int, AT_LEAST_0] = 0
    """Last groups of layers of the locked image tower that are trained nevertheless."""
    lock_image_freeze_bn_stats: bool = False
    """Also freeze the running statistics of the locked image tower's batch normalisation."""
    lock_text: bool = False
    """Freeze the text tower."""
    lock_text_unlocked_layers: Annotated[int, AT_LEAST_0] = 0
    """Last groups of layers of the locked text tower that are trained nevertheless."""
    train_data: str = ""
    """Required: .tar shards (WebDataset), or .csv, .tsv, .parquet, .jsonl, .jsonl.gz or .arrow
    tables: a path, a pattern such as 'shards/{00000..00099}.tar', or a folder of them; a folder
    that Hugging Face's datasets saved to disk; several of these joined by '::'; or "glyphs", which
    come with the library. A URL (s3://, gs://, https://) or 'pipe:COMMAND', which prints a shard,
    is copied into the cache folder first. From a configuration a command needs --trust."""
    train_data_upsampling_factors: str | None = None
    """How often an epoch uses each sample of a source, one number per source: with '1::2' the
    second source's samples come twice, with '1::0.5' every other one in turn. Default: once."""
    csv_img_key: str | None = None
    """Column of image paths (or bytes) in a table of any kind. Default: filepath, image, image_path
    or file_name, whichever the table has. Like the next three: one for all sources, or one for
    each, joined by '::'."""
    csv_query_key: str | None = None
    """Column of first texts, for pairs of texts (hf: models). Default, in a table without images:
    query, anchor, question or sentence1."""
    csv_caption_key: str | None = None
    """Column of captions, or of second texts. Default: title, caption or text; for pairs of texts
    preferably positive, answer or sentence2."""
    csv_negative_key: str | None = None
    """Columns of hard negatives in a table, joined by commas; in JSON lines, Parquet and Arrow they
    may also hold lists of texts. Default: all of negative, negatives, negative_1, negative_2 and so
    on that the table has. Used with hard_negatives only."""
    csv_separator: str | None = None
    """Separator of a text table. Default: a tab if the header has one, else a comma."""
    output: Annotated[Path, MAY_CHANGE] = Path("runs/train")
    """Folder of the run: configuration, logs, checkpoints, weights."""
    resume: bool = False
    """Continue the run in the output folder from its newest checkpoint. Without a checkpoint the
    run starts at step 0, so one command serves for both."""

    global_batch_size: Annotated[int, AT_LEAST_1] = 4096
    """Pairs that the loss of one step contrasts with each other, over all processes."""
    micro_batch_size: Annotated[int | Literal["auto"], AT_LEAST_1, MAY_CHANGE] = "auto"
    """Pairs that go through the towers at a time, per process. It bounds memory and changes no
    gradient, except in models with batch normalisation. Towers run twice per step, or once if a
    process has no more pairs than this, and for pairs whose activations are kept
    (activation_memory). auto: on GPUs the fastest size that fits, found by measurements after the
    first two steps, which take less than 2 minutes; on the CPU, and with batch normalisation, 512.
    """
    epochs: Annotated[int, MAY_CHANGE] = 16
    """Passes over the data."""
    steps: Annotated[int | None, AT_LEAST_1, MAY_CHANGE] = None
    """Optimizer steps, instead of epochs."""

    loss: Annotated[LossName | Reference, Details(describe_losses())] = "clip"
    """The loss over the global batch: one of these, or module:Class, your own (docs/recipes.md)."""
    duplicates: Annotated[
        Literal["negatives", "positives", "ignored"], Details(describe_duplicates())
    ] = "negatives"
    """How the loss treats pairs with the same caption."""
    label_smoothing: Annotated[float, SHARE] = 0.0
    """For the clip loss: share of each target that is spread evenly over all columns."""
    infonce_margin: Annotated[float | None, FINITE] = None
    """For the infonce loss: ignore negatives whose similarity exceeds the positive's by more than
    this."""
    hard_negatives: Annotated[int, AT_LEAST_0] = 0
    """Hard negatives of each pair, from the table's columns (csv_negative_key): texts that are not
    a right answer for the pair's first input, nor for any other in the batch. If a row has more,
    each epoch draws a different selection; a row that has fewer is left out and counted. For the
    infonce loss."""
    matryoshka_dims: Annotated[tuple[int, ...], AT_LEAST_1] = ()
    """Widths of prefixes of the features that are trained to be useful on their own; the loss is
    the sum over them."""

    opt: Literal["adamw", "lamb", "lars", "adafactor", "lion", "sgd"] = "adamw"
    """The optimizer."""
    lr: Annotated[float, ABOVE_0] = 1e-3
    """Peak learning rate. For a pretrained text encoder (hf:) the default is 2e-5."""
    lr_scheduler: Literal["cosine", "const", "const-cooldown", "wsd"] = "cosine"
    """After the warm-up: decay to zero along half a cosine; stay constant; or stay constant and
    decay at the end (const-cooldown, also called wsd)."""
    lr_cooldown: Annotated[int | None, AT_LEAST_1, MAY_CHANGE] = None
    """Steps of the decay at the end of const-cooldown. Default: a fifth of the run."""
    lr_cooldown_power: Annotated[float, ABOVE_0, MAY_CHANGE] = 1.0
    """Exponent of that decay, (1 - x) ** lr_cooldown_power; 1 is linear."""
    lr_cooldown_end: Annotated[float, AT_LEAST_0, MAY_CHANGE] = 0.0
    """Final learning rate of that decay."""
    layer_decay: Annotated[float | None, Interval(above=0, at_most=1)] = None
    """Factor between the learning rates of a tower's layer and of the layer above it."""
    warmup: Annotated[int | None, AT_LEAST_0, MAY_CHANGE] = None
    """Steps of linear warm-up to the peak learning rate. Default: 20, or a fifth of the run if that
    is less."""
    beta1: Annotated[float, SHARE] = 0.9
    """Decay of the first moment: adamw, lamb, lion and adafactor."""
    beta2: Annotated[float, SHARE] = 0.98
    """Decay of the second moment: adamw and lamb; the second decay of lion."""
    eps: Annotated[float, ABOVE_0] = 1e-6
    """Epsilon of adamw and lamb."""
    momentum: Annotated[float, SHARE] = 0.9
    """Momentum of lars and sgd."""
    ema_decay: Annotated[float | None, SHARE] = None
    """Also keep an exponential moving average of the weights, exported as model-ema.safetensors."""
    wd: Annotated[float, AT_LEAST_0] = 0.2
    """Weight decay of matrices. Biases, gains and the logit scale have none. For a pretrained text
    encoder (hf:) the default is 0.01."""
    grad_clip_norm: Annotated[float | None, ABOVE_0] = None
    """Clip the gradient to this norm."""
    max_logit_scale: Annotated[float, AT_LEAST_1] = 100.0
    """Upper bound of the logit scale (1 / temperature), enforced after each step."""
    precision: Literal["fp32", "bf16", "fp16"] = "bf16"
    """Autocast dtype of the towers and the loss (OpenCLIP's amp_bf16 and amp). Weights stay in
    fp32; fp16 uses loss scaling."""
    device: Annotated[str, MAY_CHANGE] = "auto"
    """cpu, cuda, cuda:1 and so on; auto uses CUDA if it is available. Of several processes each
    uses a GPU of its own."""
    parallel: Annotated[Literal["ddp", "fsdp"], MAY_CHANGE] = "ddp"
    """With several processes (torchrun, srun): ddp replicates the model; fsdp (FSDP2) shards
    weights, optimizer state and gradients."""
    dist_timeout: Annotated[int, Interval(at_least=1, at_most=10**8), MAY_CHANGE] = 600
    """Seconds after which processes stop waiting for one another; must exceed the time that a
    checkpoint takes."""
    grad_checkpointing: Annotated[bool, MAY_CHANGE] = False
    """Recompute the activations inside the towers' blocks in the backward pass: slower, with less
    memory. A tower without repeated blocks (glyph-small) counts as one block, which saves little.
    """
    trim_texts: Annotated[bool, MAY_CHANGE] = True
    """Spend little computation on the padding of texts if features do not depend on it: a tower
    gets the texts in order of length, each micro-batch cut to its longest. Features change only by
    rounding. Towers that read their padding (SigLIP) get whole texts nevertheless."""
    activation_memory: Annotated[str, MAY_CHANGE] = "auto"
    """Memory on each device, such as 20GiB, in which to keep activations for the backward pass, so
    that their micro-batches go through the towers only once; 0: none; auto: on GPUs all that is
    free, measured after the first two steps, on the CPU 0."""
    torchcompile: Annotated[bool | None, MAY_CHANGE] = None
    """Compile the towers' blocks with torch.compile, which takes a minute at the start and makes
    steps faster. Blocks that cannot be compiled run as they are, and a line says why (Triton and a
    C compiler are needed). Default: compile on GPUs, but not on the CPU."""

    plan: Annotated[Literal["refuse", "warn", "off"] | None, MAY_CHANGE] = None
    """Print the memory that a step needs before the first one and, if it cannot fit, refuse or
    warn. Default: refuse on GPUs, warn on the CPU."""
    seed: Annotated[int, Interval(at_least=0, below=2**32)] = 0
    """Random seed of initial weights, data order, augmentation and dropout."""
    workers: Annotated[int, AT_LEAST_0, MAY_CHANGE] = 0
    """Processes that read and transform data, with no effect on results; 0: the trainer's own.
    Images that only need copying (grey icons, glyphs) use one thread, whatever the number."""
    decode: Annotated[Literal["early", "late"], MAY_CHANGE] = "early"
    """early: a batch waits on the host as decoded images. late: it waits as image files, which
    workers (a second set of as many) decode two micro-batches ahead, in each of a step's two
    passes; for batches that would otherwise not fit the host's memory."""
    image_resize: Literal["pillow", "torch"] = "pillow"
    """Library that resizes the images of training. pillow: OpenCLIP's pixels, bit for bit. torch:
    less than half of the time, with the same crops; few values differ, by at most 3 of 255. For
    OpenCLIP's transforms."""
    data_timeout: Annotated[int, AT_LEAST_0, MAY_CHANGE] = 600
    """Seconds to wait for a worker's data before the run stops; 0: no limit."""
    log_every: Annotated[int, AT_LEAST_1, MAY_CHANGE] = 1
    """Steps between two records in metrics.jsonl and in what report_to names."""
    report_to: Annotated[str, MAY_CHANGE] = "tensorboard"
    """Where to show curves, in addition to metrics.jsonl: tensorboard, wandb (Weights & Biases),
    mlflow, or several joined by commas. wandb and mlflow also get the configuration, and are set up
    by their own environment variables (docs/tracking.md)."""
    checkpoint_every: Annotated[int, AT_LEAST_0, MAY_CHANGE] = 100
    """Steps between two checkpoints; 0: only at the end and on a signal."""
    keep_checkpoints: Annotated[int, AT_LEAST_1, MAY_CHANGE] = 2
    """Number of checkpoints to keep, the newest ones."""
    evaluate: Annotated[bool, MAY_CHANGE] = False
    """Evaluate on val_data at the end, as `megabatch eval` does, on all processes, which must be
    able to read the output folder. On if val_data is given."""
    val_data: Annotated[str | None, MAY_CHANGE] = None
    """Held-out pairs to evaluate on, as for `megabatch eval --val-data`, with the columns of
    train_data. Default, if the training data are the glyphs: glyphs that were held out."""
    val_frequency: Annotated[int, AT_LEAST_0, MAY_CHANGE] = 0
    """Also evaluate every so many steps (OpenCLIP counts epochs), and keep the best weights in the
    output folder, under best: those with the highest recall@1 from images (or first texts) to
    texts, of the first task. 0: only at the end. Training waits for it; its results do not change.
    """


#: The names that `report_to` may have.
TRACKERS = ("tensorboard", "wandb", "mlflow")


def tracker_names(config: TrainConfig) -> list[str]:
    """The parts of `report_to`, each once."""
    return list(dict.fromkeys(filter(None, map(str.strip, config.report_to.split(",")))))


#: The micro-batch size that "auto" stands for where sizes are not measured.
UNMEASURED_MICRO_BATCH = 512


def unmeasured_micro_batch(config: TrainConfig) -> int:
    """Rows of a micro-batch if sizes are not, or not yet, measured."""
    size = config.micro_batch_size
    return size if isinstance(size, int) else UNMEASURED_MICRO_BATCH


def activation_bytes(config: TrainConfig, device_type: str) -> int | None:
    """Bytes for activations that wait for the backward pass; None: all that is free on the device.

    Raises:
        ValueError: the setting is no size.
    """
    if config.activation_memory == "auto":
        return None if device_type == "cuda" else 0
    return parse_bytes(config.activation_memory)


def check_device_name(name: str) -> None:
    """Raise a ValueError unless it is the name of a device, here or elsewhere."""
    if not re.fullmatch(r"auto|(cpu|cuda)(:\d\d?)?", name):
        raise ValueError(f"{name}: expected auto, cpu, cuda or cuda:N")


def resolve_device(name: str) -> torch.device:
    """The device that a configuration's `device` selects on this machine.

    Raises:
        ValueError: there is no such device.
    """
    check_device_name(name)
    import torch  # which --help does not need

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ValueError(f"{name}: this machine has {plural(count, 'CUDA device')}")
    return device
