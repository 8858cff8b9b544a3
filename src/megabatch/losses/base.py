"""Base classes of the losses: shared settings and their `repr`."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from megabatch.losses.arguments import check_flag, check_temperature
from megabatch.losses.normalization import LengthWarning, unit_rows
from megabatch.similarity.arguments import check_scalar, product_dtype
from megabatch.similarity.distributed.means import replicated


class ContrastiveLoss(nn.Module):
    """A loss of features that may be normalised first, over the processes of a group.

    Args:
        normalize: scale each row of the features to unit length, as `F.normalize` does.
        group: processes that share one batch: None, "local", a process group or a DeviceMesh.
    """

    #: Names of the attributes that `repr` shows.
    settings: ClassVar[tuple[str, ...]] = ("normalize", "group")

    def __init__(self, *, normalize: bool | None, group: object) -> None:
        super().__init__()
        check_flag("normalize", normalize, optional=True)
        self.normalize, self.group = normalize, group

    def _operands(self, *features: Any) -> tuple[Any, ...]:
        """Features as operands of the products: normalised if requested, in autocast's dtype."""
        return tuple(None if f is None else self._operand(f) for f in features)

    def _operand(self, features: Tensor) -> Tensor:
        dtype = product_dtype(features)
        return unit_rows(features, dtype) if self.normalize else features.to(dtype)

    def extra_repr(self) -> str:
        """The settings, for `repr`."""
        return shown(self, self.settings)


class TemperatureLoss(ContrastiveLoss):
    """A loss whose logits are similarities divided by a temperature.

    Args:
        temperature: a positive number, or a tensor of shape () or (1,). An `nn.Parameter` is learnt
            and becomes a parameter of this module; any other tensor is moved with the module.
        normalize, group: see `ContrastiveLoss`.
    """

    settings = ("temperature", *ContrastiveLoss.settings)

    def __init__(
        self, temperature: float | Tensor, *, normalize: bool | None, group: object
    ) -> None:
        super().__init__(normalize=normalize, group=group)
        temperature = check_temperature(temperature)
        if isinstance(temperature, Tensor) and not isinstance(temperature, nn.Parameter):
            # Not persistent, as a number in its place would not be in a state dict either.
            self.register_buffer("temperature", temperature, persistent=False)
        else:
            self.temperature = temperature
        self._lengths = LengthWarning()

    def _scale(self, temperature: float | Tensor | None, like: Tensor) -> Tensor:
        """1 / temperature, of this call or else of the constructor."""
        given = check_temperature(self.temperature if temperature is None else temperature)
        value = check_scalar("temperature", given, like)
        if temperature is not None:
            value = keep_in_graph(value, self.temperature)
        return replicated(value, self.group).reciprocal()

    def _look_at_lengths(self, features: Tensor) -> None:
        """Warn at the first eager call if rows are not normalised and `normalize` is None."""
        if self.normalize is None:
            self._lengths.look(features, type(self).__name__)


def keep_in_graph(value: Tensor, *unused: Any) -> Tensor:
    """`value`, with zero gradients for trainable tensors that it does not depend on.

    DDP waits for a gradient of every parameter. The sum over an empty slice is 0, and so is its
    gradient, even if the tensor contains NaN.
    """
    for tensor in unused:
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            nothing = (tensor if tensor.dim() else tensor[None])[:0]
            value = value + nothing.sum().to(value)
    return value


def shown(module: nn.Module, settings: tuple[str, ...]) -> str:
    """Settings of a module for `repr`, except submodules, which it shows itself."""
    values = {name: getattr(module, name) for name in settings}
    return ", ".join(
        f"{name}={_shown(value)}"
        for name, value in values.items()
        if not isinstance(value, nn.Module)
    )


def _shown(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    number = value.device.type if value.is_meta else f"{value.detach().float().item():.6g}"
    return f"{number} (learnt)" if value.requires_grad else number
