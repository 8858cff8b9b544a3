"""`megabatch bench loss`: forward and backward of a loss, contenders side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from megabatch.benchmarking import launch
from megabatch.benchmarking.contenders import Contender, Loss
from megabatch.benchmarking.inputs import Case
from megabatch.benchmarking.measure import Effort, Result
from megabatch.benchmarking.records import Record, combine


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to measure."""

    loss: Loss
    contenders: Sequence[Contender]
    batch_sizes: Sequence[int]
    width: int
    dtype: str
    device: str
    scale: float
    rounds: int  #: processes for each contender
    effort: Effort

    def cases(self, b: int) -> list[Case]:
        """Every contender at one batch size."""
        return [
            Case(self.loss.name, c.name, self.device, self.dtype, b, self.width, self.scale)
            for c in self.contenders
        ]


def run(plan: Plan, tell: Callable[[str], None]) -> Iterator[list[Record]]:
    """Measure one batch size after the other; gives the records of each.

    Contenders take turns, A B A B, so that a machine that grows slower harms all alike. One that
    did not get through its first round is not tried again.
    """
    for b in plan.batch_sizes:
        cases = plan.cases(b)
        results: dict[Case, list[Result]] = {case: [] for case in cases}
        for turn in range(plan.rounds):
            for case in cases:
                if any(result.status != "ok" for result in results[case]):
                    continue
                tell(f"{case.contender}, b = {b:,}, round {turn + 1} of {plan.rounds}")
                results[case].append(launch.run(case, plan.effort))
        yield [combine(case, results[case], plan.loss.work) for case in cases]
