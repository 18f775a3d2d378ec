"""Ranks for tests: processes of one Gloo group that stay, and run functions on all of them."""

import contextlib
import datetime
import multiprocessing
import os
import socket
import tempfile
import traceback

import devices
import torch
import torch.distributed as dist

import zeropage


def join(timeout):
    """The Gloo group that the environment names, with a timeout of so many seconds, which begins when all ranks are
    there: on a busy machine they come far apart."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    limit = datetime.timedelta(seconds=timeout)
    store = dist.TCPStore(address, port, size, rank == 0, timeout=datetime.timedelta(seconds=120))
    store.set_timeout(limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)


def _serve(rank, size, port, timeout, pipe):
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    torch.set_num_threads(1)
    devices.use(devices.NAME, devices.SEED and devices.SEED + rank)
    devices.place_updates(rank)
    join(timeout)
    pipe.send((True, None))
    while True:
        try:
            call = pipe.recv()
        except EOFError:
            break
        if call is None:
            break
        function, args = call
        torch.manual_seed(0)
        try:
            pipe.send((True, function(*args)))
        except BaseException as error:
            pipe.send((False, f"rank {rank}: {error}\n{traceback.format_exc()}"))
    dist.destroy_process_group()


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Ranks:
    """`timeout`: seconds after which a collective gives up."""

    def __init__(self, size, timeout=60):
        context = multiprocessing.get_context("spawn")
        port = _free_port()
        self.size = size
        self._pipes, self.processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, port, timeout, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)
        try:
            for rank in range(size):
                self.answer(rank)  # it has joined
        except BaseException:
            self.close()
            raise

    def start(self, function, *args):
        for pipe in self._pipes:
            pipe.send((function, args))

    def answer(self, rank, timeout=120):
        """Whether the rank's function returned, and what; or what it raised, as text."""
        assert self._pipes[rank].poll(timeout), f"rank {rank} hangs"
        return self._pipes[rank].recv()

    def run(self, function, *args):
        """function(*args) on every rank; results in rank order."""
        self.start(function, *args)
        answers = [self.answer(rank) for rank in range(self.size)]
        failures = [answer for ok, answer in answers if not ok]
        assert not failures, "\n".join(failures)
        return [answer for _, answer in answers]

    def close(self):
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self.processes:
            process.join(10)
            process.kill()


@contextlib.contextmanager
def space(tier="disk", **settings):
    """A small space that pages everything; on a rank."""
    with tempfile.TemporaryDirectory(dir="build", prefix="swap-") as path:
        roles = dict.fromkeys(["parameters", "gradients", "optimizer"], tier)
        small = {
            "device": devices.NAME,
            "device_memory": "6MB",
            "host_memory": "4MB",
            "min_page_bytes": 1,
            "page_size": "16KiB",
        }
        if dist.get_world_size() == 1:
            settings["group"] = dist.group.WORLD  # asked for: one rank otherwise is one process
        made = zeropage.init(**{**small, **roles, **({"disk_path": path} if tier == "disk" else {}), **settings})
        yield made
        made.close()


def cut_swap_files():
    """Take this rank's swap files away under it: what it has not in memory cannot be read any more."""
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if "swap-" in os.readlink(f"/proc/self/fd/{descriptor}"):
                os.ftruncate(int(descriptor), 0)


def mean_by_hand(parameters, group):
    """Average the gradients of a plain model as zeropage promises: added in rank order, and divided once."""
    for p in parameters:
        parts = [torch.empty_like(p) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, p.grad.contiguous(), group=group)
        mean = parts[0].clone()
        for part in parts[1:]:
            mean += part
        p.grad = mean / len(parts)
