"""A rank on one of two hosts: trains, and says how far it got. Run by test_ranks_hosts.py."""

import sys

import torch
import torch.distributed as dist
from models import GPT, gpt_loss
from ranks import join

import zeropage

steps = int(sys.argv[1])
torch.set_num_threads(1)
join(timeout=8)
torch.manual_seed(0)
with zeropage.init(
    device="cpu", parameters="disk", gradients="disk", optimizer="disk", disk_path=sys.argv[2], device_memory="6MB",
    host_memory="4MB", min_page_bytes=1, page_size="16KiB",
):  # fmt: skip
    model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
try:
    for step in range(steps):
        loss = gpt_loss(model, step * dist.get_world_size() + dist.get_rank())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print("step", step, loss.item(), flush=True)
    print("peers", zeropage.report().peers, flush=True)
except zeropage.RankError as error:
    print("RankError", str(error).replace("\n", " | "), flush=True)
