"""The settings of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from megabatch.hints import Details, Interval
from megabatch.losses.registry import LossName, describe_duplicates, describe_losses

if TYPE_CHECKING:
    import torch

#: Headings of the settings, each under the first that is below it.
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


AT_LEAST_0, AT_LEAST_1 = Interval(at_least=0), Interval(at_least=1)
ABOVE_0, SHARE, FINITE = Interval(above=0), Interval(at_least=0, below=1), Interval()


class MayChange:
    """Marks a setting of which a resumed run may have another value.

    Steps and epochs are among them: the schedule then ends later, and the steps from there on
    follow the new one.
    """


MAY_CHANGE = MayChange()


@dataclass(frozen=True)
class TrainConfig:
    """Train two towers on pairs with one contrastive loss over the whole global batch."""

    model: str = ""
    """Needed: the name of an open_clip architecture such as ViT-B-32; local-dir:PATH, a folder that
    open_clip saved for the hub; hf:PATH, a folder that transformers saved: a model of images and
    texts (CLIP, SigLIP), or a text encoder for pairs of texts; or glyph-small or icon-small."""
    pretrained: Path | None = None
    """Weights to start from: a local .safetensors file, a .pt file of OpenCLIP's trainer, or a
    folder that open_clip or a run wrote."""
    pretrained_image_path: Path | None = None
    """Weights of the image tower alone, over the others: out of a whole model's file, a tower's or
    a timm trunk's."""
    pretrained_text_path: Path | None = None
    """Weights of the text tower alone."""
    force_patch_dropout: Annotated[float | None, SHARE] = None
    """Share of an image's patches left out in training, instead of the model's own."""
    force_image_size: Annotated[int | None, AT_LEAST_1] = None
    """Pixels a side, instead of the model's own."""
    force_context_length: Annotated[int | None, AT_LEAST_1] = None
    """Tokens a text, instead of the model's own."""
    init_logit_scale: Annotated[float | None, FINITE] = None
    """Where the logarithm of the logit scale starts, where no weights are loaded. Default: the
    model's own; with the siglip loss log 10."""
    init_logit_bias: Annotated[float | None, FINITE] = None
    """Where the logit bias starts; gives the model one. Default: the model's own; with the siglip
    loss -10."""
    hf_pooling: Literal["mean", "cls", "last"] = "mean"
    """Of hf: models, a text's feature: the mean over its tokens, the first token, or the last."""
    hf_share: bool = True
    """Of hf: models, one encoder for both texts; otherwise two that start alike."""
    lock_image: bool = False
    """Train the image tower no further (LiT); wholly locked it runs once a step, and in evaluation
    mode."""
    lock_image_unlocked_groups: Annotated[int, AT_LEAST_0] = 0
    """Groups of layers at the image tower's end that are trained all the same."""
    lock_image_freeze_bn_stats: bool = False
    """Keep the running statistics of the locked image tower's batch normalisation as well."""
    lock_text: bool = False
    """Train the text tower no further."""
    lock_text_unlocked_layers: Annotated[int, AT_LEAST_0] = 0
    """Groups of layers at the text tower's end that are trained all the same."""
    train_data: str = ""
    """Needed: .tar shards (WebDataset), or .csv, .tsv, .parquet, .jsonl, .jsonl.gz or .arrow
    tables: a path, a pattern such as 'shards/{00000..00099}.tar', or a folder of them; or a folder
    that Hugging Face's datasets saved to disk; or several of these joined by '::'; or "glyphs",
    which come with the library."""
    train_data_upsampling_factors: str | None = None
    """How often an epoch has each sample of a source, one number a source: '1::2' has those of the
    second twice, '1::0.5' every other one in turn. Default: each once."""
    csv_img_key: str | None = None
    """Column of image paths (or bytes) in a table of any kind. Default: filepath, image, image_path
    or file_name, whichever the table has. Like the next two, one or, joined by '::', one a source.
    """
    csv_query_key: str | None = None
    """Column of first texts, for pairs of texts (hf: models). Default, in a table without images:
    query, anchor, question or sentence1."""
    csv_caption_key: str | None = None
    """Column of captions, or of second texts. Default: title, caption or text; of pairs of texts
    before those positive, answer or sentence2."""
    csv_separator: str | None = None
    """Separator of a text table. Default: a comma, in .tsv files a tab."""
    svg_size: Annotated[int, AT_LEAST_1] = 224
    """Pixels of the longer side that .svg images in shards are drawn with, before the transform. A
    little above the model's image size is enough, and quick."""
    output: Annotated[Path, MAY_CHANGE] = Path("runs/train")
    """The run's folder: configuration, logs, checkpoints, weights."""
    resume: bool = False
    """Continue the run in the output folder where its newest checkpoint left it. A folder without
    one is begun from the start, so the same command serves both."""

    global_batch_size: Annotated[int, AT_LEAST_1] = 4096
    """Pairs that are contrasted with each other in one step, over all processes."""
    micro_batch_size: Annotated[int, AT_LEAST_1] = 512
    """Pairs that go through the towers at a time, on each process: bounds memory and changes no
    gradient (models with batch normalisation excepted). Towers run twice a step, once where a
    process's pairs are no more than this."""
    epochs: Annotated[int, MAY_CHANGE] = 16
    """Passes over the data."""
    steps: Annotated[int | None, AT_LEAST_1, MAY_CHANGE] = None
    """Optimizer steps; given, it decides instead of epochs."""

    loss: Annotated[LossName, Details(describe_losses())] = "clip"
    """The loss over the global batch."""
    duplicates: Annotated[
        Literal["negatives", "positives", "ignored"], Details(describe_duplicates())
    ] = "negatives"
    """How the loss treats pairs with the same caption."""
    label_smoothing: Annotated[float, SHARE] = 0.0
    """Of the clip loss: this share of each target is spread over all columns."""
    infonce_margin: Annotated[float | None, FINITE] = None
    """Of the infonce loss: negatives more similar than the own pair by more than this are left out.
    """
    matryoshka_dims: Annotated[tuple[int, ...], AT_LEAST_1] = ()
    """Widths of the features' prefixes that are trained to serve alone; the loss is their sum."""

    opt: Literal["adamw", "lamb", "lars", "adafactor", "lion", "sgd"] = "adamw"
    """The optimizer."""
    lr: Annotated[float, ABOVE_0] = 1e-3
    """Peak learning rate, at a batch of lr_base_batch_size."""
    lr_scaling: Literal["none", "sqrt", "linear"] = "none"
    """The peak grows with the batch: lr * (global_batch_size / lr_base_batch_size) ** p, p = 0, 1/2
    or 1."""
    lr_base_batch_size: Annotated[int, AT_LEAST_1] = 4096
    """The batch size that lr is meant for; matters to lr_scaling alone."""
    lr_scheduler: Literal["cosine", "const", "const-cooldown", "wsd"] = "cosine"
    """After the warm-up: fall to zero along a half cosine; stay; or stay and fall at the end
    (const-cooldown, and wsd is another name for it)."""
    lr_cooldown: Annotated[int | None, AT_LEAST_1, MAY_CHANGE] = None
    """Steps of the fall at the end of const-cooldown. Default: a fifth of the run."""
    lr_cooldown_shape: Annotated[Literal["power", "1-sqrt", "cosine"], MAY_CHANGE] = "power"
    """How it falls: (1 - x) ** lr_cooldown_power, 1 - sqrt(x), or half a cosine."""
    lr_cooldown_power: Annotated[float, ABOVE_0, MAY_CHANGE] = 1.0
    """1: a straight line."""
    lr_cooldown_end: Annotated[float, AT_LEAST_0, MAY_CHANGE] = 0.0
    """Learning rate that it falls to."""
    layer_decay: Annotated[float | None, Interval(above=0, at_most=1)] = None
    """Factor of the learning rate from each layer of a tower to the one below it."""
    warmup: Annotated[int, AT_LEAST_0, MAY_CHANGE] = 20
    """Steps in which the learning rate rises linearly to its peak; a fifth of a run that is shorter
    than the default."""
    beta1: Annotated[float, SHARE] = 0.9
    """Decay of the mean gradient, of adamw, lamb, lion and adafactor."""
    beta2: Annotated[float, SHARE] = 0.98
    """Decay of the mean squared gradient, of adamw and lamb; lion's second decay."""
    eps: Annotated[float, ABOVE_0] = 1e-6
    """Epsilon of adamw and lamb."""
    momentum: Annotated[float, SHARE] = 0.9
    """Of lars and sgd."""
    ema_decay: Annotated[float | None, SHARE] = None
    """Also keep a moving average of the weights; at the end it is model-ema.safetensors."""
    wd: Annotated[float, AT_LEAST_0] = 0.2
    """Weight decay of matrices; biases, gains and the logit scale have none."""
    grad_clip_norm: Annotated[float | None, ABOVE_0] = None
    """Largest norm of the whole gradient; longer ones are scaled down."""
    max_logit_scale: Annotated[float, AT_LEAST_1] = 100.0
    """The logit scale (1 / temperature) is clamped to this after each step."""
    precision: Literal["fp32", "bf16", "fp16"] = "bf16"
    """Of the towers' and the loss's products, by autocast (OpenCLIP's amp_bf16 and amp); weights
    stay in fp32. fp16 scales the loss."""
    device: Annotated[str, MAY_CHANGE] = "auto"
    """cpu, cuda, cuda:1 ...; auto takes cuda where there is one. Of several processes each takes
    its own."""
    parallel: Annotated[Literal["ddp", "fsdp"], MAY_CHANGE] = "ddp"
    """With several processes (torchrun, srun): ddp, each has the whole model; fsdp (FSDP2), each
    has a part of weights, optimizer state and gradients."""
    use_bn_sync: bool = False
    """With several processes: batch normalisation over the micro-batches of all of them (GPUs)."""
    dist_timeout: Annotated[int, AT_LEAST_1, MAY_CHANGE] = 600
    """Seconds after which processes give up on one that does not come; more than a checkpoint
    takes."""
    grad_checkpointing: Annotated[bool, MAY_CHANGE] = False
    """Keep no activations inside the towers' blocks but compute them again: less memory, slower.
    Without repeated blocks (glyph-small) a tower is one block, and hardly anything is saved."""
    torchcompile: Annotated[bool, MAY_CHANGE] = False
    """Translate the towers' blocks by torch.compile."""

    plan: Annotated[Literal["refuse", "warn", "off"] | None, MAY_CHANGE] = None
    """What a step will take of the memory is told before the first one. Where it cannot fit: refuse
    or warn. Default: refuse on GPUs, warn on the CPU."""
    on_nonfinite: Annotated[Literal["stop", "skip"], MAY_CHANGE] = "stop"
    """When loss or gradient is NaN or infinite: stop, or leave the step out and go on."""
    max_nonfinite: Annotated[int, AT_LEAST_1, MAY_CHANGE] = 10
    """So many steps left out in a row stop the run all the same."""
    check_replicas_every: Annotated[int, AT_LEAST_0, MAY_CHANGE] = 100
    """Steps between two comparisons of what all processes should hold alike; 0: never."""

    seed: Annotated[int, Interval(at_least=0, below=2**32)] = 0
    """Of the weights, the order of the data, augmentation and dropout."""
    workers: Annotated[int, AT_LEAST_0, MAY_CHANGE] = 0
    """Processes that read and transform data; 0: none beside the trainer. Changes no result.
    Images that are only to be copied (grey icons, glyphs) take one thread for any number."""
    decode: Annotated[Literal["early", "late"], MAY_CHANGE] = "early"
    """early: images wait for their step on the host as the numbers that the towers take. late: they
    wait as files, which workers (as many again) decode a micro-batch ahead, once a pass and so
    twice a step: for batches that the host has no room for otherwise."""
    data_timeout: Annotated[int, AT_LEAST_0, MAY_CHANGE] = 600
    """Seconds after which workers that give no data are given up; 0: never."""
    log_every: Annotated[int, AT_LEAST_1, MAY_CHANGE] = 1
    """Steps between two lines of metrics.jsonl and two points in TensorBoard."""
    checkpoint_every: Annotated[int, AT_LEAST_0, MAY_CHANGE] = 100
    """Steps between two checkpoints; 0: only at the end and on a signal."""
    keep_checkpoints: Annotated[int, AT_LEAST_1, MAY_CHANGE] = 2
    """How many of the newest checkpoints are kept."""
    evaluate: Annotated[bool, MAY_CHANGE] = False
    """Evaluate at the end, on val_data, as `megabatch eval` does: on all processes where each can
    read the output folder, else on the first alone. On where val_data is given."""
    val_data: Annotated[str | None, MAY_CHANGE] = None
    """Held-out pairs to evaluate on: what `megabatch eval --val-data` takes, with the columns of
    train_data. Default, with the glyphs as training data: glyphs that were held out."""


def resolve_device(name: str) -> torch.device:
    """The device that a configuration's `device` means here.

    Raises:
        ValueError: there is no such device.
    """
    import torch  # --help does without

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"{name}: expected auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"{name}: expected auto, cpu, cuda or cuda:N")
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ValueError(f"{name}: this machine has {count} CUDA devices")
    return device
