"""Whether the ranks' weights drift apart, as they do where nothing averages their gradients."""

from __future__ import annotations

import math
import struct
import warnings
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

#: Training steps at whose beginning weights are compared: after the first update, and later, since
#: there may be several steps to one update.
STEPS = (2, 10)
#: Parameters compared.
PARAMETERS = 4
#: Sums of equal weights may differ so much, relatively, from one kind of GPU to another.
TOLERANCE = 1e-9

_NOTHING = [0] * PARAMETERS


class DriftCheck:
    """Compares a few parameters over the ranks, and warns once if they differ.

    What is compared are sums of elements. They travel with what the ranks tell each other in each
    step; a GPU is waited for at the steps of `STEPS` alone.
    """

    def __init__(self) -> None:
        self._step = 0
        self._compared: list[str] = []
        self._warned = False

    def numbers(self, parameters: Iterable[tuple[str, Tensor]]) -> list[int]:
        """This rank's part of the exchange at the next training step, always as many numbers.

        Args:
            parameters: with their names, in the same order on each rank.
        """
        self._step += 1
        self._compared = []
        if self._step not in STEPS or self._warned:
            return _NOTHING
        chosen = _spread([(name, p) for name, p in parameters if _replicated(p)])
        self._compared = [name for name, _ in chosen]
        sums = [float(p.detach().sum(dtype=torch.float64)) for _, p in chosen]
        return [*map(_bits, sums), *_NOTHING[len(sums) :]]

    def compare(self, table: Sequence[Sequence[int]], ranks: Sequence[int]) -> None:
        """Warn, on the first rank, if the numbers in the table's rows differ, one row a rank."""
        for name, *bits in zip(self._compared, *table, strict=False):
            sums = [_number(value) for value in bits]
            other = next((i for i in range(len(sums)) if not _close(sums[i], sums[0])), None)
            if other is None:
                continue
            self._warned = True
            if ranks[0] == torch.distributed.get_rank():
                warnings.warn(self._message(name, ranks, sums, other), stacklevel=4)
            return

    def _message(self, name: str, ranks: Sequence[int], sums: Sequence[float], other: int) -> str:
        return (
            f"GradientCache: the weights of the ranks differ at the beginning of step {self._step}:"
            f" the elements of {name} add up to {sums[0]:.9g} on rank {ranks[0]} and "
            f"{sums[other]:.9g} on rank {ranks[other]}, a difference of "
            f"{abs(sums[0] - sums[other]):.3g}. Nothing seems to average gradients over the ranks: "
            "wrap each encoder, or the model that has them, in DistributedDataParallel or "
            "fully_shard, and start all ranks from the same weights; or pass group='local' if "
            "each rank is to train weights of its own"
        )


def _replicated(parameter: Tensor) -> bool:
    """Whether each rank should hold the same: no shard of DTensor, FSDP, DeepSpeed or Megatron."""
    return (
        parameter.requires_grad
        and parameter.is_floating_point()
        and parameter.numel() > 0
        and not hasattr(parameter, "device_mesh")
        and not hasattr(parameter, "_fsdp_flattened")
        and not hasattr(parameter, "ds_id")
        and not getattr(parameter, "tensor_model_parallel", False)
    )


def _spread(parameters: list[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """The first, the last, and as many between them as are compared."""
    last = len(parameters) - 1
    places = {round(i * last / (PARAMETERS - 1)) for i in range(PARAMETERS)} if parameters else ()
    return [parameters[i] for i in sorted(places)]


def _close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=TOLERANCE) or (math.isnan(a) and math.isnan(b))


def _bits(number: float) -> int:
    (bits,) = struct.unpack("q", struct.pack("d", number))
    return int(bits)


def _number(bits: int) -> float:
    (number,) = struct.unpack("d", struct.pack("q", bits))
    return float(number)
