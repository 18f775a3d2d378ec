"""Importing zeropage changes no attribute of other libraries. The first space does, the last one restores them."""

import gc
import json
import subprocess
import sys

import pytest
import torch

import zeropage
from zeropage import _integrations

pytestmark = pytest.mark.cpu

LIBRARIES = ["torch", "transformers", "peft", "accelerate", "lightning", "safetensors"]

CHILD = """
import contextlib, gc, importlib, json, sys, weakref

LIBRARIES = json.loads(sys.argv[1])
SUBMODULES = [
    "torch._inductor.output_code", "torch.distributed.fsdp", "torch.distributed.checkpoint", "safetensors.torch",
    "transformers.trainer", "transformers.modeling_utils", "peft", "peft.tuners.tuners_utils",
    "accelerate.checkpointing", "lightning.pytorch.strategies",
]
for name in LIBRARIES + SUBMODULES:
    with contextlib.suppress(ImportError):
        importlib.import_module(name)

def attributes(modules):
    found = {}
    for module in modules:
        for name, value in list(vars(module).items()):
            found[f"{module.__name__}:{name}"] = value
            if isinstance(value, type) and value.__module__.split(".")[0] in LIBRARIES:
                for attribute, content in list(vars(value).items()):
                    found[f"{value.__module__}.{value.__qualname__}.{attribute}"] = content
    return found

def differing():
    now = attributes(modules)
    return sorted(
        name for name in {*now, *before}
        if before.get(name, missing) is not now.get(name, missing)
        and not name.endswith(("__warningregistry__", "_abc_impl", "RemovableHandle.next_id"))
        and name.replace(":", ".") not in sys.modules  # a submodule that was imported meanwhile
    )

def step(model):
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()

import torch
step(torch.nn.Linear(64, 64))  # torch keeps notes of its own in attributes
early = torch.optim.AdamW(torch.nn.Linear(64, 64).parameters())
scheduler = torch.optim.lr_scheduler.ConstantLR(early)  # gives the optimizer a step() of its own
own_step = early.step
gone = type("Gone", (), {})()
proxy = weakref.proxy(gone)  # whose object is gone
del gone
missing = object()
modules = [m for n, m in sys.modules.items() if n.split(".")[0] in LIBRARIES and hasattr(m, "__dict__")]
before = attributes(modules)
import zeropage
at_import = differing()

def use(end):
    settings = dict(device="cpu", device_memory="8MB", host_memory="32MB", parameters="host", min_page_bytes=1)
    with zeropage.init(**settings) as space:
        model = torch.nn.Linear(64, 64)
    step(model)
    assert early.step is not own_step and early.step.zeropage
    early.step()
    inside = differing()
    kept = model.state_dict()["weight"] if end == "tensor" else None
    if end == "close":
        space.close()
    return inside, kept

said = {"import": at_import}
for end in ("close", "collected", "tensor"):
    said[end + " inside"], kept = use(end)
    gc.collect()
    if kept is not None:
        said["with a tensor left"] = differing()
        kept.tolist()
        del kept
        gc.collect()
    gc.collect()
    said[end] = differing()
    assert early.step is own_step
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def said():
    run = subprocess.run([sys.executable, "-c", CHILD, json.dumps(LIBRARIES)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(run.stdout)


def test_importing_zeropage_changes_no_attribute(said):
    assert said["import"] == []


@pytest.mark.parametrize("end", ["close", "collected", "tensor"])
def test_the_last_space_leaves_every_attribute_as_it_was(end, said):
    assert len(said[f"{end} inside"]) > 20
    assert said[end] == []


def test_changes_stay_while_a_tensor_outlives_its_space(said):
    assert "torch.Tensor.tolist" in said["with a tensor left"]


def test_every_attribute_that_changes_is_declared_with_a_reason(said):
    declared = {name for change in _integrations.changes() for name in change.attributes}
    changed = {name.replace(":", ".") for name in said["close inside"]}
    # A class or function is reached by several names, and each optimizer class has a step() of its own.
    undeclared = {name for name in changed - declared if not name.endswith(".step")}
    assert {name.rsplit(".", 1)[-1] for name in undeclared} <= {name.rsplit(".", 1)[-1] for name in declared}
    assert all(change.why and change.library in LIBRARIES for change in _integrations.changes())


def test_an_attribute_that_another_library_has_replaced_since_is_left_alone(monkeypatch):
    with zeropage.init(device="cpu", device_memory="8MB", host_memory="8MB") as space:
        ours = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: ours(self))
    space.close()
    del space
    gc.collect()
    if not _integrations.in_force():  # no other test's space is left
        assert torch.Tensor.tolist is not ours
    assert torch.ones(2).tolist() == [1.0, 1.0]


ORDERS = """
import importlib, json, sys
import zeropage
from zeropage import _integrations

def bring_in():
    for name in json.loads(sys.argv[1]):
        importlib.import_module(name)

if sys.argv[2] == "before":
    bring_in()
space = zeropage.init(device="cpu", device_memory="8MB", host_memory="8MB")
first = _integrations.in_force()
if sys.argv[2] == "after":
    bring_in()
inside = _integrations.in_force()
space.close()
print(json.dumps([sorted(first), sorted(inside), sorted(_integrations.in_force())]))
"""


def test_a_library_that_comes_after_the_first_space_is_changed_alike():
    libraries = [
        *("transformers.trainer", "transformers.modeling_utils", "peft", "peft.tuners.tuners_utils"),
        *("accelerate.checkpointing", "safetensors.torch", "torch.distributed.checkpoint", "lightning.pytorch"),
    ]
    said = {}
    for order in ("before", "after"):
        command = [sys.executable, "-c", ORDERS, json.dumps(libraries), order]
        ran = subprocess.run(command, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr[-4000:]
        said[order] = json.loads(ran.stdout.splitlines()[-1])
    (_, before, left_before), (first, after, left_after) = said["before"], said["after"]
    assert left_before == left_after == []
    own_steps = {name for name in {*before, *after} if name.endswith(".step")}  # of optimizer classes that exist
    assert set(before) - own_steps == set(after) - own_steps
    assert len(set(after) - set(first)) > 5
