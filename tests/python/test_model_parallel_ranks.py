"""GPT and Llama of transformers, parallel in the program's own code, with ZeRO over the ranks that this leaves.

Tensor parallelism by DTensors, pipelines, sequences in parts (Ulysses), experts on ranks, and three of these at once.
All states are on disk. The reference is the same parallel program on plain tensors, whose gradients are averaged by
hand.
"""

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from ranks import space
from test_dtensors_ranks import content, mean_of_local
from test_parallel_groups_ranks import AllToAll
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zeropage

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.timeout(300), pytest.mark.cpu]

TOKENS, WIDTH, HEADS, LENGTH, ROWS, MICRO_BATCHES = 64, 32, 4, 16, 4, 2
SHAPE = dict(
    vocab_size=TOKENS,
    hidden_size=WIDTH,
    intermediate_size=2 * WIDTH,
    num_hidden_layers=2,
    num_attention_heads=HEADS,
    max_position_embeddings=LENGTH,
    tie_word_embeddings=False,
)


def llama():
    config = transformers.LlamaConfig(num_key_value_heads=HEADS, **SHAPE)
    model = transformers.LlamaForCausalLM(config)
    return (
        config,
        model.model.embed_tokens,
        model.model.rotary_emb,
        model.model.layers,
        model.model.norm,
        model.lm_head,
    )


def gpt():
    # GPT-2's matrices belong to a class of their own, which parallelize_module() does not know.
    config = transformers.GPTNeoXConfig(hidden_dropout=0.0, attention_dropout=0.0, **SHAPE)
    model = transformers.GPTNeoXForCausalLM(config)
    inner = model.gpt_neox
    return (
        config,
        inner.embed_in,
        inner.rotary_emb,
        inner.layers,
        inner.final_layer_norm,
        model.get_output_embeddings(),
    )


MODELS = {"llama": llama, "gpt": gpt}
LLAMA_IN_SHORT = ["llama", pytest.param("gpt", marks=pytest.mark.full)]
TENSORS = {
    "llama": {
        **{f"self_attn.{name}_proj": ColwiseParallel for name in "qkv"},
        "self_attn.o_proj": RowwiseParallel,
        **{f"mlp.{name}_proj": ColwiseParallel for name in ("gate", "up")},
        "mlp.down_proj": RowwiseParallel,
    },
    "gpt": {
        "attention.query_key_value": ColwiseParallel,
        "attention.dense": RowwiseParallel,
        "mlp.dense_h_to_4h": ColwiseParallel,
        "mlp.dense_4h_to_h": RowwiseParallel,
    },
}


class Part(nn.Module):
    """Some layers of a model, with what comes before the first and after the last. `begin`: the first position."""

    def __init__(self, parts, numbers, begin=0):
        super().__init__()
        self.config, embedding, self.rotary, layers, norm, head = parts
        self.begin = begin
        self.layers = nn.ModuleList(layers[i] for i in numbers)
        self.embedding = embedding if 0 in numbers else nn.Identity()
        is_last = len(layers) - 1 in numbers
        self.norm, self.head = (norm, head) if is_last else (nn.Identity(), nn.Identity())

    def forward(self, x):
        x = self.embedding(x)
        places = torch.arange(self.begin, self.begin + x.shape[1])[None]
        angles = self.rotary(x, places)
        for layer in self.layers:
            made = layer(x, attention_mask=None, position_ids=places, position_embeddings=angles)
            x = made[0] if isinstance(made, tuple) else made
        return self.head(self.norm(x))


class Mixture(nn.Module):
    """As many experts as the group has ranks, one on each. Token i goes to expert i % ranks."""

    def __init__(self, group, expert):
        super().__init__()
        self.group, self.expert = group, expert

    def forward(self, x):
        ranks = dist.get_world_size(self.group)
        sent = x.reshape(-1, ranks, WIDTH).transpose(0, 1)
        done = self.expert(AllToAll.apply(sent, self.group))
        return AllToAll.apply(done, self.group).transpose(0, 1).reshape(x.shape)


def attention_over(group):
    """Attention for transformers, over sequences that the ranks have in parts. Each rank computes some heads."""

    def attend(module, query, key, value, mask, **_):
        ranks = dist.get_world_size(group)
        rows, heads, here, width = query.shape
        parts = torch.stack([query, key, value]).view(3, rows, ranks, heads // ranks, here, width)
        parts = AllToAll.apply(parts.permute(2, 0, 1, 3, 4, 5), group)  # [ranks, 3, rows, heads, here, width]
        whole = parts.permute(1, 2, 3, 0, 4, 5).reshape(3, rows, heads // ranks, ranks * here, width)
        mixed = nn.functional.scaled_dot_product_attention(*whole, is_causal=True)
        mixed = mixed.view(rows, heads // ranks, ranks, here, width).permute(2, 0, 3, 1, 4)
        mixed = AllToAll.apply(mixed, group)  # [ranks of heads, rows, here, heads, width]
        return mixed.permute(1, 2, 0, 3, 4).reshape(rows, here, heads, width), None

    return attend


def build(kind, mesh):
    """This rank's part of the model, and its experts, which only some ranks hold."""
    torch.manual_seed(0)
    parts = MODELS[kind]()
    config, layers = parts[0], parts[3]
    numbers, begin, experts = range(len(layers)), 0, []
    if "pp" in mesh.mesh_dim_names:
        numbers = [mesh["pp"].get_local_rank()]
    if "sp" in mesh.mesh_dim_names:
        group = mesh["sp"].get_group()
        transformers.AttentionInterface.register("in_parts", attention_over(group))
        config._attn_implementation = "in_parts"
        begin = LENGTH // dist.get_world_size(group) * dist.get_rank(group)
    if "ep" in mesh.mesh_dim_names:
        group = mesh["ep"].get_group()
        for layer in layers:
            torch.manual_seed(100 + dist.get_rank(group))  # each rank of a group has another expert
            expert = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            layer.mlp = Mixture(group, expert)
            experts.append(expert)
    part = Part(parts, numbers, begin)
    if "tp" in mesh.mesh_dim_names:
        for layer in part.layers:
            parallelize_module(layer, mesh["tp"], {name: how() for name, how in TENSORS[kind].items()})
    return part, experts


def loss_of(logits, labels):
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def train(kind, mesh, of_rest, of_experts, rest_group):
    part, experts = build(kind, mesh)
    held = {p for expert in experts for p in expert.parameters()}
    if of_rest:
        for expert in experts:
            zeropage.page(expert, of_experts)
        zeropage.page(part, of_rest)
    rest = [p for p in part.parameters() if p not in held]
    optimizer = torch.optim.AdamW(part.parameters(), lr=1e-2)
    schedule, is_last = None, True
    if "pp" in mesh.mesh_dim_names:
        place, size = mesh["pp"].get_local_rank(), mesh["pp"].size()
        stage = PipelineStage(part, place, size, torch.device("cpu"), group=mesh["pp"].get_group())
        schedule, is_last = ScheduleGPipe(stage, MICRO_BATCHES, loss_fn=loss_of), place == size - 1
    losses = []
    for step in range(3):
        # Ranks with other data: those of data parallelism, and of groups of experts.
        which = mesh["dp"].get_local_rank() if "ep" not in mesh.mesh_dim_names else dist.get_rank()
        generator = torch.Generator().manual_seed(100 * step + which)
        tokens = torch.randint(TOKENS, (ROWS, LENGTH + 1), generator=generator)
        x, labels = tokens[:, :-1], tokens[:, 1:]
        if "sp" in mesh.mesh_dim_names:
            x, labels = (t.chunk(mesh["sp"].size(), 1)[mesh["sp"].get_local_rank()].contiguous() for t in (x, labels))
        if schedule is None:
            loss = loss_of(part(x), labels)
            loss.backward()
            losses.append(loss.item())
        else:
            of_step = []
            given = (x,) if mesh["pp"].get_local_rank() == 0 else ()
            schedule.step(*given, **({"target": labels, "losses": of_step} if is_last else {}))
            losses += [loss.item() for loss in of_step]
        if of_rest is None:
            mean_of_local(rest, rest_group)
            if experts:
                mean_of_local(held_in_order(experts), mesh["dp"].get_group())
        optimizer.step()
        optimizer.zero_grad()
    if of_rest:
        locals_ = [p._local_tensor if isinstance(p, DTensor) else p for p in part.parameters()]
        assert all(map(zeropage.is_paged, locals_))
    return losses, [content(p) for p in part.parameters()]


def held_in_order(experts):
    return [p for expert in experts for p in expert.parameters()]


def parallel(kind, layout):
    """`layout`: the mesh's dimensions, by name."""
    torch.use_deterministic_algorithms(True)
    mesh = init_device_mesh("cpu", tuple(layout.values()), mesh_dim_names=tuple(layout))
    # Ranks of a sequence, or of a group of experts, share what is not an expert.
    rest_group = dist.group.WORLD if {"sp", "ep"} & {*layout} else mesh["dp"].get_group()
    with space(group=rest_group) as of_rest, space(group=mesh["dp"].get_group()) as of_experts:
        losses, parameters = train(kind, mesh, of_rest, of_experts, rest_group)
    expected, right = train(kind, mesh, None, None, rest_group)
    assert losses == expected and all(map(torch.equal, parameters, right))
    return losses


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("way", ["tp", "pp", "sp", "ep"])
def test_two_ranks_that_share_a_model_have_the_bits_of_plain_ones(way, kind, two):
    two.run(parallel, kind, {"dp": 1, way: 2})


@pytest.mark.parametrize("kind", LLAMA_IN_SHORT)
@pytest.mark.parametrize("way", ["tp", "pp", "sp", "ep"])
def test_with_data_parallelism_over_four_ranks(way, kind, four):
    four.run(parallel, kind, {"dp": 2, way: 2})


@pytest.mark.parametrize("kind", LLAMA_IN_SHORT)
def test_data_pipelines_and_tensors_over_eight_ranks(kind, eight):
    eight.run(parallel, kind, {"dp": 2, "pp": 2, "tp": 2})
