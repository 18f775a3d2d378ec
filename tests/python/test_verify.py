"""`zeropage verify`: scripts that are equal to the bit, and six planted faults that it names."""

import os
import pathlib
import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.cpu

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"

SCRIPT = """
    import torch
    import torch.nn as nn
    import torch.nn.functional as F


    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(64, 256), nn.Linear(256, 64)

        def forward(self, x):
            hidden = F.gelu(self.first(x))
            return self.last(hidden)


    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for step in range(30):
        x = torch.randn(32, 64)
        loss = F.mse_loss(net(x), x.roll(1))
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
"""

DATA_PARALLEL = """
    import torch
    import torch.distributed as dist
    import torch.nn as nn

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64)))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    torch.manual_seed(1 + dist.get_rank())
    for step in range(30):
        x = torch.randn(32, 64)
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""

RANK_AWARE = """
    import os
    import torch

    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 64))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for step in range(30):
        x = torch.randn(32, 64)[rank::ranks]
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""

TWO_MODELS = """
    import torch

    models = [torch.nn.Linear(64, 64) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for step in range(3):
        models[1](models[0](torch.randn(4, 64))).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
"""

# The shared part of the faults. They hide from torch functions' modes, as a fault of zeropage's core would.
PLANT = """
    import torch
    from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    steps, kept = [0], {}

    def last_weight(optimizer):
        return optimizer.param_groups[0]["params"][2]

    def in_secret(function):
        def hook(*args):
            with torch._C.DisableTorchFunction(), torch.no_grad():
                function(*args)
        return hook

    @in_secret
    def count(*_):
        steps[0] += 1
    register_optimizer_step_post_hook(count)
"""

A_KERNEL_THAT_ROUNDS = """
    library = torch.library.Library("aten", "IMPL")

    def gelu(x, approximate="none"):
        return (x * 0.5 * (1 + torch.erf(x * 0.5**0.5))).bfloat16().float()
    library.impl("gelu", gelu, "CPU")
"""

A_WRITE_BEHIND_AUTOGRAD = """
    @in_secret
    def write(module, args, output):
        if isinstance(module, torch.nn.Linear) and module.in_features == 256 and steps[0] == 2:
            args[0].data[3, 5] += 1  # which last has saved
    register_module_forward_hook(write)
"""

A_DROPPED_UPDATE = """
    @in_secret
    def keep(optimizer, *_):
        kept["before"] = last_weight(optimizer).detach().clone()

    @in_secret
    def drop(optimizer, *_):
        if steps[0] == 3:
            last_weight(optimizer).copy_(kept["before"])
    register_optimizer_step_pre_hook(keep)
    register_optimizer_step_post_hook(drop)
"""

A_DROPPED_UPDATE_THAT_READING_HIDES = (
    """
    import json, sys
    task = json.load(open(sys.argv[1]))
    if task["inside"] or task["operators_at"] is not None:
        steps[0] = 10
"""
    + A_DROPPED_UPDATE
)

A_STALE_PAGE = """
    @in_secret
    def keep(optimizer, *_):
        if steps[0] == 1:
            kept["old"] = last_weight(optimizer).detach().clone()

    @in_secret
    def restore(module, *_):
        if isinstance(module, torch.nn.Linear) and module.in_features == 256 and steps[0] == 3:
            module.weight.copy_(kept["old"])
    register_optimizer_step_post_hook(keep)
    register_module_forward_pre_hook(restore)
"""

A_WRONG_SCALE = """
    backward = torch.autograd.backward

    def scaled(*args, **kwargs):
        backward(*args, **kwargs)
        in_secret(lambda: kept["last"].weight.grad.mul_(0.5))()
    torch.autograd.backward = scaled

    @in_secret
    def find(module, *_):
        if isinstance(module, torch.nn.Linear):
            kept["last"] = module
    register_module_forward_pre_hook(find)
"""

A_MISSING_REDUCTION = """
    import zeropage

    @in_secret
    def keep(module, args):
        if isinstance(module, torch.nn.Linear) and module.in_features == 256 and "last" not in kept:
            kept["last"] = module
            module.weight.register_hook(lambda gradient: kept.update(own=gradient.clone()))
    register_module_forward_pre_hook(keep)

    @in_secret
    def write_own(*_):
        with zeropage.pinned(kept["last"].weight.grad) as gradient:
            gradient.numpy()[:] = kept["own"].numpy()  # where ranks would compare what an operator writes
    register_optimizer_step_pre_hook(write_own)
"""


@pytest.fixture
def verify(tmp_path, disk):
    """Runs the command on a script, and returns its exit status and what it prints."""

    def run(script, *options, plant=None):
        if isinstance(script, str):
            path = tmp_path / "script" / "train.py"
            path.parent.mkdir()
            path.write_text(textwrap.dedent(script))
            script = path
        if plant is not None:
            fault = tmp_path / "plant" / "fault.py"
            fault.parent.mkdir()
            fault.write_text(textwrap.dedent(PLANT) + textwrap.dedent(plant))
            options = ("--plant", str(fault), *options)
        command = [sys.executable, "-m", "zeropage", "verify", "--disk-path", disk, str(script), *options]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        ended = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
        return ended.returncode, ended.stdout + ended.stderr

    return run


def test_a_script_is_equal_and_the_command_says_what_it_compared(verify):
    status, said = verify(SCRIPT, "--steps", "4")
    assert status == 0, said
    assert "equal to the bit over 4 steps" in said and "4 losses, 4 clipped norms" in said
    assert "4 parameters (4 paged), 4 gradients, 12 optimizer states" in said


@pytest.mark.full
def test_a_script_that_ends_early_is_compared_as_far_as_it_goes(verify):
    status, said = verify(SCRIPT.replace("range(30)", "range(2)"), "--steps", "4")
    assert status == 0 and "over 2 steps" in said and "12 optimizer states" in said, said


def test_models_with_the_same_names_are_all_compared(verify):
    status, said = verify(TWO_MODELS, "--steps", "6")
    assert status == 0 and "over 6 steps" in said and "4 parameters (4 paged), 4 gradients" in said, said


@pytest.mark.full
def test_a_script_for_trainer_is_equal(verify):
    pytest.importorskip("transformers")
    from test_cli import TRAINER

    status, said = verify(TRAINER, "--steps", "3", "--", "64")
    assert status == 0 and "equal to the bit over 3 steps" in said and "3 clipped norms" in said, said


SFT = """
    import tempfile
    import tokenizers
    import torch
    from datasets import Dataset
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    torch.manual_seed(0)
    words = {word: i for i, word in enumerate(["[PAD]", "</s>", "[UNK]", *"abcdefghij"])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", eos_token="</s>", unk_token="[UNK]"
    )
    shape = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(words), **shape))
    dataset = Dataset.from_dict({"text": [" ".join("abcdefghij"[i:] + "cab"[: i % 3]) for i in range(10)]})
    with tempfile.TemporaryDirectory() as folder:
        settings = SFTConfig(folder, optim="adamw_torch_fused", max_steps=3, use_cpu=True, report_to=[], max_length=32,
                             per_device_train_batch_size=2, save_strategy="no", disable_tqdm=True)
        SFTTrainer(model=model, args=settings, train_dataset=dataset, processing_class=tokenizer).train()
"""


@pytest.mark.full
def test_supervised_fine_tuning_by_trl_is_equal(verify):
    pytest.importorskip("trl")
    status, said = verify(SFT, "--steps", "3")
    assert status == 0 and "equal to the bit over 3 steps" in said and "3 clipped norms" in said, said


SMALL_GPT = ["--width", "64", "--layers", "2", "--heads", "2", "--length", "32", "--json"]


@pytest.mark.parametrize("form", ["--plain", "--json"], ids=["plain", "with a scope of its own"])
def test_the_example_is_equal(form, verify):
    status, said = verify(EXAMPLES / "train_gpt.py", "--steps", "3", "--", *SMALL_GPT, form)
    assert status == 0 and "equal to the bit over 3 steps" in said, said


@pytest.mark.full
def test_the_example_over_ranks_is_equal_to_one_process_within_rounding(verify):
    status, said = verify(EXAMPLES / "train_gpt.py", "--steps", "3", "--ranks", "2", "--", *SMALL_GPT)
    assert status == 0 and "equal within rounding over 3 steps, 2 ranks against one plain process" in said, said


@pytest.mark.full
def test_ranks_that_take_parts_of_a_batch_are_equal_to_one_process(verify):
    status, said = verify(RANK_AWARE, "--steps", "3", "--ranks", "2")
    assert status == 0 and "2 ranks against one plain process" in said, said


def test_two_ranks_are_equal_to_data_parallel_to_the_bit(verify):
    status, said = verify(DATA_PARALLEL, "--steps", "4", "--ranks", "2")
    assert status == 0 and "equal to the bit over 4 steps, 2 ranks against plain DistributedDataParallel" in said, (
        said
    )


def found(result, *parts):
    status, said = result
    assert status == 1, said
    for part in parts:
        assert part in said, said


@pytest.mark.full
def test_a_kernel_that_rounds_is_named(verify):
    found(
        verify(SCRIPT, "--steps", "2", plant=A_KERNEL_THAT_ROUNDS),
        "differs in step 1\n",
        "first operator: torch.nn.functional.gelu: float32[32, 256] → float32[32, 256]\n"
        "  at train.py:13: hidden = F.gelu(self.first(x))\n"
        "  its kernel gives other bits",
    )


@pytest.mark.full
def test_a_write_behind_autograd_is_named(verify):
    found(
        verify(SCRIPT, "--steps", "4", plant=A_WRITE_BEHIND_AUTOGRAD),
        "differs in step 3\nfirst tensor: gradient of last.weight, shape (64, 256), float32\n",
        "first operator: backward of torch.nn.functional.linear (AddmmBackward0)",
        "  at train.py:14: return self.last(hidden)\n"
        "  the tensor that it saved for backward as 'mat1' differs: it was written behind autograd's back\n",
    )


@pytest.mark.full
def test_a_dropped_update_is_named(verify):
    found(
        verify(SCRIPT, "--steps", "4", plant=A_DROPPED_UPDATE),
        "differs in step 3\nfirst tensor: parameter of last.weight, shape (64, 256), float32\n"
        "  at train.py:24: optimizer.step()\n",
        "an update is missing: the content is that of step 2\n",
        "first operator: none",
    )


def test_bisection_finds_a_fault_that_reading_hides(verify):
    found(
        verify(SCRIPT, "--steps", "6", plant=A_DROPPED_UPDATE_THAT_READING_HIDES),
        "differs in step 3\nfirst tensor: parameter of last.weight",
        "an update is missing: the content is that of step 2\n",
        "first operator: not found, because the difference is gone when operators are recorded",
    )


@pytest.mark.full
def test_a_stale_page_is_named(verify):
    found(
        verify(SCRIPT, "--steps", "5", plant=A_STALE_PAGE),
        "differs in step 4\n",
        "first operator: torch.nn.functional.linear: float32[32, 256], float32[64, 256], float32[64] → "
        "float32[32, 64]\n  at train.py:14: return self.last(hidden)\n"
        "  parameter last.weight is stale: the operator sees the content of step 1\n",
    )


@pytest.mark.full
def test_a_wrong_scale_is_named(verify):
    found(
        verify(SCRIPT, "--steps", "2", plant=A_WRONG_SCALE),
        "differs in step 1\nfirst tensor: gradient of last.weight, shape (64, 256), float32\n",
        "a wrong scale: the paged tensor is 0.5 times the plain one\n",
        "gradient last.weight differs, though every operator before gave equal results",
    )


def test_a_missing_reduction_is_named(verify):
    found(
        verify(DATA_PARALLEL, "--steps", "2", "--ranks", "2", "--stage", "1", plant=A_MISSING_REDUCTION),
        "differs in step 1, rank 0\nfirst tensor: gradient of module.2.weight, shape (64, 256), float32\n",
        "a missing reduction: the paged ranks hold different gradients\n",
    )


AN_ERROR = """
    def fail(module, args):
        if steps[0] == 1:
            raise ValueError("only here")
    register_module_forward_pre_hook(fail)
"""


def test_an_error_of_the_paged_run_is_a_difference(verify):
    found(
        verify(SCRIPT, "--steps", "2", plant=AN_ERROR),
        "only the paged run fails, after 1 steps: ValueError: only here\n  at train.py:",
    )


@pytest.mark.parametrize(
    "script, options, reason",
    [
        (pathlib.Path("none.py"), [], "none.py: no such file"),
        (SCRIPT, ["--steps", "0"], "--steps 0"),
        (SCRIPT, ["--compute-dtype", "bfloat16"], "compute_dtype changes numbers"),
        ("print('nothing')", [], "took no step"),
        ("raise ValueError('broken')", [], "fails without paging: ValueError: broken\ntrain.py:1: raise"),
        ("import sys; sys.exit('usage')", [], "its last output:\nusage"),
        (
            SCRIPT.replace("net = Net()", "import os; torch.manual_seed(os.getpid()); net = Net()"),
            ["--steps", "2"],
            "the script does not repeat: two plain runs differ in step 0, parameter of first.weight",
        ),
    ],
    ids=["no script", "no step", "other numbers", "no optimizer", "an error", "an exit", "random"],
)
def test_what_cannot_be_compared_is_said(script, options, reason, verify):
    status, said = verify(script, *options)
    assert status == 2 and reason in said and "Traceback" not in said, said
