"""Print the requirements of the build, of the package and of extras, one a line; without torch.

python tools/requirements.py examples test    those of two extras
python tools/requirements.py all              those of every extra
"""

import pathlib
import re
import sys

# Python 3.10 has no tomllib, and the environment has no package yet: the tables are plain lists of strings.
text = pathlib.Path("pyproject.toml").read_text(encoding="utf-8")


def strings(name: str) -> list[str]:
    found = re.search(rf"^{name} = \[(.*?)\]$", text, re.MULTILINE | re.DOTALL)
    return re.findall(r'"([^"]+)"', found[1]) if found else []


optional = text.split("[project.optional-dependencies]")[1].split("\n[")[0]
extras = sys.argv[1:]
if extras == ["all"]:
    extras = re.findall(r"^(\w+) = \[", optional, re.MULTILINE)
wanted = strings("requires") + strings("dependencies") + [r for extra in extras for r in strings(extra)]
print("\n".join(sorted({w.replace(" ", "") for w in wanted if not w.startswith("torch")})))
