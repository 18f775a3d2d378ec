"""Rules that walk a tensor page by page change no bit, wherever pages, vectors and threads' shares end."""

import pytest
import torch

import zeropage

# Operators whose scalar tails round otherwise than their vector loops, and some whose do not.
OPERATORS = {
    "pow": lambda a, b, c: a.copy_(b.abs().pow(1.7)),
    "atan2": lambda a, b, c: a.copy_(torch.atan2(b, c)),
    "rsqrt": lambda a, b, c: a.copy_(b.abs().rsqrt()),
    "add_": lambda a, b, c: a.add_(b, alpha=0.37),
    "lerp_": lambda a, b, c: a.lerp_(b, 0.1),
    "addcmul_": lambda a, b, c: a.addcmul_(b, c, value=0.3),
    "addcdiv_": lambda a, b, c: a.addcdiv_(b, c, value=0.3),
    "exp": lambda a, b, c: a.copy_(b.exp()),
    "hypot": lambda a, b, c: a.copy_(torch.hypot(b, c)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPERATORS)
def test_odd_sizes_and_pages_that_no_vector_fits_give_the_same_bits(name, dtype, config):
    plain = [torch.randn(331, 777).to(dtype) for _ in range(3)]  # above the size at which ATen shares among threads
    with zeropage.init(config, page_size="12KiB", device_memory="8MB", host_memory="1MB") as space:
        paged = [torch.empty(331, 777, dtype=dtype) for _ in range(3)]
    with torch.no_grad():
        for p, q in zip(paged, plain, strict=True):
            p.copy_(q)
        for _ in range(2):
            OPERATORS[name](*plain)
            OPERATORS[name](*paged)
    assert torch.equal(paged[0], plain[0])
    assert not space.report().unpaged_operators
