"""zeropage.io: what is written is what a file holds and what is read, at any range, from any thread."""

import itertools
import os
import pathlib
import random
import signal
import sys
import threading
import time
import traceback
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy
import pytest
import torch

import zeropage.io
from zeropage import AccessError, BudgetError, ConfigError, DiskError

pytestmark = pytest.mark.cpu
SIZE = 3_000_000
NOTHING_UNDER_WAY = 8


@pytest.fixture
def path(disk):
    return os.path.join(disk, "data.bin")


@pytest.fixture(params=["auto", "threads"])
def engine(request):
    return zeropage.io.Engine(request.param, block_size=64 << 10)


def random_bytes(size):
    return torch.randint(0, 256, (size,), dtype=torch.uint8)


def test_ranges_of_tensors(path, engine):
    expected = random_bytes(SIZE)
    aligned = zeropage.io.empty(SIZE, dtype=torch.uint8)
    with zeropage.io.open(path, "w", size=SIZE, engine=engine) as file:
        file.write(expected)
        chance = random.Random(1)
        for _ in range(100):
            begin = chance.randrange(SIZE)
            end = chance.randrange(begin, SIZE)
            if chance.random() < 0.5:
                part = random_bytes(end - begin)
                aligned[begin:end] = part
                expected[begin:end] = part
                file.write(aligned[begin:end], begin)
            else:
                aligned[begin:end].zero_()
                file.read(aligned[begin:end], begin)
                assert torch.equal(aligned[begin:end], expected[begin:end])
        file.sync()
        assert file.size == SIZE
    with open(path, "rb") as plain:
        assert plain.read() == expected.numpy().tobytes()


def test_other_buffers(path):
    with zeropage.io.open(path, "w") as file:
        file.write(b"0123456789", 4090)
        array, memory = numpy.empty(10, dtype=numpy.uint8), bytearray(4)
        file.read(array, 4090)
        file.read(memoryview(memory), 4096)
        assert array.tobytes() == b"0123456789" and memory == b"6789" and file.size == 4100
        file.read(bytearray(), 0)
        with pytest.raises(ConfigError, match="read-only"):
            file.read(b"cannot")
        with pytest.raises(ConfigError, match="gaps"):
            file.read(torch.empty(4, 4)[:, ::2])
        with pytest.raises(ConfigError, match="cannot be transferred"):
            file.write(numpy.zeros(2, dtype="M8[s]"))
        with pytest.raises(ConfigError, match="Python objects"):
            file.write(numpy.array([None]))


@pytest.mark.parametrize("make", [bytes, lambda data: memoryview(data).toreadonly(), bytearray])
def test_threads_that_write_at_once_leave_the_filters_of_warnings_alone(make, path, monkeypatch):
    before, frombuffer = list(warnings.filters), torch.frombuffer
    first_is_in, second_is_in, first_is_out = threading.Event(), threading.Event(), threading.Event()

    def slow(*args, **named):
        if threading.current_thread().name == "first":
            first_is_in.set()
            assert second_is_in.wait(10)
        else:
            second_is_in.set()
            assert first_is_out.wait(10)
        return frombuffer(*args, **named)

    monkeypatch.setattr(torch, "frombuffer", slow)
    with zeropage.io.open(path, "w") as file:
        threads = [
            threading.Thread(target=file.write, args=(make(b"12"), 2 * i), name=name)
            for i, name in enumerate(("first", "second"))
        ]
        threads[0].start()
        assert first_is_in.wait(10)
        threads[1].start()
        threads[0].join()
        first_is_out.set()
        threads[1].join()
    assert warnings.filters == before
    assert pathlib.Path(path).read_bytes() == b"1212"


def test_read_only_memory_is_written_without_a_warning_and_kept_meanwhile(path):
    expected = random_bytes(SIZE).numpy().tobytes()
    with warnings.catch_warnings(), zeropage.io.open(path, "w") as file:
        warnings.simplefilter("error")
        lists = [bytearray(expected) for _ in range(2)]
        tickets = [file.start_write(memoryview(lists[0]).toreadonly()[10:], 10)]
        tickets += [file.start_write(bytes(lists[1][:10]), 0)]
        with pytest.raises(BufferError):
            lists[0].clear()  # the transfer has it
        zeropage.io.wait_all(tickets)
    assert pathlib.Path(path).read_bytes() == expected


@pytest.mark.parametrize("dtype", ["complex64", "float32", [("a", "f4"), ("Other", "c16")]])
def test_arrays_of_any_dtype(path, dtype):
    array = numpy.zeros((3, 5), dtype=dtype)
    array.view(numpy.uint8)[:] = numpy.arange(array.view(numpy.uint8).shape[1])
    back = numpy.zeros_like(array)
    with zeropage.io.open(path, "w") as file:
        file.write(array, 10)
        file.read(back, 10)
        assert file.size == 10 + array.nbytes and back.tobytes() == array.tobytes()


def test_numbers_that_memory_does_not_hold_are_refused(path):
    numbers = torch.randn(8, dtype=torch.complex64)
    with zeropage.io.open(path, "w") as file:
        with pytest.raises(ConfigError, match=r"resolve_conj\(\)"):
            file.write(numbers.conj())
        with pytest.raises(ConfigError, match=r"resolve_neg\(\)"):
            file.write(torch._neg_view(numbers.real.contiguous()))
        file.write(numbers.conj().resolve_conj())
        back = torch.empty_like(numbers)
        file.read(back)
        assert torch.equal(back, numbers.conj())


def test_many_transfers_of_threads_and_files_are_under_way_together(disk, engine):
    contents = [random_bytes(SIZE) for _ in range(4)]
    failures = []

    def move(i):
        try:
            with zeropage.io.open(os.path.join(disk, f"{i}.bin"), "w", engine=engine) as file:
                cuts = sorted({0, SIZE, *(random.Random(i).sample(range(SIZE), 30))})
                ranges = list(itertools.pairwise(cuts))
                zeropage.io.wait_all([file.start_write(contents[i][a:b], a) for a, b in ranges])
                back = torch.empty_like(contents[i])
                tickets = [file.start_read(back[a:b], a) for a, b in ranges]
            engine.wait_all()  # the file closes behind its transfers
            assert all(ticket.done() for ticket in tickets)
            zeropage.io.wait_all(tickets)
            assert torch.equal(back, contents[i])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=move, args=[i]) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_failed_and_short_transfers_say_where(path):
    with zeropage.io.open(path, "w", size=10_000) as file:
        buffer = zeropage.io.empty(8192, dtype=torch.uint8)
        tickets = [file.start_read(buffer, 0), file.start_read(buffer, 8192), file.start_read(buffer[:100], 100)]
        with pytest.raises(DiskError, match=r"offset 8192 of .*data\.bin.*only 1\.8 kB"):
            zeropage.io.wait_all(tickets)
        assert all(ticket.done() for ticket in tickets)
        with pytest.raises(ValueError, match="must not be negative"):
            file.read(buffer, -1)
    with pytest.raises(ValueError, match="closed"):
        file.read(buffer)
    with pytest.raises(DiskError, match="No such file"):
        zeropage.io.open(path + ".missing")
    with zeropage.io.open(path) as file, pytest.raises(DiskError, match="for reading"):
        file.write(buffer)
    with pytest.raises(ConfigError, match="mode"):
        zeropage.io.open(path, "rw")


def test_a_deadline_leaves_the_transfer_under_way(path):
    size = 128 << 20
    with zeropage.io.open(path, "w", size=size) as file:
        file.write(b"the end", size - 7)
        buffer = zeropage.io.empty(size, dtype=torch.uint8)
        ticket = file.start_read(buffer)
        with pytest.raises(TimeoutError):
            ticket.wait(timeout=0)
        with pytest.raises(ConfigError, match="timeout"):
            ticket.wait(timeout=float("nan"))
        ticket.wait(timeout=60)
        assert ticket.done() and bytes(buffer[-7:].tolist()) == b"the end"


def test_arenas_give_aligned_memory_until_they_are_full():
    arena = zeropage.io.Arena(4 << 20)
    first = arena.empty(1000, 3, dtype=torch.bfloat16)
    second = arena.empty(1 << 20, dtype=torch.uint8)
    assert first.data_ptr() % 4096 == second.data_ptr() % 4096 == 0 and first.shape == (1000, 3)
    with pytest.raises(BudgetError, match=r"arena of 4\.2 MB"):
        arena.empty(1 << 20)
    del second
    assert arena.empty(900_000).numel() == 900_000 and arena.empty(0).numel() == 0
    del arena
    first.fill_(1)


def test_a_ticket_keeps_what_it_uses(path):
    content = random_bytes(SIZE)
    with zeropage.io.open(path, "w") as file:
        file.write(content)
    ticket = zeropage.io.open(path).start_read(zeropage.io.empty(SIZE, dtype=torch.uint8))
    del ticket  # waits
    kept = zeropage.io.empty(SIZE, dtype=torch.uint8)
    ticket = zeropage.io.open(path, engine=zeropage.io.Engine()).start_read(kept)
    ticket.wait(timeout=30)
    ticket.wait()
    assert torch.equal(kept, content)


def test_a_ticket_keeps_memory_that_its_tensor_lets_go_of(path):
    content = random_bytes(SIZE)
    with zeropage.io.open(path, "w", size=SIZE) as file:
        file.write(content)
        arena = zeropage.io.Arena(SIZE)
        buffer = arena.empty(SIZE, dtype=torch.uint8)
        ticket = file.start_read(buffer)
        buffer.data = torch.empty(0, dtype=torch.uint8)
        with pytest.raises(BudgetError):
            arena.empty(SIZE, dtype=torch.uint8)
        del ticket
        arena.empty(SIZE, dtype=torch.uint8)


def test_paged_tensors_are_pinned_until_their_transfers_have_ended(path, disk):
    settings = dict(device="cpu", parameters="disk", disk_path=disk, min_page_bytes=1)
    with zeropage.init(**settings, device_memory="1MB", host_memory="1MB") as space:
        first, second = torch.nn.Parameter(torch.zeros(200_000)), torch.nn.Parameter(torch.zeros(200_000))
    content = torch.randn(200_000)
    with zeropage.io.open(path, "w") as file, torch.no_grad():
        file.write(content)
        file.read(first)
        assert torch.equal(first, content)
        with zeropage.pinned(first):
            ticket = file.start_read(first[100:], offset=400)
        with pytest.raises(BudgetError), zeropage.pinned(second):  # there is no memory but that of the first
            pass
        ticket.wait()
        with zeropage.pinned(second):
            second.fill_(1)
        zeropage.page_out(first)
        assert torch.equal(first, content)
        file.write(second)
        file.read(content)
        assert content.eq(1).all()
    space.close()


def test_threads_wait_for_one_ticket(path):
    size = 64 << 20
    with zeropage.io.open(path, "w", size=size) as file:
        buffer = zeropage.io.empty(size, dtype=torch.uint8)
        ticket = file.start_write(buffer)
        threads = [threading.Thread(target=ticket.wait) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert ticket.done()
        short = file.start_read(buffer, size - 1)
        for _ in range(2):
            with pytest.raises(DiskError, match="only 1 B"):
                short.wait()


def in_child(function):
    """Its result, by a forked child that ends as programs do; None unless the child has ended within 10 s."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = function()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    end = time.monotonic() + 10
    while time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def test_forked_children_use_files_and_leave_what_is_their_parents(path):
    with zeropage.io.open(path, "w", size=SIZE) as file:
        file.write(random_bytes(SIZE))
        own = zeropage.io.open(path, engine=zeropage.io.Engine("threads"))
        ended = own.start_read(torch.empty(SIZE, dtype=torch.uint8))
        ended.wait()
        arena = zeropage.io.Arena(1 << 20)
        kept = [arena.empty(1000)]
        aligned = zeropage.io.empty(SIZE, dtype=torch.uint8)
        many = []

        def child():
            nonlocal own, ended
            back = bytearray(SIZE)
            file.read(back)  # by an engine of the child's own
            with open(path, "rb") as plain:
                assert plain.read() == back
            ended.wait()
            for into in (back, aligned, aligned[1:], aligned[:4096]):  # as one transfer, and as several
                with pytest.raises(AccessError):
                    own.start_read(into)
            with pytest.raises(AccessError):
                arena.empty(1)
            lost = 0
            for ticket in many:
                assert ticket.done()
                try:
                    ticket.wait()
                except AccessError:
                    lost += 1
            if lost == 0:
                return NOTHING_UNDER_WAY
            with pytest.raises(AccessError):
                zeropage.io.wait_all(many)
            own = ended = None
            many.clear()
            kept.clear()
            return 7

        # Reads must be under way as the process forks; a busy machine may have ended them by then.
        for reads in (64, 128, 256, 512):
            many[:] = [file.start_read(torch.empty(SIZE, dtype=torch.uint8)) for _ in range(reads)]
            code = in_child(child)
            zeropage.io.wait_all(many)
            if code != NOTHING_UNDER_WAY:
                break
        assert code == 7


def test_what_a_graph_has_saved_notices_a_read(path):
    def read_what_is_saved():
        with zeropage.io.open(path, "w") as file:
            file.write(torch.ones(4))
            weight = torch.ones(4, requires_grad=True)
            saved = torch.zeros(4)
            y = (weight * saved).sum()
            file.read(saved)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.backward()

    # A space of an earlier test may still keep what autograd saves on this thread.
    with ThreadPoolExecutor(1) as pool:
        pool.submit(read_what_is_saved).result()


@pytest.mark.parametrize("settings", [dict(block_size=1000), dict(block_size=0), dict(depth=0), dict(depth=10**6)])
def test_settings_that_cannot_be(settings):
    with pytest.raises(ConfigError):
        zeropage.io.Engine(**settings)
    with pytest.raises(ConfigError, match="engine"):
        zeropage.io.Engine("fast")
