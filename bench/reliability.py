"""Count what failures leave of a checkpoint: kills at random moments, flipped bits, cut files.

Each must end in an intact older checkpoint, equal to the bit, or in an error that says what is wrong.
"""

import argparse
import collections
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import torch
import torch.nn as nn
from _common import finish
from tqdm import tqdm

import zeropage

#: Saves without end; every tensor of checkpoint n is filled with n.
SAVES = """
import sys, torch, zeropage
from torch import nn
with zeropage.init(parameters="disk", gradients="disk", optimizer="disk", disk_path=sys.argv[2], device="cpu",
                   device_memory="8MB", host_memory="8MB", page_size="64KiB", min_page_bytes=1):
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
value = int(sys.argv[3])
while True:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    zeropage.save(sys.argv[1], model, extra={"value": value})
    print(value, flush=True)
    value += 1
"""


def plain_model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))


def outcome(folder: pathlib.Path, said: list[int]) -> str:
    """Classify a folder after the process reported the checkpoints `said`, and perhaps wrote one more."""
    model = plain_model()
    try:
        value = zeropage.load(folder, model)["value"]
    except zeropage.ZeropageError:
        return "error"
    whole = all(torch.equal(p, torch.full_like(p, value)) for p in model.parameters())
    if not whole:
        return "WRONG CONTENT"
    if value == said[-1] + 1:
        return "whole, one that was not reported yet"
    return "whole, the latest" if value == said[-1] else "WRONG: an older one"


def kills(count: int, directory: pathlib.Path, generator: random.Random) -> collections.Counter[str]:
    """Kill the process at random moments over three saves and the time between them."""
    outcomes: collections.Counter[str] = collections.Counter()
    folder, value = directory / "killed" / "checkpoint", 0
    folder.parent.mkdir()
    for _ in tqdm(range(count), desc="kills", leave=False, disable=None):
        command = [sys.executable, "-c", SAVES, str(folder), str(directory), str(value)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            said = [int(process.stdout.readline())]
            time.sleep(generator.random() * 0.2)
            process.send_signal(signal.SIGKILL)
            said += map(int, process.stdout.read().split())
        outcomes[outcome(folder, said)] += 1
        value = said[-1] + 1
        rubbish = [path for path in folder.parent.iterdir() if path != folder]
        outcomes["left half a folder, which the next save removed" if rubbish else "left nothing"] += 1
        if len(rubbish) > 1:
            outcomes["RUBBISH GROWS"] += 1
    return outcomes


def damages(count: int, directory: pathlib.Path, generator: random.Random, cut: bool) -> collections.Counter[str]:
    """Flip one bit of any file, or cut a file at any byte."""
    outcomes: collections.Counter[str] = collections.Counter()
    model = plain_model()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.ones(1, 512)).sum().backward()
    optimizer.step()
    folder = directory / ("cut" if cut else "flipped")
    zeropage.save(folder, model, optimizer)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    files = sorted(folder.iterdir())
    sizes = [path.stat().st_size for path in files]
    for _ in tqdm(range(count), desc="cuts" if cut else "flips", leave=False, disable=None):
        # Half of the damages choose a file uniformly, so that they hit small ones; the others choose by size.
        path = generator.choice(files) if generator.random() < 0.5 else generator.choices(files, sizes)[0]
        whole = path.read_bytes()
        at = generator.randrange(len(whole))
        flipped = bytes([whole[at] ^ (1 << generator.randrange(8))]) + whole[at + 1 :]
        path.write_bytes(whole[:at] + (b"" if cut else flipped))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        try:
            zeropage.load(folder, model, optimizer)
            same = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
            outcomes["loaded, the same" if same else "WRONG CONTENT"] += 1
        except zeropage.DiskError as error:
            outcomes[f"an error that names the {'tensor' if '.weight' in str(error) else 'file'}"] += 1
        path.write_bytes(whole)
    shutil.rmtree(folder)
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, help="of each")
    parser.add_argument("--directory", default="build", help="on the disk to use")
    args = parser.parse_args()
    generator = random.Random(1)
    rows, figures = [], {}
    with tempfile.TemporaryDirectory(dir=args.directory) as name:
        directory = pathlib.Path(name)
        for what, outcomes in (
            ("kill -9 while saving", kills(args.count, directory, generator)),
            ("a flipped bit", damages(args.count, directory, generator, cut=False)),
            ("a file cut short", damages(args.count, directory, generator, cut=True)),
        ):
            rows += [[what, outcome, count] for outcome, count in sorted(outcomes.items())]
            figures[what] = dict(outcomes)
    finish(rows, ["what happened", "outcome", "times"], **figures)


if __name__ == "__main__":
    main()
