"""zeropage: virtual memory for training state.

A PyTorch program trains a model whose parameters, gradients and optimizer states do not fit, and does not change:

    with zeropage.init(parameters="disk", gradients="disk", optimizer="disk",
                       disk_path="swap", device_memory="256MB", host_memory="256MB"):
        model = GPT(...)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-4)
    # an ordinary loop
"""

import pathlib

import torch

try:
    from zeropage import _core
except ImportError as error:
    raise ImportError(
        f"zeropage's core does not load beside torch {torch.__version__} ({error}); build it for that torch: "
        "`pip install --no-build-isolation .` in zeropage's source"
    ) from None
if torch.__version__.split(".")[:2] != _core.built_for_torch.split(".")[:2]:
    raise ImportError(
        f"zeropage was built for torch {_core.built_for_torch} and torch {torch.__version__} is installed; build "
        "it for that torch: `pip install --no-build-isolation .` in zeropage's source"
    )

from zeropage import io
from zeropage._checkpoint import Saving, latest, load, save
from zeropage._core import AccessError, BudgetError, DiskError, Error, RankError, SettingError, is_paged
from zeropage._explain import Explanation, explain
from zeropage._lion import Lion
from zeropage._patches import install as _install_patches
from zeropage._report import Report
from zeropage._space import Config, Space, evict, init, page, pinned, report, wait
from zeropage._together import together
from zeropage._tracing import trace

_install_patches()

#: For CMAKE_PREFIX_PATH, so that `find_package(zeropage)` finds the C++ library this package carries.
cmake_prefix_path = str(pathlib.Path(_core.__file__ or "").parent / "share" / "cmake")

__all__ = [
    "AccessError",
    "BudgetError",
    "Config",
    "DiskError",
    "Error",
    "Explanation",
    "Lion",
    "RankError",
    "Report",
    "Saving",
    "SettingError",
    "Space",
    "cmake_prefix_path",
    "evict",
    "explain",
    "init",
    "io",
    "is_paged",
    "latest",
    "load",
    "page",
    "pinned",
    "report",
    "save",
    "together",
    "trace",
    "wait",
]
