#!/usr/bin/env bash
# Builds the tree on another release of torch, in an environment of its own, imports it, and runs the short tests.
#   tools/test_torch.sh 2.14.1
set -euo pipefail
cd "$(dirname "$0")/.."

torch=$1
root=build/torch-$torch
python=$root/venv/bin/python
[ -x "$python" ] || python3 -m venv "$root/venv"
"$python" -c "import torch; assert torch.__version__.startswith('$torch')" 2> /dev/null || "$python" -m pip install -q "torch==$torch"
"$python" -m pip install -q $(python3 tools/requirements.py examples test)
"$python" -m pip install -q --no-build-isolation --no-deps -C build-dir="$root/build" -C cmake.define.CMAKE_UNITY_BUILD=ON .
# From another folder, so that the installed package is what is imported. device="auto" takes the accelerator if there
# is one, and the CPU on a machine without.
"$python" - << 'PROGRAM'
import os
os.chdir("/")
import torch, zeropage
with zeropage.init(device_memory="64MB", host_memory="64MB") as space:
    model = torch.nn.Linear(512, 512)
print(f"torch {torch.__version__}: a paged model on {model.weight.device}, zeropage built for {zeropage.__file__}")
PROGRAM
OMP_WAIT_POLICY=passive "$python" -m pytest -q -n 2 -p no:cacheprovider tests/python \
  -k "not ranks and not verify and not readme and not cpp and not examples_in_docs" "${@:2}"
