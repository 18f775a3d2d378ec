"""Prints what .venv needs beside torch: the build's, the package's and every extra's requirements, one a line."""

import tomllib

with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)
wanted = project["build-system"]["requires"] + project["project"]["dependencies"]
for extra in project["project"]["optional-dependencies"].values():
    wanted += extra
print("\n".join(sorted({w.replace(" ", "") for w in wanted if not w.startswith("torch")})))
