"""`zeropage run`: scripts that know nothing of zeropage print what they print without it."""

import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.cpu

PLAIN = """
    import sys
    import torch

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm = torch.nn.Linear(64, 256), torch.nn.BatchNorm1d(256)
            self.last = torch.nn.Linear(256, int(sys.argv[1]))

        def forward(self, x):
            return self.last(torch.relu(self.norm(self.first(x))))

    if __name__ == "__main__":
        torch.manual_seed(0)
        net = Net()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        for step in range(4):
            x = torch.randn(16, 64)
            loss = torch.nn.functional.cross_entropy(net(x), torch.arange(16) % int(sys.argv[1]))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(repr(loss.item()))
        print(repr(sum(p.double().abs().sum().item() for p in net.parameters())))
        if "zeropage" in sys.modules:
            import zeropage
            print("paged:", all(zeropage.is_paged(p) for p in net.parameters()), file=sys.stderr)
"""

TRAINER = """
    import sys, tempfile
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    torch.manual_seed(0)
    shape = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=int(sys.argv[1]), **shape))
    tokens = torch.randint(0, int(sys.argv[1]), (16, 24))
    with tempfile.TemporaryDirectory() as folder:
        settings = dict(per_device_train_batch_size=4, max_steps=3, report_to=[], logging_steps=1, disable_tqdm=True)
        settings |= dict(save_strategy="no", use_cpu=True)
        trainer = Trainer(model=model, args=TrainingArguments(folder, **settings),
                          train_dataset=[dict(input_ids=row, labels=row) for row in tokens])
        trainer.train()
    for entry in trainer.state.log_history:
        print(repr(entry.get("loss")), repr(entry.get("grad_norm")))
    if "zeropage" in sys.modules:
        import zeropage
        print("paged:", all(zeropage.is_paged(p) for p in model.parameters()), file=sys.stderr)
"""


def run(*command):
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("script", [PLAIN, TRAINER], ids=["plain", "trainer"])
def test_scripts_run_as_they_are(script, tmp_path, disk):
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(script))
    plain = run(str(path), "100")
    homes = [part for role in ("parameters", "gradients", "optimizer") for part in (f"--{role}", "disk")]
    memory = ["--device-memory", "4MB", "--host-memory", "2MB", "--resident-below", "1", "--device", "cpu"]
    paged = run("-m", "zeropage", "run", *homes, *memory, "--disk-path", disk, str(path), "100")
    assert plain.returncode == 0, plain.stderr[-2000:]
    assert paged.returncode == 0, paged.stderr[-2000:]
    assert "paged: True" in paged.stderr
    same = [line for line in plain.stdout.splitlines() if "runtime" not in line]
    assert same and same == [line for line in paged.stdout.splitlines() if "runtime" not in line]


def test_errors_are_the_scripts_own(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("import sys\nprint(sys.argv[1:])\nraise ValueError('its own')\n")
    ended = run("-m", "zeropage", "run", "--device", "cpu", str(path), "--flag", "of the script")
    assert ended.returncode == 1 and "ValueError: its own" in ended.stderr and 'train.py", line 3' in ended.stderr
    assert "['--flag', 'of the script']" in ended.stdout


@pytest.mark.parametrize(
    "flags, text",
    [
        (["--device-memory", "much"], "device_memory"),
        (["--no-such", "1"], "--no-such"),
        ([], "missing.py: no such file"),
    ],
)
def test_wrong_flags_say_so_in_one_line(flags, text, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("")
    ended = run("-m", "zeropage", "run", *flags, str(script if flags else "missing.py"))
    assert ended.returncode != 0 and text in ended.stderr and "Traceback" not in ended.stderr
