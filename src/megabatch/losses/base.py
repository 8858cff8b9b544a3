"""Base classes of the losses: shared settings, normalisation and its warning, `repr`."""

from __future__ import annotations

import inspect
import math
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megabatch.losses.arguments import check_flag, check_temperature
from megabatch.similarity import replicated
from megabatch.similarity.arguments import (
    accumulator_dtype,
    check_scalar,
    extremes,
    product_dtype,
)
from megabatch.torch_internals import transforms_active

#: Rows whose lengths are checked.
SAMPLE = 1024

#: Mean distance of rows' lengths from 1 above which rows count as not normalised.
TOLERANCE = 0.1


class ContrastiveLoss(nn.Module):
    """A loss of features that may be normalised first, over the processes of a group.

    Features are floating-point tensors (b, d); row i of each belongs to row i of the others. Under
    autocast they may have any dtypes that it casts. A call returns a scalar in float32 (float64 for
    float64 features), and raises a TypeError or a ValueError that names the argument, what came
    and what was expected.

    Args:
        normalize: scale each row of all features to unit length first, as `F.normalize` does.
        group: processes that share one batch: None for the default group if there is one, "local",
            a process group, or a DeviceMesh of one dimension.
    """

    normalize: bool | None

    def __init__(self, *, normalize: bool = False, group: object = None) -> None:
        super().__init__()
        self.normalize, self.group = check_flag("normalize", normalize), group

    def _operand(self, features: Tensor) -> Tensor:
        """Features as operand of the products: normalised if requested, in autocast's dtype."""
        dtype = product_dtype(features)
        return unit_rows(features, dtype) if self.normalize else features.to(dtype)

    def extra_repr(self) -> str:
        """The constructor's arguments, except submodules, which a module shows itself."""
        names = inspect.signature(type(self)).parameters
        values = {name: getattr(self, name) for name in names if hasattr(self, name)}
        return ", ".join(
            f"{name}={_shown(value)}"
            for name, value in values.items()
            if not isinstance(value, nn.Module)
        )


class TemperatureLoss(ContrastiveLoss):
    """A loss whose logits are similarities divided by a temperature.

    Args:
        temperature: a positive number, or a tensor of shape () or (1,). An `nn.Parameter` is learnt
            and becomes a parameter of this module; any other tensor is moved with the module.
            Calls take `temperature=` in its place.
        normalize: as for `ContrastiveLoss`, False included. None: take features as they are, and
            warn at the first eager call if their lengths are far from 1 (on a GPU at the second, to
            avoid a synchronisation).
        group: as for `ContrastiveLoss`.
    """

    def __init__(
        self, temperature: float | Tensor, *, normalize: bool | None, group: object
    ) -> None:
        super().__init__(normalize=False if normalize is None else normalize, group=group)
        self.normalize = normalize
        temperature = check_temperature(temperature)
        if isinstance(temperature, Tensor) and not isinstance(temperature, nn.Parameter):
            # Not persistent, as a number in its place would not be in a state dict either.
            self.register_buffer("temperature", temperature, persistent=False)
        else:
            self.temperature = temperature
        self._lengths_checked = normalize is not None
        self._deviation: Tensor | None = None  #: on the host; -1 until a GPU's number has arrived

    def _scale(self, temperature: float | Tensor | None, like: Tensor) -> Tensor:
        """1 / temperature, of this call or else of the constructor."""
        given = check_temperature(self.temperature if temperature is None else temperature)
        if temperature is None and not isinstance(given, Tensor):  # on the host: fewer launches
            return check_scalar("temperature", 1 / given, like)
        value = check_scalar("temperature", given, like)
        if temperature is not None:
            value = keep_in_graph(value, self.temperature)
        return replicated(value, self.group).reciprocal()

    def _check_lengths(self, features: Tensor) -> None:
        """Warn once if normalize=None and the first features are far from unit length.

        On a GPU the host does not wait: the first call starts the transfer of one number to the
        host, and the first later call that finds it there warns. Not in traced programs.
        """
        if self._lengths_checked or torch.compiler.is_compiling():
            return
        deviation = _length_deviation(features) if self._deviation is None else self._deviation
        values = None if deviation is None else extremes(deviation)
        if values is None:
            return
        self._lengths_checked = values[0] >= 0 or math.isnan(values[0])
        self._deviation = None if self._lengths_checked else deviation
        if values[0] > TOLERANCE:
            warnings.warn(
                f"{type(self).__name__}: the lengths of rows differ from 1 by {values[0]:.3g} on "
                "average, and this loss takes features as they are. Pass normalize=True for cosine "
                "similarities, as in libraries that normalise, or normalize=False for dot "
                "products.",
                stacklevel=5,  # the caller of the loss
            )


def unit_rows(features: Tensor, dtype: torch.dtype) -> Tensor:
    """Features as `F.normalize` scales them along their last dimension, in `dtype`.

    Computed in float32 (float64 for float64 features), so that half precision rounds once.
    """
    return F.normalize(features.to(accumulator_dtype(features.dtype)), dim=-1).to(dtype)


def _length_deviation(features: Tensor) -> Tensor | None:
    """Mean distance of rows' lengths from 1, on the host; None if there are none to check."""
    if type(features) not in (Tensor, nn.Parameter) or not features.numel():
        return None
    if features.device.type not in ("cpu", "cuda") or transforms_active():
        return None
    if features.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    rows = features.detach()[:SAMPLE]
    lengths = torch.linalg.vector_norm(rows, dim=-1, dtype=accumulator_dtype(rows.dtype))
    deviation = (lengths - 1).abs().mean()
    if not features.is_cuda:
        return deviation
    arrived = torch.full_like(deviation, -1, device="cpu", pin_memory=True)
    return arrived.copy_(deviation, non_blocking=True)


def keep_in_graph(value: Tensor, *unused: Any) -> Tensor:
    """`value`, with zero gradients for trainable tensors that it does not depend on.

    DDP waits for a gradient of every parameter. The sum over an empty slice is 0, and so is its
    gradient, even if the tensor contains NaN.
    """
    for tensor in unused:
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            value = value + torch.atleast_1d(tensor)[:0].sum().to(value)
    return value


def _shown(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    number = value.device.type if value.is_meta else f"{value.detach().float().item():.6g}"
    return f"{number} (learnt)" if value.requires_grad else number
