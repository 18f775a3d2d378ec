"""Models of DTensors, made by parallelize_module(), with ZeRO over another dimension of their mesh.

The reference is the same parallel program on plain tensors, whose gradients are averaged by hand in rank order over the
data-parallel dimension.
"""

import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from models import ResidualMLP
from ranks import space
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from zeropage._core import plain_copy

import zeropage

pytestmark = [pytest.mark.timeout(300), pytest.mark.cpu]

WIDTH = 32


def mesh_of(parallel):
    """[dp, tp], with so many ranks in the second dimension."""
    return init_device_mesh("cpu", (dist.get_world_size() // parallel, parallel), mesh_dim_names=("dp", "tp"))


PLANS = {
    "columns and rows": {"up": ColwiseParallel(), "down": RowwiseParallel()},
    "sequences": {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=torch.distributed.tensor.Shard(1)),
        "down": RowwiseParallel(output_layouts=torch.distributed.tensor.Shard(1)),
    },
}


def mean_of_local(parameters, group):
    for p in parameters:
        local = p.grad._local_tensor if isinstance(p.grad, DTensor) else p.grad
        parts = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, local.contiguous(), group=group)
        mean = parts[0].clone()
        for part in parts[1:]:
            mean += part
        local.copy_(mean / len(parts))


def content(p):
    local = p._local_tensor if isinstance(p, DTensor) else p
    return plain_copy(local.detach()) if zeropage.is_paged(local) else local.detach().clone()


def train(mesh, plan, form, made, when, steps=3, micro=2):
    """Losses, norms, parameters and states. `made`: a space, or None. `when` it is paged: before or after."""
    torch.manual_seed(0)
    net = nn.Sequential(ResidualMLP(WIDTH), ResidualMLP(WIDTH))
    if made and when == "before":
        zeropage.page(net, made)
    for block in net:
        parallelize_module(block, mesh["tp"], PLANS[plan])
    if made:
        zeropage.page(net, made)
    optimizer = form(net.parameters())
    losses, norms = [], []
    for step in range(steps):
        sums = [None for _ in net.parameters()]
        for part in range(micro):
            seed = 100 * step + 10 * part + mesh["dp"].get_local_rank()
            x = torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(seed))
            if plan == "sequences":
                x = x.chunk(mesh["tp"].size(), 1)[mesh["tp"].get_local_rank()]
            loss = net(x).square().mean() / micro
            loss.backward()
            losses.append(loss.item())
            if made is None:
                settle_placements(net)
                mean_of_local(net.parameters(), mesh["dp"].get_group())
                for p, before in zip(net.parameters(), sums, strict=True):
                    p.grad = p.grad if before is None else before + p.grad
                sums = [p.grad for p in net.parameters()]
                if part + 1 < micro:
                    net.zero_grad()
        # PyTorch clips no DTensors together with ordinary tensors.
        norm = nn.utils.clip_grad_norm_([p for p in net.parameters() if isinstance(p, DTensor)], 1e9)
        norms.append(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        if made:
            zeropage.page_out(net)
    states = [s for p in net.parameters() for s in optimizer.state[p].values() if torch.is_tensor(s)]
    if made:
        parts = [t._local_tensor for t in [*net.parameters(), *states] if isinstance(t, DTensor)]
        assert parts and all(zeropage.is_paged(t) for t in parts)
    return losses, norms, [content(p) for p in net.parameters()], [content(s) for s in states]


FORMS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "AdamW-foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
}


def parallel(plan, form, tensors, when, settings):
    mesh = mesh_of(tensors)
    expected = train(mesh, plan, FORMS[form], None, when)
    with space(mesh=mesh, dim="dp", **settings) as made:
        found = train(mesh, plan, FORMS[form], made, when)
    assert found[0] == expected[0]
    for ours, right in zip(found[2] + found[3], expected[2] + expected[3], strict=True):
        assert torch.equal(ours, right)
    assert found[1] == pytest.approx(expected[1], rel=1e-6)


@pytest.mark.parametrize(
    "plan, form",
    # PyTorch's foreach operators take no DTensors together with ordinary tensors.
    [("columns and rows", "AdamW"), *(("sequences", form) for form in FORMS)],
)
def test_a_parallel_model_has_the_bits_of_a_plain_one(plan, form, two):
    two.run(parallel, plan, form, 2, "after", {})


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("stage", [0, *(pytest.param(stage, marks=pytest.mark.full) for stage in (1, 2)), 3])
def test_its_tensors_are_partitioned_over_the_other_dimension(stage, plan, when, four):
    four.run(parallel, plan, "AdamW", 2, when, {"stage": stage})


@pytest.mark.parametrize("plan", PLANS)
def test_matrices_that_run_in_tiles(plan, four):
    # A row of a page is a tile here, and an exact tile has the bits of the whole.
    four.run(parallel, plan, "AdamW", 2, "after", {"tiling": "exact", "tile_above": "4KB", "page_size": "4KiB"})


def made(mesh, settings, seed=0, plan="sequences"):
    torch.manual_seed(seed)
    net = nn.Sequential(ResidualMLP(WIDTH), ResidualMLP(WIDTH))
    for block in net:
        parallelize_module(block, mesh["tp"], PLANS[plan])
    return zeropage.page(net, settings) if settings else net


def batch(mesh, seed):
    x = torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(10 * seed + mesh["dp"].get_local_rank()))
    return x.chunk(mesh["tp"].size(), 1)[mesh["tp"].get_local_rank()]


def settle_placements(net):
    for p in net.parameters():
        if isinstance(p.grad, DTensor) and p.grad.placements != p.placements:
            p.grad = p.grad.redistribute(placements=p.placements)


def same_gradients(net, plain):
    for p, q in zip(net.parameters(), plain.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        assert p.grad is None or torch.equal(content(p.grad), content(q.grad))


def accumulated(how, settings):
    mesh = mesh_of(2)
    group = mesh["dp"].get_group()
    with space(group=group, **settings) as of:
        net, plain = made(mesh, of), made(mesh, None)
        for step in range(2):
            if how == "no_sync":
                with zeropage.no_sync(net):
                    net(batch(mesh, step)).square().mean().backward()
                assert all(zeropage.is_paged(p.grad._local_tensor) for p in net.parameters())
                net(batch(mesh, step + 5)).square().mean().backward()
                for s in (step, step + 5):
                    plain(batch(mesh, s)).square().mean().backward()
                    settle_placements(plain)
            elif how == "set":
                for each in (net, plain):
                    each(batch(mesh, step)).square().mean().backward()
                settle_placements(plain)
                mean_of_local(plain.parameters(), group)
                for each in (net, plain):
                    for p in each.parameters():
                        p.grad = DTensor(
                            content(p.grad) * (1.0 + mesh["dp"].get_local_rank()), p._spec, requires_grad=False
                        )
            elif how == "some":  # ranks of one part of the data leave a block out
                for each in (net, plain):
                    used = each if mesh["dp"].get_local_rank() == 0 else each[:1]
                    used(batch(mesh, step)).square().mean().backward()
                settle_placements(plain)
                for p in plain.parameters():
                    p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            else:  # autograd.grad, whose results are each rank's own, and partial sums for norms
                for each in (net, plain):
                    loss = each(batch(mesh, step)).square().mean()
                    for p, g in zip(
                        each.parameters(), torch.autograd.grad(loss, list(each.parameters())), strict=True
                    ):
                        p.grad = g
                settle_placements(plain)
            mean_of_local(plain.parameters(), group)
            optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (net, plain)]
            optimizers[0].step()  # sends what each rank has for itself
            optimizers[1].step()
            same_gradients(net, plain)
            for optimizer in optimizers:
                optimizer.zero_grad()
        for p, q in zip(net.parameters(), plain.parameters(), strict=True):
            assert torch.equal(content(p), content(q))


@pytest.mark.parametrize(
    "how, stage", [*((how, stage) for how in ("no_sync", "set", "autograd.grad") for stage in (1, 3)), ("some", 1)]
)
def test_gradients_of_each_rank_are_averaged_as_those_of_ordinary_parameters(how, stage, four):
    four.run(accumulated, how, {"stage": stage})


def saved(folder):
    import torch.distributed.checkpoint as dcp

    mesh = mesh_of(2)
    with space(group=mesh["dp"].get_group()) as of:
        net = made(mesh, of)
        right = [p.full_tensor() for p in made(mesh, None).parameters()]
        dcp.save({"model": net.state_dict()}, checkpoint_id=folder)
    for tensors, paged in ((4, True), (1, True), (1, False)):
        mesh = mesh_of(tensors)
        with space(group=mesh["dp"].get_group()) as of:
            settings = of if paged else None
            other = made(mesh, settings, seed=1)
            state = {"model": other.state_dict()}
            dcp.load(state, checkpoint_id=folder)
            for p, expected in zip(other.parameters(), right, strict=True):
                assert torch.equal(p.full_tensor(), expected)


def test_distributed_checkpoint_resumes_on_another_mesh(four, tmp_path):
    four.run(saved, str(tmp_path))


def refused():
    mesh = mesh_of(2)
    for given, error in (
        ({"mesh": mesh}, r"mesh has 2 dimensions: name one of \['dp', 'tp'\] in dim"),
        ({"mesh": mesh, "dim": "ep"}, r"dim = 'ep' is no dimension of mesh, which has \['dp', 'tp'\]"),
        ({"dim": "dp"}, "dim = 'dp' needs mesh"),
        ({"mesh": mesh, "dim": 0, "group": mesh["dp"].get_group()}, "mesh and group contradict each other"),
    ):
        with pytest.raises(zeropage.ConfigError, match=error):
            zeropage.init(**given)
    mixed = r"compute_dtype = .* is not for DTensors, and 0.norm.weight"
    with space(mesh=mesh, dim="dp", compute_dtype="bfloat16") as of, pytest.raises(zeropage.ConfigError, match=mixed):
        made(mesh, of)
    with space(group=mesh["dp"].get_group()) as of:
        net = made(mesh, None)
        net(batch(mesh, 0)).sum().backward()
        with pytest.raises(zeropage.AccessError, match=r"0.norm.weight, a DTensor, has a gradient: clear it"):
            zeropage.page(net, of)
        net.zero_grad()
        parts = r"0.up.weight is in parts over dimension 'tp'"
        with space() as of_all, pytest.raises(zeropage.ConfigError, match=parts):
            zeropage.page(net, of_all)
        assert not any(zeropage.is_paged(p._local_tensor) for p in net.parameters())
        zeropage.page(net, of)
        with pytest.raises(zeropage.ZeropageError, match=r"take no DTensors.*use torch.distributed.checkpoint"):
            zeropage.save("build/never", net)
        with pytest.raises(RuntimeError, match=r"create_graph=True"):
            net(batch(mesh, 0)).square().sum().backward(create_graph=True)


def test_what_dtensors_cannot_do_is_an_error_that_names_the_parameter(two):
    two.run(refused)


def changed(how):
    import copy

    mesh = mesh_of(2)
    with space(mesh=mesh, dim="dp") as of:
        net = made(mesh, of)
        if how == "moved":
            net.to("cpu").to(torch.float64).to(torch.float32)
        elif how == "frozen":
            out = net(batch(mesh, 0)).square().mean()
            net.requires_grad_(False)
            out.backward()
            assert all(p.grad is None for p in net.parameters())
            net.requires_grad_(True)
        elif how == "copied":
            net = copy.deepcopy(net)
        elif how == "made frozen":
            net = made(mesh, None).requires_grad_(False)
            zeropage.page(net, of)
            net.requires_grad_(True)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        net(batch(mesh, 0)).square().mean().backward()
        is_watched = how in ("moved", "frozen")
        assert all(zeropage.is_paged(p.grad._local_tensor) == is_watched for p in net.parameters())
        if how in ("copied", "made frozen"):
            with pytest.raises(
                zeropage.RankError, match=r"nothing averages the gradient of a DTensor .* page.*again"
            ):
                optimizer.step()
            optimizer.zero_grad()
            zeropage.page(net, of)
            net(batch(mesh, 0)).square().mean().backward()
        optimizer.step()
        plain = made(mesh, None)
        plain(batch(mesh, 0)).square().mean().backward()
        settle_placements(plain)
        mean_of_local(plain.parameters(), mesh["dp"].get_group())
        torch.optim.SGD(plain.parameters(), lr=0.1).step()
        for p, q in zip(net.parameters(), plain.parameters(), strict=True):
            assert zeropage.is_paged(p._local_tensor) and torch.equal(content(p), content(q))


@pytest.mark.parametrize("how", ["moved", "frozen", "copied", "made frozen"])
def test_a_model_that_the_program_changes_is_averaged_or_refused(how, four):
    four.run(changed, how)


def freed():
    import gc
    import weakref

    mesh = mesh_of(2)
    with space(group=mesh["dp"].get_group()) as of:
        net = made(mesh, of)
        net(batch(mesh, 0)).square().mean().backward()
        parameters = [weakref.ref(p) for p in net.parameters()]
        assert sum(home.now for home in of.report().homes) > 0
        del net
        gc.collect()
        assert not any(p() is not None for p in parameters)
        assert sum(home.now for home in of.report().homes) == 0


def test_a_model_that_the_program_drops_is_freed(two):
    two.run(freed)


def alone():
    mesh = mesh_of(1)
    with tempfile.TemporaryDirectory(dir="build", prefix="swap-") as path:
        small = {"device_memory": "6MB", "host_memory": "4MB", "min_page_bytes": 1, "page_size": "16KiB"}
        of = zeropage.init(device="cpu", states="disk", disk_path=path, **small)
        net, plain = made(mesh, of, plan="columns and rows"), made(mesh, None, plan="columns and rows")
        for each in (net, plain):
            optimizer = torch.optim.AdamW(each.parameters(), lr=1e-2)
            for step in range(3):
                each(batch(mesh, step)).square().mean().backward()
                ups = [each[0].up.weight, each[1].up.weight]
                (ups[0] + ups[1]).square().sum().backward()  # one gradient for both
                nn.utils.clip_grad_norm_(ups, 0.5)
                optimizer.step()
                optimizer.zero_grad()
                zeropage.page_out(each)
        for p, q in zip(net.parameters(), plain.parameters(), strict=True):
            assert torch.allclose(content(p), content(q), rtol=1e-5, atol=1e-6)  # a norm has another order of sums
        assert all(zeropage.is_paged(p._local_tensor) for p in net.parameters() if isinstance(p, DTensor))
        of.close()


def test_one_process_pages_dtensors_too(one):
    one.run(alone)
