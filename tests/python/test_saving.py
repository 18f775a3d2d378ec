"""Saving and loading by stock ways: nothing is lost, and a resumed run is the uninterrupted one to the bit."""

import collections
import copy
import io
import pickle

import pytest
import torch
from torch import nn

import zeropage

OPTIMIZERS = {
    "AdamW": dict(foreach=False),
    "AdamW-foreach": dict(foreach=True),
    "AdamW-fused": dict(fused=True, amsgrad=True),
    "Adam-fused": dict(fused=True),
    "SGD-momentum": dict(momentum=0.9, foreach=False),
    "SGD-foreach": dict(momentum=0.9, foreach=True),
    "SGD-fused": dict(momentum=0.9, fused=True),
    "RMSprop": dict(momentum=0.5, centered=True, foreach=True),
    "RMSprop-single": dict(foreach=False),
    "Adagrad": dict(foreach=False),
    "Adadelta": dict(foreach=True),
    "Adamax": dict(foreach=True),
    "NAdam": dict(foreach=True),
    "RAdam": dict(foreach=False),
    "ASGD": dict(foreach=True),
    "Rprop": dict(foreach=False),
    "Adafactor": dict(foreach=False),
}
PRECISIONS = {
    "float32": {},
    "mixed": dict(compute_dtype="bfloat16"),
    "float32_split": dict(compute_dtype="bfloat16", master_dtype="float32_split"),
}

FORMS = [  # each form in one precision; in all of them with --full
    pytest.param(form, precision, marks=[] if (i + j) % 3 == 0 else [pytest.mark.full])
    for i, form in enumerate(OPTIMIZERS)
    for j, precision in enumerate(PRECISIONS)
]


def build(scope):
    torch.manual_seed(0)
    with scope:
        model = nn.Sequential(nn.Linear(96, 96), nn.LayerNorm(96), nn.Linear(96, 96), nn.Linear(96, 4))
        model[2].weight = model[0].weight
    return model


def build_strided(scope):
    """As build(), with weights whose rows do not follow one another in memory: over ranks, saving gathers them."""
    model = build(scope)
    with scope:
        for layer in model[0], model[3]:
            weight = torch.empty(layer.weight.t().shape).t()
            with torch.no_grad():
                weight.copy_(layer.weight)
            layer.weight = nn.Parameter(weight)
        model[2].weight = model[0].weight
    assert not model[0].weight.is_contiguous() and not model[3].weight.is_contiguous()
    return model


def make_optimizer(model, form):
    name = form.split("-")[0]
    return getattr(torch.optim, name)(model.parameters(), lr=1e-2, **OPTIMIZERS[form])


def run_steps(model, optimizer, seeds):
    losses = []
    for seed in seeds:
        x = torch.randn(8, 96, generator=torch.Generator("cpu").manual_seed(seed), device="cpu")
        loss = model(x.to(model[0].weight.device, model[0].weight.dtype)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        zeropage.page_out(model)
    return losses


def same(a, b):
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("form, precision", FORMS)
def test_a_resumed_run_is_the_uninterrupted_one(form, precision, config, tmp_path):
    config = config.replace(**PRECISIONS[precision], min_page_bytes=4096)
    model = build(zeropage.init(config))
    optimizer = make_optimizer(model, form)
    run_steps(model, optimizer, range(3))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "all.pt")
    expected = run_steps(model, optimizer, range(3, 6))

    state = torch.load(tmp_path / "all.pt")
    assert not any(zeropage.is_paged(tensor) for tensor in state["model"].values())
    again = build(zeropage.init(config))
    again.load_state_dict(state["model"])
    optimizer_again = make_optimizer(again, form)
    optimizer_again.load_state_dict(state["optimizer"])
    made = dict(optimizer.state[model[0].weight])
    for name, value in optimizer_again.state[again[0].weight].items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == made[name].dtype, name
            assert zeropage.is_paged(value) == zeropage.is_paged(made[name]), name
    assert run_steps(again, optimizer_again, range(3, 6)) == expected
    assert same(model, again)


@pytest.mark.parametrize("moments", ["8bit", "bfloat16"])
def test_quantised_moments_resume(moments, config, tmp_path):
    config = config.replace(optimizer_dtype=moments, min_page_bytes=4096)
    model = build(zeropage.init(config))
    optimizer = make_optimizer(model, "AdamW-fused")
    run_steps(model, optimizer, range(3))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "all.pt")
    expected = run_steps(model, optimizer, range(3, 6))
    state = torch.load(tmp_path / "all.pt")
    again = build(zeropage.init(config))
    again.load_state_dict(state["model"])
    optimizer_again = make_optimizer(again, "AdamW-fused")
    optimizer_again.load_state_dict(state["optimizer"])
    assert run_steps(again, optimizer_again, range(3, 6)) == expected
    assert same(model, again)


def test_state_dict_gives_masters_or_what_operators_see(config):
    for setting, dtype in (("master", torch.float32), ("compute", torch.bfloat16)):
        for precision in ("mixed", "float32_split"):
            model = build(zeropage.init(config.replace(**PRECISIONS[precision], state_dict=setting)))
            state = model.state_dict()
            assert {value.dtype for value in state.values()} == {dtype}
            assert state["0.weight"] is state["2.weight"]  # tied
            assert model.state_dict(keep_vars=True)["0.weight"] is model[0].weight
            plain = build(torch.no_grad())
            expected = plain[0].weight.to(dtype)
            assert torch.equal(state["0.weight"].cpu(), expected.cpu())
    with pytest.raises(zeropage.ConfigError, match="state_dict"):
        zeropage.init(config.replace(state_dict="both"))


class Keeper(nn.Module):
    """A module that saves another model of its own accord: an average, or a teacher."""

    def __init__(self, way):
        super().__init__()
        self.layer = nn.Linear(64, 64)
        self.other = [nn.Sequential(nn.Linear(64, 64))]  # hidden from modules
        self.seen = None
        if way == "a hook":
            self.register_state_dict_pre_hook(lambda module, *_: module.save())
        self.way = way

    def save(self):
        self.seen = self.other[0].state_dict()
        return self.seen

    def get_extra_state(self):
        return self.save() if self.way == "extra state" else None

    def set_extra_state(self, state):
        pass

    def state_dict(self, *args, **named):
        if self.way == "an override":
            self.save()
        return super().state_dict(*args, **named)


@pytest.mark.parametrize("way", ["a hook", "extra state", "an override"])
@pytest.mark.parametrize("nested", [False, True], ids=["", "nested"])
def test_a_model_that_is_saved_while_another_is_gives_its_masters_too(way, nested, config):
    with zeropage.init(config, compute_dtype="bfloat16"):
        model = nn.Sequential(nn.Sequential(Keeper(way))) if nested else Keeper(way)
    keeper = model[0][0] if nested else model
    state = model.state_dict(prefix="all.")
    assert {value.dtype for name, value in state.items() if "extra" not in name} == {torch.float32}
    assert {value.dtype for value in keeper.seen.values()} == {torch.float32}
    assert state._metadata["all" if not nested else "all.0"] == {"version": 1}
    into = collections.OrderedDict(other=1)
    assert model.state_dict(destination=into, keep_vars=True) is into and into["other"] == 1
    assert {value.dtype for name, value in keeper.layer.state_dict(None, "x.").items()} == {torch.float32}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("saved", [torch.float32, torch.bfloat16, torch.float64])
def test_either_dtype_loads_and_is_converted_once(precision, saved, config):
    settings = config.replace(**PRECISIONS[precision])
    values = {name: torch.randn_like(value).to(saved) for name, value in build(torch.no_grad()).state_dict().items()}
    values["2.weight"] = values["0.weight"]
    for assign in (False, True):
        model = build(zeropage.init(settings))
        model.load_state_dict({name: value.clone() for name, value in values.items()}, assign=assign)
        if assign and not PRECISIONS[precision]:
            assert model[0].weight.dtype == saved  # as PyTorch has it
        for name, value in model.state_dict().items():
            wanted = values[name].to(value.dtype)
            assert torch.equal(value.cpu(), wanted.cpu()), name
        for name, parameter in model.named_parameters():
            assert zeropage.is_paged(parameter), name
            if PRECISIONS[precision]:
                assert parameter.dtype == torch.bfloat16
                assert torch.equal(parameter.detach().cpu(), values[name].float().bfloat16().cpu())


def test_a_group_added_later_and_an_optimizer_before_its_first_step(config, tmp_path):
    def make(model):
        optimizer = torch.optim.AdamW(model[0].parameters(), lr=1e-2)
        return optimizer

    model = build(zeropage.init(config))
    fresh = make(model)
    torch.save(fresh.state_dict(), tmp_path / "fresh.pt")
    fresh.load_state_dict(torch.load(tmp_path / "fresh.pt"))
    run_steps(model, fresh, range(2))
    fresh.add_param_group({"params": list(model[3].parameters()), "lr": 1e-3})
    run_steps(model, fresh, range(2, 4))
    torch.save({"model": model.state_dict(), "optimizer": fresh.state_dict()}, tmp_path / "all.pt")
    expected = run_steps(model, fresh, range(4, 6))
    again = build(zeropage.init(config))
    state = torch.load(tmp_path / "all.pt")
    again.load_state_dict(state["model"])
    optimizer = make(again)
    optimizer.add_param_group({"params": list(again[3].parameters()), "lr": 1e-3})
    optimizer.load_state_dict(state["optimizer"])
    assert run_steps(again, optimizer, range(4, 6)) == expected


def test_what_torch_save_writes_is_what_plain_pytorch_writes(config, tmp_path):
    plain, paged = build(torch.no_grad()), build(zeropage.init(config))
    for name, model in (("plain", plain), ("paged", paged)):
        torch.save([model.state_dict(), model[0].weight, model[0].weight[3:5].detach()], tmp_path / name)
        torch.save(model.state_dict(), tmp_path / f"{name}.old", _use_new_zipfile_serialization=False)
    a, b = (torch.load(tmp_path / name, weights_only=False) for name in ("plain", "paged"))
    assert all(torch.equal(a[0][name].cpu(), b[0][name].cpu()) for name in a[0])
    assert b[0]["0.weight"].untyped_storage()._cdata == b[0]["2.weight"].untyped_storage()._cdata  # written once
    assert b[2].untyped_storage()._cdata == b[1].untyped_storage()._cdata  # so are views
    assert isinstance(b[1], nn.Parameter) and b[1].requires_grad and torch.equal(a[2].cpu(), b[2].cpu())
    assert abs((tmp_path / "plain").stat().st_size - (tmp_path / "paged").stat().st_size) < 1024
    old = torch.load(tmp_path / "paged.old")
    assert all(torch.equal(a[0][name].cpu(), old[name].cpu()) for name in old)


def test_pickling_and_copying_need_no_file(config):
    paged = build(zeropage.init(config))
    for copied in (pickle.loads(pickle.dumps(paged[0].weight)), copy.copy(paged[0].weight)):
        assert torch.equal(copied.detach().cpu(), paged[0].weight.detach().cpu())
    buffer = io.BytesIO()
    torch.save(paged[0], buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer, weights_only=False).weight.cpu(), paged[0].weight.detach().cpu())


def test_a_save_that_fails_lets_go_of_what_it_held(config, tmp_path):
    class Refuses:
        def __reduce__(self):
            raise ValueError("not this")

    paged = build(zeropage.init(config))
    with pytest.raises(ValueError, match="not this"):
        torch.save([paged.state_dict(), Refuses()], tmp_path / "x")
    with pytest.raises((RuntimeError, OSError)):
        torch.save(paged.state_dict(), tmp_path / "missing" / "x")
    zeropage.page_out(paged)
    run_steps(paged, torch.optim.SGD(paged.parameters(), lr=0.1), [0])
    torch.save(paged.state_dict(), tmp_path / "x")
    assert torch.equal(torch.load(tmp_path / "x")["0.weight"].cpu(), paged[0].weight.detach().cpu())


def test_safetensors_files_are_those_of_its_own_library(config, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    plain, paged = build(torch.no_grad()), build(zeropage.init(config))
    names = ["0.weight", "1.bias", "3.weight"]
    mixed = {'a \u00e9"\n': torch.arange(5, dtype=torch.int64), "z": torch.zeros(0, 3), "s": torch.tensor(2.0)}
    for dtype in (torch.bool, torch.uint8, torch.float8_e5m2, torch.float16, torch.bfloat16, torch.complex64):
        mixed[f"of {dtype}"] = torch.zeros(7).to(dtype)
    for name, model in (("plain", plain), ("paged", paged)):
        state = model.state_dict()
        tensors = {**{name: state[name] for name in names}, **mixed}
        safetensors.save_file(tensors, tmp_path / name, metadata={"format": "pt"})
        assert safetensors.save(tensors, metadata={"format": "pt"}) == (tmp_path / name).read_bytes()
        safetensors.save_model(model, str(tmp_path / f"{name}.model"))
    assert (tmp_path / "plain").read_bytes() == (tmp_path / "paged").read_bytes()
    assert (tmp_path / "plain.model").read_bytes() == (tmp_path / "paged.model").read_bytes()
    with torch.no_grad():
        for parameter in paged.parameters():
            parameter.zero_()
    safetensors.load_model(paged, str(tmp_path / "plain.model"))
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(plain.parameters(), paged.parameters(), strict=True))
    with pytest.raises(ValueError, match="non contiguous"):
        safetensors.save_file({"t": paged[3].weight.detach().t()}, tmp_path / "x")


class Pickles:
    """Pickles a tensor by itself, while torch.save pickles this."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __getstate__(self):
        return pickle.dumps(self.tensor)

    def __setstate__(self, state):
        self.tensor = pickle.loads(state)


def test_a_tensor_that_is_pickled_inside_of_what_is_saved_has_its_content(config, tmp_path):
    paged = build(zeropage.init(config))
    torch.save([Pickles(paged[0].weight.detach()), paged[0].weight], tmp_path / "x")
    inner, outer = torch.load(tmp_path / "x", weights_only=False)
    assert torch.equal(inner.tensor.cpu(), outer.detach().cpu())


def test_states_of_another_space_are_copied_into_this_one(config):
    spaces = [zeropage.init(config), zeropage.init(config)]
    models = [build(space) for space in spaces]
    optimizers = [make_optimizer(model, "AdamW-fused") for model in models]
    run_steps(models[0], optimizers[0], range(2))
    models[1].load_state_dict(models[0].state_dict())
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    for state in optimizers[1].state.values():
        state["step"] = state["step"].clone()  # torch gives both the same
    expected = run_steps(models[0], optimizers[0], range(2, 4))
    spaces[0].close()
    assert run_steps(models[1], optimizers[1], range(2, 4)) == expected


def test_a_module_that_loads_by_keywords_still_can():
    class ByKeywords(nn.Linear):
        def _load_from_state_dict(self, **named):
            super()._load_from_state_dict(**named)

    module = ByKeywords(2, 2)
    named = dict(prefix="", local_metadata={}, strict=True, missing_keys=[], unexpected_keys=[], error_msgs=[])
    module._load_from_state_dict(state_dict=module.state_dict(), **named)


def test_a_disk_that_fails_while_torch_writes_leaves_no_pin(config):
    class Full(io.BytesIO):
        def write(self, data):
            if self.tell() > 20_000:
                raise OSError("full")
            return super().write(data)

    paged = build(zeropage.init(config))
    with pytest.raises((OSError, RuntimeError)):
        torch.save(paged.state_dict(), Full())
    for parameter in paged.parameters():
        zeropage._core.evict(parameter)
    held = {memory.name: memory.now for memory in zeropage.report().budgets}
    assert sum(held.values()) == 0


def test_what_operators_see_follows_a_master_that_a_program_changes(config):
    model = build(zeropage.init(config.replace(**PRECISIONS["mixed"])))
    state = model.state_dict()
    with torch.no_grad():
        for change in (
            lambda value: value.mul_(0.5),
            lambda value: value.copy_(torch.full_like(value, 3.0)),
            lambda value: value[1:3].add_(1.0) if value.dim() else value,
            lambda value: value.zero_(),
            lambda value: torch._foreach_add_([value, state["0.bias"]], 2.0),
        ):
            for name in ("0.weight", "3.weight"):
                change(state[name])
            for name, parameter in model.named_parameters():
                assert torch.equal(parameter.detach().cpu(), state[name].cpu().bfloat16()), name
            zeropage.page_out(model)
            assert torch.equal(model[0].weight.detach().cpu(), state["0.weight"].cpu().bfloat16())
