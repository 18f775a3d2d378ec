"""Ranks for tests: processes of one Gloo group that stay, and run functions on all of them."""

import contextlib
import datetime
import multiprocessing
import os
import socket
import tempfile
import traceback

import torch
import torch.distributed as dist


def _serve(rank, size, port, pipe):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
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
    def __init__(self, size):
        context = multiprocessing.get_context("spawn")
        port = _free_port()
        self.size = size
        self._pipes, self._processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, port, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function, *args):
        """function(*args) on every rank; results in rank order."""
        for pipe in self._pipes:
            pipe.send((function, args))
        answers = [pipe.recv() for pipe in self._pipes]
        failures = [answer for ok, answer in answers if not ok]
        assert not failures, "\n".join(failures)
        return [answer for _, answer in answers]

    def close(self):
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self._processes:
            process.join(10)
            process.kill()


def swap_directory():
    return tempfile.TemporaryDirectory(dir="build", prefix="swap-")
