"""Check that each module of src/zeropage includes only the modules that docs/architecture.md allows."""

import pathlib
import re
import sys

MAY_USE = {
    "base": [],
    "io": ["base"],
    "store": ["base", "io"],
    "page": ["base", "io", "store"],
    "comm": ["base", "page", "kernels"],
    "plan": ["base", "io", "store"],
    "pager": ["base", "io", "store", "page", "comm"],
    "kernels": [],
    "tensor": ["base", "page", "comm", "pager", "kernels"],
    "rules": ["base", "page", "comm", "plan", "pager", "kernels", "tensor"],
    "train": ["base", "store", "page", "comm", "plan", "pager", "kernels", "tensor", "rules"],
    "fault": ["base", "page", "comm", "pager", "tensor", "rules", "train"],
    "space": ["base", "io", "store", "page", "comm", "plan", "pager", "kernels", "tensor", "rules", "train", "fault"],
    "checkpoint": ["base", "io", "store", "page", "comm", "pager", "tensor", "rules", "space"],
    "stock": ["base", "store", "page", "pager", "tensor", "rules", "train", "fault", "space"],
}
WITHOUT_TORCH = ["io", "plan", "store", "page", "pager", "kernels"]

root = pathlib.Path("src/zeropage")
wrong = []
for source in sorted(root.glob("*/**/*.*")):
    module = source.relative_to(root).parts[0]
    if module not in MAY_USE:
        wrong.append(f"{source}: no such module; add it to tools/check_modules.py and docs/architecture.md")
        continue
    for line, text in enumerate(source.read_text().splitlines(), 1):
        if match := re.match(r'#include "zeropage/(\w+)/', text):
            if match[1] != module and match[1] not in MAY_USE[module]:
                wrong.append(f"{source}:{line}: {module} may not use {match[1]}")
        elif module in WITHOUT_TORCH and re.match(r"#include <(ATen|c10|torch)/", text):
            wrong.append(f"{source}:{line}: {module} knows nothing of torch")
print("\n".join(wrong) or "modules: as the table says")
sys.exit(bool(wrong))
