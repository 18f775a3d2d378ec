"""Programs over ranks end as those of plain PyTorch do."""

import collections
import os
import subprocess
import sys

import pytest
import torch
import torch._dynamo  # which optimizers import: once here, not in every program
import torch.distributed as dist
import torch.nn as nn
from ranks import _free_port

import zeropage


def program(rank, ranks, port, reads):
    """A program as torchrun runs it. The last collective is the program's own."""
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    settings = {"parameters": "host", "gradients": "host", "optimizer": "host", "device": "cpu", "stage": 1}
    with zeropage.init(**settings, device_memory="4MB", host_memory="4MB", page_size="16KiB", min_page_bytes=1):
        layers = [nn.Linear(65, 65), nn.GELU(), *(nn.Linear(65, 65) for _ in range(30)), nn.Linear(65, 1)]
        globals()["model"] = nn.Sequential(*layers)  # lives until the end
    optimizer = torch.optim.AdamW(model.parameters())  # noqa: F821
    for _ in range(2):
        loss = model(torch.ones(3, 65)).pow(2).mean()  # noqa: F821
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.all_reduce(loss.detach())
    if reads:
        model[0].weight[0, 0].item()  # noqa: F821  # the other parameters are on their way
    dist.destroy_process_group()


def run_programs(times, ranks):
    """Each rank's program is a fork of this process, which has torch loaded; it ends as the interpreter does."""
    ends = collections.Counter()
    for time in range(times):
        port, processes = _free_port(), []
        for rank in range(ranks):
            process = os.fork()
            if process == 0:
                program(rank, ranks, port, reads=time % 2 == 1)
                sys.exit(0)
            processes.append(process)
        ends.update(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes)
    print(dict(ends))


@pytest.mark.full
def test_programs_end_with_status_0_time_after_time():
    ran = subprocess.run([sys.executable, __file__, "8", "3"], capture_output=True, text=True, timeout=300)
    assert ran.stdout == "{0: 24}\n", ran.stdout + ran.stderr


if __name__ == "__main__":
    run_programs(int(sys.argv[1]), int(sys.argv[2]))
