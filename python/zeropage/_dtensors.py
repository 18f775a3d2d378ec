"""Pages the local tensors of DTensor parameters, such as those that parallelize_module() makes.

[Note: DTensors] A DTensor keeps its part of a tensor inside, and calls operators on it below autograd. The paged local
tensor faults there (`kInnerKey` in src/zeropage/base/torch_compat.h), so results that are made like it are paged, such
as an optimizer's states. A hook of the parameter takes each gradient that backward makes: it gives it the parameter's
placements, and its local tensor becomes a paged gradient, over ranks the mean over the space's group. The other
dimensions of the parameter's mesh stay what they are to DTensor.
"""

from __future__ import annotations

import collections
import contextlib
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from zeropage import _core

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from zeropage._space import Space


_GRAD: Any = torch.Tensor.grad


def is_dtensor(tensor: torch.Tensor) -> bool:
    tensors: Any = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and isinstance(tensor, tensors.DTensor)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The local tensor of a DTensor, or the tensor itself."""
    if not is_dtensor(tensor):
        return tensor
    local: torch.Tensor = tensor._local_tensor  # type: ignore[attr-defined]
    return local


_has_paged = False  # a DTensor: without any, no step looks for them


def locals_of(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors, with its local tensor for each DTensor, once any is paged."""
    return [local_of(tensor) for tensor in tensors] if _has_paged else list(tensors)


def dtensors_among(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The DTensors, once any is paged."""
    return [*filter(is_dtensor, tensors)] if _has_paged else []


def settled_locals_of(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Do the same for an optimizer's parameters, once their gradients have their own placements.

    Backward gives them these, but a program, or a schedule that splits backward, may set partial sums. The ranks of the
    mesh call it together.
    """
    parameters = list(parameters)
    for parameter in dtensors_among(parameters):
        if is_watched(parameter):
            settle_gradient(parameter)
    return locals_of(parameters)


def settle_gradient(parameter: Any) -> None:
    gradient = parameter.grad
    if gradient is not None and is_dtensor(gradient) and gradient.placements != parameter.placements:
        _GRAD.__set__(parameter, gradient.redistribute(placements=parameter.placements))


def is_watched(parameter: torch.Tensor) -> bool:
    """Whether it is a DTensor whose gradients are paged."""
    hooks = (parameter._backward_hooks or {}).values() if is_dtensor(parameter) else ()
    return any(isinstance(hook, _Gradients) and hook.parameter() is parameter for hook in hooks)


def check_parameter(space: Space, name: str, parameter: Any) -> None:
    """Check a DTensor before anything is paged.

    Raises ConfigError for a space in mixed precision, or one over ranks that hold different parts of the parameter, and
    AccessError if its gradient exists already.
    """
    if space.config.compute_dtype != "auto":
        raise _core.ConfigError(
            f'compute_dtype = "{space.config.compute_dtype}" is not for DTensors, and {name} is one: write "auto", and '
            "give the model its dtype before parallelize_module, or run it under torch.autocast"
        )
    if not is_watched(parameter) and parameter.grad is not None:
        raise _core.AccessError(f"{name}, a DTensor, has a gradient: clear it with zero_grad() before it is paged")
    mesh, ranks = parameter.device_mesh, space.ranks_of_groups()
    # A slice of a mesh, such as mesh["tp"], holds the ranks along this one's row alone.
    places = [place for rank in ranks if (place := (mesh.mesh == rank).nonzero().flatten().tolist())]
    for dim, placement in enumerate(parameter.placements):
        if not placement.is_replicate() and len({tuple(place[dim : dim + 1]) for place in places}) > 1:
            of_dim = repr(mesh.mesh_dim_names[dim]) if mesh.mesh_dim_names else dim
            raise _core.ConfigError(
                f"{name} is in parts over dimension {of_dim} of its mesh, and the space's ranks {ranks} hold different "
                "ones: partition over another dimension, with zeropage.init(mesh=…, dim=…)"
            )


def page_parameter(space: Space, name: str, parameter: torch.Tensor) -> None:
    """Page a DTensor parameter's local tensor, and have its gradients paged. Over ranks, start_equal() must follow.

    Raises AccessError for a local tensor that cannot be paged.
    """
    local = local_of(parameter)
    if local.numel() == 0 or is_watched(parameter):
        return
    global _has_paged
    _has_paged = True
    outer = _Parameter(parameter)
    if not space._core.page_inner(local, outer.gradient, outer.set_gradient):
        if space.is_over_ranks():
            raise _core.AccessError(
                f"the local tensor of {name}, {list(local.shape)}, cannot be paged, so its gradient would not be "
                "averaged over ranks: it must be strided, a leaf, of no subclass, and in no other space"
            )
    elif parameter.requires_grad:
        parameter.register_hook(_Gradients(parameter, outer))  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def paged_again(
    tensors: Iterable[torch.Tensor],
    space_of: Callable[[torch.Tensor], Space | None],
    keep: Callable[[Space, torch.Tensor], None],
) -> Iterator[None]:
    """Inside, torch.utils.swap_tensors() may give DTensor parameters another content, which is paged afterwards."""
    watched = [(tensor, space_of(local_of(tensor))) for tensor in tensors if is_watched(tensor)]
    for tensor, _ in watched:
        for hook in (tensor._backward_hooks or {}).values():
            if isinstance(hook, _Gradients):
                hook.forget()
    yield  # if it raises, nothing watches the gradients, and the next step over ranks says so
    for tensor, space in watched:
        if space is None:
            continue
        # The hooks' dict stays with the object, but only its setter makes the other content call them.
        hooks: Any = tensor._backward_hooks or {}
        kept = {number: hook for number, hook in hooks.items() if not isinstance(hook, _Gradients)}
        tensor._backward_hooks = collections.OrderedDict(kept) if kept else None
        page_parameter(space, "a parameter", tensor)
        keep(space, local_of(tensor))
        space._core.start_equal()


class _Parameter:
    """The core reads and sets a parameter's gradient by it. Does not keep the parameter alive."""

    def __init__(self, parameter: torch.Tensor) -> None:
        self.parameter: Callable[[], Any] = weakref.ref(parameter)

    def forget(self) -> None:
        self.parameter = lambda: None

    def gradient(self) -> torch.Tensor | None:
        parameter = self.parameter()
        if parameter is None or parameter.grad is None:
            return None
        if not is_dtensor(parameter.grad):
            raise _core.RankError("a DTensor's gradient was set to an ordinary tensor: set it to a DTensor")
        if parameter.grad.placements != parameter.placements:
            raise _core.RankError(
                f"a DTensor's gradient was set to one with placements {parameter.grad.placements}, and backward meets "
                f"it: give it the parameter's, with redistribute(placements={parameter.placements})"
            )
        return local_of(parameter.grad)

    def set_gradient(self, gradient: torch.Tensor | None) -> None:
        parameter = self.parameter()
        if parameter is not None:
            # Past the assignments of the program, which _integrations/parameters.py watches.
            _GRAD.__set__(parameter, None if gradient is None else _like(parameter, gradient))


class _Gradients(_Parameter):
    """Pages the gradients that backward makes."""

    __torch_unserializable__ = True  # torch.save() leaves it out

    def __init__(self, parameter: torch.Tensor, outer: _Parameter) -> None:
        super().__init__(parameter)
        self.outer = outer

    def forget(self) -> None:
        super().forget()
        self.outer.forget()

    def __call__(self, gradient: DTensor) -> torch.Tensor | None:
        parameter = self.parameter()
        if parameter is None or not parameter.requires_grad:  # frozen since forward
            return None
        node = torch.autograd.graph.get_gradient_edge(parameter).node
        try:
            accumulates = torch._C._will_engine_execute_node(node)
        except RuntimeError:  # so torch says that autograd.grad() asks for the parameter's gradient
            accumulates = False
        return page_gradient(parameter, gradient) if accumulates else None


def _like(parameter: Any, local: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    made: Any = DTensor
    tensor: torch.Tensor = made(local, parameter._spec, requires_grad=False)
    return tensor


def page_gradient(parameter: DTensor, gradient: DTensor) -> torch.Tensor:
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    if gradient.requires_grad and torch.is_grad_enabled():
        raise _core.AccessError(
            "backward(create_graph=True) is not for paged DTensors: take such gradients with torch.autograd.grad"
        )
    if gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)
    new = local_of(gradient)
    new = new.wait() if isinstance(new, AsyncCollectiveTensor) else new
    return _like(parameter, _core.inner_gradient(local_of(parameter), new.detach()))
