"""Run the statements of a training program, plain or paged, and say where two runs differ.

A statement's outcome is the class of the exception that it raised, all that it looked at, and the state of the random
number generator after it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import io
import linecache
import os
import random
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch._dynamo  # which the first optimizer imports: once for all workers
import torch.nn as nn
import torch.nn.functional as F
import torch.nn.utils.prune
import torch.optim.swa_utils
import torch.utils.checkpoint
import training_programs
from execution import NAMES, Run
from training_programs import Program

import zeropage

Looked = list[tuple[str, Any]]
Outcome = tuple[str, str, Looked, torch.Tensor]  # class and message of an exception, …, random numbers' state
RESIDENT = {
    **{role: "device" for role in ("parameters", "gradients", "optimizer")},
    **{
        "device_memory": "512MB",
        "host_memory": "512MB",
        "tiling": "off",
        "async_step": False,
        "early_update": "never",
    },
    **{"activations": "device", "memory": "auto", "optimizer_device": "auto"},
}
# Refusals by design, with words of zeropage's error for each.
REFUSALS = {
    "budget": "cannot hold",
    "raw memory": "zeropage.pinned(",
    "second derivative in tiles": "a second derivative by a weight that is taken in tiles",
    "a cast weight in tiles is written before backward": "no cast of it is kept for autocast",
    "growth": "keeps the size it was made with",
    "other parameters": "or they are others",  # a checkpoint knows an optimizer's parameters by name
    # A recomputation on ordinary memory saves a matrix where tiles have saved it as the only one of a batch.
    "a tiled weight leaves its page before a recomputation": "saved metadata: {'shape': torch.Size([1, ",
    "written before backward under save_on_cpu": "a paged tensor of [",  # which keeps no second copy
}
# A norm's squares are added in another order, and tensors smaller than min_page_bytes have moments in fewer bits too.
ROUNDS_OVER_RANKS = re.compile("norm|Adafactor|optimizer_dtype")
WIDER_GRADIENT = re.compile(r"gradient.*: torch\.float32 \[.*\] for torch\.(b?float16) ")
OTHER_NUMBERS = " elements,"  # in what tells of them
OTHER_DATA = re.compile(r"\.data = torch\.zeros_like|model\.(double|half)\(\)")
REFUSALS_OVER_RANKS = {
    "sparse gradients": "are not summed over ranks",
    "second derivatives in p.grad": "is not summed over ranks",
    "parameters outside the space": "over ranks nothing sums their gradients",
    "a page of fewer rows": "are needed at once; raise device_memory",
    "gradients of a failed backward": "ended in an error before ranks had summed it",
}
# A saved tensor is written before backward: plain PyTorch raises, paged activations keep what was saved.
SAVED = "modified by an inplace operation"


class Twin:
    """Mixed precision by hand: a low-precision model and its masters."""

    def __init__(self, high: nn.Module, seen: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.high, self.low, self.seen = high, copy.deepcopy(high), seen
        self.versions: dict[nn.Parameter, int] = {}  # of masters, as they are shown
        for low, master in self._pairs():
            low.grad = None
            low.data = seen(master.detach())
            low.grad_dtype = None  # as operators make it
            low.register_post_accumulate_grad_hook(functools.partial(self._widen, master))

    def _pairs(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        return zip(self.low.parameters(), self.high.parameters(), strict=True)

    @staticmethod
    def _widen(master: nn.Parameter, low: torch.Tensor) -> None:
        assert low.grad is not None
        if master.grad is None:
            master.grad = low.grad.float()
        else:
            master.grad.add_(low.grad)
        low.grad = None

    def follow(self) -> None:
        self.low.train(self.high.training)
        for low, master in self._pairs():
            low.requires_grad_(master.requires_grad)
            if self.versions.get(master, master._version) != master._version:
                with torch.no_grad():
                    low.copy_(self.seen(master.detach()))
            else:  # the program may have written it in a way that PyTorch does not count
                low.data.copy_(self.seen(master.detach()))
            self.versions[master] = master._version


class TrainingRun(Run):
    """One execution. `mode` is "plain", "paged", "hand" or "resident"; see `training_programs.Program`."""

    def __init__(self, program: Program, mode: str, folder: str, is_off: bool = False) -> None:
        super().__init__(program.text(), program.seed, mode)
        self.over_ranks = self.ranks > 1
        self.rounds_means = self.ranks.bit_count() > 1  # a third of three equal numbers may be another one
        self.rank, self.ranks = 0, 1  # all ranks have the same data
        self.program, self.folder, self.saves = program, folder, 0
        self.is_off = is_off  # parameters are to begin a little off
        self.twins: list[Twin] = []
        self.looked: Looked = []

    @property
    def is_paged(self) -> bool:
        return self.mode in ("paged", "resident")

    # The methods that the program's text calls.

    @contextlib.contextmanager
    def _plain_scope(self) -> Iterator[None]:
        yield

    def make_space(self, **settings: Any) -> Any:
        if not self.is_paged:
            return self._plain_scope()
        if self.mode == "resident":
            settings |= RESIDENT
        if self.over_ranks and self.mode == "paged":
            settings["stage"] = random.Random(f"{self.seed} stage").choice([0, 1, 2, 3, 3])
            nodes = random.Random(f"{self.seed} nodes")
            if settings["stage"] == 3 and nodes.random() < 0.4:  # each rank is a node
                settings |= {"node_ranks": 1, "secondary_partition": nodes.choice(["host", "disk"])}
        if "disk" in settings.values():
            settings["disk_path"] = self.stack.enter_context(
                tempfile.TemporaryDirectory(dir=self.folder, prefix="swap-")
            )
        # Half of the programs leave updates to forward, as they would on a slower disk.
        leaves = {"ZEROPAGE_LEAVE_UPDATES": str(self.seed)} if self.seed % 2 else {}
        # A reference is one process: no rank knows of the others.
        alone = self.over_ranks and self.mode == "resident"
        no_groups = mock.patch("zeropage._space.find_groups", lambda *_: zeropage._ranks.Groups())
        with mock.patch.dict(os.environ, leaves), no_groups if alone else contextlib.nullcontext():
            self.spaces.append(zeropage.init(device="cpu", **settings))
        return self.spaces[-1]

    def page(self, model: nn.Module, **settings: Any) -> nn.Module:
        return zeropage.page(model, self.make_space(**settings)) if self.is_paged else model

    def evict(self, what: Any) -> None:
        if self.is_paged:
            zeropage.page_out(what)

    def wait(self) -> None:
        if self.is_paged:
            zeropage.synchronize()

    def pinned(self, tensor: torch.Tensor) -> Any:
        return zeropage.pinned(tensor) if self.is_paged else contextlib.nullcontext(tensor)

    def labels(self, at: int, rows: int, many: int) -> torch.Tensor:
        return self.tokens(at + 7, rows, 1, many)[:, 0]

    def save(self, model: nn.Module, opt: torch.optim.Optimizer, background: bool = False) -> Any:
        """A checkpoint's folder; plain, copies of the states."""
        if any(torch.nn.parameter.is_lazy(p) for p in model.parameters()):
            raise ValueError("a checkpoint holds no parameter without a shape")
        if not self.is_paged:
            return copy.deepcopy((model.state_dict(), opt.state_dict()))
        opt.state_dict()  # raises where the program has broken the optimizer
        if self.over_ranks and self.mode == "paged":
            folder, self.saves = f"{self.folder}/checkpoint-{self.seed}-{self.saves}", self.saves + 1
            self.stack.callback(shutil.rmtree, folder, ignore_errors=True)
        else:
            folder = self.stack.enter_context(
                tempfile.TemporaryDirectory(dir=self.folder, prefix="checkpoint-", ignore_cleanup_errors=True)
            )
        zeropage.save(f"{folder}/saved", model, opt, background=background)
        return f"{folder}/saved"

    def load(self, saved: Any, model: nn.Module, opt: torch.optim.Optimizer, forget: bool = False) -> None:
        """Load it, all or nothing. `forget`: delete the folder, which pages may still be in."""
        if self.is_paged:
            opt.state_dict()  # as in save()
            try:
                zeropage.load(saved, model, opt, restore_rng=False)
            except zeropage.ZeropageError as error:
                if type(error) is not zeropage.ZeropageError:
                    raise
                raise ValueError(f"the states do not fit: {error}") from error
            if forget:
                if self.over_ranks and self.mode == "paged":
                    torch.distributed.barrier()  # all have loaded
                shutil.rmtree(saved, ignore_errors=self.over_ranks)
            return
        states, groups = copy.deepcopy(saved)
        shapes = [
            {k: t.shape if torch.is_tensor(t) else None for k, t in of.items()} for of in (states, model.state_dict())
        ]
        many = [[len(group["params"]) for group in of["param_groups"]] for of in (groups, opt.state_dict())]
        if shapes[0] != shapes[1] or many[0] != many[1]:
            raise ValueError("the states do not fit")
        model.load_state_dict(states)
        opt.load_state_dict(groups)

    def look(self, name: str, what: Any) -> None:
        """Record the content of tensors, modules and optimizers, and of lists and mappings of them."""
        if isinstance(what, nn.Module):
            for key, parameter in what.named_parameters():
                self.look(f"{name}: parameter {key}", parameter)
                self.look(f"{name}: {key} has gradients", parameter.requires_grad)
                self.look(f"{name}: gradient of {key}", parameter.grad)
            for key, buffer in what.named_buffers():
                self.look(f"{name}: buffer {key}", buffer)
        elif isinstance(what, torch.optim.Optimizer):
            for number, group in enumerate(what.param_groups):
                self.look(f"{name}: group {number}", {k: v for k, v in group.items() if k != "params"})
                for at, parameter in enumerate(group["params"]):
                    state = what.state.get(parameter, {})
                    self.look(f"{name}: state of {number}, {at}", dict(state) if state else None)
        elif isinstance(what, dict):
            for key, value in what.items():
                self.look(f"{name} {key}", value)
        elif isinstance(what, (list, tuple)):
            for i, each in enumerate(what):
                self.look(f"{name} {i}", each)
        elif isinstance(what, torch.Tensor):
            self.looked.append((name, self._copied(what)))
        else:
            self.looked.append((name, what if isinstance(what, float) else repr(what)))

    def _copied(self, tensor: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            tensor = tensor.detach()
            if self.program.judge == "hand" and isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                tensor = tensor.float()  # a master
            if tensor.is_sparse:
                tensor = tensor.coalesce().to_dense()
            return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)

    def see(self, model: nn.Module) -> nn.Module:
        """The model that operators see. By hand: a copy in fewer bits, whose gradients become the masters'."""
        if self.mode != "hand":
            return model
        twin = next((twin for twin in self.twins if twin.high is model), None)
        if twin is None:
            with torch.inference_mode(False):
                twin = Twin(model, self._seen)
            self.twins.append(twin)
        twin.follow()
        return twin.low

    def _seen(self, high: torch.Tensor) -> torch.Tensor:
        if self.program.settings.get("master_dtype") != "float32_split":
            return high.to(getattr(torch, self.program.settings["compute_dtype"]))
        # The nearest, ties away from zero; what is not a number stays so.
        kept = (high.view(torch.int32) + 0x8000).bitwise_and(-0x10000).view(torch.float32)
        return torch.where(high.isfinite(), kept, high).bfloat16()

    # Statement by statement.

    def outcomes(self) -> Iterator[tuple[str, Outcome]]:
        own = ["see", "pinned", "labels", "save", "load"]
        self.names = {
            **{"torch": torch, "nn": nn, "F": F, "copy": copy, "gc": gc, "io": io, "__name__": "program"},
            **{"rank": 0, "ranks": 1},
            **{each: getattr(self, each) for each in [*NAMES, *own]},
        }
        torch.manual_seed(self.seed)
        with contextlib.ExitStack() as self.stack, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if self.over_ranks and self.mode == "resident":
                self.stack.enter_context(mock.patch("zeropage._integrations.process_groups.join_ranks", lambda: None))
            try:
                for number, statement in enumerate(self.program.statements()):
                    yield statement, self._execute(number, statement)
            finally:
                self.names.clear()
                self.twins.clear()
                gc.collect()
                for space in self.spaces:
                    space.close()

    def _execute(self, number: int, statement: str) -> Outcome:
        self.looked, raised, said = [], "", ""
        name = f"<program {self.seed}, {number}>"
        linecache.cache[name] = (len(statement), None, statement.splitlines(True), name)
        try:
            exec(compile(statement, name, "exec"), self.names)
        except Exception as error:
            raised, said = type(error).__name__, str(error)
        if self.is_off and isinstance(self.names.get("model"), nn.Module):
            self.is_off = False
            with torch.no_grad():
                for p in self.names["model"].parameters():
                    if not torch.nn.parameter.is_lazy(p):
                        p.mul_(1 + (8 if p.dtype == torch.float32 else 1) * torch.finfo(p.dtype).eps)
        for twin in self.twins:
            twin.follow()
        return raised, said, self.looked, torch.get_rng_state()


def _is_near(found: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether they differ by rounding, each element or next to the largest one."""
    finite = right[right.isfinite()].abs()
    largest = finite.max().item() if finite.numel() else 0.0
    return torch.allclose(found, right, rtol=1e-2, atol=1e-3 * largest, equal_nan=True)


def difference(found: Any, right: Any, is_exact: bool = True) -> str:
    """Describe how two values differ; "" if dtype, shape and bits are equal. NaN equals NaN.

    If not `is_exact`, values of floating-point tensors may differ by rounding.
    """
    if isinstance(found, float) and isinstance(right, float):
        found, right = torch.tensor(found, dtype=torch.float64), torch.tensor(right, dtype=torch.float64)
    if not isinstance(found, torch.Tensor) or not isinstance(right, torch.Tensor):
        told = [f"a tensor {list(t.shape)}" if isinstance(t, torch.Tensor) else t for t in (found, right)]
        return "" if told[0] == told[1] else f"{told[0]} for {told[1]}"
    if (found.shape, found.dtype) != (right.shape, right.dtype):
        return f"{found.dtype} {list(found.shape)} for {right.dtype} {list(right.shape)}"
    found, right = found.flatten(), right.flatten()
    if not is_exact and found.is_floating_point() and _is_near(found.double(), right.double()):
        return ""
    bad = (found != right) & ~((found != found) & (right != right))
    if found.is_floating_point():
        bad |= (found == 0) & (right == 0) & (found.signbit() != right.signbit())
    if not bad.any():
        return ""
    at = int(bad.nonzero()[0])
    return (
        f"{int(bad.sum())} of {bad.numel()}{OTHER_NUMBERS} at {at} {found[at].item():.9g} for {right[at].item():.9g}"
    )


# PyTorch's fused SGD reads a bfloat16 momentum beyond its end, so the last elements depend on other memory.
FURTHER_ON = re.compile(r"SGD\(.*momentum=0\.[1-9].*fused=True")


def judge(program: Program, folder: str, plain: bool = False) -> tuple[str, str]:
    """("right" | "differs" | "raises" | "refused" | "unsteady", why) of the program on paged tensors.

    If `plain`, of the program run plain twice.
    """
    right = list(TrainingRun(program, program.judge, folder).outcomes())
    run = TrainingRun(program, program.judge if plain else "paged", folder)
    outcomes = run.outcomes()
    rounds = run.rounds_means or (run.over_ranks and ROUNDS_OVER_RANKS.search(program.text()))
    is_exact = not rounds
    with contextlib.closing(outcomes):
        for at, ((statement, found), (_, expected)) in enumerate(zip(outcomes, right, strict=True)):
            if verdict := _compare(statement, found, expected, program.judge == "hand", is_exact):
                if verdict[0] != "differs":
                    return verdict
                is_steady = _is_steady(program, folder, right)
                if is_steady and not is_exact and OTHER_NUMBERS in verdict[1]:
                    is_steady = _is_stable(program, folder, right, at)
                return verdict if is_steady else ("unsteady", verdict[1])
    return "right", ""


def judge_rank(seed: int, folder: str) -> dict[str, Any]:
    """Judge a program on this rank, where all ranks have the same data.

    The mean of two equal gradients is the gradient, so a run over two ranks must have the bits of one process, except
    where ROUNDS_OVER_RANKS says otherwise. Over three, values may differ by rounding.
    """
    program = training_programs.generate(seed)
    kind, said = judge(program, folder)
    if kind == "differs" and "optimizer_dtype" in program.text():
        kind = "unsteady"  # other blocks of moments have scales of their own
    if kind == "differs" and "compute_dtype" in program.text() and OTHER_DATA.search(program.text()):
        kind = "unsteady"  # `.data = …` copies into the parameter's pages, and keeps its dtype: docs/settings.md
    if kind == "differs" and "compute_dtype" in program.text() and WIDER_GRADIENT.search(said):
        kind = "unsteady"  # a gradient that the program sets becomes the mean, which is float32
    return {"verdict": (kind, said)} | ({} if kind in ("right", "refused", "unsteady") else {"differs": said})


def _is_stable(program: Program, folder: str, right: list[tuple[str, Outcome]], at: int) -> bool:
    """Whether what a statement shows stays near if all parameters begin a little off.

    Adam makes a gradient of noise alone, such as that of a bias before a norm, as large as any other.
    """
    for number, (text, found) in enumerate(TrainingRun(program, program.judge, folder, is_off=True).outcomes()):
        if number == at:
            return not _compare(text, found, right[at][1], by_hand=False, is_exact=False)
    raise AssertionError(at)


def _is_steady(program: Program, folder: str, right: list[tuple[str, Outcome]]) -> bool:
    """Whether what is right has the same bits again, in memory that held something else."""
    if FURTHER_ON.search(program.text()) and "bfloat16" in program.text():
        return False
    kept = [torch.full((size,), float("nan")) for size in range(16, 4096, 16)]
    del kept
    again = TrainingRun(program, program.judge, folder).outcomes()
    return not any(
        _compare(text, found, expected, False) for (text, found), (_, expected) in zip(again, right, strict=True)
    )


def _compare(
    statement: str, found: Outcome, expected: Outcome, by_hand: bool, is_exact: bool = True
) -> tuple[str, str] | None:
    raised, said, looked, state = found
    refusals = REFUSALS | (REFUSALS_OVER_RANKS if torch.distributed.is_initialized() else {})
    for reason, words in refusals.items():
        if raised and words in said and words not in expected[1]:
            return "refused", f"{reason}: {statement}: {said}"
    if raised != expected[0]:
        if SAVED in expected[1] or (by_hand and SAVED in said):  # by hand, versions are others
            return "refused", "a saved tensor is written before backward"
        told = f"{raised or 'nothing'} for {expected[0] or 'nothing'}"
        return "raises", f"{told}: {statement}: {said[:300] or 'plain: ' + expected[1][:200]}"
    for (name, a), (other, b) in zip(looked, expected[2], strict=False):
        if name != other:
            return "differs", f"{name!r} for {other!r}: {statement}"
        if told := difference(a, b, is_exact):
            return "differs", f"{name}: {told}: {statement}"
    if len(looked) != len(expected[2]):
        return "differs", f"{len(looked)} looked at for {len(expected[2])}: {statement}"
    if not torch.equal(state, expected[3]):
        return "differs", f"random numbers after: {statement}"
    return None
