"""Every example in README.md and docs/ runs: Python blocks, shell commands' names, and the C++ program.

Paths, sizes and devices of an example are replaced by small ones of this machine. Names that a block takes from the
program around it come from `around()`.
"""

import contextlib
import os
import pathlib
import re
import subprocess
import sys
import textwrap
import types

import pytest
import torch
import torch.nn as nn
from test_integrations import group_of_one

import zeropage

pytestmark = pytest.mark.cpu

ROOT = pathlib.Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCKS = [
    pytest.param(page, textwrap.dedent(code), id=f"{page.relative_to(ROOT)}-{i}")
    for page in PAGES
    for i, code in enumerate(
        re.findall(r"^ *```python[^\n]*\n(.*?)^ *```", page.read_text(), re.DOTALL | re.MULTILINE)
    )
]
SIZES = {
    r'"\d+GB"': '"64MB"',
    r"1 << 28": "1 << 16",
    r"1 << 30": "1 << 18",
    r"i << 28": "i << 16",
    r"max_steps=1000": "max_steps=2",
    r"range\(20\)": "range(3)",
    r"gradient_accumulation_steps=8": "gradient_accumulation_steps=1, max_steps=2, use_cpu=True, report_to=[]",
    r"SFTConfig\(": "SFTConfig(max_steps=2, use_cpu=True, report_to=[], max_length=32, ",
}
DEVICES = {
    r"torch\.cuda\.set_device\(.*\)": "None",
    r'"cuda"': '"cpu"',
    r"dist\.init_process_group\(\)": "dist.init_process_group('gloo')",
    r"zeropage\.init\((?![^)]*\bdevice=)": 'zeropage.init(device="cpu", ',
    r"(ZeropageStrategy\()": r'\1device="cpu", ',
}


class Sentences(torch.utils.data.Dataset):
    """A few tokens as language models take them, or as pairs of vectors."""

    def __init__(self, vectors=False):
        self.vectors = vectors

    def __len__(self):
        return 16

    def __getitem__(self, i):
        generator = torch.Generator().manual_seed(i)
        if self.vectors:
            return torch.randn(64, generator=generator), torch.randn(64, generator=generator)
        tokens = torch.randint(1, 100, (16,), generator=generator)
        return {"input_ids": tokens, "labels": tokens.clone(), "attention_mask": torch.ones_like(tokens)}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def loss(self, x, y):
        return (self.layer(x) - y).square().mean()


@pytest.fixture(scope="module")
def saved_model(tmp_path_factory):
    """A small Llama with a tokenizer, in a folder."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("models") / "model"
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    words = {"[PAD]": 0, "[UNK]": 1, "</s>": 2, **{f"w{i}": i for i in range(3, 128)}}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", eos_token="</s>", unk_token="[UNK]"
    )
    fast.save_pretrained(folder)
    return folder


def around(code, saved_model):
    """The names that a block takes from the program around it."""
    names = {"__name__": "example", "torch": torch, "nn": nn, "zeropage": zeropage}
    needs = {word for word in re.findall(r"\b\w+\b", code)}
    if "from_pretrained" in needs:
        from transformers import AutoModelForCausalLM

        names["AutoModelForCausalLM"] = AutoModelForCausalLM
    if "SFTTrainer" in needs:
        datasets = pytest.importorskip("datasets")
        names["dataset"] = datasets.Dataset.from_dict({"text": ["w5 w6 w7 w8 w9"] * 16})
    else:
        names["dataset"] = Sentences()
    names["loader"] = torch.utils.data.DataLoader(Sentences(), batch_size=4)
    if "module" in needs:
        import lightning

        class Module(lightning.LightningModule):
            def __init__(self):
                super().__init__()
                self.model = Model()

            def training_step(self, batch, _):
                return self.model.loss(*batch)

            def configure_optimizers(self):
                return torch.optim.AdamW(self.parameters())

        names["module"] = Module()
        names["loader"] = torch.utils.data.DataLoader(Sentences(vectors=True), batch_size=4)
    if "model" in needs and not re.search(r"\bmodel = ", code):
        from transformers import AutoModelForCausalLM

        with zeropage.init(device="cpu", device_memory="64MB", host_memory="64MB") as names["space"]:
            names["model"] = AutoModelForCausalLM.from_pretrained(saved_model)
        names["optimizer"] = torch.optim.AdamW(names["model"].parameters())
        names["scheduler"] = torch.optim.lr_scheduler.ConstantLR(names["optimizer"])
    elif "train_step" in needs:
        with zeropage.init(device="cpu", device_memory="64MB", host_memory="64MB") as names["space"]:
            names["kept"] = Model()
        names["train_step"] = lambda batch: names["kept"].loss(*batch).backward()
    names["batches"] = [(torch.ones(2, 64), torch.ones(2, 64))] * 2
    names["batch"] = names["batches"][0] if "train_step" in needs else next(iter(names["loader"]))
    if re.search(r"extra=\{\"loader\"", code):
        names["loader"] = {"seed": 1}  # a loader that is saved has a state_dict(); plain data stands for it
    return names


def small(code, folder, saved_model):
    for pattern, value in (SIZES | DEVICES).items():
        code = re.sub(pattern, value, code)
    code = code.replace('"path/of/the/model"', repr(str(saved_model))).replace(
        '"model-of-any-size"', repr(str(saved_model))
    )
    return re.sub(r'"(/scratch|/var/tmp)', f'"{folder}', code)


def run(code, folder, names):
    before = pathlib.Path.cwd()
    os.chdir(folder)
    try:
        exec(compile(code, "example", "exec"), names)
    finally:
        os.chdir(before)
        for name in [name for name in names if name != "__builtins__"]:
            del names[name]


@pytest.mark.parametrize(("page", "code"), BLOCKS)
def test_the_example_runs(page, code, disk, saved_model, monkeypatch, request):
    if "dist." in code or "torch.distributed" in code:
        request.getfixturevalue("two").run(run_on_a_rank, small(code, disk, saved_model), str(disk))
        return
    if "SFTTrainer" in code:
        pytest.importorskip("trl")
    names = around(code, saved_model)
    with group_of_one():
        run(small(code, disk, saved_model), disk, names)


def run_on_a_rank(code, folder):
    """The examples over ranks: a script, the first lines under srun, a mesh."""
    import torch.distributed as dist

    rank, ranks = dist.get_rank(), dist.get_world_size()
    os.environ.update(SLURM_PROCID=str(rank), SLURM_NTASKS=str(ranks), SLURM_LOCALID=str(rank), LOCAL_RANK=str(rank))
    project = types.ModuleType("my_project")
    project.Model, project.training_set, project.evaluation_set = Model, Sentences(True), Sentences(True)
    sys.modules["my_project"] = project
    # The group exists already, and the next test needs it.
    code = code.replace("dist.init_process_group('gloo')", "None").replace("dist.destroy_process_group()", "None")
    names = {"__name__": "example", "torch": torch, "zeropage": zeropage, "dist": dist, "nodes": 1, "gpus": ranks}
    if "model = " not in code:
        names |= {"rank": rank, "ranks": ranks, "evaluation_set": project.evaluation_set}
        with zeropage.init(device="cpu", device_memory="64MB", host_memory="64MB") as names["space"]:
            names["model"] = Model()
    said = open(os.devnull, "w")  # noqa: SIM115
    with contextlib.redirect_stdout(said):
        run(code, folder, names)


@pytest.mark.full
def test_the_program_in_the_page_on_cpp_computes_what_plain_libtorch_does(tmp_path, disk):
    page = (ROOT / "docs/guides/cpp.md").read_text()
    program, checkpoints, ranks, files = re.findall(r"```cpp\n(.*?)```", page, re.DOTALL)
    program = program.replace("int main() {", "int main() {\n  torch::manual_seed(0);\n  std::cout.precision(17);")
    plain = re.sub(r".*\b(config|space|scope)\b.*\n", "", program).replace("#include <zeropage/zeropage.h>\n", "")
    assert "zeropage" not in plain
    program = program.replace("  space->synchronize();", f"{checkpoints}  space->synchronize();")
    (pathlib.Path(disk) / "block.bin").write_bytes(bytes(1 << 20))
    program = ranks + files + program.replace("int main() {", 'int main() {\n  read_a_block("block.bin");')
    (project,) = re.findall(r"```cmake\n(.*?)```", page, re.DOTALL)
    (tmp_path / "train.cpp").write_text(program.replace("/var/tmp", str(disk)))
    (tmp_path / "plain.cpp").write_text(plain)
    project += project[project.index("add_executable") :].replace("train", "plain")
    (tmp_path / "CMakeLists.txt").write_text(project)
    prefix = f"-DCMAKE_PREFIX_PATH={zeropage.cmake_prefix_path}"
    losses = []
    for command in (
        ["cmake", "-S", tmp_path, "-B", tmp_path / "build", "-GNinja", prefix],
        ["cmake", "--build", tmp_path / "build"],
        [tmp_path / "build/train"],
        [tmp_path / "build/plain"],
    ):
        ran = subprocess.run(command, capture_output=True, text=True, cwd=disk)
        assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-2000:]
        losses.append(ran.stdout.splitlines())
    assert zeropage.latest_checkpoint(pathlib.Path(disk) / "runs/a").name == "step-1000"
    assert len(losses[-1]) == 10 and losses[-2] == losses[-1]


def test_every_command_that_the_docs_name_exists():
    from zeropage._cli import main

    named = {
        command
        for page in PAGES
        for command in re.findall(r"(?:\n\n    |`)zeropage ([a-z]+)(?=[ `\n])", page.read_text())
    }
    named.discard("pages")  # the beginning of an error's text
    assert named and named <= set(main.commands)


def test_every_make_target_that_the_docs_name_exists():
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    targets |= {f"bench-{path.stem}" for path in (ROOT / "bench").glob("[a-z]*.py")}
    named = {target for page in PAGES for target in re.findall(r"(?:\n\n    |`)make ([a-z_-]+)", page.read_text())}
    assert named and named <= targets, named - targets
