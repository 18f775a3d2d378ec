"""Accelerate, PEFT and torch.compile over ranks, unmodified: two ranks with half of a batch each give the losses of
one process with all of it. Scripts for DistributedDataParallel under `zeropage run`, and Lightning: what they give
without zeropage."""

import contextlib
import copy
import itertools
import os
import subprocess
import sys
import textwrap
import warnings

import pytest
import torch
from models import llama
from ranks import space
from test_hugging_face import build
from torch.nn.parallel import DistributedDataParallel
from zeropage._cli.running import _modules_paged
from zeropage._core import plain_copy
from zeropage._tracing import summarize

import zeropage

accelerate = pytest.importorskip("accelerate")
TINY = dict(device_memory="16MB", host_memory="16MB")


def part(step, rank, ranks):
    tokens = torch.randint(0, 512, (4, 24), generator=torch.Generator().manual_seed(step))
    return tokens.chunk(ranks)[rank]


def mean(loss, ranks):
    total = loss.detach().clone()
    if ranks > 1:
        torch.distributed.all_reduce(total)
    return total.item() / ranks


def with_accelerate(scope, rank, ranks, folder):
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = build(llama, scope)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    assert not isinstance(model, torch.nn.parallel.DistributedDataParallel)
    losses = []
    for step in range(6):
        if step == 4:
            accelerator.save_state(folder)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1)
            accelerator.load_state(folder)
        with accelerator.accumulate(model):
            tokens = part(step, rank, ranks)
            loss = model(input_ids=tokens, labels=tokens).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(mean(loss, ranks))
    return losses


def with_peft(scope, rank, ranks, _folder):
    peft = pytest.importorskip("peft")

    model = build(llama, scope)
    torch.manual_seed(1)
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return trained(peft.get_peft_model(model, lora), rank, ranks)


def with_compile(scope, rank, ranks, _folder):
    model = build(llama, scope)
    for block in model.model.layers:
        block.compile()
    return trained(model, rank, ranks)


def trained(model, rank, ranks):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    losses = []
    for step in range(4):
        tokens = part(step, rank, ranks)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean(loss, ranks))
    return losses


def over_ranks(run, stage, folder):
    with space(stage=stage, **TINY) as made:
        rank = torch.distributed.get_rank()
        return run(made, rank, torch.distributed.get_world_size(), folder)


@pytest.mark.parametrize(
    "run, stage",
    [
        *itertools.product([with_accelerate, with_peft], [1, 3]),
        pytest.param(with_compile, 1, marks=pytest.mark.full),
        (with_compile, 3),
    ],
)
def test_ranks_give_the_losses_of_one(run, stage, two, tmp_path):
    one, other = two.run(over_ranks, run, stage, str(tmp_path / "ranks"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        alone = run(None, 0, 1, str(tmp_path / "alone"))
    finally:
        torch.set_num_threads(threads)
    assert one == other
    for loss, expected in zip(one, alone, strict=True):
        assert abs(loss - expected) <= 1e-5 * expected


def steps_beside_a_plain_parameter():
    with space(**TINY) as made:
        with made:
            model = torch.nn.Sequential(torch.nn.Linear(64, 64))
        model.append(torch.nn.Linear(64, 8))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(2, 64)).sum().backward()
        with pytest.raises(zeropage.RankError, match=r"not paged \(\[8, 64\], \[8\]\).*sums their gradients"):
            optimizer.step()


def traces(folder):
    with space(**TINY) as made:
        with made:
            model = torch.nn.Linear(256, 256)
        with zeropage.trace(f"{folder}/run.json", model) as recording:
            model(torch.ones(2, 256)).sum().backward()
        return recording.path


def test_each_rank_records_its_own_timeline(two, tmp_path):
    paths = two.run(traces, str(tmp_path))
    assert paths == [f"{tmp_path}/run.rank{rank}.json" for rank in range(2)]
    for path in paths:
        assert summarize(path).moved["all-gather"] > 0


def test_a_plain_parameter_beside_paged_ones_is_an_error(two):
    two.run(steps_beside_a_plain_parameter)


def logged_by_trainer(folder, with_callback):
    """Return the logs that reached a reporter on this rank, and the number of collectives."""
    transformers = pytest.importorskip("transformers")
    from zeropage.hugging_face import ReportCallback

    class Reporter(transformers.TrainerCallback):
        def on_log(self, args, state, control, logs, **kwargs):
            logged.append(dict(logs))

    logged = []
    arguments = transformers.TrainingArguments(
        folder, max_steps=4, per_device_train_batch_size=2, logging_steps=2, report_to=[], use_cpu=True,
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    with space(**TINY) as made:
        model = build(llama, made)
        data = [{"input_ids": torch.arange(24), "labels": torch.arange(24)}] * 16
        callbacks = [Reporter(), *([ReportCallback()] if with_callback else [])]
        transformers.Trainer(model, arguments, train_dataset=data, callbacks=callbacks).train()
        made.synchronize()
        return logged, made.report().collectives


def test_the_rank_that_logs_logs_its_report_and_waits_for_no_other(two, tmp_path):
    (logged, collectives), (others, _) = two.run(logged_by_trainer, str(tmp_path), True)
    assert [log.get("zeropage/gathered_gb", 0) > 0 for log in logged] == [True, True, False]
    assert all(log["zeropage/reduced_gb"] > 0 for log in logged[:2])
    assert not [name for log in others for name in log if "zeropage" in name]
    assert collectives == two.run(logged_by_trainer, str(tmp_path), False)[0][1]


DATA_PARALLEL = """
    import contextlib, sys
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP

    def say(*words):  # a line of one rank is one write
        sys.stdout.write(" ".join(map(str, words)) + "\\n")

    dist.init_process_group("gloo")
    rank, accumulate = dist.get_rank(), 0 if "accumulate" in sys.argv else None
    torch.manual_seed(0)
    net = DDP(torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8)))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    torch.manual_seed(rank)
    for step in range(4):
        x = torch.randn(16, 64)
        with net.no_sync() if step % 2 == accumulate else contextlib.nullcontext():
            loss = torch.nn.functional.cross_entropy(net(x), torch.arange(16) % 8)
            loss.backward()
        say(rank, step, loss.item())
        if step % 2 == accumulate:
            continue
        optimizer.step()
        optimizer.zero_grad()
    say(rank, list(net.state_dict())[0], sum(p.double().abs().sum().item() for p in net.parameters()))
    if "zeropage" in sys.modules:
        import zeropage
        paged = all(zeropage.is_paged(p) for p in net.parameters())
        sys.stderr.write(f"paged: {paged} {zeropage.report().ranks}\\n")
    dist.destroy_process_group()
"""

LIGHTNING = """
    import sys, tempfile
    import torch
    import lightning.pytorch as lightning
    from lightning.pytorch.strategies import DDPStrategy

    def say(*words):
        sys.stdout.write(" ".join(map(str, words)) + "\\n")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 8))

        def training_step(self, batch, index):
            loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            say(self.global_rank, self.global_step, repr(loss.item()))
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    strategy = DDPStrategy(process_group_backend="gloo")
    if "strategy" in sys.argv:
        from zeropage.lightning import ZeropageStrategy
        homes = dict.fromkeys(["parameters", "gradients", "optimizer"], "disk")
        strategy = ZeropageStrategy(process_group_backend="gloo", device="cpu", device_memory="4MB",
                                    host_memory="2MB", min_page_bytes="1", disk_path=sys.argv[1], **homes)
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(32, 64), torch.randint(0, 8, (32,)))
    module = Module()
    with tempfile.TemporaryDirectory() as folder:
        quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder)
        quiet |= dict(accumulate_grad_batches=2 if "accumulate" in sys.argv else 1)
        trainer = lightning.Trainer(max_epochs=2, accelerator="cpu", devices=2, strategy=strategy, **quiet)
        trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=4))
        if trainer.global_rank == 0:
            saved = torch.load(trainer.checkpoint_callback.best_model_path, weights_only=False)["state_dict"]
            say({name: t.double().sum().item() for name, t in saved.items()})
    if "zeropage" in sys.modules:
        import zeropage
        paged = all(zeropage.is_paged(p) for p in module.parameters())
        sys.stderr.write(f"paged: {paged} {zeropage.report().ranks}\\n")
"""


ACCELERATE = """
    import sys
    import torch
    from accelerate import Accelerator

    def say(*words):
        sys.stdout.write(" ".join(map(str, words)) + "\\n")

    accelerator = Accelerator(gradient_accumulation_steps=2)
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(64, 64), torch.randint(0, 8, (64,)))
    net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    net, optimizer, loader = accelerator.prepare(net, optimizer, torch.utils.data.DataLoader(data, batch_size=8))
    for step, (x, y) in enumerate(loader):
        with accelerator.accumulate(net):
            loss = torch.nn.functional.cross_entropy(net(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        say(accelerator.process_index, step, loss.item(), accelerator.gather(loss.detach()).tolist())
    if "zeropage" in sys.modules:
        import zeropage
        paged = all(zeropage.is_paged(p) for p in net.parameters())
        sys.stderr.write(f"paged: {paged} {zeropage.report().ranks}\\n")
    accelerator.end_training()
"""


def torchrun(*command, ranks=2):
    return started(["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"], *command)


def accelerate_launch(*command):
    """On the CPU: `--cpu` starts one process, so it is --multi_gpu, which starts ranks, and the environment."""
    launch = ["accelerate.commands.launch", "--multi_gpu", "--num_machines=1", "--num_processes=2"]
    options = ["--mixed_precision=no", "--dynamo_backend=no", "--main_process_port=0"]
    return started([*launch, *options], *command, ACCELERATE_USE_CPU="true")


def started(launcher, *command, **environment):
    ended = subprocess.run(
        [sys.executable, "-m", *launcher, *command],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return sorted(ended.stdout.splitlines()), ended.stderr


def paged_by_the_command(disk, *arguments, launcher=torchrun):
    flags = [part for role in ("parameters", "gradients", "optimizer") for part in (f"--{role}", "disk")]
    flags += ["--device-memory", "4MB", "--host-memory", "2MB", "--min-page-bytes", "1", "--device", "cpu"]
    paged, errors = launcher("-m", "zeropage", "run", *flags, "--disk-path", disk, *arguments)
    assert errors.count("paged: True 2") == 2
    return paged


@pytest.mark.full
def test_zeropage_run_accumulates_as_data_parallel_does(tmp_path, disk):
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(DATA_PARALLEL))
    expected, _ = torchrun(str(path), "accumulate")
    assert len(expected) > 8
    assert paged_by_the_command(disk, str(path), "accumulate") == expected


LATE_RANKS = """
    import torch, torch.distributed as dist
    net = torch.nn.Linear(64, 64)
    dist.get_world_size = lambda group=None: 2
    torch.nn.parallel.DistributedDataParallel(net)
"""


def test_ranks_that_start_after_the_command_are_an_error(tmp_path, disk):
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(LATE_RANKS))
    flags = ["--min-page-bytes", "1", "--device", "cpu", "--disk-path", disk]
    command = [sys.executable, "-m", "zeropage", "run", *flags, str(path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert ended.returncode != 0 and "torchrun --nproc-per-node N -m zeropage run" in ended.stderr


@pytest.mark.parametrize("stage", [pytest.param("1", marks=pytest.mark.full), "3"])
@pytest.mark.parametrize(
    "script",
    [pytest.param(DATA_PARALLEL, id="plain"), pytest.param(LIGHTNING, id="lightning", marks=pytest.mark.full)],
)
def test_zeropage_run_gives_what_data_parallel_gives(script, stage, tmp_path, disk):
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(script))
    expected, _ = torchrun(str(path))
    assert expected and paged_by_the_command(disk, "--stage", stage, str(path)) == expected


@pytest.mark.full
def test_accelerate_launch_gives_what_data_parallel_gives(tmp_path, disk):
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(ACCELERATE))
    expected, _ = accelerate_launch(str(path))
    assert len(expected) == 8
    assert paged_by_the_command(disk, str(path), launcher=accelerate_launch) == expected


@pytest.mark.parametrize(
    "options", [pytest.param([], marks=pytest.mark.full, id=""), pytest.param(["accumulate"], id="accumulate")]
)
def test_lightnings_strategy_gives_what_data_parallel_gives(options, tmp_path, disk):
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(LIGHTNING))
    expected, _ = torchrun(str(path), *options)
    paged, errors = torchrun(str(path), disk, "strategy", *options)
    assert errors.count("paged: True 2") == 2
    assert expected and paged == expected


class Counting(torch.nn.Module):
    """Buffers that each rank changes by its own data: small, and as large as a weight."""

    def __init__(self):
        super().__init__()
        layer = torch.nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
        self.encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)  # copies the layer
        self.norm = torch.nn.BatchNorm1d(32)
        self.register_buffer("mean", torch.zeros(64, 32))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean((0, 1)).repeat(64, 1), 0.1)
        return self.norm(self.encoder(x).mean(1)) + self.mean.mean(0)


@contextlib.contextmanager
def run_by_the_command(stage):
    with space(stage=stage, **TINY) as made, _modules_paged(made):
        yield


def data_parallel(stage, wrapper=DistributedDataParallel, **settings):
    """Losses, parameters and buffers of a script whose ranks seed for themselves; plain without a stage."""
    rank = torch.distributed.get_rank()
    with contextlib.nullcontext() if stage is None else run_by_the_command(stage):
        torch.manual_seed(rank if stage != 3 else 0)
        net = wrapper(Counting(), **settings)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        torch.manual_seed(rank)
        losses = []
        for step in range(4):
            x = torch.randn(4, 3, 32)
            with net.no_sync() if step == 1 else contextlib.nullcontext():
                loss = net(x).square().mean()
                loss.backward()
            losses.append(loss.item())
            if step != 1:
                optimizer.step()
                optimizer.zero_grad()
        net.eval()
        with torch.no_grad():
            losses.append(net(torch.ones(1, 3, 32)).sum().item())
        assert stage is None or all(map(zeropage.is_paged, net.parameters()))
        state = {name: plain_copy(t.detach().clone()) for name, t in net.state_dict().items()}
        return losses, state, type(net).__name__


def as_data_parallel_does(stage, settings):
    losses, state, name = data_parallel(stage, **settings)
    expected, expected_state, expected_name = data_parallel(None, **settings)
    assert name in (expected_name, "Passed")
    assert losses == pytest.approx(expected, rel=1e-4)
    for key, tensor in expected_state.items():
        torch.testing.assert_close(state[key], tensor, rtol=1e-4, atol=1e-5, msg=key)


@pytest.mark.parametrize("stage", range(4))
def test_copied_layers_and_buffers_are_those_of_rank_0(stage, two):
    two.run(as_data_parallel_does, stage, {})


def initialised_after_a_call(stage):
    with run_by_the_command(stage):
        torch.manual_seed(torch.distributed.get_rank())
        layer = torch.nn.Linear(64, 64)
        layer(torch.ones(1, 64))
        torch.nn.init.normal_(layer.weight)
        net = DistributedDataParallel(layer)
        return plain_copy(net.module.weight.detach().clone())


@pytest.mark.parametrize("stage", range(3))
def test_a_wrapped_model_is_rank_0s_also_where_it_was_called_before(stage, two):
    first, other = two.run(initialised_after_a_call, stage)
    torch.manual_seed(0)
    expected = torch.nn.init.normal_(torch.nn.Linear(64, 64).weight)
    assert torch.equal(first, expected) and torch.equal(other, expected)


def test_buffers_may_stay_each_ranks_own(two):
    two.run(as_data_parallel_does, 1, {"broadcast_buffers": False})


def paged_again_after_a_step(stage):
    with space(stage=stage, **TINY) as made:
        with made:
            model = torch.nn.Linear(256, 256)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(2, 256)).square().mean().backward()
        optimizer.step()
        optimizer.step()
        zeropage.page(model, made)
        return [plain_copy(p.detach().clone()) for p in model.parameters()]


@pytest.mark.parametrize("stage", range(4))
def test_a_model_that_is_paged_again_keeps_what_it_has_learnt(stage, two):
    torch.manual_seed(0)
    plain = torch.nn.Linear(256, 256)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    plain(torch.ones(2, 256)).square().mean().backward()
    optimizer.step(), optimizer.step()
    for parameters in two.run(paged_again_after_a_step, stage):
        for parameter, expected in zip(parameters, plain.parameters(), strict=True):
            torch.testing.assert_close(parameter, expected)


def seeds_of_their_own(stage):
    torch.manual_seed(torch.distributed.get_rank())
    with run_by_the_command(stage), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        net = DistributedDataParallel(torch.nn.Linear(64, 64))
        net(torch.ones(1, 64)), net(torch.ones(1, 64))
    return [str(warning.message) for warning in said if "seeded its own" in str(warning.message)]


def test_ranks_that_seed_for_themselves_are_told_what_partitioned_parameters_become(two):
    first, other = two.run(seeds_of_their_own, 3)
    assert len(first) == 1 and "set stage to 2" in first[0] and not other
    assert two.run(seeds_of_their_own, 2) == [[], []]


class Doubling(DistributedDataParallel):
    def __init__(self, module):
        super().__init__(module)
        self.calls = 0

    def forward(self, *args):
        self.calls += 1
        return super().forward(*args) * 2

    def extra(self):
        return self.module


def wraps_in_a_subclass():
    group = torch.distributed.new_group([0])
    with run_by_the_command(2):
        torch.manual_seed(0)
        net = Doubling(torch.nn.Linear(64, 64))
        assert isinstance(net, Doubling) and type(net).__name__ == "Doubling" and net.extra() is net.module
        x = torch.randn(2, 64)
        assert torch.equal(net(x), net.module(x) * 2) and net.calls == 1
        twin = copy.deepcopy(net)
        assert twin.calls == 1 and torch.equal(twin(x), net(x)) and twin.process_group is net.process_group
        with pytest.raises(zeropage.ConfigError, match="join"):
            net.join()
        if torch.distributed.get_rank() == 0:
            with pytest.raises(zeropage.ConfigError, match="over 1 of 2 ranks"):
                DistributedDataParallel(torch.nn.Linear(64, 64), process_group=group)


def test_a_subclass_of_data_parallel_keeps_its_methods(two):
    two.run(wraps_in_a_subclass)


def as_lightning_optimises_by_hand(settings):
    from lightning.pytorch.overrides.distributed import prepare_for_backward

    with run_by_the_command(2):
        net = DistributedDataParallel(torch.nn.Linear(64, 64), **settings)
        assert net.device.type == "cpu" and net.static_graph == settings.get("static_graph", False)
        net.require_backward_grad_sync = False  # until its backward()
        loss = net(torch.ones(1, 64)).sum()
        net.require_backward_grad_sync = True
        prepare_for_backward(net, loss)
        loss.backward()
        net.reducer._delay_all_reduce()
        assert not net._get_ddp_logging_data()
        return plain_copy(net.module.weight.grad).sum().item()


@pytest.mark.parametrize("settings", [{}, {"static_graph": True}, {"find_unused_parameters": True}], ids=str)
def test_libraries_that_ask_the_wrapper_for_its_parts_find_them(settings, two):
    pytest.importorskip("lightning")
    assert two.run(as_lightning_optimises_by_hand, settings) == [64 * 64] * 2
