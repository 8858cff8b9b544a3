"""Options of OpenCLIP's trainer that this one lacks, and their replacements.

All options of open_clip_train/params.py (3.3, and 4.2.0.dev0 of June 2026) that are not fields of
TrainConfig: those of 3.3 in its order, then those that 4 adds.
"""

from __future__ import annotations

from typing import get_args

from megabatch.config.settings import TrainConfig
from megabatch.hints import settings_of

_NO_DOWNLOAD = "nothing is downloaded; --pretrained takes a local file or folder"
_LAUNCHER = "processes find each other through what torchrun or srun sets; leave it out"
_MODEL_CONFIG = (
    "images are prepared as the model's own configuration says; save one with open_clip and name "
    "it by --model local-dir:PATH"
)
_EVAL = (
    "classification is a command of its own, after the run: megabatch eval RUN --class-data PATH"
)
_COCA = "there is no captioning loss (CoCa); leave it out"
_WANDB = "set the environment variable {0}, which Weights & Biases reads"
_REMOTE = "nothing is copied elsewhere; --output may be a mounted folder"
_OUTPUT = "use --output FOLDER, which holds everything that a run writes"
_RANKS = "the gradient is exact over all processes whatever this says; leave it out"
_DISTILL = "there is no distillation; leave it out"
_CHECKPOINTS = "use --checkpoint-every STEPS and --keep-checkpoints N"

_AUDIO = "there are no audio towers; leave it out"
_CAPTION = 'the caption is a sample\'s txt, or else "caption" in its json; leave it out'
_LAYER_DECAY = "use --layer-decay, a factor for both towers"
_COMPILED = "--torchcompile compiles the towers' blocks; leave it out"
_FSDP = "how --parallel fsdp shards the model is chosen for you; leave it out"
_NAFLEX = "all images have the model's size, or that of --force-image-size; leave it out"
_BY_LENGTH = "texts are encoded in order of length (--trim-texts); leave it out"
_RETRIEVAL = "how retrieval is computed is chosen for you; leave it out"

#: Option -> the end of a sentence that begins with it.
INSTEAD = {
    "--train-num-samples": "the samples are counted; use --epochs or --steps for the length",
    "--val-num-samples": "the samples are counted; leave it out",
    "--dataset-type": "it is seen from the files' names; leave it out",
    "--dataset-resampled": "an epoch has each sample as often as --train-data-upsampling-factors "
    "says, without replacement; leave it out",
    "--imagenet-val": _EVAL,
    "--imagenet-v2": _EVAL,
    "--cache-dir": _NO_DOWNLOAD,
    "--logs": _OUTPUT,
    "--log-local": "one process writes the log, in --output; leave it out",
    "--name": _OUTPUT,
    "--batch-size": "use --global-batch-size, the pairs of all processes together (OpenCLIP's "
    "times processes times --accum-freq), and --micro-batch-size for what a process encodes "
    "at a time",
    "--epochs-cooldown": "use --lr-scheduler const-cooldown --lr-cooldown STEPS",
    "--skip-scheduler": "use --lr-scheduler const --warmup 0",
    "--save-frequency": _CHECKPOINTS,
    "--save-most-recent": _CHECKPOINTS,
    "--zeroshot-frequency": "use --val-frequency STEPS; " + _EVAL,
    "--pretrained-image": "use --pretrained-image-path FILE, the image tower's weights",
    "--image-mean": _MODEL_CONFIG,
    "--image-std": _MODEL_CONFIG,
    "--image-interpolation": _MODEL_CONFIG,
    "--image-resize-mode": _MODEL_CONFIG,
    "--aug-cfg": "there is no augmentation other than the model's own transform; leave it out",
    "--local-loss": _RANKS,
    "--gather-with-grad": _RANKS,
    "--force-quick-gelu": "name the architecture that has it, such as --model ViT-B-32-quickgelu",
    "--force-custom-text": "weights of either layout are read; leave it out",
    "--torchscript": "use --torchcompile",
    "--trace": "use --torchcompile",
    "--accum-freq": "use --micro-batch-size: a --global-batch-size of any size goes through the "
    "towers in micro-batches, with the gradient of the whole batch",
    "--dist-url": _LAUNCHER,
    "--dist-backend": _LAUNCHER,
    "--wandb-notes": _WANDB.format("WANDB_NOTES"),
    "--wandb-project-name": _WANDB.format("WANDB_PROJECT"),
    "--debug": "there is no such log; metrics.jsonl in --output has every step",
    "--copy-codebase": "the code is not copied; config.toml in --output repeats a run",
    "--horovod": "start processes with torchrun or srun; leave it out",
    "--ddp-static-graph": "DDP needs no such promise here; leave it out",
    "--no-set-device-rank": "use --device cuda where each process sees one GPU",
    "--lock-text-freeze-layer-norm": "layer normalisation has no running statistics; --lock-text "
    "locks its weights",
    "--log-every-n-steps": "use --log-every STEPS",
    "--coca-caption-loss-weight": _COCA,
    "--coca-contrastive-loss-weight": _COCA,
    "--remote-sync": _REMOTE,
    "--remote-sync-frequency": _REMOTE,
    "--remote-sync-protocol": _REMOTE,
    "--delete-previous-checkpoint": "use --keep-checkpoints 1",
    "--distill-model": _DISTILL,
    "--distill-pretrained": _DISTILL,
    "--use-bnb-linear": "there are no 8-bit layers; leave it out",
    "--siglip": "use --loss siglip",
    "--loss-dist-impl": "use --loss siglip; how ranks exchange features is chosen for you",
    **dict.fromkeys(
        (
            *("--audio-ext", "--pretrained-audio", "--audio-fill", "--audio-trunc"),
            *("--audio-fusion", "--audio-int16-normalize", "--audio-zeroshot-dataset"),
            *("--audio-zeroshot-split", "--audio-zeroshot-audio-key"),
            *("--audio-zeroshot-target-key", "--audio-zeroshot-class-key"),
            *("--audio-zeroshot-template", "--audio-zeroshot-workers"),
            *("--audio-zeroshot-multiprocessing-context", "--audio-multiprocessing-context"),
            *("--audio-layer-decay", "--naflex-pad-multiple"),
        ),
        _AUDIO,
    ),
    "--image-key": "the image is a sample's jpg, jpeg, png, webp, bmp or ppm; leave it out",
    "--max-image-pixels": "there is no limit but that of the decoder; leave it out",
    **dict.fromkeys(("--text-key", "--json-text-key", "--json-text-key-probs"), _CAPTION),
    "--opt-kwargs": "use --beta1, --beta2, --eps and --momentum",
    "--opt-fallback-list": "no optimizer here treats some parameters as another does; leave it out",
    **dict.fromkeys(
        ("--text-layer-decay", "--image-layer-decay", "--visual-layer-decay"), _LAYER_DECAY
    ),
    "--wd-exclude": "vectors, biases and normalisation have no weight decay; leave it out",
    "--text-pooler-own-group": "groups of layers are the model's own; leave it out",
    **dict.fromkeys(("--val-retrieval-chunk-size", "--val-retrieval-precision"), _RETRIEVAL),
    **dict.fromkeys(
        ("--torchcompile-strategy", "--torchcompile-backend", "--torchcompile-mode"), _COMPILED
    ),
    "--fsdp": "use --parallel fsdp",
    **dict.fromkeys(("--fsdp-no-reshard-after-forward", "--fsdp-offload-cpu"), _FSDP),
    "--fsdp-checkpoint": "checkpoints are the same for any number of processes; leave it out",
    "--log-metric-every-n-steps": "metrics.jsonl in --output has every step; leave it out",
    "--train-loss-ema-samples": "the log has the loss of the step; leave it out",
    **dict.fromkeys(
        (
            *("--use-naflex", "--force-naflex-vision", "--naflex-num-train-image-tokens"),
            *("--naflex-patch-sizes", "--naflex-patch-size-probs", "--naflex-seq-lens"),
            *("--naflex-seq-len-probs", "--naflex-max-tokens-per-batch"),
            *("--naflex-max-text-tokens", "--naflex-batch-divisor", "--naflex-loss-scale"),
        ),
        _NAFLEX,
    ),
    **dict.fromkeys(
        (
            *("--length-bucketing", "--bucket-pool", "--bucket-chunk", "--bucket-prefetch-pools"),
            "--text-pad-multiple",
        ),
        _BY_LENGTH,
    ),
}

_PURE = "weights are never in half precision; use --precision {0}, autocast over fp32 weights"

#: Setting -> OpenCLIP's value -> the end of a sentence that begins with both.
VALUES = {
    "precision": {
        "amp": "use --precision fp16, autocast with a scaled loss",
        "amp_bf16": "use --precision bf16, which is autocast",
        "amp_bfloat16": "use --precision bf16, which is autocast",
        "pure_bf16": _PURE.format("bf16"),
        "pure_fp16": _PURE.format("fp16"),
    },
    "opt": {
        f"timm/{name}": f"use --opt {name}"
        for name in get_args(settings_of(TrainConfig)["opt"].type)
    },
    "resume": {"latest": "it takes the newest checkpoint in --output anyway; leave the value out"},
}
