"""Memory of large ordinary tensors on the CPU while a space is open: as PyTorch's own, without page faults."""

import concurrent.futures
import copy
import multiprocessing
import pickle
import resource

import pytest
import torch

import zeropage

MB = 1 << 20


def open_space():
    return zeropage.init(device="cpu", device_memory="8MB", host_memory="8MB", states="host")


def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def a_step():
    """Make what forward saves and backward frees, in sizes that do not fit each other's holes."""
    saved = [torch.ones(size * MB, dtype=torch.uint8) for size in (40, 3, 5, 7, 11)]
    while saved:
        gradient = torch.full((len(saved) * MB,), 3, dtype=torch.uint8)
        saved.pop()
    return gradient


def test_a_step_touches_its_memory_again_without_page_faults():
    space = open_space()
    for _ in range(3):
        a_step()
    before = faults()
    for _ in range(10):
        a_step()
    assert faults() - before < 10 * 60 * MB // 4096 // 20  # of the pages that all steps touch, 5 %
    space.close()


def test_memory_returns_when_the_last_space_closes_and_living_tensors_stay():
    with multiprocessing.get_context("spawn").Pool(1) as pool:  # other tests' spaces may be open in this process
        pool.apply(open_and_close)


def open_and_close():
    one, other = open_space(), open_space()
    before = resident()
    stays = torch.arange(8 * MB)
    wants = stays.sum().item()
    large = torch.ones(400 * MB, dtype=torch.uint8)
    del large
    one.close()
    assert resident() > before + 400 * MB
    other.close()
    assert resident() < before + 64 * MB + stays.nbytes
    assert stays.sum().item() == wants
    assert torch.equal(stays.add_(1).sub_(1), torch.arange(8 * MB))
    again = open_space()
    assert torch.equal(stays, torch.arange(8 * MB))
    again.close()


def test_free_memory_does_not_count_against_another_space():
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        pool.apply(open_after_a_peak)


def open_after_a_peak():
    one = open_space()
    before = zeropage._core.tensor_heap_bytes()
    large = torch.ones(400 * MB, dtype=torch.uint8)
    assert zeropage._core.tensor_heap_bytes() == before + 400 * MB
    del large
    kept = resident()
    other = open_space()
    assert resident() < kept - 350 * MB
    other.close()
    one.close()


def test_a_space_may_be_closed_in_a_forked_child_and_by_two_threads():
    space, other = open_space(), open_space()
    before = zeropage._core.tensor_heap_bytes()
    process = multiprocessing.get_context("fork").Process(target=space.close)
    process.start()
    process.join(20)
    assert process.exitcode == 0
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for _ in pool.map(lambda _: space.close(), range(4)):
            pass
    large = torch.ones(MB, dtype=torch.uint8)
    assert zeropage._core.tensor_heap_bytes() == before + large.nbytes  # the other space is open
    other.close()


def test_what_no_memory_can_hold_raises_as_in_pytorch():
    def error():
        with pytest.raises(RuntimeError) as caught:
            torch.empty(1 << 50, dtype=torch.uint8)
        return str(caught.value)

    plain = error()
    space = open_space()
    assert error() == plain
    space.close()


def twice(tensor):
    fresh = torch.full((4 * MB,), 2, dtype=torch.uint8)
    return fresh[: len(tensor)] * tensor


def test_forked_workers_read_large_tensors_and_make_their_own():
    space = open_space()
    ones = torch.ones(2 * MB, dtype=torch.uint8)
    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
    with multiprocessing.get_context("fork").Pool(2) as pool:
        for _ in range(2):
            for sent in pool.map(twice, [ones[: 300 * 1024]] * 4):
                assert torch.equal(sent, torch.full((300 * 1024,), 2, dtype=torch.uint8))
    space.close()


@pytest.mark.parametrize("opens", [False, True])
def test_storages_of_large_tensors_do_what_pytorchs_do(opens):
    space = open_space() if opens else None
    tensor = torch.arange(MB)
    storage = tensor.untyped_storage()
    storage.resize_(16 * MB)
    assert torch.equal(tensor, torch.arange(MB))
    assert storage.nbytes() == 16 * MB
    storage.resize_(0)
    storage.resize_(8 * MB)
    tensor.copy_(torch.arange(MB))
    lazy = torch._lazy_clone(tensor)
    lazy[0] = 7
    assert tensor[0] == 0
    assert lazy[0] == 7
    assert torch.equal(pickle.loads(pickle.dumps(tensor)), tensor)
    assert torch.equal(copy.deepcopy(tensor), tensor)
    array = tensor.numpy()
    array[1] = 9
    assert tensor[1] == 9
    del tensor, storage
    assert array[2] == 2
    shared = torch.arange(MB).share_memory_()
    assert torch.equal(shared, torch.arange(MB))
    if space:
        space.close()


def test_a_model_of_an_earlier_space_or_of_none_can_be_paged():
    before = torch.nn.Linear(1024, 1024)
    one = open_space()
    during = torch.nn.Linear(1024, 1024)
    one.close()
    space = zeropage.init(device="cpu", device_memory="32MB", host_memory="32MB", states="host")
    for model in (before, during):
        wants = copy.deepcopy(model.weight.detach())
        x = torch.ones(2, 1024)
        y = model(x)
        assert all(space.page(parameter) for parameter in model.parameters() if parameter.ndim > 1)
        assert zeropage.is_paged(model.weight)
        assert torch.equal(model.weight, wants)
        assert torch.equal(model(x), y)
    space.close()
