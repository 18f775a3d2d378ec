"""Run the text of one rank program on one rank: paged by zeropage, and plain with gradients averaged by hand.

A program's text uses torch's names and a few more: `rank`, `ranks`, and the methods of `Run` that `NAMES` lists. Both
runs execute the same text, with different implementations of these names.

The plain run computes what DistributedDataParallel would if it summed in rank order. Each `backward` adds to `p.grad`
the mean over ranks of its own gradients, in which a rank without a gradient counts as zeros. `p.grad` stays None
where no rank has one. Records are compared to the bit, or within a tolerance: of programs that take a norm over
ranks or have tiles with other sums, and in mixed precision.
"""

from __future__ import annotations

import contextlib
import gc
import linecache
import math
import os
import re
import resource
import signal
import subprocess
import tempfile
import threading
import traceback
import unittest.mock
import zlib
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import zeropage

PAGED = ("paged", "alone")
SMALL = {"device_memory": "6MB", "host_memory": "4MB", "min_page_bytes": 1, "page_size": "16KiB"}
TOLERANCE, MIXED = 2e-5, 3e-2  # of a tensor's norm; the second with bfloat16
STABLE = 5e-6  # of float32 against float64
FLOOR = 1e-8  # of an element: what rounding leaves of sums that are 0

# Ranks add the norms of their shares in float64, so the last bit differs from plain PyTorch's.
TAKES_NORM = re.compile(r"\bnorm\(|grad_norm_")
# A hook after accumulation sees the sum of two backwards, which is averaged here at once and by zeropage in parts.
# Tiles with tiling="auto" sum an input's gradient in another order.
SEES_SUMS = re.compile(r"register_post_accumulate_grad_hook.*(retain_graph|for micro in)|tiling='auto'", re.DOTALL)

Record = list[tuple[str, torch.Tensor | None]]


class Run:
    """One execution, in a mode.

    "paged" is what is judged. "plain" averages by hand; so do "again", in another way, "double", in float64, and
    "alone", which is paged, but by each process for itself.
    """

    def __init__(self, text: str, seed: int, mode: str) -> None:
        self.text, self.seed, self.mode = text, seed, mode
        self.rank, self.ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.record: Record = []
        self.spaces: list[Any] = []
        self.has_written = False
        self._in_backward = False
        self._keeps = self._has_kept = False  # no_sync() now, and since gradients were averaged

    @staticmethod
    def alone_here() -> bool:
        return not (dist.is_initialized() and dist.get_world_size() > 1)

    # The methods that the program's text calls.

    @contextlib.contextmanager
    def _plain_scope(self) -> Any:
        yield
        self._built(self.names["model"])

    def _built(self, model: nn.Module) -> nn.Module:
        if self.mode == "double":  # built in float32, so that values are equal
            torch.set_default_dtype(torch.float64)
            return model.double()
        return model

    def page(self, model: nn.Module, **settings: Any) -> nn.Module:
        if self.mode not in PAGED:
            return self._built(model)
        return zeropage.page(model, self.make_space(**settings))

    def evict(self, model: nn.Module) -> None:
        if self.mode in PAGED:
            zeropage.page_out(model)

    def wait(self) -> None:
        if self.mode in PAGED:
            zeropage.synchronize()

    def wrote(self, parameter: torch.Tensor) -> None:
        """Tell the judge that this rank alone wrote a parameter. Ranks notice it if it is trained."""
        self.has_written = self.has_written or parameter.requires_grad

    def pause(self, seconds: float) -> None:
        """Stop this process, as a debugger or a busy machine does."""
        subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)

    def stall_link(self, seconds: float) -> None:
        """From now on nothing passes the ranks' link, for so long. Without a link of their own: pause."""
        network = os.environ.get("RANKS_NETWORK")
        if self.mode not in PAGED:
            return
        if network is None:
            self.pause(min(seconds, 1))
            return
        of_link = ["dev", "lo", "root"]
        # A bucket of fewer bytes than any packet has.
        queue = ["tbf", "rate", "8bit", "burst", "1", "limit", "1"]
        subprocess.run(["tc", "qdisc", "add", *of_link, *queue], check=True, capture_output=True)

        def end() -> None:
            subprocess.run(["tc", "qdisc", "del", *of_link], capture_output=True)

        timer = threading.Timer(seconds, end)
        timer.daemon = True
        timer.start()
        self.stack.callback(lambda: (timer.cancel(), end()))

    def fill_disk(self) -> None:
        """From now on files of this process cannot grow."""
        if self.mode in PAGED:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
            self.stack.callback(resource.setrlimit, resource.RLIMIT_FSIZE, [resource.RLIM_INFINITY] * 2)

    def make_space(self, **settings: Any) -> Any:
        if self.mode not in PAGED:
            return self._plain_scope()
        if self.ranks == 1 or self.mode == "alone":
            settings.pop("stage", None)
        if "disk" in settings.values():
            settings["disk_path"] = self.stack.enter_context(tempfile.TemporaryDirectory(dir="build", prefix="swap-"))
        self.spaces.append(zeropage.init(**{"device": "cpu", **SMALL, **settings}))
        return self.spaces[-1]

    def together(self, module: nn.Module) -> nn.Module:
        return zeropage.gather_together(module) if self.mode in PAGED else module

    def _random(self, at: int, shape: tuple[int, ...], rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + at * 101 + rank)
        return torch.randn(shape, generator=generator, dtype=torch.float32).to(torch.get_default_dtype())

    def mine(self, at: int, *shape: int) -> torch.Tensor:
        """This rank's own data, number `at`."""
        return self._random(at, shape, 1 + self.rank)

    def everyones(self, at: int, *shape: int) -> torch.Tensor:
        """Data that is equal on all ranks."""
        return self._random(at, shape, 0)

    def tokens(self, at: int, rows: int, columns: int, vocabulary: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + at * 101 + 1 + self.rank)
        return torch.randint(vocabulary, (rows, columns), generator=generator)

    def mean_over_ranks(self, tensor: torch.Tensor) -> torch.Tensor:
        """The program's own collective, in all runs."""
        mean = tensor / self.ranks
        if self.ranks > 1:
            dist.all_reduce(mean)
        return mean

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Any:
        """Backwards inside accumulate on each rank."""
        if self.mode == "paged":
            with zeropage.no_sync(model):
                yield
            return
        self._keeps = True
        try:
            yield
        finally:
            self._keeps = False

    def mean_by_hand(self, model: nn.Module) -> None:
        """Average `p.grad` over ranks where the program set it. zeropage must do so by itself."""
        if self.mode != "paged":
            self._mean(model, is_own=True)

    def _mean(self, model: nn.Module, is_own: bool) -> None:
        if self.ranks == 1:
            return
        if self.mode == "plain":
            self._mean_in_rank_order(model, is_own)
        elif self.mode == "again":
            self._mean_each(model)
        else:
            self._mean_at_once(model)

    def look(self, name: str, what: Any) -> None:
        """Record a tensor, a list of them, or all that a module holds."""
        if isinstance(what, nn.Module):
            for kind, tensors in (("parameter", what.named_parameters()), ("buffer", what.named_buffers())):
                for key, tensor in tensors:
                    self.look(f"{name}: {kind} {key}", tensor)
                    if kind == "parameter":
                        self.look(f"{name}: gradient of {key}", tensor.grad)
        elif isinstance(what, (list, tuple)):
            for i, tensor in enumerate(what):
                self.look(f"{name} {i}", tensor)
        elif isinstance(what, torch.Tensor):
            self.record.append((name, torch.empty(what.shape, dtype=what.dtype).copy_(what.detach())))
        else:
            self.record.append((name, what if what is None else torch.tensor(float(what), dtype=torch.float64)))

    # How the plain runs average.

    @staticmethod
    def _mean_in_rank_order(model: nn.Module, is_own: bool) -> None:
        """What zeropage promises: gradients added in rank order, in their own dtype, and divided once.

        A value stays if all ranks have set it themselves.
        """
        for p in model.parameters():
            have = torch.tensor(float(p.grad is not None))
            dist.all_reduce(have)
            if have:
                mine = torch.zeros_like(p) if p.grad is None else p.grad.detach().contiguous()
                parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
                dist.all_gather(parts, mine)
                mean = parts[0].clone()
                for part in parts[1:]:
                    mean.add_(part)
                mean.div_(len(parts))
                if is_own:
                    equal = torch.stack([part == parts[0] for part in parts]).all(0)
                    mean = torch.where(equal, parts[0], mean)
                _set_gradient(p, mean)

    @staticmethod
    def _mean_at_once(model: nn.Module) -> None:
        parameters = [p for p in model.parameters() if p.numel()]
        have = torch.tensor([float(p.grad is not None) for p in parameters], dtype=torch.float64)
        flat = [(torch.zeros_like(p) if p.grad is None else p.grad).detach().double().flatten() for p in parameters]
        sent = torch.cat([have, *flat])
        dist.all_reduce(sent)
        have, *means = (sent / dist.get_world_size()).split([len(have), *(p.numel() for p in parameters)])
        for p, some, mean in zip(parameters, have, means, strict=True):
            if some:
                # In mixed precision gradients are in float32.
                _set_gradient(p, mean.view(p.shape).to(torch.float32 if p.dtype == torch.bfloat16 else p.dtype))

    @staticmethod
    def _mean_each(model: nn.Module) -> None:
        for p in model.parameters():
            have = torch.tensor(float(p.grad is not None))
            dist.all_reduce(have)
            if have:
                mean = torch.zeros_like(p) if p.grad is None else p.grad.detach() / dist.get_world_size()
                dist.all_reduce(mean)
                _set_gradient(p, mean)

    @contextlib.contextmanager
    def _averaging(self) -> Any:
        of_torch = torch.autograd.backward

        def backward(*args: Any, **kwargs: Any) -> None:
            if self._in_backward or self._keeps:
                self._has_kept = self._has_kept or self._keeps
                return of_torch(*args, **kwargs)
            self._in_backward = True
            model = self.names["model"]
            # Each backward's gradients are averaged alone, and added to the sum of the ones before. A hook after
            # accumulation must see that sum. Sums made under no_sync() are averaged too.
            before = {
                p: p.grad
                for p in model.parameters()
                if self.mode == "plain" and p.grad is not None and not p._post_accumulate_grad_hooks
                if not self._has_kept
            }
            self._has_kept = False
            for p in before:
                p.grad = None
            try:
                of_torch(*args, **kwargs)
            finally:
                self._in_backward = False
            self._mean(model, is_own=False)
            for p, sum_ in before.items():
                if p.grad is not None:
                    sum_.detach().add_(p.grad)
                p.grad = sum_

        torch.autograd.backward = backward
        try:
            yield
        finally:
            torch.autograd.backward = of_torch

    @contextlib.contextmanager
    def _same_numbers(self) -> Any:
        """In float64, random tensors have the numbers that they have in float32."""
        originals = {name: getattr(torch, name) for name in ("randn_like", "rand_like")}
        normal = torch.Tensor.normal_

        def in_float32(name: str) -> Any:
            return lambda t, **kwargs: originals[name](t.float(), **kwargs).to(t.dtype)

        for name in originals:
            setattr(torch, name, in_float32(name))
        torch.Tensor.normal_ = lambda t, *args, **kwargs: t.copy_(normal(t.float(), *args, **kwargs))
        try:
            yield
        finally:
            torch.Tensor.normal_ = normal
            for name, original in originals.items():
                setattr(torch, name, original)
            torch.set_default_dtype(torch.float32)

    def execute(self) -> Record:
        name = f"<program {self.seed}>"
        linecache.cache[name] = (len(self.text), None, self.text.splitlines(True), name)
        self.names: dict[str, Any] = {
            **{"torch": torch, "nn": nn, "F": F, "rank": self.rank, "ranks": self.ranks, "__name__": "program"},
            **{each: getattr(self, each) for each in NAMES},
        }
        torch.manual_seed(self.seed)
        with contextlib.ExitStack() as self.stack:
            sizes = {"ZEROPAGE_PEER_BYTES": "1"} if self.seed % 3 else {}  # parts are short here
            if self.seed % 2:  # gradients fill buckets while backward goes on
                sizes["ZEROPAGE_BUCKET_BYTES"] = str(4096 << self.seed // 2 % 4)
            self.stack.enter_context(unittest.mock.patch.dict(os.environ, sizes))
            if self.mode != "paged":
                self.stack.enter_context(self._averaging())
            if self.mode == "alone":
                no_groups = unittest.mock.patch("zeropage._space.find_groups", lambda *_: zeropage._ranks.Groups())
                self.stack.enter_context(no_groups)
                self.stack.enter_context(
                    unittest.mock.patch("zeropage._integrations.process_groups.join_ranks", lambda: None)
                )
            if self.mode == "double":
                self.stack.enter_context(self._same_numbers())
            exec(compile(self.text, name, "exec"), self.names)
            self.names.clear()
            gc.collect()
            for space in self.spaces:
                space.close()
        return self.record


NAMES = [
    "make_space",
    "page",
    "evict",
    "wait",
    "wrote",
    "pause",
    "fill_disk",
    "stall_link",
    "together",
    "mine",
    "everyones",
    "tokens",
    "mean_over_ranks",
    "mean_by_hand",
    "no_sync",
    "look",
]


def _set_gradient(p: nn.Parameter, mean: torch.Tensor) -> None:
    if p.grad is None:
        p.grad = mean
    else:
        with torch.no_grad():
            p.grad.copy_(mean)


def difference(a: torch.Tensor | None, b: torch.Tensor | None, floor: float = FLOOR) -> float:
    """Relative to the norm of what is right; 0 below `floor`, what rounding may make of elements whose sum is 0."""
    if a is None or b is None:
        return 0.0 if a is b else math.inf
    if a.shape != b.shape:
        return math.inf
    a, b = a.double(), b.double()
    if not a.isfinite().all() or not b.isfinite().all():
        return 0.0 if torch.equal(a.nan_to_num(), b.nan_to_num()) else math.inf
    off = (a - b).norm().item()
    return 0.0 if off <= floor * math.sqrt(a.numel()) else off / (b.norm().item() + 1e-30)


def first_difference(found: Record, right: Record, tolerance: float, exact: bool = False) -> str | None:
    """The first entry that differs, in the order of the program; or None."""
    for (name, a), (expected, b) in zip(found, right, strict=False):
        if name != expected:
            return f"looked at {name!r} where plain looks at {expected!r}"
        if exact and (a is None) == (b is None) and (a is None or (a.shape == b.shape and torch.equal(a, b))):
            continue
        off = difference(a, b, floor=0.0 if exact else FLOOR)
        if exact or off > tolerance:
            missing = " (paged is None)" if a is None else " (plain is None)" if b is None else ""
            return f"{name} differs by {off:.1e}{missing}"
    return None if len(found) == len(right) else "records have other lengths"


def where_raised(error: BaseException) -> str:
    """The program's line that raised, innermost."""
    lines = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.startswith("<program")]
    return f"line {lines[-1].lineno}: {lines[-1].line}" if lines else ""


def compare(text: str, seed: int, against: str = "paged") -> dict[str, Any]:
    """Run a program on this rank, plain and then `against`, and say how they differ. All ranks call it."""
    mixed = "compute_dtype" in text and against == "paged"  # the one that rounds as the paged run does
    plain = Run(text, seed, "alone" if mixed else "plain").execute()
    try:
        found = Run(text, seed, against).execute()
    except Exception as error:
        return {"raised": f"{type(error).__name__}: {error}", "at": where_raised(error)}
    exact = against == "paged" and not mixed and not SEES_SUMS.search(text)
    exact = exact and (Run.alone_here() or not TAKES_NORM.search(text))
    same = first_difference(found, plain, 0.0, exact=True) is None
    held = [t for name, t in found if t is not None and ": parameter " in name]
    said = {
        "differs": first_difference(
            found, plain, STABLE if against == "double" else MIXED if mixed else TOLERANCE, exact
        ),
        "parameters": _checksum(held),
        "entries": len(plain),
        "exact": exact,
        "same": same,
    }
    return said


def endure(text: str, seed: int, has_plain: bool) -> dict[str, Any]:
    """Run a program in which one rank may do what others do not; on this rank. After an error, close its spaces."""
    plain = Run(text, seed, "plain").execute() if has_plain else None
    run = Run(text, seed, "paged")
    try:
        found = run.execute()
    except Exception as error:
        said = {"raised": f"{type(error).__name__}: {error}", "at": where_raised(error)}
        traceback.clear_frames(error.__traceback__)
        run.names.clear()
        gc.collect()
        for space in run.spaces:
            with contextlib.suppress(zeropage.ZeropageError):
                space.close()
        return said
    held = [t for name, t in found if t is not None and name.startswith("at the end: parameter ")]
    exact = not SEES_SUMS.search(text) and not TAKES_NORM.search(text)
    return {
        "differs": plain and first_difference(found, plain, 10 * TOLERANCE, exact),
        "same": plain is None or first_difference(found, plain, 0.0, exact=True) is None,
        "parameters": _checksum(held),
        "wrote": run.has_written,
    }


def _checksum(tensors: list[torch.Tensor]) -> int:
    return zlib.crc32(b"".join(t.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for t in tensors))


def train(seed: int, folder: str) -> dict[str, Any]:
    """Run a training program of one process on all ranks, and judge it on this one."""
    from training_execution import judge_rank

    return judge_rank(seed, folder)


def steadiness(text: str, seed: int) -> dict[str, float]:
    """How far the plain run in float32 is from one in float64, at most."""
    found, right = (Run(text, seed, mode).execute() for mode in ("plain", "double"))
    off = max((difference(a, b) for (_, a), (_, b) in zip(found, right, strict=True)), default=0.0)
    return {"rounding": off}
