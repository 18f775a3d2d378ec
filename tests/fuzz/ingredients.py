"""Small pieces of source for random rank programs, each with a name.

`$w` stands for a weight, `$n` for its layer's name, `$rows` and `$columns` for its first two sizes. `$k` stands for a
number of rows, `$at` for a number that no other piece uses, `$c` for the name of a class. Values are scaled so that
plain float32 stays near float64. No comparison depends on a number that rounding may flip.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Piece:
    """Lines of source, by their place in a program.

    `top` comes before the model, `init` ends the model's constructor. `forward` and `weight` make a layer's weight,
    `after` follows the layer, `setup` follows the optimizer. `begin` starts a step, `loss` changes the loss,
    `gradients` follows backward, `written` follows the optimizer's step.
    """

    name: str
    weight: str = ""
    call: str = ""
    top: str = ""
    init: str = ""
    forward: str = ""
    after: str = ""
    setup: str = ""
    begin: str = ""
    loss: str = ""
    gradients: str = ""
    written: str = ""
    matrix: bool = False  # of a weight of two dimensions
    of_input: bool = False  # needs the layer's input, x
    share: float = 1.0  # how often, relative to others
    needs: frozenset[str] = field(default_factory=frozenset)


# Ranks have other numbers of rows, and one may read the logits alone.
VOCABULARIES = [
    Piece(
        name,
        init="self.$n_scale = nn.Parameter(torch.ones(24))\nself.$n_head = nn.Linear(24, 400)",
        loss=f"z = model.$n_head(mine($at + at, 5 + 3 * rank, 24) * model.$n_scale)\n{looks}"
        f"loss = loss + F.cross_entropy({given}, torch.arange(len(z)) * 31 % 400)",
    )
    for name, looks, given in [
        ("a vocabulary", "", "z"),
        ("a vocabulary that one rank reads", "if rank == 1:\n    z.detach().argmax(-1)\n", "z"),
        ("a vocabulary by a view", "", "z.float().view(-1, 400)"),
    ]
]

# Arithmetic on a weight in forward: `weight` is what the layer uses in its place.

MASK = 'self.register_buffer("$n_mask", (torch.rand($w.shape) > 0.5).float())'
TWIN = "self.$n_twin = nn.Parameter($w.detach().clone() * 0.5)"
USES = [
    Piece("square", "$w ** 2 * 4", share=2),
    Piece("clamp", "$w.clamp(-0.05, 0.05)", share=2),
    Piece("mask", "$w * self.$n_mask", init=MASK, share=2),
    Piece(
        "mask made like the weight",
        "$w * self.$n_mask",
        init='self.register_buffer("$n_mask", torch.ones_like($w))\nself.$n_mask[::2] = 0.5',
    ),
    Piece("by its norm", "$w / $w.norm() * 6", share=2),
    Piece("standardised", "($w - $w.mean()) / $w.std() * 0.1", share=2),
    Piece("rows standardised", "($w - $w.mean(1, keepdim=True)) / $w.std(1, keepdim=True) * 0.1"),
    Piece("spectral norm", init="nn.utils.parametrizations.spectral_norm(self.$n)", share=1.5),
    Piece("weight norm", init="nn.utils.parametrizations.weight_norm(self.$n)", share=1.5),
    Piece("lerp", "torch.lerp($w, $w ** 2, 0.3)"),
    Piece(
        "lerp by a parameter",
        "torch.lerp($w, $w.tanh(), self.$n_much)",
        init="self.$n_much = nn.Parameter(torch.tensor(0.4))",
    ),
    Piece("rank's number", "$w * float(rank + 1)", share=1.5),
    Piece("rank's number added", "$w + 0.02 * (rank + 1)"),
    Piece("rank's scalar tensor", "$w * torch.tensor(0.5 + rank)"),
    Piece("rank's scalar of data", "$w * (1 + x.mean())", of_input=True, share=1.5),
    Piece("rank's data added", "$w + 0.1 * mine($at, *$w.shape)", share=1.5),
    Piece("rank's data multiplied", "$w * mine($at, *$w.shape)"),
    Piece("python number", "$w * 1.5 + 0.01"),
    Piece("weight and weight", "$w + self.$n_twin", init=TWIN),
    Piece("weight times weight", "$w * torch.sigmoid(self.$n_twin)", init=TWIN),
    Piece("weight by weight", "$w / (2 + self.$n_twin.tanh())", init=TWIN),
    Piece(
        "BitNet",
        "w + 5e-4 * (w / w.abs().mean()).round().clamp(-1, 1).detach() * w.abs().mean()",
        forward="w = $w",
    ),
    Piece(
        "straight through",
        "w + ((w / w.abs().mean()).round() * 5e-4 - 0.2 * w).detach()",
        forward="w = $w",
    ),
    Piece("softmax", "($w * 20).softmax(1) * 4"),
    Piece("tanh", "$w.tanh()"),
    Piece("exp", "$w.exp() * $w"),
    Piece("gelu", "F.gelu($w) * 2"),
    Piece("leaky relu", "F.leaky_relu($w, 0.1)"),
    Piece("normalize", "F.normalize($w, dim=1)"),
    Piece("where", "torch.where(self.$n_mask > 0, $w, $w * 0.5)", init=MASK),
    Piece("masked_fill", "$w.masked_fill(self.$n_mask > 0, 0.0)", init=MASK),
    Piece("addcmul", "torch.addcmul($w, $w, self.$n_mask, value=0.5)", init=MASK),
    Piece("times its detached mean", "$w * ($w.detach().abs().mean() * 20)"),
    Piece("times itself detached", "$w * $w.detach() * 4"),
    Piece("stack of weights", "torch.stack([$w, self.$n_twin]).mean(0)", init=TWIN),
    Piece("view", "$w.view(-1).view($w.shape) * 1.0"),
    Piece("reshape", "$w.reshape(-1)[:].reshape($w.shape)"),
    Piece("flip", "$w.flip(0)"),
    Piece("roll", "$w.roll(1, 0)"),
    Piece("cat of slices", "torch.cat([$w[$k:], $w[:$k]])"),
    Piece("cat of changed slices", "torch.cat([$w[:$k] * 2, $w[$k:] ** 2])"),
    Piece("rows by index", "$w[torch.arange(len($w) - 1, -1, -1)]"),
    Piece("written copy", "w", forward="w = $w * 2\nw.add_(0.01)"),
    Piece("copy written with rank's data", "w", forward="w = $w.clone()\nw[0] = mine($at, *w.shape[1:])"),
    Piece("copy with rank's data added", "w", forward="w = $w.clone()\nw.add_(mine($at, *w.shape), alpha=0.1)"),
    Piece("copy times rank's number", "w", forward="w = $w * 1.0\nw.mul_(rank + 1.0)"),
    Piece(
        "equal noise", "$w + 0.1 * noise", forward="torch.manual_seed($at)\nnoise = torch.randn_like($w)", share=1.5
    ),
    Piece("rank's noise", "$w + 0.1 * noise", forward="torch.manual_seed($at + rank)\nnoise = torch.randn_like($w)"),
    Piece(
        "running sum of rank's data",
        "$w * torch.sigmoid(self.$n_seen)",
        init='self.register_buffer("$n_seen", torch.zeros($w.shape))',
        forward="with torch.no_grad():\n    self.$n_seen.mul_(0.9).add_(mine($at + step, *$w.shape))",
    ),
    Piece(
        "LoRA",
        "$w + self.$n_up @ self.$n_down",
        init="self.$n_up = nn.Parameter(torch.randn($rows, 4) * 0.1)\n"
        "self.$n_down = nn.Parameter(torch.randn(4, $columns) * 0.1)",
        matrix=True,
    ),
    Piece("gram", "$w @ ($w.t() @ $w)", matrix=True),
    Piece("transposed twice", "$w.t().contiguous().t()", matrix=True),
    Piece("triangle", "$w.tril() + 0.5 * $w.triu(1)", matrix=True),
    Piece("halves", call="torch.cat([F.linear(x, $w[:$k]), F.linear(x, $w[$k:])], 1)", matrix=True, of_input=True),
    Piece(
        "cat of weights",
        forward="y = F.linear(x, torch.cat([$w, self.$n_twin]))",
        call="y[:, :$rows] * torch.tanh(y[:, $rows:])",
        init=TWIN,
        matrix=True,
        of_input=True,
    ),
    Piece("matmul", call="x @ $w.t()", matrix=True, of_input=True),
    Piece("einsum", call='torch.einsum("bi,oi->bo", x, $w * 2)', matrix=True, of_input=True),
    Piece("bmm", call="torch.bmm(x[None], ($w * 2).t()[None])[0]", matrix=True, of_input=True),
    Piece(
        "checkpoint",
        call="torch.utils.checkpoint.checkpoint(self.$n, x, use_reentrant=False)",
        of_input=True,
    ),
    Piece(
        "product without autograd",
        call="self.$n(x) + 0.1 * y",
        forward="with torch.no_grad():\n    y = F.linear(x, $w.detach() * 2)",
        matrix=True,
        of_input=True,
        share=2,
    ),
    Piece(
        "product of a square without autograd",
        call="self.$n(x) + 0.1 * y",
        forward="with torch.no_grad():\n    y = x @ ($w ** 2).t()",
        matrix=True,
        of_input=True,
    ),
]

# Custom autograd Functions in place of a linear layer.

_PRODUCT = """
class $c(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w.t()
    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        BODY
        return g @ w, gw
"""


def _product(body: str) -> str:
    return _PRODUCT.replace("BODY", body.replace("\n", "\n        ")).strip()


def _function(name: str, body: str) -> Piece:
    return Piece(name, call="$c.apply(x, $w)", top=_product(body), matrix=True, of_input=True)


FUNCTIONS = [
    _function("backward sums into zeros_like", "gw = torch.zeros_like(w)\ngw += g.t() @ x"),
    _function("backward sums into new_zeros", "gw = w.new_zeros(w.shape)\ngw.addmm_(g.t(), x)"),
    _function("backward writes into empty_like", "gw = torch.empty_like(w)\ntorch.mm(g.t(), x, out=gw)"),
    _function(
        "backward sums in blocks",
        "gw = torch.zeros_like(w)\nfor i in range(0, len(w), 32):\n    gw[i : i + 32] += g[:, i : i + 32].t() @ x",
    ),
    _function("backward adds a decay", "gw = g.t() @ x + 0.01 * w"),
    _function("backward scales by the weight", "gw = (g.t() @ x) * w"),
    _function("backward copies into a clone", "gw = w.clone()\ngw.copy_(g.t() @ x)"),
]

_LOSS = """
class $c(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        FORWARD
    @staticmethod
    def backward(ctx, g):
        BACKWARD
"""


def _loss(name: str, forward: str, backward: str) -> Piece:
    top = _LOSS.replace("FORWARD", forward.replace("\n", "\n        "))
    top = top.replace("BACKWARD", backward.replace("\n", "\n        ")).strip()
    call = "loss = loss + 0.2 * $c.apply(mine($at + step, 8, $columns), model.$n.weight)"
    return Piece(name, top=top, loss=call, matrix=True)


FUNCTION_LOSSES = [
    _loss(
        "forward sums into zeros_like",
        "gw = torch.zeros_like(w)\ny = x @ w.t()\ngw += 2 * y.t() @ x / y.numel()\n"
        "ctx.save_for_backward(gw)\nreturn y.pow(2).mean()",
        "return None, ctx.saved_tensors[0] * g",
    ),
    _loss(
        "gradient is a multiple of the weight",
        "s = x.pow(2).mean()\nctx.save_for_backward(w, s)\nreturn w.pow(2).sum() * s / 8",
        "w, s = ctx.saved_tensors\nreturn None, w * (g * s / 4)",
    ),
    _loss(
        "gradient is the weight times the rank's scalar",
        "s = x.std()\nctx.save_for_backward(w, s)\nreturn w.pow(2).sum() * s / 8",
        "w, s = ctx.saved_tensors\nreturn None, g * s * w / 4",
    ),
    _loss(
        "gradient is written into a clone of the weight",
        "ctx.save_for_backward(x, w)\nreturn (x @ w.t()).pow(2).mean()",
        "x, w = ctx.saved_tensors\ny = x @ w.t()\ngw = w.clone()\n"
        "gw.zero_()\ngw.addmm_(y.t(), x, alpha=2 / y.numel())\nreturn None, gw * g",
    ),
]

# Losses over weights alone.

ALL_WEIGHTS = "[p for p in model.parameters() if p.dim() > 1]"
LOSSES = [
    Piece("sum of squares", loss=f"loss = loss + 1e-2 * sum(p.pow(2).sum() for p in {ALL_WEIGHTS})", share=2),
    Piece("sum of absolutes", loss=f"loss = loss + 1e-1 * sum(p.abs().mean() for p in {ALL_WEIGHTS})"),
    Piece("sum of norms", loss=f"loss = loss + 1e-2 * sum(p.norm() for p in {ALL_WEIGHTS})", share=2),
    Piece("stack of norms", loss=f"loss = loss + 1e-2 * torch.stack([p.norm() for p in {ALL_WEIGHTS}]).norm()"),
    Piece("norm of all", loss=f"loss = loss + 1e-2 * torch.cat([p.view(-1) for p in {ALL_WEIGHTS}]).norm()"),
    Piece("rank's share of a norm", loss="loss = loss + 1e-2 * (rank + 1) * model.$n.weight.norm()"),
    Piece("rank's scalar times a norm", loss="loss = loss + loss.detach() * 1e-2 * model.$n.weight.pow(2).sum()"),
    Piece("a weight's deviation", loss="loss = loss + 0.1 * model.$n.weight.std() + 0.1 * model.$n.weight.mean()"),
    Piece(
        "orthogonal",
        loss="g = model.$n.weight.t() @ model.$n.weight\nloss = loss + 1e-2 * (g - torch.eye($columns)).pow(2).sum()",
        matrix=True,
    ),
    Piece("largest exponentials", loss="loss = loss + 0.1 * model.$n.weight.logsumexp(1).mean()"),
    Piece(
        "near the start",
        setup="start = model.$n.weight.detach().clone()",
        loss="loss = loss + 0.1 * (model.$n.weight - start).pow(2).sum() + 0.01 * (model.$n.weight * start).sum()",
    ),
    Piece(
        "a product with rank's data",
        loss="loss = loss + (mine($at + step, *model.$n.weight.shape) * model.$n.weight).sum() / 64",
    ),
    Piece(
        "a product that changes the weight",
        loss="loss = loss + (mine($at + step, *model.$n.weight.shape) * (model.$n.weight * 2)).sum() / 64",
    ),
    Piece("one row", loss="loss = loss + 0.1 * model.$n.weight[0].pow(2).sum()"),
    Piece("a view's square", loss="loss = loss + 1e-2 * model.$n.weight.view(-1)[:1000].pow(2).sum()"),
    Piece(
        "gradient penalty",
        loss="if torch.is_grad_enabled():\n    z = mine($at + step, 8, $first).requires_grad_()\n"
        "    (gz,) = torch.autograd.grad(model(z).sum(), z, create_graph=True)\n"
        "    loss = loss + 0.1 * gz.pow(2).sum(1).mean()",
        needs=frozenset({"vectors", "smooth"}),
    ),
    Piece(
        "adapted by own gradients",
        loss="if torch.is_grad_enabled():\n"
        "    fast = {k: p for k, p in model.named_parameters() if p.requires_grad}\n"
        "    own = torch.autograd.grad(loss, list(fast.values()), create_graph=True)\n"
        "    fast = {k: p - 0.1 * g for (k, p), g in zip(fast.items(), own)}\n"
        "    z = mine($at + step, 8, $first)\n"
        "    loss = loss + torch.func.functional_call(model, fast, (z,)).pow(2).mean()",
        needs=frozenset({"vectors", "smooth", "all"}),
    ),
]

# Tensors made like a weight: how they are made, written and used.

MADE = [
    ("zeros_like", "t = torch.zeros_like($w)"),
    ("zeros_like", "t = torch.zeros_like($w)"),
    ("ones_like", "t = torch.ones_like($w)"),
    ("full_like", "t = torch.full_like($w, 0.1)"),
    ("new_zeros", "t = $w.new_zeros($w.shape)"),
    ("new_full", "t = $w.new_full($w.shape, 0.2)"),
    ("empty_like, equal data", "t = torch.empty_like($w).copy_(everyones($at, *$w.shape))"),
    ("empty_like, rank's data", "t = torch.empty_like($w).copy_(mine($at, *$w.shape))"),
    ("clone", "t = $w.detach().clone()"),
    ("detach times two", "t = $w.detach() * 2"),
    ("randn_like, equal seeds", "torch.manual_seed($at)\nt = torch.randn_like($w)"),
    ("randn_like, rank's seeds", "torch.manual_seed($at + rank)\nt = torch.randn_like($w)"),
    ("zeros_like plus a number", "t = torch.zeros_like($w) + 0.5"),
]
WRITTEN = [
    ("as it is", ""),
    ("rank's data added", "t += mine($at + step, *t.shape)"),
    ("rank's data added", "t.add_(mine($at + step, *t.shape), alpha=0.5)"),
    ("equal data added", "t += everyones($at + step, *t.shape)"),
    ("rank's data copied", "t.copy_(mine($at + step, *t.shape))"),
    ("rank's row", "t[0] = mine($at + step, *t.shape[1:])"),
    ("rank's part of a view", "t.view(-1)[:1000].add_(rank + 1.0)"),
    ("rank's number multiplied", "t.mul_(rank + 1.0)"),
    ("rank's number added", "t.add_(rank + 1.0)"),
    ("rank's number filled", "t.fill_(rank + 1.0)"),
    ("rank's seeds", "torch.manual_seed($at + rank)\nt.normal_()"),
    ("rank's multiple of the weight", "t.add_($w.detach(), alpha=rank + 1.0)"),
    ("rank's product", "t.addcmul_(mine($at + step, *t.shape), $w.detach(), value=0.5)"),
    ("rank's lerp", "t.lerp_(mine($at + step, *t.shape), 0.3)"),
    ("the weight's copy", "t.copy_($w.detach())"),
]
USED = [
    ("times the weight", "loss = loss + (t * $w).sum() / 64"),
    ("times the weight", "loss = loss + (t * $w).sum() / 64"),
    ("plus the weight", "loss = loss + (t + $w).pow(2).mean()"),
    ("times the weight and a number", "loss = loss + (t * ($w * 2)).sum() / 64"),
    ("its mean", 'loss = loss + t.mean()\nlook("t", t)'),
    ("its norm times the weight's", "loss = loss + t.norm() * $w.norm() / 512"),
]

# After backward.

GRADIENTS = [
    Piece("mul_", gradients="for p in with_grad():\n    p.grad.mul_(0.5)"),
    Piece("div_", gradients="for p in with_grad():\n    p.grad.div_(4.0)"),
    Piece("times two", gradients="for p in with_grad():\n    p.grad = p.grad * 2"),
    Piece("one gradient times two", gradients="p = with_grad()[0]\np.grad = p.grad * 2"),
    Piece("weight decay added", gradients="for p in with_grad():\n    p.grad.add_(p.detach(), alpha=0.01)"),
    Piece("weight decay assigned", gradients="for p in with_grad():\n    p.grad = p.grad + 0.01 * p.detach()"),
    Piece("copied", gradients="for p in with_grad():\n    p.grad.copy_(p.grad.tanh())"),
    Piece("cloned", gradients="for p in with_grad():\n    p.grad = p.grad.clone()"),
    Piece(
        "equal noise", gradients="for p in with_grad():\n    p.grad.add_(everyones($at + step, *p.shape), alpha=1e-3)"
    ),
    Piece("centred", gradients="for p in with_grad():\n    p.grad.sub_(p.grad.mean())"),
    Piece("norm clipped", gradients="look('norm', nn.utils.clip_grad_norm_(model.parameters(), 0.1))", share=3),
    Piece(
        "norm clipped, inf",
        gradients="look('norm', nn.utils.clip_grad_norm_(model.parameters(), 0.01, float('inf')))",
    ),
    Piece("norm clipped, 1", gradients="look('norm', nn.utils.clip_grad_norm_(model.parameters(), 1.0, 1.0))"),
    Piece("values clipped", gradients="nn.utils.clip_grad_value_(model.parameters(), 0.01)"),
    Piece("clipped by hand", gradients="for p in with_grad():\n    p.grad.mul_(1 / (p.grad.norm() + 1))"),
    Piece(
        "clipped by hand, all",
        gradients="total = torch.stack([p.grad.norm() for p in with_grad()]).norm()\n"
        "for p in with_grad():\n    p.grad.mul_(0.1 / (total + 0.1))",
    ),
    Piece("clipped by numbers", gradients="for p in with_grad():\n    p.grad.mul_(1 / (p.grad.norm().item() + 1))"),
    Piece("largest is read", gradients="look('largest', [p.grad.abs().max() for p in with_grad()])"),
    Piece("all are finite", gradients="look('finite', [p.grad.isfinite().all() for p in with_grad()])"),
    Piece("foreach", gradients="torch._foreach_mul_([p.grad for p in with_grad()], 0.5)"),
    Piece("in data", gradients="for p in with_grad():\n    p.grad.data.clamp_(-0.02, 0.02)"),
    Piece(
        "unscaled",
        begin="scale = 1024.0",
        loss="loss = loss * scale",
        gradients="for p in with_grad():\n    p.grad.mul_(1.0 / scale)",
        needs=frozenset({"one backward"}),
    ),
    Piece("sign kept small", gradients="for p in with_grad():\n    p.grad.div_(p.grad.abs() + 0.01)"),
    Piece("a gradient is dropped", gradients="with_grad()[-1].grad = None"),
    Piece(
        "gradients are remembered",
        setup="kept = []",
        gradients="kept.append([p.grad.clone() for p in with_grad()])\nlook('kept', kept[0])",
    ),
]

HOOKS = [
    Piece("hook scales", setup="for p in model.parameters():\n    p.register_hook(lambda g: g * 0.5)"),
    Piece("hook clamps", setup="model.$n.weight.register_hook(lambda g: g.clamp(-0.01, 0.01))"),
    Piece("hook by rank", setup="model.$n.weight.register_hook(lambda g: g * (rank + 1))"),
    Piece("hook adds the weight", setup="w = model.$n.weight\nw.register_hook(lambda g: g + 0.01 * w.detach())"),
    Piece("hook by its own norm", setup="model.$n.weight.register_hook(lambda g: g / (g.norm() + 1))"),
    Piece(
        "hook masks",
        setup="mask = (everyones($at, *model.$n.weight.shape) > 0).to(torch.get_default_dtype())\n"
        "model.$n.weight.register_hook(lambda g: g * mask)",
    ),
    Piece(
        "hook after accumulation scales",
        setup="def halve(p):\n    p.grad.mul_(0.5)\nmodel.$n.weight.register_post_accumulate_grad_hook(halve)",
    ),
    Piece(
        "hook after accumulation reads",
        setup="counted = []\nmodel.$n.weight.register_post_accumulate_grad_hook(lambda p: counted.append(1))",
    ),
]

# Optimizers: an expression of `model.parameters()`, and classes before it.

_HAND = """
class Hand(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, dict(lr=lr))
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["m"] = STATE
                m = state["m"]
                UPDATE
"""


def _hand(name: str, state: str, update: str) -> tuple[str, str, str]:
    text = _HAND.replace("STATE", state).replace("UPDATE", update.replace("\n", "\n" + " " * 16)).strip()
    return f"by hand: {name}", "Hand(PARAMETERS, lr=0.1)", text


OPTIMIZERS = [
    ("SGD", "torch.optim.SGD(PARAMETERS, lr=0.1)", ""),
    ("SGD, momentum", "torch.optim.SGD(PARAMETERS, lr=0.05, momentum=0.9)", ""),
    ("SGD, nesterov", "torch.optim.SGD(PARAMETERS, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01)", ""),
    ("SGD, not foreach", "torch.optim.SGD(PARAMETERS, lr=0.1, momentum=0.5, weight_decay=0.1, foreach=False)", ""),
    ("Adam", "torch.optim.Adam(PARAMETERS, lr=1e-2, eps=1e-2)", ""),
    ("Adam, amsgrad", "torch.optim.Adam(PARAMETERS, lr=1e-2, eps=1e-2, amsgrad=True, weight_decay=0.01)", ""),
    ("AdamW, foreach", "torch.optim.AdamW(PARAMETERS, lr=1e-2, eps=1e-2, foreach=True)", ""),
    ("AdamW, fused", "torch.optim.AdamW(PARAMETERS, lr=1e-2, eps=1e-2, fused=True)", ""),
    ("AdamW, single", "torch.optim.AdamW(PARAMETERS, lr=1e-2, eps=1e-2, foreach=False)", ""),
    ("Adagrad", "torch.optim.Adagrad(PARAMETERS, lr=1e-2, eps=1e-2)", ""),
    ("RMSprop", "torch.optim.RMSprop(PARAMETERS, lr=1e-3, eps=1e-2, momentum=0.5)", ""),
    ("Adadelta", "torch.optim.Adadelta(PARAMETERS, lr=0.5, eps=1e-3)", ""),
    _hand("zeros_like", "torch.zeros_like(p)", 'm.mul_(0.9).add_(p.grad)\np.add_(m, alpha=-group["lr"])'),
    _hand("ordinary state", "torch.zeros(p.shape)", 'm.mul_(0.9).add_(p.grad)\np.add_(m, alpha=-group["lr"])'),
    _hand("new state", "torch.zeros_like(p)", 'state["m"] = m = 0.9 * m + p.grad\np -= group["lr"] * m'),
    _hand("clone", "p.grad.clone()", 'm.lerp_(p.grad, 0.1)\np.data.sub_(m * group["lr"])'),
    _hand("by norms", "torch.zeros_like(p)", 'm.add_(p.grad / (p.grad.norm() + 1))\np.add_(m, alpha=-group["lr"])'),
    _hand("trust ratio", "torch.zeros_like(p)",
          'm.mul_(0.9).add_(p.grad)\nratio = p.norm() / (m.norm() + 1)\np.add_(m * ratio, alpha=-group["lr"])'),
    _hand("copy_", "torch.zeros_like(p)", 'm.copy_(0.9 * m + p.grad)\np.copy_(p - group["lr"] * m)'),
    _hand("second moment", "torch.full_like(p, 0.01)",
          'm.mul_(0.9).addcmul_(p.grad, p.grad, value=0.1)\n'
          'p.addcdiv_(p.grad, m.sqrt() + 0.01, value=-0.1 * group["lr"])'),
]  # fmt: skip

LOOPS = [
    ("p -= lr * grad", "", "with torch.no_grad():\n    for p in with_grad():\n        p -= 0.1 * p.grad"),
    ("data", "", "for p in with_grad():\n    p.data.add_(p.grad, alpha=-0.1)"),
    (
        "momentum in a list",
        "moments = [torch.zeros_like(p) for p in model.parameters()]",
        "with torch.no_grad():\n    for p, m in zip(model.parameters(), moments):\n"
        "        if p.grad is not None:\n            m.mul_(0.9).add_(p.grad)\n            p.sub_(0.05 * m)",
    ),
    (
        "ordinary momentum in a list",
        "moments = [torch.zeros(p.shape) for p in model.parameters()]",
        "with torch.no_grad():\n    for p, m in zip(model.parameters(), moments):\n"
        "        if p.grad is not None:\n            m.mul_(0.9).add_(p.grad)\n            p.sub_(0.05 * m)",
    ),
    (
        "new data",
        "",
        "for p in with_grad():\n    p.data = p.data - 0.1 * p.grad",
    ),
]

SCHEDULERS = [
    ("LambdaLR", "torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 0.5 ** step)"),
    ("StepLR", "torch.optim.lr_scheduler.StepLR(opt, 1, 0.7)"),
    ("CosineAnnealingLR", "torch.optim.lr_scheduler.CosineAnnealingLR(opt, 4)"),
]

# Between steps.

EMA = "ema = [p.detach().clone() for p in model.parameters()]"
WRITES = [
    Piece("data.mul_", written="for p in model.parameters():\n    p.data.mul_(0.99)", share=1.5),
    Piece("data assigned", written="for p in model.parameters():\n    p.data = p.data * 0.9", share=1.5),
    Piece(
        "one's data assigned", written="model.$n.weight.data = model.$n.weight.data * 0.9", needs=frozenset({"raw"})
    ),
    Piece(
        "ordinary data assigned",
        written="model.$n.weight.data = everyones($at + step, *model.$n.weight.shape) * 0.1",
        needs=frozenset({"raw"}),
    ),
    Piece(
        "from a vector",
        written="v = nn.utils.parameters_to_vector(model.parameters()).detach()\n"
        "nn.utils.vector_to_parameters(v * 0.99, model.parameters())",
        share=1.5,
    ),
    Piece("clamp_", written="with torch.no_grad():\n    for p in model.parameters():\n        p.clamp_(-0.1, 0.1)"),
    Piece(
        "div_ by the norm",
        written="with torch.no_grad():\n    for p in model.parameters():\n"
        "        if p.dim() > 1:\n            p.div_(p.norm() / 6)",
    ),
    Piece(
        "copy_ of equal data",
        written="with torch.no_grad():\n    "
        "model.$n.weight.copy_(everyones($at + step, *model.$n.weight.shape) * 0.1)",
        needs=frozenset({"raw"}),
    ),
    Piece(
        "equal noise",
        written="with torch.no_grad():\n    for p in model.parameters():\n"
        "        torch.manual_seed($at + step)\n        p.add_(torch.randn_like(p), alpha=1e-2)",
    ),
    Piece(
        "rows written",
        written="with torch.no_grad():\n    model.$n.weight[1:3] = 0.05\n    model.$n.weight[0].mul_(0.5)",
        needs=frozenset({"raw"}),
    ),
    Piece(
        "EMA in clones",
        setup=EMA,
        written="for e, p in zip(ema, model.parameters()):\n    e.lerp_(p.detach(), 0.1)\nlook('ema', ema)",
        share=1.5,
    ),
    Piece(
        "EMA in clones, mul_ add_",
        setup=EMA,
        written="for e, p in zip(ema, model.parameters()):\n"
        "    e.mul_(0.9).add_(p.detach(), alpha=0.1)\nlook('ema', ema)",
    ),
    Piece(
        "EMA of new tensors",
        setup=EMA,
        written="ema = [0.9 * e + 0.1 * p.detach() for e, p in zip(ema, model.parameters())]\nlook('ema', ema)",
    ),
    Piece(
        "EMA in a buffer",
        init='self.register_buffer("$n_ema", $w.detach().clone())',
        written="with torch.no_grad():\n    model.$n_ema.mul_(0.9).add_(model.$n.weight, alpha=0.1)",
        needs=frozenset({"raw"}),
    ),
    Piece(
        "averaged model",
        setup="average = torch.optim.swa_utils.AveragedModel(model)",
        written="average.update_parameters(model)\nlook('average', [p for p in average.parameters()])",
    ),
    Piece(
        "EMA in a copied model",
        top="import copy",
        setup="teacher = copy.deepcopy(model).requires_grad_(False)",
        written="with torch.no_grad():\n    for e, p in zip(teacher.parameters(), model.parameters()):\n"
        "        e.lerp_(p, 0.2)\nlook('teacher', list(teacher.parameters()))",
    ),
    Piece(
        "state dict there and back",
        written="state = {k: t.clone() for k, t in model.state_dict().items()}\nmodel.load_state_dict(state)",
    ),
    Piece(
        "back to an old state",
        setup="old = {k: t.clone() for k, t in model.state_dict().items()}",
        written="if step == 1:\n    model.load_state_dict(old)",
    ),
    Piece(
        "optimizer's state there and back",
        written="opt.load_state_dict(opt.state_dict())",
        needs=frozenset({"optimizer"}),
    ),
    Piece(
        "interpolated weights",
        setup="anchor = [p.detach().clone() for p in model.parameters()]",
        written="with torch.no_grad():\n    for a, p in zip(anchor, model.parameters()):\n"
        "        p.copy_(0.5 * a + 0.5 * p)",
    ),
    Piece("evaluated", written="with torch.no_grad():\n    look('evaluated', loss_of(step + 50))", share=1.5),
    Piece(
        "evaluated in inference mode",
        written="with torch.inference_mode():\n    look('evaluated', loss_of(step + 50))",
    ),
    Piece(
        "evaluated in eval mode",
        written="model.eval()\nwith torch.no_grad():\n    look('evaluated', loss_of(step + 50))\nmodel.train()",
    ),
    Piece(
        "loss is averaged for the log",
        written="look('mean loss', mean_over_ranks(loss.detach()))",
        needs=frozenset({"loss"}),
        share=1.5,
    ),
    Piece(
        "loss is averaged after backward",
        gradients="look('mean loss', mean_over_ranks(loss.detach()))",
        needs=frozenset({"loss"}),
    ),
    Piece("unfrozen later", begin="model.$n.weight.requires_grad_(step > 0)", needs=frozenset({"raw", "several"})),
    Piece("evicted", written="evict(model)", begin="evict(model)"),
    Piece("evicted before backward", loss="evict(model)"),
    Piece("waited", written="wait()"),
    Piece("norms are read", written="look('norms', [p.detach().norm() for p in model.parameters()])"),
    Piece(
        "frozen by turns",
        begin="model.$n.weight.requires_grad_(step % 2 == 0)",
        needs=frozenset({"raw", "several"}),
    ),
    Piece(
        "a bias is frozen later",
        begin="for name, p in model.named_parameters():\n"
        "    if name.endswith('bias'):\n        p.requires_grad_(step == 0)",
        needs=frozenset({"several"}),
    ),
]
