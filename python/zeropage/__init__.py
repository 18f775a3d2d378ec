"""zeropage: virtual memory for training state.

A PyTorch program trains a model whose parameters, gradients and optimizer states do not fit, and does not change:

    with zeropage.init(states="disk", disk_path="swap", device_memory="256MB", host_memory="256MB"):
        model = GPT(...)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-4)
    # an ordinary loop
"""

import importlib.metadata
import pathlib
import warnings

import torch

try:
    from zeropage import _core
except ImportError as error:
    raise ImportError(
        f"zeropage's core does not load with torch {torch.__version__} ({error}); build it for that torch: "
        "`pip install --no-build-isolation .` in zeropage's source"
    ) from None
if torch.__version__.split(".")[:2] != _core.built_for_torch.split(".")[:2]:
    raise ImportError(
        f"zeropage was built for torch {_core.built_for_torch} and torch {torch.__version__} is installed; build "
        "it for that torch: `pip install --no-build-isolation .` in zeropage's source"
    )

from zeropage import io, optim
from zeropage._checkpoint import SaveHandle, latest_checkpoint, load, save
from zeropage._config import Config
from zeropage._core import AccessError, BudgetError, ConfigError, DiskError, RankError, ZeropageError, is_paged
from zeropage._explain import Explanation, explain
from zeropage._gather_together import gather_together
from zeropage._no_sync import no_sync
from zeropage._report import Report
from zeropage._space import Space, init, page, page_out, pinned, report, synchronize
from zeropage._tracing import Trace, trace

#: The latest release of torch that the tests pass on.
_TESTED = (2, 14)
if tuple(int(part) for part in torch.__version__.split(".")[:2]) > _TESTED:
    warnings.warn(
        f"zeropage is tested up to torch {'.'.join(map(str, _TESTED))}, and torch {torch.__version__} is installed",
        stacklevel=2,
    )

__version__ = importlib.metadata.version("zeropage")

#: For CMAKE_PREFIX_PATH, so that `find_package(zeropage)` finds the C++ library this package carries.
cmake_prefix_path = str(pathlib.Path(_core.__file__ or "").parent / "share" / "cmake")

__all__ = [
    "AccessError",
    "BudgetError",
    "Config",
    "ConfigError",
    "DiskError",
    "Explanation",
    "RankError",
    "Report",
    "SaveHandle",
    "Space",
    "Trace",
    "ZeropageError",
    "__version__",
    "cmake_prefix_path",
    "explain",
    "gather_together",
    "init",
    "io",
    "is_paged",
    "latest_checkpoint",
    "load",
    "no_sync",
    "optim",
    "page",
    "page_out",
    "pinned",
    "report",
    "save",
    "synchronize",
    "trace",
]
