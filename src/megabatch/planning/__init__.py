"""Estimates of a run's memory and time, before it starts, as `megabatch plan` prints."""

from typing import TYPE_CHECKING

from megabatch.imports import lazy

if TYPE_CHECKING:
    from megabatch.planning.machine import Machine, this_machine
    from megabatch.planning.plan import NoPlan, Plan, make_plan
    from megabatch.planning.show import print_plan

__all__ = ["Machine", "NoPlan", "Plan", "make_plan", "print_plan", "this_machine"]

__getattr__ = lazy(__name__)
