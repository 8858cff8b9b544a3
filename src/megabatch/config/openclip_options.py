"""Options of OpenCLIP's trainer that this one lacks, and their replacements.

All options of open_clip_train/params.py (3.3, and 4.2.0.dev0 of June 2026) that are not fields of
TrainConfig.
"""

from __future__ import annotations

_EVAL = (
    "classification is a command of its own, after the run: megabatch eval RUN --class-data PATH"
)
_OUTPUT = "use --output FOLDER, which holds everything that a run writes"
_CHECKPOINTS = "use --checkpoint-every STEPS and --keep-checkpoints N"
_TRANSFORM = (
    "images are prepared as the model's own configuration says; save one with open_clip and name "
    "it by --model local-dir:PATH"
)
_UNNEEDED = "its work is done without it; leave it out"
_MISSING = "this trainer has no such feature; leave it out"

#: Option -> the end of a sentence that begins with it. `*` stands for any end of a name.
INSTEAD = {
    "--train-num-samples": "the samples are counted; use --epochs or --steps for the length",
    "--dataset-resampled": "an epoch has each sample as often as --train-data-upsampling-factors "
    "says, without replacement; leave it out",
    "--imagenet-*": _EVAL,
    "--zeroshot-frequency": "use --val-frequency STEPS; " + _EVAL,
    "--cache-dir": "nothing is downloaded; --pretrained takes a local file or folder",
    "--logs": _OUTPUT,
    "--name": _OUTPUT,
    "--batch-size": "use --global-batch-size, the pairs of all processes together (OpenCLIP's "
    "times processes times --accum-freq), and --micro-batch-size for what a process encodes "
    "at a time",
    "--accum-freq": "use --micro-batch-size: a --global-batch-size of any size goes through the "
    "towers in micro-batches, with the gradient of the whole batch",
    "--epochs-cooldown": "use --lr-scheduler const-cooldown --lr-cooldown STEPS",
    "--skip-scheduler": "use --lr-scheduler const --warmup 0",
    "--save-*": _CHECKPOINTS,
    "--delete-previous-checkpoint": "use --keep-checkpoints 1",
    "--remote-sync*": "nothing is copied elsewhere; --output may be a mounted folder",
    "--pretrained-image": "use --pretrained-image-path FILE, the image tower's weights",
    "--lock-image-freeze-bn-stats": "a tower that is locked as a whole runs in evaluation mode, "
    "with its own statistics; leave it out",
    "--force-quick-gelu": "name the architecture that has it, such as --model ViT-B-32-quickgelu",
    **dict.fromkeys(
        ("--image-mean", "--image-std", "--image-interpolation", "--image-resize-mode"), _TRANSFORM
    ),
    "--aug-cfg": "there is no augmentation other than the model's own transform; leave it out",
    "--torchscript": "use --torchcompile",
    "--trace": "use --torchcompile",
    "--torchcompile-*": "--torchcompile compiles the towers' blocks; leave it out",
    "--wandb-notes": "set the environment variable WANDB_NOTES, which Weights & Biases reads",
    "--wandb-project-name": "set the environment variable WANDB_PROJECT, which Weights & Biases "
    "reads",
    **dict.fromkeys(
        ("--horovod", "--dist-*"), "processes are started with torchrun or srun; leave it out"
    ),
    "--no-set-device-rank": "use --device cuda where each process sees one GPU",
    "--log-every-n-steps": "use --log-every STEPS",
    "--use-bn-sync": "batch normalisation takes the statistics of each process's micro-batch; "
    "leave it out, with a larger --micro-batch-size",
    "--siglip": "use --loss siglip",
    "--loss-dist-impl": "use --loss siglip; how ranks exchange features is chosen for you",
    "--fsdp": "use --parallel fsdp",
    "--fsdp-*": "how --parallel fsdp shards the model is chosen for you; leave it out",
    "--image-key": "the image is a sample's jpg, jpeg, png, webp, bmp or ppm; leave it out",
    **dict.fromkeys(
        ("--text-key", "--json-text-key*"),
        'the caption is a sample\'s txt, or else "caption" in its json; leave it out',
    ),
    "--opt-kwargs": "use --beta1, --beta2, --eps and --momentum",
    **dict.fromkeys(
        ("--text-layer-decay", "--image-layer-decay", "--visual-layer-decay"),
        "all layers have one learning rate; leave it out",
    ),
    "--lock-text-freeze-layer-norm": "layer normalisation has no running statistics; --lock-text "
    "locks its weights",
    **dict.fromkeys(
        ("--length-bucketing", "--bucket-*", "--text-pad-multiple"),
        "texts are encoded in order of length (--trim-texts); leave it out",
    ),
    **dict.fromkeys(
        (
            *("--val-num-samples", "--dataset-type", "--log-local", "--local-loss"),
            *("--gather-with-grad", "--force-custom-text", "--debug", "--copy-codebase"),
            *("--ddp-static-graph", "--val-retrieval-*", "--log-metric-every-n-steps"),
            *("--train-loss-ema-samples", "--wd-exclude", "--max-image-pixels"),
        ),
        _UNNEEDED,
    ),
    **dict.fromkeys(
        (
            *("--audio-*", "--pretrained-audio", "--coca-*", "--distill-*", "--use-bnb-linear"),
            *("--use-naflex", "--force-naflex-vision", "--naflex-*", "--opt-fallback-list"),
            "--text-pooler-own-group",
        ),
        _MISSING,
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
        for name in ("adamw", "lamb", "lars", "adafactor", "lion", "sgd")
    },
    "resume": {"latest": "it takes the newest checkpoint in --output anyway; leave the value out"},
}
