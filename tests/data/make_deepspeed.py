"""Makes tests/data/deepspeed: what DeepSpeed itself saved on two ranks, and what its own functions say is in it.

make peers && build/peers/bin/python tests/data/make_deepspeed.py tests/data/deepspeed
"""

import os
import pathlib
import shutil
import subprocess
import sys
from typing import Any

import torch
from torch import nn

WORLD = 2
STEPS = 3
KINDS: dict[str, dict[str, Any]] = {
    "zero1": {"zero_optimization": {"stage": 1}},
    "zero2": {"zero_optimization": {"stage": 2}},
    "zero3": {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "sub_group_size": 40}},
    "bf16": {"zero_optimization": {"stage": 1}, "data_types": {"grad_accum_dtype": "fp32"}},
}


class Net(nn.Module):
    """Odd sizes, tied weights, a buffer, and a part that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.body = nn.Linear(5, 5)
        self.frozen = nn.Linear(5, 5)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("count", torch.arange(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.frozen(torch.tanh(self.body(self.embedding(tokens)))))


def groups(model: nn.Module) -> list[dict[str, Any]]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0},
    ]


def state_of(optimizer: Any, parameter: Any, key: str) -> torch.Tensor:
    """Gather a parameter's state from the parts that DeepSpeed maps into each rank's flat tensors."""
    if hasattr(parameter, "ds_id"):
        from deepspeed.utils import safe_get_full_optimizer_state

        return safe_get_full_optimizer_state(parameter, key).clone()
    mine = None
    if (where := parameter._hp_mapping) is not None:
        flats = getattr(optimizer, "fp32_groups_flat_partition", None) or optimizer.single_partition_of_fp32_groups
        flat = optimizer.optimizer.state[flats[where.param_group_index]][key]
        mine = flat.narrow(0, where.hp_fragment_address.start, where.hp_fragment_address.numel).clone()
    everyones: list[Any] = [None] * WORLD
    torch.distributed.all_gather_object(everyones, mine)
    return torch.cat([part for part in everyones if part is not None]).view(parameter.shape)


def train(kind: str, out: pathlib.Path) -> None:
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    deepspeed.init_distributed(dist_backend="gloo")
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    model = Net()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.8, 0.99], "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        "steps_per_print": 1_000_000,
        **KINDS[kind],
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups(model), config=config)
    for step in range(STEPS):
        tokens = torch.randint(0, 7, (2, 4), generator=torch.Generator().manual_seed(10 * step + rank))
        loss = engine(tokens).float().square().mean()
        engine.backward(loss)
        engine.step()
    engine.save_checkpoint(str(out / kind), tag="step3", client_state={"epoch": 7, "note": "of the program"})
    expected: dict[str, dict[str, torch.Tensor]] = {"master": {}, "exp_avg": {}, "exp_avg_sq": {}}
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            expected["master"][name] = safe_get_full_fp32_param(parameter).clone()
            for key in ("exp_avg", "exp_avg_sq"):
                expected[key][name] = state_of(engine.optimizer, parameter, key)
        else:
            with deepspeed.zero.GatheredParameters(parameter):
                expected["master"][name] = parameter.detach().clone()
    expected["master"]["count"] = engine.module.count.clone()
    if rank == 0:
        torch.save(expected, out / kind / "expected.pt")
    torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)  # DeepSpeed's threads of stage 3 abort an ordinary exit


def main() -> None:
    out = pathlib.Path(sys.argv[1]).resolve()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    common = dict(os.environ, DS_ACCELERATOR="cpu", WORLD_SIZE=str(WORLD), MASTER_ADDR="localhost")
    for i, kind in enumerate(KINDS):
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, str(out), kind],
                env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_PORT": str(29541 + i)},
            )
            for rank in range(WORLD)
        ]
        if any([process.wait() for process in ranks]):
            raise SystemExit(f"{kind} failed")
    for kind in ("zero1", "zero2", "zero3"):
        place = out / f"{kind}-universal"
        command = ["deepspeed.checkpoint.ds_to_universal", "--input_folder", str(out / kind / "step3")]
        command += ["--output_folder", str(place / "step3"), "--inject_missing_state"]
        subprocess.run([sys.executable, "-m", *command], env=common, check=True)
        shutil.copy(out / kind / "expected.pt", place)
    for script in out.rglob("*.py"):
        script.unlink()  # zero_to_fp32.py


if __name__ == "__main__":
    if len(sys.argv) > 2:
        train(sys.argv[2], pathlib.Path(sys.argv[1]))
    else:
        main()
