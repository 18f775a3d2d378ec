"""The device "sim" (device.h): `import sim` makes it torch's accelerator, as `torch.sim`."""

import atexit
import ctypes
import pathlib
import types

import torch


def _library() -> pathlib.Path:
    root = pathlib.Path(__file__).resolve().parents[2]
    found = sorted(root.glob("build/cp*/tests/libsim.so"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise FileNotFoundError("the simulated device is not built; run: make cpp-tests")
    return found[-1]


ctypes.CDLL(str(_library()), ctypes.RTLD_GLOBAL)  # torch_device.cpp looks for simHostRegister as for cudaHostRegister
torch.utils.rename_privateuse1_backend("sim")
_ops = torch.ops.sim


class _Module(types.ModuleType):
    """The attributes that torch requires of a device's module."""

    def is_available(self):
        return True

    def is_initialized(self):
        return True

    def _is_in_bad_fork(self):
        return False

    def device_count(self):
        return 1

    def current_device(self):
        return 0

    def set_device(self, device):
        pass

    class device:  # a context manager, as torch.cuda.device
        def __init__(self, device):
            pass

        def __enter__(self):
            pass

        def __exit__(self, *error):
            pass

    def synchronize(self, device=None):
        _ops.synchronize()

    def current_stream(self, device=None):
        return torch.accelerator.current_stream()

    def stream(self, stream):
        return stream  # torch.Stream is a context manager

    def manual_seed(self, seed):
        _ops.manual_seed(seed if seed < 2**63 else seed - 2**64)

    manual_seed_all = manual_seed

    def get_rng_state(self, device=None):
        return _ops.get_rng_state()

    def set_rng_state(self, state, device=None):
        _ops.set_rng_state(state)

    def get_amp_supported_dtype(self):
        return [torch.bfloat16, torch.float16]

    set_delays = staticmethod(lambda seed, microseconds: _ops.set_delays(seed, microseconds))
    set_link = staticmethod(lambda bytes_per_second: _ops.set_link(float(bytes_per_second)))

    set_capturing = staticmethod(_ops.set_capturing)
    leave_out_waits = staticmethod(_ops.leave_out_waits)
    leave_no_waits_out = staticmethod(_ops.leave_no_waits_out)

    def waits(self):
        """How often who waited for whose events: by (waiting, awaited), streams, and -1 for the host."""
        flat = _ops.waits()
        return {(a, b): n for a, b, n in zip(flat[::3], flat[1::3], flat[2::3], strict=True)}

    def statistics(self):
        names = ["uploaded", "downloaded", "link_seconds", "waited_seconds", "host_waited_seconds"]
        names += ["operators", "synchronous"]
        return dict(zip(names, _ops.statistics(), strict=True))


torch._register_device_module("sim", _Module("sim"))
torch.utils.generate_methods_for_privateuse1_backend()
atexit.register(_ops.synchronize)  # no kernel runs while Python takes itself apart
