"""Checkpoints of other libraries: what is exported trains on there to the bit, and what is imported here."""

import contextlib
import json
import os
import pathlib
import pickle
import shutil
import subprocess
import sys
import zipfile
import zlib

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from zeropage._checkpoint import contents as contents_module
from zeropage._convert import export_checkpoint, import_checkpoint, unpickling

import zeropage

DATA = pathlib.Path(__file__).resolve().parents[1] / "data" / "deepspeed"
FORMS = {
    "AdamW-fused": (torch.optim.AdamW, dict(fused=True)),
    "AdamW": (torch.optim.AdamW, dict(foreach=True, amsgrad=True)),
    "SGD": (torch.optim.SGD, dict(momentum=0.9)),
    "Adafactor": (torch.optim.Adafactor, {}),
}


@pytest.fixture
def folder(disk):
    return pathlib.Path(disk)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 64)
        self.body = nn.Linear(64, 64)
        self.frozen = nn.Linear(64, 64).requires_grad_(False)
        self.head = nn.Linear(64, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("count", torch.arange(3, device="cpu"))

    def forward(self, tokens):
        return self.head(self.frozen(torch.tanh(self.body(self.embedding(tokens)))))


def build(scope=None, form="AdamW-fused"):
    torch.manual_seed(0)
    with scope or contextlib.nullcontext():
        model = Net()
    kind, settings = FORMS[form]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [{"params": trained[:1], "lr": 2e-2}, {"params": trained[1:], "lr": 1e-2}]
    return model, kind(groups, **settings)


def train(model, optimizer, seeds):
    losses = []
    for seed in seeds:
        tokens = torch.randint(0, 50, (4, 8), generator=torch.Generator("cpu").manual_seed(seed), device="cpu")
        loss = model(tokens).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def same(a, b):
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def paged(config, form="AdamW-fused"):
    return build(zeropage.init(config.replace(min_page_bytes=4096)), form)


def saved(config, folder, form="AdamW-fused", **options):
    """A paged model that was trained and saved, and its optimizer."""
    model, optimizer = paged(config, form)
    train(model, optimizer, range(3))
    zeropage.save(folder / "ours", model, optimizer, **options)
    return model, optimizer


# ---- export


@pytest.mark.parametrize("form", FORMS)
def test_plain_pytorch_goes_on_from_an_exported_file(form, config, folder):
    model, optimizer = saved(config, folder, form, extra={"epoch": 3, "seen": (1, [2.5])})
    export_checkpoint(folder / "ours", folder / "all.pt", "torch")
    state = torch.load(folder / "all.pt")
    assert state["extra"] == {"epoch": 3, "seen": (1, [2.5])}
    assert state["model"]["head.weight"].data_ptr() == state["model"]["embedding.weight"].data_ptr()
    plain, plain_optimizer = build(form=form)
    plain.load_state_dict(state["model"])
    plain_optimizer.load_state_dict(state["optimizer"])
    assert train(plain, plain_optimizer, range(3, 6)) == train(model, optimizer, range(3, 6))
    assert same(plain, model)


@pytest.mark.parametrize("form", ["AdamW-fused", "SGD"])
def test_plain_pytorch_goes_on_from_an_exported_folder_of_dcp(form, config, folder):
    model, optimizer = saved(config, folder, form, extra={"epoch": 3})
    export_checkpoint(folder / "ours", folder / "dcp", "dcp")
    plain, plain_optimizer = build(form=form)
    model_state, optimizer_state = get_state_dict(plain, plain_optimizer)
    state = {"model": model_state, "optim": optimizer_state, "extra": {"epoch": 0}}
    dcp.load(state, checkpoint_id=folder / "dcp", no_dist=True)
    assert state["extra"]["epoch"] == 3
    set_state_dict(plain, plain_optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    assert train(plain, plain_optimizer, range(3, 6)) == train(model, optimizer, range(3, 6))
    assert same(plain, model)


@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize("visible", [False, True])
def test_masters_are_exported_as_deepspeed_does(visible, shards, config, folder, monkeypatch):
    model, _ = saved(config.replace(compute_dtype="bfloat16"), folder, low_precision=visible)
    if shards:
        monkeypatch.setattr(contents_module, "SHARD_BYTES", 20_000)
    export_checkpoint(folder / "ours", folder / "fp32", "deepspeed-fp32")
    assert (folder / "fp32" / "pytorch_model.bin.index.json").exists() == shards
    state = {}
    for file in sorted((folder / "fp32").glob("*.bin")):
        state |= torch.load(file)
    expected = model.state_dict()
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        assert state[name].dtype == (torch.float32 if tensor.is_floating_point() else tensor.dtype)
        assert torch.equal(state[name], tensor.to(state[name].dtype)), name
    assert sorted(path.name for path in folder.iterdir()) == ["fp32", "ours"]


def test_a_flipped_byte_is_not_exported(config, folder):
    saved(config, folder)
    path = folder / "ours" / "optimizer.safetensors"
    data = bytearray(path.read_bytes())
    data[5000] ^= 1
    path.write_bytes(data)
    for to in ("torch", "dcp", "deepspeed-fp32"):
        with pytest.raises(zeropage.DiskError, match=r"weight/exp_avg"):
            export_checkpoint(folder / "ours", folder / "out", to)
        assert not (folder / "out").exists()


def test_a_small_file_takes_the_place_of_no_other_in_an_export(folder):
    zeropage.save(folder / "ours", nn.Linear(2, 2))
    (folder / "ours" / "pytorch_model.bin").write_bytes(b"evil")
    path = folder / "ours" / "zeropage-checkpoint.json"
    head, body, _ = path.read_bytes().splitlines()
    manifest = json.loads(body)
    manifest["others"]["pytorch_model.bin"] = zlib.crc32(b"evil")
    covered = head + b"\n" + json.dumps(manifest).encode()
    path.write_bytes(covered + b'\n{"crc": %d}\n' % zlib.crc32(covered))
    with pytest.raises(zeropage.DiskError, match="File exists"):
        export_checkpoint(folder / "ours", folder / "out", "deepspeed-fp32")
    assert not (folder / "out").exists()


def test_what_is_there_and_is_something_else_stays(config, folder):
    saved(config, folder)
    (folder / "out").mkdir()
    (folder / "out" / "precious").write_text("x")
    for to in ("torch", "dcp", "deepspeed-fp32"):
        with pytest.raises(zeropage.ZeropageError, match="out"):
            export_checkpoint(folder / "ours", folder / "out", to)
    with pytest.raises(zeropage.ZeropageError, match="out"):
        import_checkpoint(DATA / "zero1", folder / "out")
    assert [path.name for path in (folder / "out").iterdir()] == ["precious"]
    with pytest.raises(zeropage.ZeropageError, match="no form"):
        export_checkpoint(folder / "ours", folder / "other", "onnx")
    with pytest.raises(zeropage.ZeropageError, match="no checkpoint of DeepSpeed"):
        import_checkpoint(folder / "ours", folder / "other")


def test_nothing_that_is_there_is_replaced(config, folder):
    saved(config, folder)
    for to, name in (("dcp", ".metadata"), ("deepspeed-fp32", "pytorch_model.bin")):
        shutil.rmtree(folder / "out", ignore_errors=True)
        (folder / "out").mkdir()
        (folder / "out" / name).write_text("precious")
        (folder / "out" / "tokenizer.json").write_text("precious")
        with pytest.raises(zeropage.ZeropageError, match="there already"):
            export_checkpoint(folder / "ours", folder / "out", to)
        assert sorted(os.listdir(folder / "out")) == sorted([name, "tokenizer.json"])
    (folder / "all.pt").write_text("precious")
    with pytest.raises(zeropage.ZeropageError, match="there already"):
        export_checkpoint(folder / "ours", folder / "all.pt", "torch")
    assert (folder / "all.pt").read_text() == "precious"


def test_a_checkpoint_that_is_replaced_meanwhile_is_not_mixed(config, folder):
    model, optimizer = saved(config, folder)

    def progress(_passed, _size):
        if not replaced:
            replaced.append(True)
            train(model, optimizer, [9])
            zeropage.save(folder / "ours", model, optimizer)

    replaced = []
    with pytest.raises(zeropage.ZeropageError, match=r"replaced|not what was written"):
        export_checkpoint(folder / "ours", folder / "all.pt", "torch", progress)
    assert not (folder / "all.pt").exists() and not list(folder.glob(".all*"))


@pytest.mark.parametrize("to", ["torch", "dcp", "deepspeed-fp32"])
def test_a_full_disk_is_an_error_and_leaves_nothing(to, config, folder, monkeypatch):
    saved(config, folder)

    def save(*_args, **_named):
        raise RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed")

    monkeypatch.setattr(torch, "save", save)
    with pytest.raises(zeropage.DiskError, match="cannot be written"):
        export_checkpoint(folder / "ours", folder / "out", to)
    assert sorted(os.listdir(folder)) == ["ours"]


# ---- import: DeepSpeed. The folders were made by it: tests/data/make_deepspeed.py


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.body = nn.Linear(5, 5)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("count", torch.zeros(3, dtype=torch.int64, device="cpu"))


def small(config, fused=True):
    with zeropage.init(config.replace(min_page_bytes=0)):
        model = Small()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1]},
        {"params": [p for p in trained if p.dim() == 1]},
    ]
    return model, torch.optim.AdamW(groups, fused=fused)


@pytest.mark.parametrize("kind", ["zero1", "zero2", "zero3", "bf16", *(f"zero{i}-universal" for i in (1, 2, 3))])
def test_what_deepspeed_saved_is_loaded(kind, config, folder):
    left_out = import_checkpoint(DATA / kind, folder / "ours")
    expected = torch.load(DATA / kind / "expected.pt")
    model, optimizer = small(config)
    result = zeropage.load(folder / "ours", model, optimizer)
    assert result["epoch"] == 7 and result["note"] == "of the program" and result["global_steps"] == 3
    assert not {"epoch", "note"} & set(left_out)
    state = model.state_dict()
    assert state.keys() == expected["master"].keys() | {"head.weight"}
    for name, tensor in expected["master"].items():
        assert torch.equal(state[name], tensor.to(state[name].dtype)), name
    assert torch.equal(state["head.weight"], state["embedding.weight"])
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            held = optimizer.state[parameter]
            assert torch.equal(held["exp_avg"], expected["exp_avg"][name]), name
            assert torch.equal(held["exp_avg_sq"], expected["exp_avg_sq"][name]), name
            assert held["step"].item() == 3
    decay, no_decay = optimizer.param_groups
    assert (decay["weight_decay"], no_decay["weight_decay"]) == (0.1, 0.0)
    assert tuple(decay["betas"]) == (0.8, 0.99)


def copy(kind, folder):
    shutil.copytree(DATA / kind, folder / kind)
    return folder / kind / "step3"


@pytest.mark.parametrize("kind", ["zero1", "zero3", "bf16"])
def test_a_part_that_is_missing_is_an_error(kind, folder):
    place = copy(kind, folder)
    lost = next(place.glob("*zero_pp_rank_0_mp_rank_00_optim_states.pt"))
    kept = lost.read_bytes()
    lost.unlink()
    with pytest.raises(zeropage.DiskError, match="rank 0"):
        import_checkpoint(folder / kind, folder / "ours")
    lost.write_bytes(kept[: len(kept) // 2])
    with pytest.raises(zeropage.DiskError, match="damaged"):
        import_checkpoint(folder / kind, folder / "ours")
    lost.write_bytes(kept)
    next(place.glob("*zero_pp_rank_1_mp_rank_00_optim_states.pt")).unlink()
    with pytest.raises(zeropage.DiskError, match="of 1 ranks, and was saved by 2"):
        import_checkpoint(folder / kind, folder / "ours")
    assert not (folder / "ours").exists()


def edit(place, change):
    """The optimizer states of each rank; classes of DeepSpeed's are not kept."""
    for path in sorted(place.glob("*optim_states.pt")):
        state = unpickling.load(path)["optimizer_state_dict"]
        state = {key: value for key, value in state.items() if key not in ("loss_scaler", "param_slice_mappings")}
        state["zero_stage"] = unpickling.number(state["zero_stage"])
        change(state)
        torch.save({"optimizer_state_dict": state}, f"{path}.new")
        os.replace(f"{path}.new", path)


def test_a_group_that_trains_nothing_moves_no_states(config, folder):
    def change(state):
        groups = state["optimizer_state_dict"]["param_groups"]
        groups.insert(1, {**groups[0], "params": []})

    edit(copy("zero3", folder), change)
    import_checkpoint(folder / "zero3", folder / "ours")
    expected = torch.load(DATA / "zero3" / "expected.pt")
    model, _ = small(config)
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [[p for p in trained if p.dim() > 1], [model.frozen.weight], [p for p in trained if p.dim() == 1]]
    groups[0].append(model.frozen.bias)  # that an optimizer has, and DeepSpeed does not
    optimizer = torch.optim.AdamW([{"params": group} for group in groups])
    zeropage.load(folder / "ours", model, optimizer)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert torch.equal(optimizer.state[parameter]["exp_avg"], expected["exp_avg"][name]), name


def test_states_that_are_only_there_in_part_are_an_error(folder):
    def lose(state):
        for key in ("exp_avg", "exp_avg_sq"):
            state["optimizer_state_dict"]["state"][0].pop(key)

    edit(copy("zero3", folder), lose)
    with pytest.raises(zeropage.ZeropageError, match="of others are not"):
        import_checkpoint(folder / "zero3", folder / "ours")

    def cut(state):
        states = state["base_optimizer_state"]["state"]
        states[0]["exp_avg"] = states[0]["exp_avg"][:-4].clone()

    edit(copy("zero1", folder), cut)
    with pytest.raises(zeropage.DiskError, match="not whole"):
        import_checkpoint(folder / "zero1", folder / "ours")

    def elastic(state):
        state["base_optimizer_state"] = list(state["base_optimizer_state"]["state"].values())

    edit(copy("zero2", folder), elastic)
    with pytest.raises(zeropage.ZeropageError, match="elastic"):
        import_checkpoint(folder / "zero2", folder / "ours")

    shutil.rmtree(folder / "zero1")
    edit(copy("zero1", folder), lambda state: state.pop("partition_count"))
    with pytest.raises(zeropage.DiskError, match="partition_count"):
        import_checkpoint(folder / "zero1", folder / "ours")
    (folder / "zero1" / "latest").write_text("../elsewhere")
    with pytest.raises(zeropage.ZeropageError, match="elsewhere"):
        import_checkpoint(folder / "zero1", folder / "ours")


def test_what_was_split_otherwise_is_an_error(folder):
    place = copy("zero1", folder)
    shutil.copy(place / "mp_rank_00_model_states.pt", place / "mp_rank_01_model_states.pt")
    with pytest.raises(zeropage.ZeropageError, match="split by tensors"):
        import_checkpoint(folder / "zero1", folder / "ours")
    (place / "mp_rank_01_model_states.pt").rename(place / "layer_00-model_states.pt")
    with pytest.raises(zeropage.ZeropageError, match="pipeline"):
        import_checkpoint(folder / "zero1", folder / "ours")
    (place / "layer_00-model_states.pt").unlink()
    for path in place.glob("*optim_states.pt"):
        path.unlink()
    with pytest.raises(zeropage.ZeropageError, match="without ZeRO"):
        import_checkpoint(folder / "zero1", folder / "ours")


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return self.run, (self.path.parent / "source", self.path)

    run = staticmethod(shutil.copyfile)


class VeryEvil(Evil):
    def __reduce__(self):
        return os.mkdir, (os.fspath(self.path),)


def test_no_pickle_of_deepspeeds_is_run(config, folder):
    place = copy("zero2", folder) / "mp_rank_00_model_states.pt"
    with torch.serialization.safe_globals([]):
        state = torch.load(place, weights_only=False)
    (folder / "source").write_text("x")
    torch.save({**state, "odd": VeryEvil(folder / "ran")}, place)
    with pytest.raises(zeropage.ZeropageError, match="no plain data"):
        import_checkpoint(folder / "zero2", folder / "ours")
    torch.save({**state, "odd": Evil(folder / "ran")}, place)
    left_out = import_checkpoint(folder / "zero2", folder / "ours")
    assert "odd" in left_out and not (folder / "ran").exists()
    model, optimizer = small(config)
    zeropage.load(folder / "ours", model, optimizer)


@pytest.mark.parametrize("name", ["..", ".", "/etc", "a/b", "a\0b"])
def test_no_name_in_deepspeeds_files_leads_out_of_the_folder(name, folder):
    copy("zero1-universal", folder)
    universal = folder / "zero1-universal"
    latest = next(universal / known for known in ("latest", "latest_universal") if (universal / known).exists())
    tag = latest.read_text()
    latest.write_text(name)
    with pytest.raises(zeropage.ZeropageError, match="names a folder elsewhere"):
        import_checkpoint(universal, folder / "ours")
    latest.write_text(tag)
    (path,) = (universal / tag.strip()).glob("mp_rank_00_model_states.pt")
    state = unpickling.load(path)
    state["param_shapes"][0][name] = torch.Size([5])
    torch.save(state, path)
    with pytest.raises(zeropage.ZeropageError, match="is no name of a parameter"):
        import_checkpoint(universal, folder / "ours")


def built(target, state):
    """A pickle that gives `state` to an object or class and returns it. `target` pickles that object or class."""
    return b"\x80\x02" + target + pickle.dumps(state, 2)[2:-1] + b"b."


@pytest.mark.parametrize("state", [{"parent": "evil"}, (None, {"parent": "evil"}), (None, {"__init__": "evil"})])
@pytest.mark.parametrize(
    "module, name",
    [
        ("pathlib", "PosixPath"),
        ("torch.distributed.checkpoint.metadata", "Metadata"),
        ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        ("torch", "Size"),
        ("torch", "float32"),
        ("collections", "OrderedDict"),
    ],
)
def test_metadata_changes_no_class(module, name, state, folder):
    real = getattr(sys.modules[module], name)
    before = dict(vars(real)) if hasattr(real, "__dict__") else {}
    (folder / "a").mkdir()
    (folder / "a" / ".metadata").write_bytes(built(f"c{module}\n{name}\n".encode(), state))
    try:
        with pytest.raises(zeropage.DiskError, match="is damaged, or is not what torch wrote"):
            import_checkpoint(folder / "a", folder / "ours")
        assert dict(getattr(real, "__dict__", {})) == before
    finally:  # for the tests that follow
        for key in set(getattr(real, "__dict__", {})) - before.keys():
            delattr(real, key)
        if name != "PosixPath" and "__init__" in before and vars(real)["__init__"] != before["__init__"]:
            real.__init__ = before["__init__"]
    assert pathlib.Path("/a/b").parent == pathlib.Path("/a")


def test_an_object_in_metadata_is_given_no_other_class(folder):
    (folder / "a").mkdir()
    entry = b"ctorch.distributed.checkpoint.metadata\nBytesStorageMetadata\n)\x81"
    (folder / "a" / ".metadata").write_bytes(built(entry, (None, {"__class__": "evil", "__dict__": {}})))
    with pytest.raises(zeropage.DiskError, match="BytesStorageMetadata in place of a Metadata"):
        import_checkpoint(folder / "a", folder / "ours")


@pytest.mark.parametrize("name", ["_dynamo", "load", "Tensor", "serialization.load", "__builtins__"])
def test_metadata_gets_nothing_else_of_torch(name, folder, monkeypatch):
    (folder / "a").mkdir()
    (folder / "a" / ".metadata").write_bytes(f"ctorch\n{name}\n.".encode())
    monkeypatch.setattr(torch, "__getattr__", lambda name: pytest.fail(f"imports {name}"))
    with pytest.raises(zeropage.DiskError, match="it asks for torch"):
        import_checkpoint(folder / "a", folder / "ours")


@pytest.mark.parametrize("size", [(-1,), ("a",), (1.5,), (True,), "ab", None])
def test_metadata_with_a_shape_that_is_none_is_an_error(size, folder):
    dcp.save({"model": {"w": torch.zeros(3, device="cpu")}}, checkpoint_id=folder / "a", no_dist=True)
    metadata = pickle.loads((folder / "a" / ".metadata").read_bytes())
    metadata.state_dict_metadata["model.w"].size = size
    (folder / "a" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(zeropage.DiskError, match="in place of a"):
        import_checkpoint(folder / "a", folder / "ours")


@pytest.mark.parametrize("name", ["../outside", "..", ".", "", "/etc/hostname", "a\0b", 3])
def test_metadata_that_names_files_outside_the_folder_is_an_error(name, folder):
    dcp.save({"model": {"w": torch.zeros(3, device="cpu")}}, checkpoint_id=folder / "a", no_dist=True)
    metadata = pickle.loads((folder / "a" / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = name
    (folder / "a" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(zeropage.ZeropageError, match="outside its folder"):
        import_checkpoint(folder / "a", folder / "ours")


def torch_file(path, pickled):
    """A file of torch.save with another pickle in it."""
    torch.save({}, path)
    with zipfile.ZipFile(path) as old:
        members = {member: old.read(member) for member in old.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as new:
        for member, data in members.items():
            new.writestr(member, pickled if member.endswith("data.pkl") else data)


@pytest.mark.parametrize("module, name", [("pathlib", "PosixPath"), ("torch", "Tensor"), ("torch", "Size")])
def test_files_of_torch_save_change_no_class(module, name, folder):
    real = getattr(sys.modules[module], name)
    before = dict(vars(real))
    for state in ({"parent": "evil"}, (None, {"parent": "evil"})):
        torch_file(folder / "evil.pt", built(f"c{module}\n{name}\n".encode(), state))
        with pytest.raises(zeropage.ZeropageError, match=r"no plain data|is damaged"):
            unpickling.load(folder / "evil.pt")
    assert dict(vars(real)) == before and not hasattr(unpickling.Inert, "parent")


# ---- import: torch.distributed.checkpoint


@pytest.mark.parametrize("form", ["AdamW-fused", "SGD"])
@pytest.mark.parametrize("layout", ["nested", "flat", "app", "root", "named"])
def test_what_dcp_saved_trains_on(layout, form, config, folder):
    plain, optimizer = build(form=form)
    train(plain, optimizer, range(3))
    options = StateDictOptions(flatten_optimizer_state_dict=layout == "flat")
    model_state, optimizer_state = get_state_dict(plain, optimizer, options=options)
    if layout == "named":
        optimizer_state = optimizer.state_dict()
        names = {id(parameter): name for name, parameter in plain.named_parameters()}
        for group, own in zip(optimizer_state["param_groups"], optimizer.param_groups, strict=True):
            group["param_names"] = [names[id(parameter)] for parameter in own["params"]]
    state = {"model": model_state, "optim": optimizer_state, "progress": {"epoch": 3, "odd": {4}}}
    if layout == "app":
        state = {"app": state}
    if layout == "root":
        state = {**model_state, "optim": optimizer_state, "progress": state["progress"]}
    dcp.save(state, checkpoint_id=folder / "dcp", no_dist=True)
    left_out = import_checkpoint(folder / "dcp", folder / "ours")
    assert left_out == ["app.progress.odd" if layout == "app" else "progress.odd"]
    model, again = paged(config, form)
    extra = zeropage.load(folder / "ours", model, again)
    assert extra == ({"app": {"progress": {"epoch": 3}}} if layout == "app" else {"progress": {"epoch": 3}})
    assert train(model, again, range(3, 6)) == train(plain, optimizer, range(3, 6))
    assert same(model, plain)


def test_what_is_exported_comes_back(config, folder):
    model, optimizer = paged(config)
    train(model, optimizer, range(3))
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3, 3])
    ema = torch.randn(5, 3, device="cpu")
    extra = {"epoch": 3, "ema": {"deep": {"w": ema}}, 7: "seven", "none": {}, "numbers": {1: 2}}
    zeropage.save(folder / "ours", model, optimizer, scheduler, extra={"all": extra, "w": ema, "epoch": 3})
    export_checkpoint(folder / "ours", folder / "dcp", "dcp")
    assert import_checkpoint(folder / "dcp", folder / "again") == []
    other, other_optimizer = paged(config)
    other_scheduler = torch.optim.lr_scheduler.MultiStepLR(other_optimizer, [9])
    result = zeropage.load(folder / "again", other, other_optimizer, other_scheduler)
    assert torch.equal(result["w"], ema) and torch.equal(result["all"]["ema"]["deep"].pop("w"), ema)
    extra["ema"]["deep"].pop("w")
    assert result["epoch"] == 3 and result["all"] == extra
    assert other_scheduler.state_dict() == scheduler.state_dict()
    assert same(model, other)
    one, other = ((folder / name / "optimizer.safetensors").stat().st_size for name in ("ours", "again"))
    assert one == other


def test_metadata_that_python_3_11_2_wrote_is_read(config, folder, monkeypatch):
    """The release pickles a member of an enumeration as an attribute of its class."""
    from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

    plain, _ = build()
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", lambda self, _: (getattr, (type(self), self.name)))
    dcp.save({"model": plain.state_dict()}, checkpoint_id=folder / "dcp", no_dist=True)
    assert b"getattr" in (folder / "dcp" / ".metadata").read_bytes()
    import_checkpoint(folder / "dcp", folder / "ours")
    model, _ = paged(config)
    zeropage.load(folder / "ours", model)
    assert same(model, plain)


@pytest.mark.parametrize(("stored", "found"), [((3,), 3), (("ZeroStageEnum", "gradients"), 2), (("a", "b"), None)])
def test_a_stage_is_found_by_value_or_by_name(stored, found):
    stage = unpickling.Inert(*stored)
    assert unpickling.number(stage) == (stage if found is None else found)
    assert unpickling.number(1) == 1


def test_metadata_gets_no_other_attribute(folder):
    (folder / "a").mkdir()
    for owner in (b"cpathlib\nPosixPath\n", b"ctorch\nSize\n", b"ctorch\nfloat32\n"):
        call = b"cbuiltins\ngetattr\n" + owner + b"X\x08\x00\x00\x00__init__\x86R."
        (folder / "a" / ".metadata").write_bytes(b"\x80\x02" + call)
        with pytest.raises(zeropage.DiskError, match=r"builtins\.getattr"):
            import_checkpoint(folder / "a", folder / "ours")


def test_groups_with_the_same_settings_are_told_apart_by_the_optimizer(config, folder):
    plain, _ = build()
    trained = [parameter for parameter in plain.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW([{"params": trained[:1]}, {"params": trained[1:]}])
    train(plain, optimizer, range(2))
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model_state, optimizer_state = get_state_dict(plain, optimizer, options=options)
    dcp.save({**model_state, "optim": optimizer_state}, checkpoint_id=folder / "dcp", no_dist=True)
    import_checkpoint(folder / "dcp", folder / "ours")
    model, _ = paged(config)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    again = torch.optim.AdamW([{"params": trained[:1]}, {"params": trained[1:]}])
    zeropage.load(folder / "ours", model, again)
    assert train(model, again, range(2, 4)) == train(plain, optimizer, range(2, 4))
    with pytest.raises(zeropage.ZeropageError, match="another optimizer"):
        zeropage.load(folder / "ours", model, torch.optim.AdamW(trained[:1]))


def test_states_by_number_say_so_and_a_model_can_be_named(folder):
    plain, optimizer = build()
    train(plain, optimizer, range(1))
    dcp.save({"model": plain.state_dict(), "optim": optimizer.state_dict()}, checkpoint_id=folder / "a", no_dist=True)
    with pytest.raises(zeropage.ZeropageError, match="by number"):
        import_checkpoint(folder / "a", folder / "ours")
    dcp.save({"ema": plain.state_dict(), "net": plain.state_dict()}, checkpoint_id=folder / "b", no_dist=True)
    with pytest.raises(zeropage.ZeropageError, match=r'--model.*"ema", "net"'):
        import_checkpoint(folder / "b", folder / "ours")
    with pytest.raises(zeropage.ZeropageError, match='nothing under "x"'):
        import_checkpoint(folder / "b", folder / "ours", model_key="x")
    import_checkpoint(folder / "b", folder / "ours", model_key="net")
    other, _ = build()
    zeropage.load(folder / "ours", other)
    assert same(other, plain)


def test_no_pickle_of_dcps_is_run(folder):
    plain, _ = build()
    dcp.save({"model": plain.state_dict(), "odd": Evil(folder / "ran")}, checkpoint_id=folder / "a", no_dist=True)
    (folder / "source").write_text("x")
    assert import_checkpoint(folder / "a", folder / "ours") == ["odd"]
    metadata = pickle.loads((folder / "a" / ".metadata").read_bytes())
    metadata.planner_data = Evil(folder / "ran")
    (folder / "a" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(zeropage.DiskError, match="asks for"):
        import_checkpoint(folder / "a", folder / "ours")
    assert not (folder / "ran").exists()
    metadata.planner_data = None
    for info in metadata.storage_data.values():
        info.relative_path = "../outside"
    (folder / "a" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(zeropage.ZeropageError, match="outside its folder"):
        import_checkpoint(folder / "a", folder / "ours")


def test_a_folder_of_dcps_that_is_not_whole_is_an_error(folder):
    plain, _ = build()
    dcp.save({"model": plain.state_dict()}, checkpoint_id=folder / "a", no_dist=True)
    data = next((folder / "a").glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:2000])
    with pytest.raises(zeropage.DiskError, match='"model'):
        import_checkpoint(folder / "a", folder / "ours")
    assert not (folder / "ours").exists() and not list(folder.glob(".ours*"))


# ---- the command


def command(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "zeropage", *map(os.fspath, arguments)], capture_output=True, text=True, timeout=120
    )


def test_the_command_exports_and_imports(config, folder):
    model, _ = saved(config, folder)
    done = command("export", folder / "ours", folder / "dcp", "--to", "dcp")
    assert done.returncode == 0 and done.stdout == f"written: {folder / 'dcp'}\n", done.stderr
    done = command("import", folder / "dcp", folder / "again")
    assert done.returncode == 0, done.stderr
    other, optimizer = paged(config)
    zeropage.load(folder / "again", other, optimizer)
    assert same(model, other)
    done = command("import", folder / "nowhere", folder / "again")
    assert done.returncode == 1 and done.stderr.startswith("Error: ") and len(done.stderr.splitlines()) == 1
