"""open_clip's models, with their own configurations, transforms and tokenizers."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from megabatch.errors import UsageError, one_line
from megabatch.models import weights as files
from megabatch.models.images import multiply_patches, with_bytes
from megabatch.models.towers import ModelOptions, Towers

#: Prefix of the name of a folder that open_clip saved, as in open_clip.
FOLDER = "local-dir:"
_CONFIG = "open_clip_config.json"


def create(name: str, weights: Path | None, options: ModelOptions) -> Towers:
    """Build an open_clip model by name, or "local-dir:PATH".

    Args:
        name: as above.
        weights: a file from `weights.find`, or None; always None for a folder, which has its own.
        options: changes to the model's own configuration.

    Raises:
        UsageError: open_clip cannot build the model here, or the weights are another model's.
    """
    import open_clip

    from megabatch.models.short_texts import accept_short_texts

    if options.given("hf_pooling", "hf_share"):
        raise UsageError(f"--hf-pooling, --hf-share: {name} is not an 'hf:' model")
    config = read_config(name)
    if name.startswith(FOLDER):
        if weights is not None:
            raise UsageError(f"--pretrained: {name} has its own weights; leave out this option")
        weights = files.find(Path(name.removeprefix(FOLDER)))
    if "multimodal_cfg" in config:
        raise UsageError(f"--model: {name} also writes captions (CoCa), expected two towers")
    stored = set() if weights is None else files.names(weights)
    with _without_warnings(), _without_questions(config):
        try:
            module, train_transform, eval_transform = open_clip.create_model_and_transforms(
                name,
                pretrained=None if weights is None else str(weights.absolute()),
                pretrained_image=False,  # these two would download
                pretrained_text=False,
                output_dict=True,
                force_patch_dropout=options.force_patch_dropout,
                force_image_size=options.force_image_size,
                force_context_length=options.force_context_length,
                **_initial_values(options, config, stored),
            )
        except Exception as error:
            # Its type depends on the architecture's own library and on the weights.
            raise UsageError(_could_not_build(name, weights, error)) from error
        tokenizer = _tokenizer(name, config, options.force_context_length)
    if weights is not None and not name.startswith(FOLDER):
        _check_origin(name, weights, config, module.visual.preprocess_cfg)
    kinds = {type(part).__name__ for part in module.visual.modules()}
    if options.force_patch_dropout and not any("PatchDropout" in kind for kind in kinds):
        raise UsageError(f"--force-patch-dropout: the image tower of {name} drops no patches")
    bias = module.logit_bias
    if weights is not None and bias is not None and "logit_bias" not in stored:
        start = options.init_logit_bias
        # open_clip starts it at 0, where negative pairs make up most of a sigmoid loss.
        torch.nn.init.constant_(
            bias, config.get("init_logit_bias", 0.0) if start is None else start
        )
    multiply_patches(module.visual)
    transforms = with_bytes(module.visual, train_transform, eval_transform)
    lengths = accept_short_texts(module)
    return Towers(
        name,
        module.train(),
        *transforms,
        tokenizer,
        config["embed_dim"],
        lengths={} if lengths is None else {"text": lengths},
    )


def read_config(name: str) -> dict[str, Any]:
    """A new copy of the configuration of a model that `create` takes, as open_clip has it.

    Raises:
        UsageError: a folder's configuration cannot be read.
    """
    import open_clip

    if not name.startswith(FOLDER):
        config: dict[str, Any] = open_clip.get_model_config(name)
        return config
    path = Path(name.removeprefix(FOLDER)) / _CONFIG
    try:
        stored: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["model_cfg"]
        return stored
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"--model: {path} cannot be used: {one_line(error, 240)}") from error


def _check_origin(
    name: str, weights: Path, config: dict[str, Any], preprocessing: dict[str, Any]
) -> None:
    """Check that weights had the same activation and pixels where they come from.

    Weights fit a model with others as well. The folder that open_clip saved for the hub says which
    they had.

    Raises:
        UsageError: they had others.
    """
    from open_clip.transform import PreprocessCfg, merge_preprocess_dict

    folder = weights.parent
    if not (folder / _CONFIG).is_file():
        return
    saved = read_config(f"{FOLDER}{folder}")
    pixels = json.loads((folder / _CONFIG).read_text(encoding="utf-8")).get("preprocess_cfg")
    theirs = merge_preprocess_dict(PreprocessCfg(), pixels or {})
    theirs["quick_gelu"] = saved.get("quick_gelu", False)
    ours = {**preprocessing, "quick_gelu": config.get("quick_gelu", False)}
    compared = ("quick_gelu", "mean", "std", "interpolation", "resize_mode")
    other = [
        f"{key} {theirs[key]} instead of {ours[key]}"
        for key in compared
        if json.dumps(theirs[key]) != json.dumps(ours[key])  # lists are tuples in JSON
    ]
    if other:
        raise UsageError(
            f"--pretrained: {folder} was saved with another configuration than {name}: "
            f"{', '.join(other)}; expected --model {FOLDER}{folder}, which includes its own"
        )


def _initial_values(
    options: ModelOptions, config: dict[str, Any], stored: set[str]
) -> dict[str, float]:
    """Initial scale and bias; with a bias in the weights, the model gets one."""
    names = ("init_logit_scale", "init_logit_bias")
    values = {name: getattr(options, name) for name in names}
    given = {name: value for name, value in values.items() if value is not None}
    if "logit_bias" in stored and config.get("init_logit_bias") is None:
        given.setdefault("init_logit_bias", 0.0)
    return given


def _could_not_build(name: str, weights: Path | None, error: Exception) -> str:
    reason = one_line(error, 240)
    if weights is None:
        return f"--model: open_clip cannot build {name} here: {reason}"
    return f"--pretrained: {weights} does not hold the weights of {name}: {reason}"


def _tokenizer(
    name: str, config: dict[str, Any], context_length: int | None
) -> Callable[[Any], torch.Tensor]:
    import open_clip

    text = config.get("text_cfg", {})
    try:
        if text.get("hf_tokenizer_name"):
            # A folder's configuration could ask transformers to run code of the folder.
            tokenizer: Callable[[Any], torch.Tensor] = open_clip.get_tokenizer(
                name, context_length=context_length, trust_remote_code=False
            )
            return tokenizer
        return _own_tokenizer(name, context_length, json.dumps(text, sort_keys=True))
    except Exception as error:  # Hugging Face tokenizers: not installed, not in the local cache ...
        raise UsageError(f"--model: the tokenizer of {name}: {one_line(error, 240)}") from error


@functools.lru_cache(maxsize=8)
def _own_tokenizer(
    name: str, context_length: int | None, configuration: str
) -> Callable[[Any], torch.Tensor]:
    """A tokenizer with open_clip's own vocabulary, made once for each configuration of texts.

    Reading the vocabulary takes most of the time of creating a small model, and a run creates its
    model several times: to plan, to train and to evaluate it.
    """
    import open_clip

    tokenizer: Callable[[Any], torch.Tensor] = open_clip.get_tokenizer(
        name, context_length=context_length
    )
    return tokenizer


@contextlib.contextmanager
def _without_questions(config: dict[str, Any]) -> Iterator[None]:
    """Keep transformers from asking the user whether to run the code of a text tower's folder.

    transformers asks the user unless `trust_remote_code` is passed, and open_clip does not pass it.
    """
    if not config.get("text_cfg", {}).get("hf_model_name"):
        yield
        return
    try:
        from transformers import dynamic_module_utils as settings
    except ImportError:  # open_clip says so
        yield
        return
    before = settings.TIME_OUT_REMOTE_CODE
    settings.TIME_OUT_REMOTE_CODE = 0  # seconds to answer; then it is refused
    try:
        yield
    finally:
        settings.TIME_OUT_REMOTE_CODE = before


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Silence open_clip, which warns through the root logger that random weights are random."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
