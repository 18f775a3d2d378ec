"""What a run needs and how long it takes, before it runs.

A plan is a dry run: the model is made in a real space on torch's "meta" device and takes real steps, whose operators
compute nothing. The pager decides as it always does; disks, links and ranks are modelled, in virtual time. So there
is no second description of what the pager would do, and a model of any size can be planned on any machine.

    machine = zeropage.plan.Machine.load("dgx-2")
    program = zeropage.plan.transformer(layers=48, hidden=1600, batch=4)
    print(zeropage.plan.simulate(program, {"parameters": "disk", "optimizer": "disk"}, machine))

`zeropage plan` does the same from the command line.
"""

from zeropage.plan._costs import CostModel, MeasuredCosts, Roofline
from zeropage.plan._fit import Budgets, FitResult, fit, least_budgets
from zeropage.plan._machine import Machine
from zeropage.plan._programs import OPTIMIZERS, Program, from_transformers, load_program, transformer
from zeropage.plan._simulate import Plan, simulate

__all__ = [
    "OPTIMIZERS",
    "Budgets",
    "CostModel",
    "FitResult",
    "Machine",
    "MeasuredCosts",
    "Plan",
    "Program",
    "Roofline",
    "fit",
    "from_transformers",
    "least_budgets",
    "load_program",
    "simulate",
    "transformer",
]
