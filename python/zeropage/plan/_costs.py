"""Costs of operators: computed from the machine's speeds, or measured."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pathlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.flop_counter import flop_registry

from zeropage import _core
from zeropage.plan._machine import Machine
from zeropage.plan._programs import Program

VERSION = 1
#: Elements that the measurement updates: more than caches hold.
_UPDATED = 1 << 23

aten = torch.ops.aten
#: Operators that move no bytes: views, and those that only allocate a tensor.
_FREE = {
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    aten.detach.default,
    aten._unsafe_view.default,
    aten._reshape_alias.default,
}
_LOOKUPS = {aten.embedding, aten.index_select, aten.gather, aten.index}


def _with_all_heads(count: Callable[..., int]) -> Callable[..., int]:
    """Count as if keys had the queries' heads: kernels broadcast them, and torch 2.11's formulas do not know it."""

    def counted(*args: Any, **kwargs: Any) -> int:
        heads = max((t.shape[1] for t in args[:4] if isinstance(t, torch.Tensor) and t.dim() == 4), default=0)
        whole = [
            t.new_empty((t.shape[0], heads, *t.shape[2:]), device="meta")
            if isinstance(t, torch.Tensor) and t.dim() == 4 and t.shape[1] < heads
            else t
            for t in args[:4]
        ]
        return count(*whole, *args[4:], **kwargs)

    return counted


_ATTENTION = [
    (f"_scaled_dot_product_{kind}_attention{end}", f"_scaled_dot_product_{kind}_attention{suffix}{end}")
    for end in ("", "_backward")
    for kind, suffix in [("flash", ""), ("flash", "_for_cpu"), ("efficient", ""), ("cudnn", "")]
]
#: The CPU's attention kernels do the same operations as a GPU's.
_OPERATIONS = flop_registry | {
    getattr(aten, name): _with_all_heads(flop_registry[getattr(aten, counted)]) for counted, name in _ATTENTION
}


class CostModel(Protocol):
    """Gives the seconds of an operator that took these "meta" arguments and returned `out`."""

    def seconds(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> float: ...

    def update_gbs(self, program: Program) -> float:
        """Return the GB per second that the program's optimizer reads and writes on the host; 0: the machine's rate."""
        ...


@functools.cache
def is_view(func: Any) -> bool:
    return bool(func.is_view)


@functools.cache
def is_free(func: Any) -> bool:
    return func in _FREE or is_view(func)


def tensors_in(*values: Any) -> list[torch.Tensor]:
    """Return the tensors in an operator's arguments or results, which nest no deeper than lists."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += [leaf for leaf in value if isinstance(leaf, torch.Tensor)]
    return found


def _results(out: Any) -> Sequence[Any]:
    return out if isinstance(out, tuple) else (out,)


@functools.cache
def _flops_of(func: Any) -> Any:
    return _OPERATIONS.get(func._overloadpacket)


class Roofline:
    """The longer of operations at the machine's rate and bytes at its memory's rate, and at least `operator_us`.

    torch.utils.flop_counter counts the operations.
    """

    def __init__(self, machine: Machine, ranks: int = 1) -> None:
        self._machine = machine
        here = min(ranks, machine.devices)
        self._bandwidth = (machine.host_gbs / here if machine.unified else machine.device_gbs) * 1e9
        self._least = machine.operator_us * 1e-6

    def seconds(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> float:
        if is_free(func):
            return 0.0
        read = tensors_in(*args, *kwargs.values())
        written = sum(t.nbytes for t in tensors_in(*_results(out)))
        # A lookup reads only the rows that it returns.
        moved = written + (written if func._overloadpacket in _LOOKUPS else sum(t.nbytes for t in read))
        seconds = moved / self._bandwidth
        if (count := _flops_of(func)) is not None and read:
            operations = count(*args, **kwargs, out_val=out)
            dtype = str(read[0].dtype).removeprefix("torch.")
            seconds = max(seconds, operations / self._machine.flops(dtype))
        return max(seconds, self._least)

    def update_gbs(self, program: Program) -> float:
        return 0.0


class MeasuredCosts:
    """Costs that this machine measures.

    An operator without a recorded cost runs here when a plan first meets it, with arguments of the same shapes, strides
    and dtypes. The model may exceed this machine, as long as each operator alone fits its memory. The optimizer's
    updates are measured in the same way.

    `device`: where operators run. `save` and `load` keep the seconds in a JSON file, for plans on another machine.
    """

    def __init__(self, device: str | torch.device = "cpu", least_seconds: float = 0.02) -> None:
        self._device, self._least = torch.device(device), least_seconds
        self._threads = torch.get_num_threads()
        self._flush: torch.Tensor | None = None
        self._known: dict[str, float] = {}
        self._recorded: dict[str, list[float]] = {}
        self._is_open = True

    def seconds(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> float:
        if is_free(func):
            return 0.0
        key = _signature(func, args, kwargs)
        if (known := self._known.get(key)) is None:
            if not self._is_open:
                raise _core.ConfigError(
                    f"the costs that were loaded have none of {key}: they are of another model, or of other sizes"
                )
            known = self._known[key] = self._measure(func, args, kwargs)
        return known

    def update_gbs(self, program: Program) -> float:
        """Measure once for each optimizer. Return 0 if loaded costs lack it, or if memory is too small."""
        key = _update_of(program)
        if key not in self._known and self._is_open:
            self._keep(self._update(program, torch.randn(_UPDATED) * 1e-3))
        return 1 / self._known[key] if key in self._known else 0.0

    def record(self, program: Program, steps: int = 4) -> None:
        """Run `program`, or its sample, as plain PyTorch, and record each operator's median time within a step.

        An operator alone would find its memory and caches warm, and appear too fast. Operators share the rest of the
        step's time, which Python and autograd take. Further calls record the mean, because a machine's speed varies.

        Raises ConfigError if the host lacks memory for twice the parameters and a reserve for activations, or if
        `program` cannot run here.
        """
        program = program.sample or program
        if self._device.type == "cpu":
            with torch.device("meta"):
                wanted = 3 * sum(p.nbytes for p in program.make_model().parameters())
            if wanted > _core.available_memory():
                raise _core.ConfigError(
                    f"{program.name} cannot be run here: it takes {wanted / 1e9:.3g} GB of memory, and "
                    f"{_core.available_memory() / 1e9:.3g} GB are free"
                )
        try:
            with self._on_its_threads():
                seconds = self._record(program, steps)
        except Exception as error:  # the program is arbitrary code on real tensors
            said = next(iter(str(error).splitlines()), type(error).__name__)
            raise _core.ConfigError(f"{program.name} cannot be run here: {said}") from error
        self._keep(seconds)

    def _keep(self, seconds: Mapping[str, float]) -> None:
        for key, value in seconds.items():
            self._recorded.setdefault(key, []).append(value)
            self._known[key] = statistics.fmean(self._recorded[key])

    def _record(self, program: Program, steps: int) -> dict[str, float]:
        with self._device:
            model = program.make_model()
        gradients = torch.empty(0)
        times: dict[str, list[float]] = {}

        def step(watch: contextlib.AbstractContextManager[object]) -> float:
            nonlocal gradients
            self._synchronize()
            start = time.perf_counter()
            with self._device, watch:
                program.forward_and_backward(model)
            self._synchronize()
            seconds = time.perf_counter() - start
            if gradients.numel() == 0:
                gradients = _some_gradients(model)
            model.zero_grad()
            return seconds

        step(contextlib.nullcontext())  # libraries initialise themselves
        whole = []
        for _ in range(steps):  # alternating, because a machine's speed varies
            step(_Recording(times, self._synchronize))
            whole.append(step(contextlib.nullcontext()))
        known = {key: statistics.median(seconds) for key, seconds in times.items()}
        calls = {key: len(seconds) / steps for key, seconds in times.items()}
        alone = sum(known[key] * calls[key] for key in known)
        beyond = statistics.median(whole) - alone
        if beyond < 0:  # recording costs more, for example because it waits for a device at each operator
            known = {key: seconds * (1 + beyond / alone) for key, seconds in known.items()}
        else:
            known = {key: seconds + beyond / sum(calls.values()) for key, seconds in known.items()}
        return known | self._update(program, gradients)

    def _update(self, program: Program, gradients: torch.Tensor) -> dict[str, float]:
        from zeropage.plan._measure import update

        try:
            with self._on_its_threads():
                return {_update_of(program): update(program, gradients)}
        except _core.ConfigError:  # no memory for the states: plans use the machine's rate
            return {}

    def __len__(self) -> int:
        return len(self._known)

    def save(self, path: str | os.PathLike[str]) -> None:
        text = json.dumps({"version": VERSION, "torch": torch.__version__, "seconds": self._known}, indent=0)
        try:
            pathlib.Path(path).write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise _core.DiskError(f"{os.fspath(path)} cannot be written: {error.strerror}") from None

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> MeasuredCosts:
        """Load costs. Raises ConfigError for other files, and for another version."""
        try:
            content = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
            version, seconds = content["version"], content["seconds"]
        except OSError as error:
            raise _core.ConfigError(f"costs {os.fspath(path)!r} cannot be read: {error.strerror}") from None
        except (ValueError, KeyError, TypeError):
            raise _core.ConfigError(f"costs {os.fspath(path)!r}: no costs that `zeropage plan` has written") from None
        if version != VERSION:
            raise _core.ConfigError(
                f"costs {os.fspath(path)!r} are of version {version}, and this is {VERSION}: measure them again"
            )
        costs = cls()
        costs._known, costs._is_open = {str(k): float(v) for k, v in seconds.items()}, False
        return costs

    def _measure(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
        try:
            with self._on_its_threads():
                return self._measure_here(func, args, kwargs)
        except RuntimeError as error:
            raise _core.ConfigError(
                f"{_signature(func, args, kwargs)} cannot be measured here: {str(error).splitlines()[0]}; plan with "
                "--machine, or with costs of a larger one"
            ) from None

    @contextlib.contextmanager
    def _on_its_threads(self) -> Iterator[None]:
        """Restore the number of threads at construction, because a dry run has one."""
        threads = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        try:
            yield
        finally:
            torch.set_num_threads(threads)

    def _measure_here(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
        from torch.utils._python_dispatch import _disable_current_modes

        limit = _index_limit(func, args)
        with _disable_current_modes(), torch.no_grad():
            real_args, real_kwargs = tree_map(
                lambda leaf: _real(leaf, self._device, limit), (list(args), dict(kwargs))
            )
            if self._flush is None:
                self._flush = torch.empty(1 << 24, device=self._device)  # in training, no cache holds the weights
            spent, times = 0.0, list[float]()
            while len(times) < 4 or (spent < self._least and len(times) < 20):
                self._flush.fill_(len(times))
                self._synchronize()
                start = time.perf_counter()
                func(*real_args, **real_kwargs)
                self._synchronize()
                times.append(time.perf_counter() - start)
                spent += times[-1]
        return statistics.median(times[1:])  # in the first, libraries initialise themselves

    def _synchronize(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)


def _update_of(program: Program) -> str:
    return f"a GB of {program.optimizer}'s updates"


def _some_gradients(model: torch.nn.Module) -> torch.Tensor:
    """Sample elements of all gradients, on the CPU: the speed of some operators depends on magnitudes."""
    given = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    step = max(1, sum(map(len, given)) // _UPDATED)
    some = torch.cat([grad[::step].float().cpu() for grad in given])
    return some.repeat(-(-_UPDATED // len(some)))[:_UPDATED].clone()


class _Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, times: dict[str, list[float]], synchronize: Callable[[], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._times, self._synchronize = times, synchronize

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_free(func):
            return func(*args, **(kwargs or {}))
        self._synchronize()
        start = time.perf_counter()
        out = func(*args, **(kwargs or {}))
        self._synchronize()
        self._times.setdefault(_signature(func, args, kwargs or {}), []).append(time.perf_counter() - start)
        return out


def _signature(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    def text(leaf: Any) -> str:
        if isinstance(leaf, torch.Tensor):
            dense = leaf.is_contiguous()
            strides = "" if dense else f"/{','.join(map(str, leaf.stride()))}"
            return f"{str(leaf.dtype).removeprefix('torch.')}[{','.join(map(str, leaf.shape))}]{strides}"
        # The device and the generator do not distinguish operators.
        return "" if isinstance(leaf, torch.device | torch.Generator) else str(leaf)

    leaves, _ = tree_flatten((list(args), dict(kwargs)))
    return f"{func}({'; '.join(text(leaf) for leaf in leaves)})"


def _index_limit(func: Any, args: Sequence[Any]) -> int:
    """Return the limit below which every integer is a valid index."""
    if func._overloadpacket is aten.embedding:
        return int(args[0].shape[0])
    if func._overloadpacket is aten.embedding_dense_backward:
        return int(args[2])
    return 1


def _real(leaf: Any, device: torch.device, limit: int) -> Any:
    if isinstance(leaf, torch.device):
        return device
    if not isinstance(leaf, torch.Tensor):
        return leaf
    span = sum((size - 1) * stride for size, stride in zip(leaf.shape, leaf.stride(), strict=True)) + 1
    memory = torch.empty(max(span if leaf.numel() else 0, 0), dtype=leaf.dtype, device=device)
    if leaf.dtype.is_floating_point:
        memory.normal_()
    elif leaf.dtype == torch.bool or leaf.dtype.is_complex:
        memory.zero_()
    else:
        memory.random_(0, limit)
    return memory.as_strided(leaf.shape, leaf.stride())
