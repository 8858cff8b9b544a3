"""The settings of a training run: names, types, ranges, defaults and help."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from megabatch.errors import UsageError, plural
from megabatch.hints import SIZE, Form, Interval, parse_bytes
from megabatch.losses.registry import describe_losses

if TYPE_CHECKING:
    import torch

Tracker = Literal["tensorboard", "wandb", "mlflow"]

#: Options of OpenCLIP's trainer that have another name here, or whose work is done anyway.
OPENCLIP = {
    "--accum-freq": "use --micro-batch-size, the pairs that a process encodes at a time",
    "--batch-size": "use --global-batch-size, the pairs of all processes together",
    "--epochs-cooldown": "use --lr-scheduler const-cooldown --lr-cooldown STEPS",
    "--force-quick-gelu": "use an architecture that has it, such as --model ViT-B-32-quickgelu",
    "--fsdp": "use --parallel fsdp",
    "--imagenet-val": "use megabatch eval RUN --class-data PATH after the run",
    "--log-every-n-steps": "use --log-every STEPS",
    **dict.fromkeys(("--logs", "--name"), "use --output FOLDER"),
    "--pretrained-image": "use --pretrained-image-path FILE",
    "--save-frequency": "use --checkpoint-every STEPS and --keep-checkpoints N",
    "--siglip": "use --loss siglip",
    "--skip-scheduler": "use --lr-scheduler const --warmup 0",
    "--train-num-samples": "samples are counted; use --epochs or --steps for the length",
    **dict.fromkeys(("--dataset-type", "--gather-with-grad", "--local-loss"), "leave it out"),
}

#: Settings that `--help` lists; `--help-all` lists all.
COMMON = (
    *("model", "pretrained", "train_data", "output", "resume", "global_batch_size"),
    *("micro_batch_size", "epochs", "steps", "loss", "lr", "precision", "val_data"),
)

AT_LEAST_0, AT_LEAST_1 = Interval(at_least=0), Interval(at_least=1)
DEVICE = Form(r"auto|(cpu|cuda)(:\d\d?)?", "auto, cpu, cuda or cuda:N")
ABOVE_0, SHARE, FINITE = Interval(above=0), Interval(at_least=0, below=1), Interval()


class MayChange:
    """Marks a setting that may change when a run is resumed, as its length: schedules follow."""


MAY_CHANGE = MayChange()


@dataclass(frozen=True)
class TrainConfig:
    """Train two towers on pairs with one contrastive loss over the whole global batch."""

    model: str = ""
    """Required: an open_clip architecture such as ViT-B-32; local-dir:PATH, a folder that open_clip
    saved for the hub; hf:PATH, a folder that transformers saved, with a model of images and texts
    or a text encoder; glyph-small; or module:function, your own. `megabatch models` lists all
    names."""
    pretrained: Path | None = None
    """Initial weights: a .safetensors file, a .pt file of OpenCLIP's trainer, or a run's
    folder."""
    pretrained_image_path: Path | None = None
    """Initial weights of the image tower, loaded after --pretrained: of a model, a tower or a
    trunk."""
    pretrained_text_path: Path | None = None
    """Initial weights of the text tower, likewise."""
    force_patch_dropout: Annotated[float | None, SHARE] = None
    """Share of an image's patches that training drops. Default: the model's own."""
    force_image_size: Annotated[int | None, AT_LEAST_1] = None
    """Height and width of images in pixels. Default: the model's own."""
    force_context_length: Annotated[int | None, AT_LEAST_1] = None
    """Tokens per text. Default: the model's own."""
    init_logit_scale: Annotated[float | None, FINITE] = None
    """Initial log of the logit scale, unless weights are loaded. Default: the model's own, or log
    10 with the siglip loss."""
    init_logit_bias: Annotated[float | None, FINITE] = None
    """Initial logit bias, also of a model without one. Default: the model's own, or -10 with the
    siglip loss."""
    hf_pooling: Literal["mean", "cls", "last"] | None = None
    """With hf: models for pairs of texts, the feature of a text: the mean over its tokens, the
    first token or the last. Default: the folder's own if sentence-transformers saved it, or mean.
    """
    hf_share: bool = True
    """With hf: models for pairs of texts, use one encoder for both sides; otherwise two with the
    same initial weights."""
    lock_image: bool = False
    """Freeze the image tower (LiT). A tower that is frozen as a whole runs once per step, in
    evaluation mode."""
    lock_image_unlocked_groups: Annotated[int, AT_LEAST_0] = 0
    """Last groups of layers of the locked image tower that are trained (models of OpenCLIP)."""
    lock_text: bool = False
    """Freeze the text tower."""
    lock_text_unlocked_layers: Annotated[int, AT_LEAST_0] = 0
    """Last groups of layers of the locked text tower that are trained (models of OpenCLIP)."""
    train_data: str = ""
    """Required: .tar shards (WebDataset), or .csv, .tsv, .parquet, .jsonl, .jsonl.gz or .arrow
    tables: a path, a pattern such as 'shards/{00000..00099}.tar', or a folder; a folder that
    Hugging Face's datasets saved; "glyphs", which come with the library; or several of these,
    joined by '::'. A URL (s3://, gs://, https://) or 'pipe:COMMAND', which prints a shard, is
    copied into the cache first."""
    train_data_upsampling_factors: str | None = None
    """How often an epoch uses each sample, one number per source: with '1::2' the second source's
    samples come twice, with '1::0.5' every other one in turn."""
    csv_img_key: str | None = None
    """Column of image paths (or bytes) in a table. Default: filepath, image, image_path or
    file_name. This and the next three are the same for all sources."""
    csv_query_key: str | None = None
    """Column of first texts, for pairs of texts. Default, in a table without images: query, anchor,
    question or sentence1."""
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

    global_batch_size: Annotated[int, AT_LEAST_1] = 4096
    """Pairs that the loss of one step contrasts with each other, over all processes."""
    micro_batch_size: Annotated[int | Literal["auto"], AT_LEAST_1, MAY_CHANGE] = "auto"
    """Pairs that go through the towers at a time, per process. It bounds memory and changes no
    gradient, except in models with batch normalisation. Towers run twice per step, or once if a
    process has no more pairs than this, and for pairs within --activation-memory. auto: on GPUs the
    fastest size, measured after two steps in less than 2 minutes; on the CPU, and with batch
    normalisation, 512."""
    epochs: Annotated[int, AT_LEAST_1, MAY_CHANGE] = 16
    """Passes over the data."""
    steps: Annotated[int | None, AT_LEAST_1, MAY_CHANGE] = None
    """Optimizer steps, instead of epochs. As an option, either replaces the configuration's."""

    loss: Annotated[str, describe_losses()] = "clip"
    """The loss over the global batch: one of these, or module:Class, your own (docs/recipes.md)."""
    duplicates: Literal["negatives", "positives", "ignored"] = "negatives"
    """How the loss treats pairs with the same caption; positives: clip and siglip only, ignored:
    clip and infonce only."""
    label_smoothing: Annotated[float, SHARE] = 0.0
    """For the clip loss: share of each target that is spread evenly over all columns."""
    infonce_margin: Annotated[float | None, FINITE] = None
    """For the infonce loss: ignore negatives that are more similar than the positive by this."""
    hard_negatives: Annotated[int, AT_LEAST_0] = 0
    """Hard negatives of each pair, from the table's columns (--csv-negative-key): wrong answers for
    every first input in the batch. From a row with more, each epoch draws others; a row with fewer
    is left out and counted. For the infonce loss."""
    matryoshka_dims: Annotated[tuple[int, ...], AT_LEAST_1] = ()
    """Widths of prefixes of the features; the loss is the sum over them."""

    opt: Literal["adamw", "lamb", "lars", "adafactor", "lion", "sgd"] = "adamw"
    """The optimizer."""
    lr: Annotated[float, ABOVE_0] = 1e-3
    """Peak learning rate. For a pretrained text encoder (hf:) the default is 2e-5."""
    lr_scheduler: Literal["cosine", "const", "const-cooldown", "wsd"] = "cosine"
    """After the warm-up: decay to zero along half a cosine; stay constant; or stay constant and
    decay linearly to zero at the end (const-cooldown, also called wsd)."""
    lr_cooldown: Annotated[int | None, AT_LEAST_1, MAY_CHANGE] = None
    """Steps of the decay at the end of const-cooldown. Default: a fifth of the run."""
    warmup: Annotated[int | None, AT_LEAST_0, MAY_CHANGE] = None
    """Steps of linear warm-up to the peak learning rate. Default: 20, at most a fifth of the
    run."""
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
    """Weight decay of matrices. For a pretrained text encoder (hf:) the default is 0.01."""
    grad_clip_norm: Annotated[float | None, ABOVE_0] = None
    """Clip the gradient to this norm."""
    max_logit_scale: Annotated[float, AT_LEAST_1] = 100.0
    """Upper bound of the logit scale (1 / temperature), enforced after each step."""
    precision: Literal["fp32", "bf16", "fp16"] = "bf16"
    """Autocast dtype of towers and loss (OpenCLIP's amp_bf16 and amp). Weights stay in fp32."""
    device: Annotated[str, DEVICE, MAY_CHANGE] = "auto"
    """cpu, cuda, cuda:1 ...; auto: CUDA if it is available. Each of several processes uses its own
    GPU."""
    parallel: Annotated[Literal["ddp", "fsdp"], MAY_CHANGE] = "ddp"
    """With several processes (torchrun, srun): ddp replicates the model, fsdp (FSDP2) shards it."""
    dist_timeout: Annotated[int, Interval(at_least=1, at_most=10**8), MAY_CHANGE] = 600
    """Seconds that processes wait for one another; more than a checkpoint takes."""
    grad_checkpointing: Annotated[bool, MAY_CHANGE] = False
    """Recompute activations inside the towers' blocks in the backward pass: slower, with less
    memory."""
    trim_texts: Annotated[bool, MAY_CHANGE] = True
    """Do not compute on the padding of texts if features do not depend on it: each micro-batch has
    texts of similar lengths, cut to the longest. Features change only by rounding."""
    activation_memory: Annotated[
        str, Form(f"auto|{SIZE}", "auto or a size such as 20GiB"), MAY_CHANGE
    ] = "auto"
    """Memory on each device, such as 20GiB, for activations that are kept for the backward pass, so
    that their micro-batches go through the towers once; auto: on GPUs all that is free, measured in
    the first two steps, on the CPU 0."""
    torchcompile: Annotated[bool | None, MAY_CHANGE] = None
    """Compile the towers' blocks with torch.compile: a minute at the start, then faster steps.
    Needs Triton and a C compiler. Default: on GPUs, but not on the CPU."""

    plan: Annotated[Literal["refuse", "warn", "off"] | None, MAY_CHANGE] = None
    """Print the memory that a step needs before the first one and, if it cannot fit, refuse or
    warn. Default: refuse on GPUs, warn on the CPU."""
    seed: Annotated[int, Interval(at_least=0, below=2**32)] = 0
    """Random seed of initial weights, data order, augmentation and dropout."""
    workers: Annotated[int, AT_LEAST_0, MAY_CHANGE] = 0
    """Processes that read and transform data, with no effect on results; 0: the trainer's own.
    Images that only need copying (glyphs) use one thread."""
    decode: Annotated[Literal["early", "late"], MAY_CHANGE] = "early"
    """late: a batch waits on the host as image files, not as decoded images; workers (a second set
    of as many) decode two micro-batches ahead, in each of a step's two passes."""
    image_resize: Literal["pillow", "torch"] = "pillow"
    """pillow resizes training images as OpenCLIP, bit for bit; torch in less than half of the time,
    with the same crops; few values differ, by at most 3 of 255. For OpenCLIP's transforms."""
    data_timeout: Annotated[int, AT_LEAST_0, MAY_CHANGE] = 600
    """Seconds to wait for a worker's data before the run stops; 0: no limit."""
    log_every: Annotated[int, AT_LEAST_1, MAY_CHANGE] = 1
    """Steps between two records in metrics.jsonl and in what --report-to names."""
    report_to: Annotated[tuple[Tracker, ...], MAY_CHANGE] = ("tensorboard",)
    """Where to show curves, in addition to metrics.jsonl; wandb (Weights & Biases) and mlflow are
    set up by their own environment variables (docs/tracking.md)."""
    checkpoint_every: Annotated[int, AT_LEAST_0, MAY_CHANGE] = 100
    """Steps between two checkpoints; 0: only at the end and on a signal."""
    keep_checkpoints: Annotated[int, AT_LEAST_1, MAY_CHANGE] = 2
    """Number of checkpoints to keep, the newest ones."""
    val_data: Annotated[str | None, MAY_CHANGE] = None
    """Held-out pairs to evaluate on at the end, as `megabatch eval --val-data` does, with the
    columns of --train-data. All processes must be able to read the output folder."""
    val_frequency: Annotated[int, AT_LEAST_0, MAY_CHANGE] = 0
    """Also save and evaluate a checkpoint every so many steps (OpenCLIP counts epochs); 0: only at
    the end."""


def unmeasured_micro_batch(config: TrainConfig) -> int:
    """Rows of a micro-batch where sizes are not, or not yet, measured."""
    size = config.micro_batch_size
    return size if isinstance(size, int) else 512


def activation_bytes(config: TrainConfig, device_type: str) -> int | None:
    """Bytes for activations that wait for the backward pass; None: all that is free there."""
    if config.activation_memory == "auto":
        return None if device_type == "cuda" else 0
    return parse_bytes(config.activation_memory)


def resolve_device(name: str, local_rank: int | None = None) -> torch.device:
    """The device of this machine that a configuration's `device` selects.

    Args:
        name: the setting.
        local_rank: of this process among several, which take a GPU each; None: it is alone.

    Raises:
        UsageError: there is none.
    """
    import torch  # which --help does not need

    if name not in DEVICE:
        raise UsageError(f"--device {name}: expected {DEVICE}")
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
