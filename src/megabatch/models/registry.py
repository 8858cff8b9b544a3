"""Models by name, and those that a function of the user's own makes."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from megabatch.errors import UsageError, as_usage_error
from megabatch.models import names, own_code, weights
from megabatch.models.towers import ModelOptions, Towers
from megabatch.options import is_reference


def create(
    name: str, *, pretrained: str | Path | None = None, options: ModelOptions | None = None
) -> Towers:
    """Build a model in float32 on the CPU, in training mode.

    Random weights come from torch's global generator, so seed it first for a reproducible start.
    Weights are never downloaded, and no code from a pickle is run. If an architecture's tokenizer
    or text tower is Hugging Face's, its library looks for their configuration in the local cache
    and then online, unless HF_HUB_OFFLINE=1 is set.

    Args:
        name: one of `available()`; "local-dir:PATH", a folder that open_clip saved for the hub
            (open_clip_config.json and weights); or "hf:PATH", a folder that transformers saved: a
            model of images and texts with tokenizer and image processor, or a text encoder and its
            tokenizer, for pairs of texts. Without weights in the folder they are random. Or
            "module:function", a function whose code is run and that returns `Towers`.
        pretrained: the model's weights: a .safetensors file such as the `model.safetensors` of a
            run or one that open_clip publishes; a file of OpenCLIP's trainer or of torch; or a
            run's folder.
        options: changes to the model's own configuration.

    Raises:
        UsageError: there is no such model, it cannot be trained here or does not have these
            options, or its weights are missing, damaged or another model's.
    """
    options = options or ModelOptions()
    names.check(name)
    if options.multi_vector and not names.is_text_encoder(name):
        raise UsageError(f"--loss maxsim: expected a text encoder (hf:PATH), got --model {name}")
    file = None if pretrained is None else weights.find(Path(pretrained))
    if is_reference(name):
        towers = _create_own(name, options)
    # The other kinds import their libraries, which take seconds.
    elif name == names.GLYPH:
        from megabatch.models import glyph

        towers = glyph.create(options)
    elif name.startswith(names.HUGGING_FACE):
        from megabatch.models import hf_images, huggingface

        folder = Path(name.removeprefix(names.HUGGING_FACE))
        with _quietly(), as_usage_error(f"--model: {folder} cannot be read"):
            config = huggingface.read_config(folder)
            has_images = hasattr(config, "vision_config") and hasattr(config, "text_config")
            module = hf_images if has_images else huggingface
            towers = module.create(name, folder, config, options)
    else:
        from megabatch.models import openclip

        with _quietly():
            return openclip.create(name, file, options)
    if file is not None:
        weights.load_model(towers.module, file, name)
    towers.module.train()
    return towers


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Keep open_clip and transformers from reporting random or unused weights, and from asking.

    open_clip does not pass `trust_remote_code`: transformers would ask the user whether to run the
    code of a text tower's folder.
    """
    with contextlib.ExitStack() as stack:
        stack.callback(logging.disable, logging.root.manager.disable)
        logging.disable(logging.WARNING)
        with contextlib.suppress(ImportError):  # told where it is needed
            from transformers import dynamic_module_utils as asking
            from transformers.utils.logging import disable_progress_bar

            disable_progress_bar()
            stack.callback(setattr, asking, "TIME_OUT_REMOTE_CODE", asking.TIME_OUT_REMOTE_CODE)
            asking.TIME_OUT_REMOTE_CODE = 0  # seconds to answer; then it is refused
        yield


def _create_own(name: str, options: ModelOptions) -> Towers:
    """Call the function that a reference names, with `options` if it has such a parameter.

    Raises:
        UsageError: there is no such function, it fails, or it returns anything but usable `Towers`.
    """
    label = f"--model {name}"
    function = own_code.load(name, "model")
    if "options" not in own_code.accepted(function, ("options",), label):
        options.refuse(f"{label}, a function without the parameter options,", *vars(options))
    towers = own_code.call(function, label, options=options)
    if not isinstance(towers, Towers):
        got = type(towers).__name__
        raise UsageError(f"{label}: expected to return megabatch.models.Towers, got {got}")
    return replace(towers, name=name)
