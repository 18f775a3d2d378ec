"""Pieces of source for random training programs: layers, optimizers, steps and events.

In a table, a blank line separates two pieces. `$w` stands for a weight, `$p` for any parameter, `$m` for a module
that has one. `$at` stands for a number that no other piece uses, `$opt` for an expression that makes an optimizer.
In layers, `$i` is the layer's name, `$c` its input's width, `$d` its result's, `$v` the number of tokens.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


def pieces(text: str) -> list[str]:
    return [piece.strip("\n") for piece in re.split(r"\n[ ]*\n", text) if piece.strip()]


@dataclass(frozen=True)
class Layer:
    """`takes` and `gives` are kinds of data: tokens, image, sequence, vector. `weights` are names below the model."""

    takes: str
    gives: str
    init: str
    forward: str
    weights: str = ""
    widths: tuple[int, ...] = ()  # of the result; none: its input's
    share: float = 1.0


NARROW, WIDE = (16, 32, 33, 64, 64, 96, 128), (512, 1024)
ONE = "$i.weight $i.bias"

_CHECKPOINTED = "nn.Sequential(nn.Linear($c, $d), nn.Dropout(0.1), nn.Tanh())"
_EXPERTS = "nn.ModuleList(nn.Linear($c, $d) for _ in range(3))"
_ENCODER = "nn.TransformerEncoderLayer($c, 2, 2 * $c, batch_first=True"
_ATTENTION_WEIGHTS = "$i.in_proj_weight $i.out_proj.weight $i.in_proj_bias"
_ENCODER_WEIGHTS = "$i.linear1.weight $i.linear2.weight $i.self_attn.in_proj_weight $i.norm1.weight"
_RECURRENT = "$i.weight_ih_l0 $i.weight_hh_l0 $i.bias_ih_l0"

LAYERS = [
    Layer("vector", "vector", "self.$i = nn.Linear($c, $d)", "x = self.$i(x)", ONE, NARROW, 8),
    Layer("vector", "vector", "self.$i = nn.Linear($c, $d, bias=False)", "x = self.$i(x)", "$i.weight", NARROW, 3),
    Layer("vector", "vector", "self.$i = nn.Linear($c, $c)", "x = x + torch.tanh(self.$i(x))", ONE, (), 3),
    Layer("vector", "vector", "self.$i = nn.Linear($c, $d)", "x = F.gelu(self.$i(x))", ONE, WIDE, 1),
    Layer("vector", "vector", "self.$i = nn.Bilinear($c, $c, 8)", "x = self.$i(x, x)", ONE, (8,), 0.3),
    Layer("vector", "vector", "self.$i = nn.LayerNorm($c)", "x = self.$i(x)", ONE, (), 2),
    Layer("vector", "vector", "self.$i = nn.RMSNorm($c)", "x = self.$i(x)", "$i.weight"),
    Layer("vector", "vector", "self.$i = nn.BatchNorm1d($c)", "x = self.$i(x)", ONE, (), 1.5),
    Layer("vector", "vector", "self.$i = nn.BatchNorm1d($c, momentum=None)", "x = self.$i(x)", ONE, (), 0.3),
    Layer("vector", "vector", "self.$i = nn.PReLU($c)", "x = self.$i(x)", "$i.weight"),
    Layer("vector", "vector", "", "x = F.dropout(x, 0.2, self.training)", share=2),
    Layer("vector", "vector", "self.$i = nn.Dropout(0.1, inplace=True)", "x = self.$i(x * 1)"),
    Layer("vector", "vector", "", "x = F.relu(x)", share=2),
    Layer("vector", "vector", "", "x = torch.tanh(x)", share=2),
    Layer("vector", "vector", "self.$i = nn.SiLU(inplace=True)", "x = self.$i(x + 0)", share=0.5),
    Layer("vector", "vector", "self.$i = nn.Parameter(torch.ones($c))", "x = x * self.$i", "$i"),
    Layer(
        "vector", "vector", "self.$i = nn.Parameter(torch.randn($c, $d) * 0.1)", "x = x @ self.$i", "$i", NARROW, 1.5
    ),
    Layer(
        "vector",
        "vector",
        'self.register_buffer("$i", torch.zeros($c))',
        "with torch.no_grad():\n    self.$i.lerp_(x.mean(0).to(self.$i.dtype), 0.1)\nx = x - self.$i",
    ),
    Layer(
        "vector",
        "vector",
        f"self.$i = {_EXPERTS}",
        "x = self.$i[0](x) if x.sum() > 0 else self.$i[1](x)",
        "$i.0.weight $i.1.weight",
        NARROW,
    ),
    Layer(
        "vector",
        "vector",
        f"self.$i = {_EXPERTS}",
        "x = torch.stack([self.$i[int(row.argmax()) % 3](row) for row in x])",
        "$i.0.weight $i.2.bias",
        NARROW,
    ),
    Layer(
        "vector",
        "vector",
        "self.$i = nn.Parameter(torch.randn(4, $c, $d) * 0.1)",
        "x = torch.stack([row @ self.$i[k % 3] for k, row in enumerate(x)])",
        "$i",
        (16, 32, 64),
    ),
    Layer(
        "vector",
        "vector",
        "self.$i = nn.Parameter(torch.randn(4, $c, $d) * 0.1)",
        "x = torch.bmm(x.view(4, -1, $c), self.$i).flatten(0, 1)",
        "$i",
        (16, 32, 64),
    ),
    Layer(
        "vector",
        "vector",
        "self.$i = nn.utils.parametrizations.weight_norm(nn.Linear($c, $d))",
        "x = self.$i(x)",
        "$i.bias $i.parametrizations.weight.original1",
        NARROW,
    ),
    Layer(
        "vector",
        "vector",
        "self.$i = nn.utils.parametrizations.spectral_norm(nn.Linear($c, $d))",
        "x = self.$i(x)",
        "$i.bias $i.parametrizations.weight.original",
        NARROW,
    ),
    Layer(
        "vector",
        "vector",
        "self.$i = nn.utils.weight_norm(nn.Linear($c, $d))",
        "x = self.$i(x)",
        "$i.weight_v $i.weight_g",
        NARROW,
        0.5,
    ),
    Layer(
        "vector",
        "vector",
        'self.$i = nn.utils.prune.l1_unstructured(nn.Linear($c, $d), "weight", 0.3)',
        "x = self.$i(x)",
        "$i.weight_orig $i.bias",
        NARROW,
        0.5,
    ),
    Layer(
        "vector",
        "vector",
        f"self.$i = {_CHECKPOINTED}",
        "x = torch.utils.checkpoint.checkpoint(self.$i, x, use_reentrant=False)",
        "$i.0.weight $i.0.bias",
        NARROW,
        1.5,
    ),
    Layer(
        "vector",
        "vector",
        f"self.$i = {_CHECKPOINTED}",
        "x = torch.utils.checkpoint.checkpoint(self.$i, x, use_reentrant=True)",
        "$i.0.weight $i.0.bias",
        NARROW,
    ),
    Layer(
        "vector",
        "vector",
        "self.$i = nn.Linear($c, $d)",
        "with torch.autograd.graph.save_on_cpu():\n    x = torch.tanh(self.$i(x))",
        ONE,
        NARROW,
        0.5,
    ),
    Layer("vector", "vector", "self.$i = nn.LazyLinear($d)", "x = self.$i(x)", "", NARROW, 0.2),
    Layer("vector", "vector", "self.$i = nn.Conv1d(1, 4, 3, padding=1)", "x = self.$i(x[:, None]).mean(1)", ONE),
    Layer(
        "vector",
        "vector",
        "self.$i = nn.Linear($c, $d)",
        "x = torch.func.functional_call(self.$i, {'weight': self.$i.weight.tanh(), 'bias': self.$i.bias}, (x,))",
        ONE,
        NARROW,
        0.5,
    ),
    # Sequences.
    Layer("sequence", "sequence", "self.$i = nn.Linear($c, $d)", "x = torch.tanh(self.$i(x))", ONE, (32, 48, 64), 3),
    Layer("sequence", "sequence", "self.$i = nn.LayerNorm($c)", "x = self.$i(x)", ONE, (), 2),
    Layer("sequence", "sequence", "self.$i = nn.RMSNorm($c)", "x = self.$i(x)", "$i.weight"),
    Layer("sequence", "sequence", "", "x = F.dropout(x, 0.1, self.training)"),
    Layer(
        "sequence",
        "sequence",
        "self.$i = nn.GRU($c, $d, batch_first=True)",
        "x = self.$i(x)[0]",
        _RECURRENT,
        (32, 48),
        2,
    ),
    Layer(
        "sequence",
        "sequence",
        "self.$i = nn.LSTM($c, $d, 2, batch_first=True, dropout=0.1)",
        "x = self.$i(x)[0]",
        _RECURRENT,
        (32, 48),
        2,
    ),
    Layer(
        "sequence",
        "sequence",
        "self.$i = nn.LSTM($c, $d // 2, batch_first=True, bidirectional=True)",
        "x = self.$i(x)[0]",
        _RECURRENT,
        (32, 48),
    ),
    Layer(
        "sequence",
        "sequence",
        "self.$i = nn.RNNCell($c, $d)",
        "x = torch.stack([self.$i(x[:, k]) for k in range(6)], 1)",
        "$i.weight_ih $i.bias_hh",
        (32, 48),
    ),
    Layer(
        "sequence",
        "sequence",
        "self.$i = nn.MultiheadAttention($c, 2, dropout=0.1, batch_first=True)",
        "x = x + self.$i(x, x, x, need_weights=False)[0]",
        _ATTENTION_WEIGHTS,
        (),
        2,
    ),
    Layer(
        "sequence",
        "sequence",
        "self.$i = nn.MultiheadAttention($c, 2, batch_first=True, add_bias_kv=True)",
        "x = x + self.$i(x, x, x)[0]",
        _ATTENTION_WEIGHTS,
    ),
    Layer("sequence", "sequence", f"self.$i = {_ENCODER})", "x = self.$i(x)", _ENCODER_WEIGHTS, (), 2),
    Layer("sequence", "sequence", f"self.$i = {_ENCODER}, norm_first=True)", "x = self.$i(x)", _ENCODER_WEIGHTS),
    Layer(
        "sequence",
        "sequence",
        "self.$i = nn.Conv1d($c, $d, 3, padding=1)",
        "x = F.gelu(self.$i(x.transpose(1, 2)).transpose(1, 2))",
        ONE,
        (32, 48),
    ),
    Layer("sequence", "vector", "", "x = x.mean(1)", share=3),
    Layer("sequence", "vector", "", "x = x[:, -1]", share=2),
    # Tokens.
    Layer("tokens", "sequence", "self.$i = nn.Embedding($v, $d)", "x = self.$i(x)", "$i.weight", (32, 48, 64), 4),
    Layer(
        "tokens",
        "sequence",
        "self.$i = nn.Embedding($v, $d, padding_idx=0)",
        "x = self.$i(x)",
        "$i.weight",
        (32, 48, 64),
        1.5,
    ),
    Layer(
        "tokens",
        "sequence",
        "self.$i = nn.Embedding($v, $d, scale_grad_by_freq=True)",
        "x = self.$i(x)",
        "$i.weight",
        (32, 48),
        0.5,
    ),
    Layer(
        "tokens",
        "sequence",
        "self.$i = nn.Embedding($v, $d, max_norm=1.0)",
        "x = self.$i(x)",
        "$i.weight",
        (32, 48),
        0.5,
    ),
    Layer(
        "tokens",
        "sequence",
        "self.$i = nn.Embedding($v, $d, sparse=True)",
        "x = self.$i(x)",
        "$i.weight",
        (32, 48),
        0.7,
    ),
    Layer(
        "tokens",
        "sequence",
        "self.$i = nn.Embedding($v, $d)\nself.$i_at = nn.Parameter(torch.randn(6, $d) * 0.1)",
        "x = self.$i(x) + self.$i_at",
        "$i.weight $i_at",
        (32, 48, 64),
    ),
    *[
        Layer(
            "tokens",
            "vector",
            f"self.$i = nn.EmbeddingBag($v, $d, {options})",
            "x = self.$i(x)",
            "$i.weight",
            (32, 48, 64),
            0.6,
        )
        for options in ('mode="sum"', 'mode="mean", padding_idx=1', 'mode="max"', 'mode="mean", sparse=True')
    ],
    # Images, 8 by 8.
    Layer("image", "image", "self.$i = nn.Conv2d($c, $d, 3, padding=1)", "x = self.$i(x)", ONE, (8, 16, 24), 4),
    Layer("image", "image", "self.$i = nn.Conv2d($c, $d, 1, bias=False)", "x = self.$i(x)", "$i.weight", (8, 16)),
    Layer("image", "image", "self.$i = nn.ConvTranspose2d($c, $d, 1)", "x = self.$i(x)", ONE, (8, 16)),
    Layer("image", "image", "self.$i = nn.Conv2d($c, $c, 3, padding=1, groups=$c)", "x = self.$i(x)", ONE),
    Layer("image", "image", "self.$i = nn.BatchNorm2d($c)", "x = self.$i(x)", ONE, (), 2),
    Layer("image", "image", "self.$i = nn.GroupNorm(4, $c)", "x = self.$i(x)", ONE, (), 2),
    Layer("image", "image", "self.$i = nn.InstanceNorm2d($c, affine=True)", "x = self.$i(x)", ONE),
    Layer("image", "image", "", "x = F.relu(x)"),
    Layer("image", "image", "", "x = F.dropout2d(x, 0.2, self.training)"),
    Layer("image", "vector", "", "x = x.mean((2, 3))", share=1.5),
    Layer("image", "vector", "", "x = F.max_pool2d(x, 4).flatten(1)[:, :$c]", share=1.5),
]

# In mixed precision, what float32 buffers and inputs of their own would make of a plain program.
NOT_MIXED = re.compile(r"BatchNorm|register_buffer|spectral|utils.weight_norm|prune|Lazy|max_norm|\[None\]|RNNCell")

# Optimizers, by what they need: nothing, or a closure.

OPTIMIZERS = pieces("""
torch.optim.SGD(PARAMETERS, lr=0.05)

torch.optim.SGD(PARAMETERS, lr=0.05, momentum=0.9FORM)

torch.optim.SGD(PARAMETERS, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01FORM)

torch.optim.SGD(PARAMETERS, lr=0.05, momentum=0.5, dampening=0.1, maximize=TrueFORM)

torch.optim.SGD(PARAMETERS, lr=0.05, weight_decay=0.01FORM)

torch.optim.Adam(PARAMETERS, lr=1e-2FORM)

torch.optim.Adam(PARAMETERS, lr=1e-2FORM)

torch.optim.Adam(PARAMETERS, lr=1e-2, amsgrad=True, weight_decay=0.01FORM)

torch.optim.Adam(PARAMETERS, lr=1e-2, maximize=TrueFORM)

torch.optim.AdamW(PARAMETERS, lr=1e-2FORM)

torch.optim.AdamW(PARAMETERS, lr=1e-2FORM)

torch.optim.AdamW(PARAMETERS, lr=1e-2, amsgrad=TrueFORM)

torch.optim.AdamW(PARAMETERS, lr=torch.tensor(1e-2)TENSORFORM)

torch.optim.AdamW(PARAMETERS, lr=1e-2, betas=(0.0, 0.5), weight_decay=0.1, maximize=TrueFORM)

torch.optim.Adagrad(PARAMETERS, lr=1e-2FORM)

torch.optim.Adagrad(PARAMETERS, lr=1e-2, lr_decay=0.1, initial_accumulator_value=0.1, weight_decay=0.01FORM)

torch.optim.RMSprop(PARAMETERS, lr=1e-3TWOFORMS)

torch.optim.RMSprop(PARAMETERS, lr=1e-3, centered=True, momentum=0.5, weight_decay=0.01TWOFORMS)

torch.optim.Adadelta(PARAMETERS, lr=0.5, weight_decay=0.01TWOFORMS)

torch.optim.Adamax(PARAMETERS, lr=1e-2TWOFORMS)

torch.optim.NAdam(PARAMETERS, lr=1e-2, weight_decay=0.01, decoupled_weight_decay=TrueTWOFORMS)

torch.optim.RAdam(PARAMETERS, lr=1e-2TWOFORMS)

torch.optim.Rprop(PARAMETERS, lr=1e-2TWOFORMS)

torch.optim.ASGD(PARAMETERS, lr=1e-2, t0=1TWOFORMS)

torch.optim.Adafactor(PARAMETERS, lr=1e-2TWOFORMS)

torch.optim.Adafactor(PARAMETERS, lr=1e-2, eps=(1e-7, 1e-3), weight_decay=0.1, maximize=TrueTWOFORMS)

torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=1e-2)

torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=1e-2, nesterov=False, ns_steps=2)
""")
FORMS = ["", "", ", foreach=True", ", foreach=False", ", fused=True", ", fused=True"]
TWO_FORMS = ["", ", foreach=True", ", foreach=False"]
FUSED = [
    each for each in OPTIMIZERS if "Adam" in each and "FORM" in each and "TWO" not in each and "TENSOR" not in each
]
# By hand, masters have another dtype than what operators see, from which Adafactor takes an eps that is not given.
BY_HAND = [each for each in OPTIMIZERS if "Adafactor" not in each or "eps" in each]
SPARSE = ["torch.optim.SparseAdam(PARAMETERS, lr=1e-2)", "torch.optim.SGD(PARAMETERS, lr=0.05)"]
LBFGS = pieces("""
torch.optim.LBFGS(PARAMETERS, lr=0.5, max_iter=3, history_size=2)

torch.optim.LBFGS(PARAMETERS, max_iter=4, line_search_fn="strong_wolfe")
""")
GROUPS = pieces("""
model.parameters()

model.named_parameters()

[{"params": [p], "weight_decay": 0.01 * i} for i, p in enumerate(model.parameters())]

[{"params": [p for p in model.parameters() if (p.dim() > 1) == big], "lr": 0.01} for big in (True, False)]

list(model.parameters())[::-1]

[p for p in model.parameters() if p.dim() > 1]

[{"params": list(model.parameters())[:1]}, {"params": list(model.parameters())[1:], "lr": 0.0}]
""")
SCHEDULERS = pieces("""
torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 0.5 ** step)

torch.optim.lr_scheduler.StepLR(opt, 1, 0.7)

torch.optim.lr_scheduler.CosineAnnealingLR(opt, 4)

torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.02, total_steps=20)

torch.optim.lr_scheduler.CyclicLR(opt, 1e-3, 1e-2, step_size_up=2, cycle_momentum=False)

torch.optim.lr_scheduler.ChainedScheduler([torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)])

torch.optim.swa_utils.SWALR(opt, swa_lr=0.01, anneal_epochs=2)
""")

# Losses: the model's result is `out`, its width $d.

LOSSES = pieces("""
F.mse_loss(out, mine(at + 500, *out.shape).to(out.dtype))

F.mse_loss(out, mine(at + 500, *out.shape).to(out.dtype))

F.cross_entropy(out, labels(at, len(out), out.shape[-1]))

F.cross_entropy(out, labels(at, len(out), out.shape[-1]))

F.cross_entropy(out.float(), labels(at, len(out), out.shape[-1]))

F.cross_entropy(out, labels(at, len(out), out.shape[-1]), label_smoothing=0.1, reduction="sum") / 8

F.smooth_l1_loss(out, torch.zeros_like(out))

out.square().mean()

out.logsumexp(1).mean() + out.var()

F.binary_cross_entropy_with_logits(out, (mine(at + 500, *out.shape) > 0).to(out.dtype))

F.nll_loss(F.log_softmax(out, 1), labels(at, len(out), out.shape[-1]))
""")

# Ways to come to gradients.

STYLES = pieces("""
with torch.autocast("cpu", dtype=torch.bfloat16):
    loss = loss_of(step)
loss.backward()
look("loss", loss)

with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
    loss = loss_of(step) + loss_of(step + 10)
loss.backward()
look("loss", loss)

loss = loss_of(step)
loss.backward()
loss = loss_of(step + 10)
loss.backward()

loss = loss_of(step)
grads = torch.autograd.grad(loss, with_gradients(), create_graph=True, allow_unused=True)
(loss + 0.1 * sum(g.square().sum() for g in grads if g is not None)).backward()
look("loss", loss)

loss = loss_of(step)
grads = torch.autograd.grad(loss, with_gradients(), allow_unused=True)
for p, g in zip(with_gradients(), grads):
    p.grad = g

def of_parameters(named):
    x, at = batch_of(step), step
    out = torch.func.functional_call(model, named, (x,))
    return out.square().mean()
named = {k: p.detach() for k, p in model.named_parameters()}
gradients, loss = torch.func.grad_and_value(of_parameters)(named)
for k, p in model.named_parameters():
    p.grad = gradients[k]
look("loss", loss)

loss = loss_of(step)
loss.backward(retain_graph=True)
look("between", model)
loss.backward()

loss = loss_of(step)
loss.backward(retain_graph=True)
model.zero_grad()
loss.backward()

total = 0.0
for micro in range(3):
    loss = loss_of(step + 10 * micro) / 3
    loss.backward()
    total += loss.item()
look("total", total)

loss = loss_of(step)
(loss * float("inf")).backward()

loss = loss_of(step)
(loss * float("nan")).backward()

loss = loss_of(step)
(loss * 1e30).backward()

loss = torch.utils.checkpoint.checkpoint(loss_of, step, use_reentrant=False)
loss.backward()
look("loss", loss)

loss = loss_of(step)
loss.backward(torch.tensor(0.5, dtype=loss.dtype))

losses = [loss_of(step), loss_of(step + 10)]
torch.autograd.backward(losses, [torch.ones_like(losses[0]), torch.ones_like(losses[1]) * 0.5])
loss = losses[0]

out = model(batch_of(step))
out.register_hook(lambda g: g * 2)
loss = out.square().mean()
loss.backward()

out = model(batch_of(step))
out.retain_grad()
loss = out.square().mean()
loss.backward()
look("gradient of the result", out.grad)

with torch.autograd.set_multithreading_enabled(False):
    loss = loss_of(step)
    loss.backward()

with torch.autograd.graph.save_on_cpu():
    loss = loss_of(step)
loss.backward()

with torch.nn.utils.parametrize.cached():
    loss = loss_of(step) + loss_of(step + 1)
loss.backward()
look("loss", loss)

x = batch_of(step)
z = x.clone().requires_grad_() if x.is_floating_point() else x
loss = model(z).square().mean()
loss.backward()
look("gradient of the input", z.grad)
""")
# As above, in mixed precision by hand.
MIXED_STYLES = pieces("""
loss = loss_of(step)
loss.backward()
look("loss", loss)

loss = loss_of(step)
loss.backward()

loss = loss_of(step)
loss.backward()
loss = loss_of(step + 10)
loss.backward()

loss = loss_of(step)
loss.backward(retain_graph=True)
loss.backward()

loss = loss_of(step)
(loss * float("inf")).backward()

losses = [loss_of(step), loss_of(step + 10)]
torch.autograd.backward(losses)
loss = losses[0]

loss = torch.utils.checkpoint.checkpoint(loss_of, step, use_reentrant=False)
loss.backward()
look("loss", loss)
""")

# After backward.

GRADIENTS = pieces("""
look("norm", nn.utils.clip_grad_norm_(model.parameters(), 0.1))

look("norm", nn.utils.clip_grad_norm_(model.parameters(), 0.1))

nn.utils.clip_grad_norm_(model.parameters(), 100.0)

nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=False)

nn.utils.clip_grad_norm_(model.parameters(), 0.5, error_if_nonfinite=True)

look("norm", nn.utils.get_total_norm([p.grad for p in with_grad()]))

nn.utils.clip_grad_value_(model.parameters(), 0.01)

for p in with_grad():
    p.grad.mul_(0.5)

$p.grad = None

$p.grad = torch.ones_like($p)

$p.grad = $p.detach() * 0.1

$p.grad.zero_()

$p.grad = $p.grad * 2

$p.grad += $p.detach()

$p.grad.data.clamp_(-0.02, 0.02)

$p.grad[0] = float("nan")

$p.grad.view(-1)[0] = float("inf")

look("gradients", [p.grad for p in model.parameters()])

look("gradients", [p.grad for p in model.parameters()])

if any(not p.grad.isfinite().all() for p in with_grad()):
    model.zero_grad()

kept = [p.grad for p in with_grad()]

kept = [p.grad.clone() for p in with_grad()]

torch._foreach_div_([p.grad for p in with_grad()], 2.0)

$p.grad.requires_grad_(False) if $p.grad._is_view() else $p.grad.detach_()  # a tiled gradient is no view

$p.grad, $w.grad = None, None

$p.grad.copy_(mine($at, *$p.shape))

with torch.no_grad():
    $p.grad.normal_()
""")

# Without arithmetic on a parameter: its result has the dtype that operators see.
MIXED_GRADIENTS = [each for each in GRADIENTS if "$p.detach()" not in each]

# At any place of a step; also in mixed precision by hand.

PLAINEST = pieces("""
model.eval()

model.train()

model.train()

with torch.no_grad():
    look("evaluated", loss_of(step + 50))

with torch.inference_mode():
    look("evaluated", loss_of(step + 50))

evict(model)

evict(model)

evict($p)

wait()

wait()

$p.grad = None

model.zero_grad()

opt.zero_grad()

opt.zero_grad(set_to_none=False)

loss = loss_of(step + 60)

loss = loss_of(step + 60); loss.backward()

opt.step()

for group in opt.param_groups:
    group["lr"] = group["lr"] * 0.5

opt = $opt

opt.state.clear()

opt.load_state_dict(opt.state_dict())

model.load_state_dict(model.state_dict())

loss = None

torch.manual_seed($at)

look("gradient", $p.grad)

look("parameter", $p)

look("state", opt)

with torch.no_grad():
    $p.copy_(mine($at, *$p.shape) * 0.1)

with torch.no_grad():
    $p.zero_()

with torch.no_grad():
    $p.fill_(0.01)

states = {k: t.clone() for k, t in model.state_dict().items()}

model.load_state_dict(states)

saved = copy.deepcopy(opt.state_dict())

opt.load_state_dict(saved)

for p in model.parameters():
    opt.state[p].clear()

for state in opt.state.values():
    for t in state.values():
        t.mul_(0.5) if torch.is_tensor(t) and t.dim() else None
""")

ANYWHERE = pieces("""
with torch.no_grad():
    $p.mul_(0.9)

with torch.no_grad():
    for p in model.parameters():
        p.mul_(0.99)

with torch.no_grad():
    $p.add_(mine($at, *$p.shape).to($p.dtype), alpha=0.01)

with torch.no_grad():
    $p[0] = 0.1

with torch.no_grad():
    $p.view(-1)[::3].mul_(0.5)

$p.data.mul_(0.97)

$p.data = $p.data * 0.9

$p.data = $p.data.clone()

$p.data = torch.zeros_like($p)

$p.data = mine($at, *$p.shape).to($p.dtype) * 0.1

$p.detach().add_(0.01)

$p.data.clamp_(-0.1, 0.1)

model.load_state_dict({k: t * 0.9 for k, t in model.state_dict().items()})

model.load_state_dict(model.state_dict(), assign=True)

nn.init.normal_($p, std=0.1)

nn.init.trunc_normal_($p, std=0.1)

nn.init.uniform_($p, -0.1, 0.1)

nn.init.xavier_uniform_($w)

nn.init.kaiming_normal_($w)

nn.init.orthogonal_($w)

nn.init.constant_($p, 0.02)

nn.init.sparse_($w, 0.2)

$m.reset_parameters()

$p.requires_grad_(False)

$p.requires_grad_(True)

$p.requires_grad_(True)

model.requires_grad_(False)

model.requires_grad_(True)

model.requires_grad_(True)

$p.requires_grad = not $p.requires_grad

look("item", $p.flatten()[0].item())

look("list", $p.flatten()[:5].tolist())

with pinned($p) as raw:
    look("deviation", float(raw.detach().numpy().std()))

with pinned($p) as raw:
    raw.detach().numpy()[...] *= 0.5

look("norms", [p.detach().norm() for p in model.parameters()])

look("text", len(repr($p)))

file = io.BytesIO(); torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, file)

file.seek(0); loaded = torch.load(file); model.load_state_dict(loaded["model"]); opt.load_state_dict(loaded["opt"])

file.seek(0); loaded = torch.load(file); model.load_state_dict(loaded["model"], assign=True)

twin = copy.deepcopy(model)
look("twin", twin)

twin = copy.deepcopy(model).eval().requires_grad_(False)

model = copy.deepcopy(model)
opt = $opt

with torch.no_grad():
    for e, p in zip(twin.parameters(), model.parameters()):
        e.lerp_(p, 0.2)
look("twin", twin)

model.load_state_dict(twin.state_dict())

average = torch.optim.swa_utils.AveragedModel(model)

average.update_parameters(model)
look("average", average)

average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))

average.update_parameters(model); average.update_parameters(model)

means = [p.detach().clone() for p in model.parameters()]

torch._foreach_lerp_(means, [p.detach() for p in model.parameters()], 0.1)
look("means", means)

alias = $p.detach()

look("alias", alias)

alias = $w.detach()[1:].view(-1)

look("kept", kept)

opt.add_param_group({"params": [$p], "lr": 0.01})

opt.add_param_group({"params": [nn.Parameter(mine($at, 3, 3))]})

opt.param_groups[0]["lr"] = 1e-3

opt.param_groups[-1]["params"] = opt.param_groups[-1]["params"][:1]

look("states", [t for t in opt.state[$p].values()])

for t in opt.state[$p].values():
    t.zero_() if torch.is_tensor(t) and t.dim() else None

opt.state[$p] = {k: t.clone() if torch.is_tensor(t) else t for k, t in opt.state[$p].items()}

for k in list(opt.state[$p]):
    opt.state[$p][k] = torch.zeros(3) if not opt.defaults.get("fused") else opt.state[$p][k]  # which checks nothing

del opt.state[$p]

opt.step(lambda: loss_of(step))

opt.step(lambda: 1 / 0)

opt.step(lambda: (model.zero_grad(), loss_of(step).backward(), nn.utils.clip_grad_norm_(model.parameters(), 0.1))[2])

other = torch.optim.SGD([$p], lr=0.1, momentum=0.9)

other.step()

other = torch.optim.Adam([$p], lr=0.01, fused=True); other.step()

handle = $p.register_hook(lambda g: g * 0.5)

handle = $p.register_hook(lambda g: None)

handle = $p.register_hook(boom)

handle = $p.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(0.5))

handle = $p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))

handle = $p.register_post_accumulate_grad_hook(boom)

handle = $m.register_forward_hook(lambda m, inputs, out: out * 1.01 if torch.is_tensor(out) else None)

handle = $m.register_forward_pre_hook(boom)

handle = $m.register_forward_hook(boom)

handle = $m.register_full_backward_hook(lambda m, gi, go: tuple(None if g is None else g * 0.5 for g in gi))

handle = $m.register_full_backward_hook(boom)

handle = $m.register_full_backward_pre_hook(lambda m, go: None)

handle = $m.register_full_backward_pre_hook(boom)

handle = opt.register_step_pre_hook(boom)

handle = opt.register_step_post_hook(boom)

handle = opt.register_step_post_hook(lambda o, args, kwargs: look("in the hook", model))

handle.remove()

handle.remove()

handle.remove()

handle.remove()

loss = loss_of(step + 60); handle = loss.register_hook(boom); loss.backward()

loss.backward()

look("loss", loss)

in_backward = torch.optim.SGD([$p], lr=0.01)
handle = $p.register_post_accumulate_grad_hook(lambda p: (in_backward.step(), in_backward.zero_grad()))

opt.zero_grad = lambda set_to_none=True: None

named = {k: p * 0.9 for k, p in model.named_parameters()}
look("function", torch.func.functional_call(model, named, (batch_of(step),)))

with torch.no_grad():
    named = {k: torch.zeros_like(p) for k, p in model.named_parameters()}
    look("function", torch.func.functional_call(model, named, (batch_of(step),)))

look("direct", torch.autograd.grad(loss_of(step), $p))

nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(model.parameters()).detach() * 0.99, model.parameters())

torch._foreach_mul_([p.data for p in model.parameters()], 0.99)

with torch.no_grad():
    torch._foreach_add_(list(model.parameters()), 0.001)

with torch.no_grad():
    a, b = $p, $w; a.lerp_(b, 0.5) if a.shape == b.shape else None

nn.utils.parametrize.register_parametrization($m, "weight", nn.Tanh())

nn.utils.prune.random_unstructured($m, "weight", 0.2)

$m.weight = nn.Parameter($m.weight.detach().clone())

$m.weight = nn.Parameter($m.weight.detach())

$m.weight = nn.Parameter(mine($at, *$m.weight.shape).to($m.weight.dtype) * 0.1)
opt = $opt

model.extra = nn.Linear(5, 5)
opt = $opt

model.register_buffer("seen", mine($at, 40, 40))

model.seen.mul_(0.5); look("seen", model.seen)

model.apply(lambda m: m.reset_parameters() if hasattr(m, "reset_parameters") else None)

model.train(not model.training)

gc.collect()

del loss

del kept, means

with torch.no_grad():
    $p.set_($p * 0.5)

with torch.no_grad():
    $p.addcmul_($p, $p, value=0.01).sub_(0.001).tanh_()

noise = torch.randn_like($p); $p.data.add_(noise, alpha=0.01)

with torch.no_grad():
    torch.add($p, 0.01, out=$p)

with torch.random.fork_rng():
    look("evaluated", loss_of(step + 50))

model.half().to($dtype)

model.to($dtype)

model.double().to($dtype)
""")
