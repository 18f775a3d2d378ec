"""Losses over a vocabulary whose logits are larger than memory: taken in parts, equal to plain PyTorch."""

import concurrent.futures

import pytest
import test_tiling
import torch
import torch.nn.functional as F
from test_tiling import input_of, plain, same
from torch import nn
from torch.utils.checkpoint import checkpoint

import zeropage

WIDTH, CLASSES, TOKENS = 64, 5000, 160  # 1.3 MB of weight, 3.2 MB of logits
BUDGET = dict(device_memory="8MB", host_memory="256KB", tiling="auto", tile_above="1MB", activations="device")


def both(config, make, run, **settings):
    return test_tiling.both(config, make, run, **{**BUDGET, **settings})[1:]


def parted(layer, logits, expected=True):
    """Check whether a paged layer's loss was computed in parts."""
    if zeropage.is_paged(layer.weight):
        assert taken_in_parts(logits) == expected


def head(bias=False):
    return nn.Linear(WIDTH, CLASSES, bias=bias)


def targets(n=TOKENS, ignored=-100):
    made = torch.randint(0, CLASSES, (n,), generator=torch.Generator("cpu").manual_seed(5), device="cpu")
    made[::7] = ignored
    return made.to(torch.get_default_device())


def results(loss, *tensors):
    loss.backward()
    found = [loss.detach(), *(tensor.grad for tensor in tensors)]
    for tensor in tensors:
        tensor.grad = None
    return [None if one is None else plain(one) for one in found]


def taken_in_parts(logits):
    """Whether nothing has made them yet."""
    try:
        logits.untyped_storage().data_ptr()
    except RuntimeError as error:
        assert "tile_above" in str(error)
        return True
    return False


@pytest.mark.parametrize("tiling", ["auto", "exact"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("bias", [False, True])
def test_losses(bias, reduction, tiling, config):
    def run(layer):
        x = input_of(TOKENS, WIDTH)
        logits = layer(x)
        loss = F.cross_entropy(logits, targets(), reduction=reduction)
        parted(layer, logits)
        loss = (loss * torch.arange(TOKENS)).sum() if reduction == "none" else loss / 3
        return results(loss, x, *layer.parameters())

    got, expected = both(config, lambda: head(bias), run, tiling=tiling)
    same(got, expected, close=([1] if tiling == "auto" else []) + [3])


def shifted(logits, labels):
    return F.cross_entropy(logits[..., :-1, :].contiguous().view(-1, CLASSES), labels[..., 1:].reshape(-1))


def upcast(logits, labels):
    return F.cross_entropy(logits.float().view(-1, CLASSES), labels.view(-1), ignore_index=-100)


def every_second(logits, labels):
    return F.cross_entropy(logits[:, ::2].reshape(-1, CLASSES), labels[:, ::2].reshape(-1))


def of_some(logits, labels):
    return F.cross_entropy(logits[0], labels[0]) + F.cross_entropy(logits[1, 3:40], labels[1, 3:40], reduction="sum")


@pytest.mark.parametrize("tiling", ["auto", "exact"])
@pytest.mark.parametrize("loss", [shifted, upcast, every_second, of_some])
def test_ways_that_programs_write_it(loss, tiling, config):
    """If bits count, reading some rows of a product computes all of it."""

    def run(layer):
        x = input_of(2, TOKENS // 2, WIDTH)
        logits = layer(x)
        found = loss(logits, targets().view(2, -1))
        parted(layer, logits, tiling == "auto" or loss is upcast)
        return results(found, x, layer.weight)

    got, expected = both(config, head, run, tiling=tiling)
    same(got, expected, close=[0, 1, 2] if tiling == "auto" else [])


@pytest.mark.parametrize("cast", ["float", "autocast", None])
def test_narrow_logits(cast, config):
    def run(layer):
        x = input_of(TOKENS, WIDTH).detach().bfloat16().requires_grad_()
        with torch.autocast(x.device.type, torch.bfloat16, enabled=cast == "autocast"):
            logits = layer(x)
            loss = F.cross_entropy(logits.float() if cast == "float" else logits, targets())
        parted(layer, logits, cast != "autocast" or x.is_cpu)
        assert loss.dtype == (torch.bfloat16 if cast is None else torch.float32)
        return results(loss, x, layer.weight)

    got, expected = both(config, lambda: head().bfloat16(), run, tile_above="64KB")
    if cast:
        same(got, expected, close=[1])
    else:
        for one, other in zip(got, expected, strict=True):
            assert torch.allclose(one.float(), other.float(), rtol=0.02, atol=1e-3)


def peak_of(space, role):
    return max((home.peak for home in space.report().homes if home.role == role), default=0)


def test_logits_are_never_whole_in_memory(config):
    with zeropage.init(config, device_memory="8MB", host_memory="4MB", activations="disk") as space:
        layer = nn.Linear(64, 20000, bias=False)
    x = input_of(1024, 64)  # 82 MB of logits
    labels = torch.randint(0, 20000, (1024,))
    for _ in range(2):
        logits = layer(x)
        F.cross_entropy(logits, labels).backward()
    assert taken_in_parts(logits)
    assert peak_of(space, "activation") < 1.3 * 1024 * 20000 * 4  # one at a time, and nothing is left over
    for memory in space.report().budgets:
        assert memory.peak <= memory.limit, memory.name


def test_logits_that_are_asked_for(config):
    """In addition to the loss: before it, after it, and by losses that are not computed in parts."""

    def run(layer):
        x = input_of(TOKENS, WIDTH)
        logits = layer(x)
        first = F.cross_entropy(logits, targets())
        right = logits.detach().argmax(-1).eq(targets()).sum()
        z_loss = torch.logsumexp(logits, -1).square().mean()
        soft = F.cross_entropy(layer(x) / 0.7, targets(), label_smoothing=0.1)
        weighted = F.cross_entropy(layer(x), targets(), weight=torch.linspace(0, 1, CLASSES))
        capped = F.cross_entropy(torch.tanh(layer(x) / 30) * 30, targets())
        return [*results(first + z_loss + soft + weighted + capped, x, layer.weight), plain(right)]

    got, expected = both(config, head, run, tiling="exact", device_memory="12MB")
    same(got, expected, close=[1, 2])


def test_changed_before_anybody_looks(config):
    def run(layer):
        x = input_of(TOKENS, WIDTH)
        logits = layer(x)
        logits.view(-1)[:CLASSES] = 0
        logits[3, 5] += 1
        return results(F.cross_entropy(logits, targets()), x, layer.weight)

    got, expected = both(config, head, run, tiling="exact")
    same(got, expected)


@pytest.mark.parametrize("how", ["on logits", "on view", "retained"])
def test_hooks_see_the_gradient(how, config):
    def run(layer):
        seen = []
        logits = layer(input_of(2, TOKENS // 2, WIDTH))
        if how == "retained":
            logits.retain_grad()
        flat = logits.view(-1, CLASSES)
        if how != "retained":
            (logits if how == "on logits" else flat).register_hook(seen.append)
        loss = F.cross_entropy(flat, targets())
        found = results(loss, layer.weight)
        return [*found, plain(logits.grad if how == "retained" else seen[0])]

    got, expected = both(config, head, run, tiling="exact")
    same(got, expected)


def test_asked_for_after_the_step(config):
    with zeropage.init(config, **{**BUDGET, "tiling": "exact"}):
        layer = head()
    logits = layer(input_of(TOKENS, WIDTH))
    F.cross_entropy(logits, targets()).backward()
    torch.optim.SGD(layer.parameters(), lr=0.1).step()
    with pytest.raises(RuntimeError, match="weight was changed since"):
        logits.argmax(-1)
    logits = layer(input_of(TOKENS, WIDTH))
    layer.weight.data.mul_(2)
    with pytest.raises(RuntimeError, match="weight was changed since"):
        logits.argmax(-1)
    # The next step is as if nothing had happened.
    F.cross_entropy(layer(input_of(TOKENS, WIDTH)), targets()).backward()


@pytest.mark.parametrize(
    "how", ["twice", "retained graph", "reentrant", "not reentrant", "frozen head", "frozen input"]
)
def test_backwards(how, config):
    def run(layer):
        x = input_of(TOKENS, WIDTH)
        layer.weight.requires_grad_(how != "frozen head")
        x.requires_grad_(how != "frozen input")

        labels = targets()

        def loss_of(x):
            return F.cross_entropy(layer(x), labels)

        if how == "twice":
            loss_of(x).backward()
        if how == "retained graph":
            loss = loss_of(x)
            loss.backward(retain_graph=True)
        elif "reentrant" in how:
            loss = checkpoint(loss_of, x, use_reentrant=how == "reentrant")
        else:
            loss = loss_of(x)
        return results(loss, x, layer.weight)

    got, expected = both(config, head, run, tiling="exact")
    same(got, expected)


def test_bad_input(config):
    with zeropage.init(config, **BUDGET):
        layer = head()
    x = input_of(TOKENS, WIDTH)
    with pytest.raises(IndexError, match=f"Target {CLASSES} is out of bounds"):
        F.cross_entropy(layer(x), torch.full((TOKENS,), CLASSES))
    with pytest.raises(ValueError, match="batch_size"):
        F.cross_entropy(layer(x), targets(3))
    loss = F.cross_entropy(layer(x), torch.full((TOKENS,), -100))
    assert loss.isnan()
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(F.cross_entropy(layer(x), targets()), x, create_graph=True)


@pytest.mark.parametrize("way", ["loss", "clone", "leaf"])
def test_data_of_logits_is_a_constant(way, config):
    def run(layer):
        x = input_of(TOKENS, WIDTH)
        data = layer(x).data
        if way == "leaf":
            data.requires_grad_()
        loss = F.cross_entropy(data.clone() if way == "clone" else data, targets())
        assert loss.requires_grad == (way == "leaf")
        loss = loss + x.sum() * 0
        return [*results(loss, x, layer.weight), None if data.grad is None else plain(data.grad)]

    same(*both(config, head, run, tiling="exact"))


def test_bits_of_logits(config):
    def run(layer):
        return [plain(layer(input_of(TOKENS, WIDTH)).view(torch.int32).clone())]

    same(*both(config, head, run, tiling="exact"))


def test_hooks_that_come_too_late(config):
    with zeropage.init(config, **BUDGET):
        layer = head()
    logits = layer(input_of(TOKENS, WIDTH))
    loss = F.cross_entropy(logits, targets())
    logits.retain_grad()
    with pytest.raises(RuntimeError, match="put it there before the loss"):
        loss.backward()


def test_frozen_between(config):
    def run(layer):
        x = input_of(TOKENS, WIDTH)
        logits = layer(x)
        layer.weight.requires_grad_(False)
        loss = F.cross_entropy(logits, targets())
        layer.weight.requires_grad_(True)
        return results(loss, x, layer.weight)

    same(*both(config, head, run, tiling="exact"))


def test_saved_tensors_that_come_back_as_others(config):
    with zeropage.init(config, **BUDGET):
        layer = head()
    x = input_of(TOKENS, WIDTH)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: plain(t).to(t.device)):
        loss = F.cross_entropy(layer(x), targets())
    with pytest.raises(RuntimeError, match="hooks for saved tensors"):
        loss.backward()


def test_looked_at_inside_the_scope(config):
    torch.manual_seed(0)
    whole = head()
    x = input_of(TOKENS, WIDTH)
    torch.manual_seed(0)
    with zeropage.init(config, **BUDGET):
        layer = head()
        highest = layer(x).argmax(-1)
        F.cross_entropy(layer(x), targets()).backward()
    assert torch.equal(plain(highest), plain(whole(x).argmax(-1)))
    F.cross_entropy(whole(x), targets()).backward()
    assert torch.equal(plain(layer.weight.grad), plain(whole.weight.grad))


def test_two_threads_on_one_product(config):
    with zeropage.init(config, **BUDGET):
        layer = head()
    for _ in range(5):
        logits = layer(input_of(TOKENS, WIDTH))
        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            losses = [pool.submit(F.cross_entropy, logits, targets()) for _ in range(2)]
            best = pool.submit(logits.argmax, -1)
            assert torch.equal(losses[0].result(), losses[1].result())
            assert torch.equal(best.result(), logits.argmax(-1))


@pytest.mark.parametrize("tokens", [161, 159, 15])
def test_rows_that_no_chunk_divides(tokens, config):
    def run(layer):
        x = input_of(tokens, WIDTH)
        logits = layer(x)
        loss = F.cross_entropy(logits, targets(tokens))
        parted(layer, logits)
        return results(loss, x, layer.weight)

    same(*both(config, head, run, tiling="exact", tile_above="200KB"))


@pytest.mark.parametrize("ties", [False, True])
def test_a_language_model(ties, config):
    transformers = pytest.importorskip("transformers")

    def make():
        shape = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
        made = transformers.LlamaConfig(vocab_size=8192, tie_word_embeddings=ties, **shape)
        return transformers.LlamaForCausalLM(made)

    def run(model):
        tokens = torch.randint(0, 8192, (2, 48), generator=torch.Generator("cpu").manual_seed(1), device="cpu")
        tokens = tokens.to(torch.get_default_device())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for _ in range(3):
            out = model(input_ids=tokens, labels=tokens)
            parted(model.lm_head, out.logits)
            out.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(plain(out.loss))
        return losses + [plain(p) for p in model.parameters()]

    got, expected = both(config, make, run, tiling="exact", device_memory="16MB")
    same(got, expected)
