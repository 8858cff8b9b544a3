"""OpenCLIP's models: folders as OpenCLIP has them on the hub, and ViTs as transformers' CLIP."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from open_clip.model import CLIPTextCfg, CLIPVisionCfg
from torch import Tensor

from megabatch.errors import UsageError
from megabatch.evaluation.run_folder import Opened
from megabatch.export.hugging_face import save_clip, write_json
from megabatch.models import ModelOptions
from megabatch.models.openclip import IMAGE_SEQ_LEN, image_seq_len, read_config
from megabatch.training.checkpoint import save_tensors

_HAS_LENGTH = hasattr(CLIPVisionCfg, "image_seq_len")  # versions after 3.3
#: The settings of a transform that OpenCLIP stores; the image's size is the model's.
_PREPROCESSING = ("mean", "std", "interpolation", "resize_mode")


def write(opened: Opened, folder: Path) -> list[str]:
    """Write `open_clip_config.json`, `open_clip_model.safetensors` and a tokenizer if it has files.

    `open_clip.create_model_and_transforms("local-dir:FOLDER")` and `open_clip.get_tokenizer` of the
    same name read them; see `Writer`.
    """
    module: Any = opened.towers.module
    config = _model_config(opened)
    preprocessing = {name: module.visual.preprocess_cfg[name] for name in _PREPROCESSING}
    written: dict[str, Any] = {"model_cfg": config, "preprocess_cfg": preprocessing}
    length = ModelOptions.of(opened.config).image_seq_len or image_seq_len(opened.towers.name)
    if length:
        written[IMAGE_SEQ_LEN] = length  # for `create`: OpenCLIP 3.3 has no setting for it
    write_json(folder / "open_clip_config.json", written)
    save_tensors(module.state_dict(), folder / "open_clip_model.safetensors")
    tokenizer: Any = opened.towers.tokenizer
    if hasattr(tokenizer, "save_pretrained"):  # Hugging Face's; OpenCLIP comes with its own
        tokenizer.save_pretrained(folder)
    notes = []
    if length and not _HAS_LENGTH:
        notes.append(f"OpenCLIP's configuration cannot hold it: images of up to {length} patches")
    if encoder := config["text_cfg"].get("hf_model_name"):
        where = "the hub or its local cache"
        notes.append(f"OpenCLIP reads the configuration of {encoder} from {where}")
    return notes


def _model_config(opened: Opened) -> dict[str, Any]:
    """An OpenCLIP model's configuration with the run's changes.

    Raises:
        UsageError: it has no setting for a change.
    """
    options = ModelOptions.of(opened.config)
    config = read_config(opened.towers.name)
    size, timm = config["vision_cfg"].get("image_size"), "timm_model_name" in config["vision_cfg"]
    if timm and options.force_image_size not in (None, size):
        raise UsageError(
            f"--to openclip: {opened.towers.name} with --force-image-size "
            f"{options.force_image_size}, but OpenCLIP builds timm's towers at their own size, "
            f"{size}, only"
        )
    changes = {
        ("vision_cfg", "patch_dropout"): options.force_patch_dropout,
        ("vision_cfg", "image_size"): options.force_image_size,
        ("vision_cfg", "image_seq_len"): options.image_seq_len if _HAS_LENGTH else None,
        ("text_cfg", "context_length"): options.force_context_length,
    }
    for (part, name), value in changes.items():
        if value is not None:
            config[part][name] = value
    module: Any = opened.towers.module
    if module.logit_bias is not None and config.get("init_logit_bias") is None:
        config["init_logit_bias"] = 0.0  # without it the model would have no bias to load
    return config


# --- ViTs as folders of transformers' CLIPModel ---------------------------------------------------

#: OpenCLIP's settings of a model and its towers that `CLIPModel` has, too, or that make no
#: difference after training. All others must have their defaults.
_SIZES = ("layers", "width", "heads", "head_width", "mlp_ratio", "patch_size", "image_size")
_TOWERS = {*_SIZES, "patch_dropout", "context_length", "vocab_size"}
_PARTS = ("vision_cfg", "text_cfg")
_MODEL = {*_PARTS, "embed_dim", "quick_gelu", "init_logit_scale", "init_logit_bias"}

#: PIL's filters by OpenCLIP's names.
_FILTERS = {"bilinear": 2, "bicubic": 3}

#: Beginnings of OpenCLIP's names of weights, and transformers' names.
_NAMES = {
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.conv1.": "vision_model.embeddings.patch_embedding.",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.ln_pre.": "vision_model.pre_layrnorm.",
    "visual.transformer.resblocks.": "vision_model.encoder.layers.",
    "visual.ln_post.": "vision_model.post_layernorm.",
    "visual.proj": "visual_projection.weight",
    "token_embedding.": "text_model.embeddings.token_embedding.",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "transformer.resblocks.": "text_model.encoder.layers.",
    "ln_final.": "text_model.final_layer_norm.",
    "text_projection": "text_projection.weight",
}
_IN_LAYERS = {
    ".ln_1.": ".layer_norm1.",
    ".attn.": ".self_attn.",
    ".ln_2.": ".layer_norm2.",
    ".mlp.c_fc.": ".mlp.fc1.",
    ".mlp.c_proj.": ".mlp.fc2.",
}


def write_clip(opened: Opened, folder: Path) -> list[str]:
    """Write the model, its tokenizer and image processor; see `Writer`.

    Raises:
        UsageError: `CLIPModel` is another architecture.
    """
    import transformers

    module: Any = opened.towers.module
    config = _model_config(opened)
    pixels = module.visual.preprocess_cfg
    if other := _other_settings(config, pixels):
        raise UsageError(
            f"--to huggingface: {opened.towers.name} has {', '.join(other)}, which CLIPModel of "
            "transformers cannot have; expected --to openclip"
        )
    tokenizer: Any = opened.towers.tokenizer
    model = transformers.CLIPModel(transformers.CLIPConfig(**_config(config, module, tokenizer)))
    notes = save_clip(model, _renamed(module.state_dict()), folder)
    _write_tokenizer(tokenizer, config["text_cfg"]["context_length"], folder)
    processor = _processor(pixels, module.visual.image_size[0])
    write_json(folder / "preprocessor_config.json", processor)
    return [
        *notes,
        "OpenCLIP's tokenizer also repairs texts (curly quotes, HTML entities, broken Unicode), "
        "transformers' does not: such texts have other tokens there",
    ]


def _other_settings(config: dict[str, Any], pixels: dict[str, Any]) -> list[str]:
    """The settings that `CLIPModel` or its image processor does not have."""
    found = [f"{name} {value!r}" for name, value in config.items() if value and name not in _MODEL]
    for part, kind in zip(_PARTS, (CLIPVisionCfg, CLIPTextCfg), strict=True):
        usual = asdict(kind())
        for name, value in asdict(kind(**config[part])).items():
            known = name in _TOWERS and isinstance(value, (int, float))  # no list, as of a ResNet
            if not known and value != usual[name]:
                found.append(f"{part}.{name} {value!r}")
    if pixels["interpolation"] not in _FILTERS:
        found.append(f"interpolation {pixels['interpolation']!r}")
    if pixels["resize_mode"] not in ("shortest", "squash"):
        found.append(f"resize_mode {pixels['resize_mode']!r}")
    return found


def _config(config: dict[str, Any], module: Any, tokenizer: Any) -> dict[str, Any]:
    """The arguments of `CLIPConfig`."""
    shared = {
        "hidden_act": "quick_gelu" if config.get("quick_gelu") else "gelu",
        "projection_dim": config["embed_dim"],
    }
    return {
        "projection_dim": config["embed_dim"],
        "vision_config": {
            **shared,
            **_sizes(module.visual.transformer),
            "image_size": module.visual.image_size[0],
            "patch_size": module.visual.patch_size[0],
        },
        "text_config": {
            **shared,
            **_sizes(module.transformer),
            "vocab_size": module.vocab_size,
            "max_position_embeddings": config["text_cfg"]["context_length"],
            "bos_token_id": tokenizer.sot_token_id,
            "eos_token_id": tokenizer.eot_token_id,
            "pad_token_id": tokenizer.eot_token_id,
        },
    }


def _sizes(transformer: Any) -> dict[str, int]:
    block = transformer.resblocks[0]
    return {
        "hidden_size": transformer.width,
        "intermediate_size": block.mlp.c_fc.out_features,
        "num_hidden_layers": transformer.layers,
        "num_attention_heads": block.attn.num_heads,
    }


def _renamed(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """OpenCLIP's weights under transformers' names, and in its layout."""
    renamed = {}
    for name, value in state.items():
        beginning = next((b for b in _NAMES if name.startswith(b)), "")
        new = _NAMES.get(beginning, "") + name.removeprefix(beginning)
        for old, other in _IN_LAYERS.items():
            new = new.replace(old, other)
        if "in_proj_" in new:
            for part, rows in zip("qkv", value.chunk(3), strict=True):
                renamed[new.replace("in_proj_", f"{part}_proj.")] = rows
        else:
            renamed[new] = value.T if name in ("visual.proj", "text_projection") else value
    return renamed


def _write_tokenizer(tokenizer: Any, context_length: int, folder: Path) -> None:
    """Write OpenCLIP's vocabulary with transformers' names of the two special tokens."""
    begin, end = "<|startoftext|>", "<|endoftext|>"
    special = {tokenizer.sot_token_id: begin, tokenizer.eot_token_id: end}
    vocabulary = {special.get(i, token): i for token, i in tokenizer.encoder.items()}
    write_json(folder / "vocab.json", vocabulary)
    merges = ["#version: 0.2", *map(" ".join, tokenizer.bpe_ranks)]
    (folder / "merges.txt").write_text("\n".join(merges) + "\n", encoding="utf-8")
    settings = {
        "tokenizer_class": "CLIPTokenizer",
        "model_max_length": context_length,
        "bos_token": begin,
        **dict.fromkeys(("eos_token", "pad_token", "unk_token"), end),
    }
    write_json(folder / "tokenizer_config.json", settings)


def _processor(pixels: dict[str, Any], side: int) -> dict[str, Any]:
    """The settings of `CLIPImageProcessor` that OpenCLIP's transform decides."""
    crop = pixels["resize_mode"] == "shortest"
    size = {"height": side, "width": side}
    return {
        "image_processor_type": "CLIPImageProcessor",
        "processor_class": "CLIPProcessor",
        "size": {"shortest_edge": side} if crop else size,
        "resample": _FILTERS[pixels["interpolation"]],
        "do_center_crop": crop,
        "crop_size": size,
        "image_mean": list(pixels["mean"]),
        "image_std": list(pixels["std"]),
    }
