"""Training paged equals training plain, to the bit: losses, gradient norms, parameters."""

import itertools
import tempfile

import devices
import pytest
import torch
from devices import generator_of
from equality import adamw, assert_equal
from models import GPT, MODELS, gpt_loss

import zeropage


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("evict", [False, True], ids=["lru", "evicted-between-statements"])
def test_every_kind_of_model_trains_equal(name, evict, config):
    build, loss_of = MODELS[name]
    assert_equal(build, loss_of, config, between=zeropage.page_out if evict else lambda model: None)


TIERS = ["device", "host", "disk"]


@pytest.mark.states_only
@pytest.mark.parametrize("tiers", itertools.product(TIERS, TIERS, TIERS), ids="-".join)
def test_each_tier_serves_each_role(tiers, config):
    roles = dict(zip(["parameters", "gradients", "optimizer"], tiers, strict=True))
    if "disk" not in tiers:
        config = zeropage.Config(**{k: v for k, v in config.given().items() if k != "disk_path"})
    config = config.replace(**roles, device_memory="16MB", host_memory="16MB")
    model = assert_equal(GPT, gpt_loss, config, steps=2)
    homes = {(h.role, h.tier) for h in zeropage.report().homes}
    names = {"parameters": "parameter", "gradients": "gradient", "optimizer": "optimizer"}
    assert homes == {(names[role], tier) for role, tier in roles.items()}
    del model


@pytest.mark.parametrize("memory", ["64MB", "8MB", "2MB", "1MB", "500kB"])
@pytest.mark.parametrize("host", ["0", "1MB"])
def test_any_budget_from_all_fits_to_one_operator_fits_gives_the_same_bits(memory, host, config, request):
    options = request.config.getoption
    if host == "0" and (options("--memory") == "separate" or options("--device") != "cpu"):
        host = "256kB"  # what moves between disk and device must pass through something
    # The largest operator takes up to 2 * 147 kB of the paged tensors: a weight and its gradient.
    assert_equal(GPT, gpt_loss, config.replace(device_memory=memory, host_memory=host, page_size="auto"))


@pytest.mark.parametrize("io", ["uring", "threads"])
def test_both_io_engines_serve(io, config):
    try:
        zeropage.init(config.replace(io=io))
    except zeropage.ConfigError as refused:
        pytest.skip(str(refused))
    _keeps_the_space = assert_equal(GPT, gpt_loss, config.replace(io=io), steps=2)
    assert zeropage.report().io == {"uring": "io_uring", "threads": "threads"}[io]


def test_gradients_accumulate_over_micro_batches(config):
    assert_equal(GPT, gpt_loss, config, accumulate=3, between=zeropage.page_out)


def forms(optimizer, *kinds, **options):
    flags_of = {"single": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}, "only": {}}
    for kind in kinds:
        flags = flags_of[kind]
        label = "-".join([optimizer, kind, *(k for k, v in options.items() if isinstance(v, bool) and v)])
        yield pytest.param(lambda p, o=optimizer, f=flags: getattr(torch.optim, o)(p, **options, **f), id=label)


OPTIMIZERS = [
    *forms("AdamW", "single", "foreach", "fused", lr=1e-3),
    *forms("AdamW", "single", "foreach", "fused", lr=1e-3, amsgrad=True, maximize=True),
    *forms("Adam", "single", "foreach", "fused", lr=1e-3, weight_decay=0.1),
    *forms("SGD", "single", "foreach", "fused", lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    *forms("SGD", "single", "foreach", "fused", lr=0.1),
    *forms("Adagrad", "single", "foreach", "fused", lr=0.01),
    *forms("Adadelta", "single", "foreach"),
    *forms("Adamax", "single", "foreach"),
    *forms("ASGD", "single", "foreach"),
    *forms("NAdam", "single", "foreach", momentum_decay=0.01),
    *forms("RAdam", "single", "foreach"),
    *forms("RMSprop", "single", "foreach", momentum=0.9, centered=True),
    *forms("Rprop", "single", "foreach"),
    *forms("Adafactor", "single", "foreach"),
    *forms("LBFGS", "only", max_iter=3),
]


class Uneven(torch.nn.Module):
    """Sizes that no page, vector or thread count divides: 300 * 257 elements and a few small ones."""

    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(257, 300), torch.nn.Linear(300, 3)
        self.scale = torch.nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return self.down(torch.tanh(self.up(x))) * self.scale


def uneven_loss(model, step):
    x = torch.randn(5, 257, generator=generator_of(step))
    return model(x).pow(2).sum()


@pytest.mark.parametrize("fused", [True, False])
def test_updates_in_the_host_give_the_bits_of_a_cpus_optimizer(fused, config):
    """On a GPU its own kernels round otherwise: the reference moves gradients to the CPU and parameters back."""
    if devices.NAME == "cpu":
        pytest.skip("updates run where the model is")
    space = zeropage.init(
        config.replace(optimizer_device="host", parameters="device", device_memory="16MB", host_memory="32MB")
    )

    def make():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(256, 300, bias=False), torch.nn.Linear(300, 256, bias=False))

    plain = make()
    with space:
        paged = make()
    masters = [parameter.detach().cpu() for parameter in plain.parameters()]
    theirs = torch.optim.AdamW(masters, lr=1e-2, fused=fused)
    ours = torch.optim.AdamW(paged.parameters(), lr=1e-2, fused=fused)
    for step in range(3):
        for model in (plain, paged):
            model.zero_grad()
            model(torch.randn(4, 256, generator=generator_of(step))).pow(2).mean().backward()
        ours.step()
        for master, parameter in zip(masters, plain.parameters(), strict=True):
            master.grad = parameter.grad.cpu()
        theirs.step()
        with torch.no_grad():
            for master, parameter in zip(masters, plain.parameters(), strict=True):
                parameter.copy_(master)
    for a, b in zip(plain.parameters(), paged.parameters(), strict=True):
        assert torch.equal(a, b)
    report = space.report()
    assert (report.updated_in_host, report.updated_on_device) == (3 * 2 * 256 * 300, 0)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_stock_optimizer_steps_equal(optimizer, config):
    assert_equal(Uneven, uneven_loss, config, optimizer=optimizer, between=zeropage.page_out)


def test_muon_steps_equal(config):
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")

    def build():
        return torch.nn.Sequential(torch.nn.Linear(65, 130, bias=False), torch.nn.Linear(130, 3, bias=False))

    def loss_of(model, step):
        return model(torch.randn(5, 65, generator=generator_of(step))).pow(2).sum()

    assert_equal(build, loss_of, config, optimizer=lambda p: torch.optim.Muon(p, lr=0.01))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_bits_do_not_depend_on_where_pages_end(threads, config):
    torch.set_num_threads(threads)
    for page_size in ("4KiB", "20KiB", "1MiB"):
        assert_equal(
            Uneven,
            uneven_loss,
            config.replace(page_size=page_size, device_memory="16MB", host_memory="16MB"),
            optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=False),
        )


def test_a_model_that_exists_is_paged_in_place(config):
    torch.manual_seed(0)
    plain, model = GPT(), GPT()
    model.load_state_dict(plain.state_dict())
    identities = [id(p) for p in model.parameters()]
    assert zeropage.page(model, config) is model
    assert [id(p) for p in model.parameters()] == identities
    assert all(zeropage.is_paged(p) for p in model.parameters())
    assert model.head.weight is model.words.weight
    a, b = adamw(plain.parameters()), adamw(model.parameters())
    for step in range(2):
        for one, opt in ((plain, a), (model, b)):
            gpt_loss(one, step).backward()
            opt.step()
            opt.zero_grad()
    assert all(torch.equal(x, y) for x, y in zip(plain.parameters(), model.parameters(), strict=True))


@pytest.mark.cpu
def test_training_over_several_disks_is_equal(config, request):
    def build():
        return torch.nn.Sequential(*[torch.nn.Linear(1000, 1000) for _ in range(4)])

    def loss_of(model, step):
        return model(torch.randn(3, 1000, generator=generator_of(step))).square().mean()

    with tempfile.TemporaryDirectory(dir=request.config.rootpath / "build", prefix="swap-") as second:
        disks = [config.disk_path, second]
        assert_equal(build, loss_of, config.replace(disk_path=disks, page_size="2MiB", device_memory="16MB"))
