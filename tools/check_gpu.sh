#!/usr/bin/env bash
# All suites and the benchmarks of a device, on the accelerator of this machine, or on the simulated one where there is
# none: one table. Usage: tools/check_gpu.sh [cuda|sim|...]
set -uo pipefail
cd "$(dirname "$0")/.."
mkdir -p build
make cpp-tests > build/check_gpu.log 2>&1 || { tail -50 build/check_gpu.log; exit 1; }
python=.venv/bin/python
device=${1:-$($python -c 'import torch; a = torch.accelerator; print(a.current_accelerator().type if a.is_available() else "sim")')}
# Several processes share the device, where pytest can.
processes=$($python -c 'import os, xdist; print("-n", 4 if os.cpu_count() >= 8 else 2)' 2>/dev/null || true)
export OMP_WAIT_POLICY=passive
rows=()
failed=0
run() {  # name, command
  local name=$1 start=$SECONDS said result=passed
  shift
  said=$("$@" 2>&1) || { result=FAILED; failed=1; }
  echo "$said" >> build/check_gpu.log
  rows+=("$name|$result|$((SECONDS - start)) s|$(echo "$said" | grep -E 'passed|failed|^\{' | tail -1 | cut -c1-90)")
  echo "$name: $result, $((SECONDS - start)) s, ${rows[-1]##*|}" >&2
}
for suite in tensors rules programs mixed quantised step equality hazards bad_input hugging_face accelerator; do
  run "$suite" timeout 300 $python -m pytest -q $processes "tests/python/test_$suite.py" --device "$device" --timeout 240
done
run "ranks" timeout 300 $python -m pytest -q tests/python/test_ranks.py -k "two and disk" --device "$device" --timeout 240
run "bench device" timeout 300 $python bench/device.py --device "$device"
printf '%s\n' "| on $device | | | |" "| --- | --- | --- | --- |"
printf '%s\n' "${rows[@]}" | sed 's/^/| /; s/|/ | /g; s/$/ |/'
exit $failed
