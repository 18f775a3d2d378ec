"""Plan a run: its memory, disk space and time, before it runs.

A plan is a dry run. The model is built in a real space on torch's "meta" device and takes real steps, but operators
compute nothing. The pager decides as in a real run; disks, links and ranks are simulated in virtual time. Any machine
can therefore plan a model of any size, and no second model of the pager is needed.

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
