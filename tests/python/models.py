"""Small models of many kinds, each with an input, as (build, loss) pairs by name."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from devices import generator_of
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        b, t, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(b, t, w))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ResidualMLP(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


class GPT(nn.Module):
    """Tied weights; `recompute` is None, or the kind of checkpointing (reentrant or not)."""

    def __init__(self, width=96, layers=3, vocab=512, length=32, recompute=None):
        super().__init__()
        self.words, self.places = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)
        self.head.weight = self.words.weight
        self.recompute = recompute

    def forward(self, ids):
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x) if self.recompute is None else checkpoint(block, x, use_reentrant=self.recompute)
        return self.head(self.norm(x))


def _ids(step, vocab=512, shape=(2, 33)):
    return torch.randint(0, vocab, shape, generator=generator_of(step))


def gpt_loss(model, step):
    ids = _ids(step)
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def autocast_loss(model, step):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return gpt_loss(model, step)


def functional_loss(model, step):
    ids = _ids(step)
    tied = dict(model.named_parameters())
    logits = torch.func.functional_call(model, tied, (ids[:, :-1],))
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def _noise(step, *shape):
    return torch.randn(shape, generator=generator_of(step))


def penalty_loss(model, step):
    """A gradient penalty: double backward."""
    x = _noise(step, 8, 64).requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return slope.pow(2).sum() + model(x).pow(2).mean()


class LSTM(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(32, 48, 2, batch_first=True), nn.Linear(48, 7)

    def forward(self, x):
        return self.head(self.lstm(x)[0])


def square_loss(*shape):
    return lambda model, step: model(_noise(step, *shape)).pow(2).mean()


def convolution():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.BatchNorm2d(32),
        nn.Flatten(), nn.Linear(32 * 36, 10),
    )  # fmt: skip


def normed(kind):
    parametrize = getattr(nn.utils.parametrizations, kind)
    return lambda: nn.Sequential(parametrize(nn.Linear(64, 96)), nn.Tanh(), parametrize(nn.Linear(96, 1)))


def _hugging_face(make):
    def build():
        model = make()
        model.train()
        return model

    return build


def llama(tied=False):
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=64, intermediate_size=172, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, vocab_size=512, max_position_embeddings=64, tie_word_embeddings=tied,
        )
    )  # fmt: skip


def t5():
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, vocab_size=512, decoder_start_token_id=0)
    )


def bert():
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=512)
    )


def modernbert():
    from transformers import ModernBertConfig, ModernBertForMaskedLM

    return ModernBertForMaskedLM(
        ModernBertConfig(
            hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=512,
            pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2, reference_compile=False,
        )
    )  # fmt: skip


def mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(
        MixtralConfig(
            hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=512, num_local_experts=4, num_experts_per_tok=2,
        )
    )  # fmt: skip


def label_loss(model, step):
    torch.manual_seed(step)  # dropout
    ids = _ids(step)
    return model(input_ids=ids, labels=ids).loss


MODELS = {
    "gpt": (GPT, gpt_loss),
    "gpt-checkpoint": (lambda: GPT(recompute=False), gpt_loss),
    "gpt-checkpoint-reentrant": (lambda: GPT(recompute=True), gpt_loss),
    "gpt-autocast": (GPT, autocast_loss),
    "gpt-functional-call": (GPT, functional_loss),
    "gpt-bf16": (lambda: GPT().bfloat16(), lambda m, s: gpt_loss(m, s).float()),
    "double-backward": (lambda: nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 1)), penalty_loss),
    "lstm": (LSTM, square_loss(4, 9, 32)),
    "convolution": (convolution, square_loss(4, 3, 16, 16)),
    "weight-norm": (normed("weight_norm"), square_loss(8, 64)),
    "spectral-norm": (normed("spectral_norm"), square_loss(8, 64)),
    "llama": (_hugging_face(llama), label_loss),
    "t5": (_hugging_face(t5), label_loss),
    "bert": (_hugging_face(bert), label_loss),
    "modernbert": (_hugging_face(modernbert), label_loss),
    "mixtral": (_hugging_face(mixtral), label_loss),
}
