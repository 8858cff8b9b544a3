"""What a run will take of each GPU's memory, before it starts. `megabatch plan` is its command."""

from megabatch.planning.machine import Machine, this_machine
from megabatch.planning.plan import NoPlan, Plan, make_plan
from megabatch.planning.show import print_plan, to_json

__all__ = ["Machine", "NoPlan", "Plan", "make_plan", "print_plan", "this_machine", "to_json"]
