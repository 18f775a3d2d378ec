# The commands of README.md. Each does everything it needs, on a fresh machine too.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:

VENV   := .venv
PYTHON := $(VENV)/bin/python
TORCH  ?= 2.13.0
BUILD  := build
# ON compiles several files at once: half the time from scratch, more time after a change. A folder keeps its mode.
UNITY  ?= $(or $(shell sed -n 's/^CMAKE_UNITY_BUILD:[^=]*=//p' $(BUILD)/cp*/CMakeCache.txt 2>/dev/null | head -1),ON)
# Extras of pyproject.toml whose tools `build` installs.
EXTRAS := all

.PHONY: arm build test test-all test-full test-torch check-headers fuzz simulate lint docs wheel bench peers demo demo-ranks sanitize format clean system cpp-tests test-install

demo: EXTRAS := examples
demo: build ## train a GPT whose states are on disk
	$(PYTHON) examples/train_gpt.py $(ARGS)

demo-ranks: EXTRAS := examples
demo-ranks: build ## the same over 2 and 4 ranks of this machine
	$(PYTHON) examples/demo_ranks.py $(ARGS)

# System packages: through apt when root, else said.
system:
	@tools/system_packages.sh

$(PYTHON):
	python3 -m venv $(VENV)
	$(PYTHON) -m pip install -q --upgrade pip

# torch is named exactly: a range could pull another release, and gigabytes with it.
build: system $(PYTHON) ## torch, the package (editable) and its tools into .venv
	@$(PYTHON) -c 'import torch; assert torch.__version__.startswith("$(TORCH)")' 2>/dev/null || $(PYTHON) -m pip install -q torch==$(TORCH)
	mkdir -p $(BUILD)
	version=$$(sha1sum pyproject.toml | cut -c1-12)
	if [ ! -e $(BUILD)/.tools-all-$$version -a ! -e $(BUILD)/.tools-$(EXTRAS)-$$version ] || ! $(PYTHON) -c 'import scikit_build_core, tqdm' 2>/dev/null; then
	  $(PYTHON) -m pip install -q $$(python3 tools/requirements.py $(EXTRAS))
	  touch $(BUILD)/.tools-$(EXTRAS)-$$version
	fi
	$(PYTHON) -m pip install -q --no-build-isolation --no-deps -C cmake.define.CMAKE_UNITY_BUILD=$(UNITY) -e .

# In the folder where the package was built: what is compiled there need not be compiled again. Tests of the modules
# without torch run under the sanitizers alone (`make sanitize`).
cpp-tests: build
	@folder=$$(ls -dt $(BUILD)/cp*-*/ | head -1)
	cmake -S . -B $$folder -DZEROPAGE_TESTS=ON > $(BUILD)/cmake.log || { cat $(BUILD)/cmake.log; exit 1; }
	ninja -C $$folder --quiet torch_tests sim simulate
	cd $$folder && ctest --output-on-failure -R "torch|simulate"

check-headers: build ## each public header alone, and all, without warnings of g++ and clang++
	@tools/system_packages.sh clang
	$(PYTHON) tools/check_headers.py

# Random programs of operators beside plain PyTorch, and over 2 ranks beside averaging by hand.
SEEDS ?= 0:2000
fuzz: build ## random programs: make fuzz SEEDS=0:20000
	$(PYTHON) tests/fuzz/run_operator_programs.py --seeds $(SEEDS)
	OMP_NUM_THREADS=1 $(PYTHON) tests/fuzz/run_training_programs.py --seeds $(SEEDS)
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(PYTHON) tests/fuzz/run_rank_programs.py --seeds $(SEEDS)

simulate: system $(PYTHON) ## the pager in virtual time, by seeds: make simulate SEEDS=0:20000
	cmake -S . -B $(BUILD)/core -G Ninja -DZEROPAGE_TESTS=ON -DZEROPAGE_TORCH=OFF -DCMAKE_UNITY_BUILD=ON \
	  -DPython3_EXECUTABLE=$(CURDIR)/$(PYTHON) > $(BUILD)/cmake.log || { cat $(BUILD)/cmake.log; exit 1; }
	ninja -C $(BUILD)/core --quiet simulate
	$(BUILD)/core/tests/simulate $(SEEDS) $(ARGS)

ON_DEVICE := accelerator activations checkpoint equality experts hazards hugging_face mixed programs quantised rules step tensors tiling
ON_DEVICE_TOO := bad_input running saving snapshots vocabulary # in test-full
PYTEST := OMP_WAIT_POLICY=passive $(PYTHON) -m pytest -q -n 2
# What a change most likely breaks: everything in one process, and the shortest files over ranks.
SHORT_RANKS := ranks_arithmetic ranks_errors ranks_placement snapshots_ranks saving_groups_ranks
test: cpp-tests ## C++ and Python tests, without the long ones
	$(PYTEST) tests/python tests/fuzz -k "not ranks and not verify and not examples_in_docs" $(ARGS)
	$(PYTEST) $(addprefix tests/python/test_,$(addsuffix .py,$(SHORT_RANKS)))

# Tests marked `full` are other sizes and forms of what CI runs, or libraries and faults that few changes reach.
test-full: cpp-tests ## the tests that `make test-all` leaves out for time, too
	$(PYTEST) --full tests/python tests/fuzz $(ARGS)
	MKL_CBWR=COMPATIBLE $(PYTEST) --device sim $(addprefix tests/python/test_,$(addsuffix .py,$(ON_DEVICE_TOO)))

test-all: cpp-tests test-install check-headers sanitize ## what CI runs
	$(PYTEST) tests/python tests/fuzz -k "not ranks" $(ARGS)
	$(PYTEST) tests/python tests/fuzz -k ranks $(ARGS)
	# The same again on a device with memory and streams of its own, simulated: tests/accelerator. Its tiles are other
	# ones, and some processors' kernels in MKL round a column by how many there are; the compatible ones do not.
	MKL_CBWR=COMPATIBLE $(PYTEST) --device sim $(addprefix tests/python/test_,$(addsuffix .py,$(ON_DEVICE)))
	$(PYTHON) -m pytest -q --device sim tests/python/test_ranks.py -k "two and (1 or 2 or 3) and disk"

# Programs outside the tree, against an installed library: a prefix, the Python package, pkg-config, an archive.
test-install: cpp-tests ## the C++ library, installed in every way
	@tools/system_packages.sh clang pkg-config
	tools/test_install.sh "$$(ls -dt $(BUILD)/cp*-*/ | head -1)" $(PYTHON)

test-torch: system ## the short tests on another release of torch: make test-torch TORCH=2.14.1
	tools/test_torch.sh $(TORCH)

# ASan+UBSan and TSan over the modules without torch, several files at once, so that names in their anonymous namespaces
# must differ. Their tests run side by side, on a core each. With SANITIZE_TORCH=ON, ASan over the rest of the C++ tests
# too: five minutes more.
SANITIZE_TORCH ?= OFF
sanitize: build
	@for kind in address thread; do
	  cmake -S . -B $(BUILD)/$$kind -G Ninja -DZEROPAGE_TESTS=ON -DZEROPAGE_TORCH=$$([ $$kind = address ] && echo $(SANITIZE_TORCH) || echo OFF) \
	    -DZEROPAGE_SANITIZE=$$kind -DCMAKE_UNITY_BUILD=ON -DPython3_EXECUTABLE=$(CURDIR)/$(PYTHON) > $(BUILD)/cmake.log || { cat $(BUILD)/cmake.log; exit 1; }
	  ninja -C $(BUILD)/$$kind --quiet core_tests simulate $$([ $${kind}$(SANITIZE_TORCH) = addressON ] && echo torch_tests)
	done
	(cd $(BUILD)/thread && ctest --output-on-failure > ctest.log 2>&1) & thread=$$!
	failed=0
	(cd $(BUILD)/address && ASAN_OPTIONS=detect_leaks=0 ctest --output-on-failure) || failed=1
	wait $$thread || failed=1
	cat $(BUILD)/thread/ctest.log
	exit $$failed

# An emulated processor is too slow for the tests of whole stresses.
arm: system $(PYTHON) ## the modules without torch for aarch64, and their tests of kernels and pager under qemu
	@tools/system_packages.sh g++-aarch64-linux-gnu qemu-user
	cmake -S . -B $(BUILD)/arm -G Ninja -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
	  -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ -DZEROPAGE_TESTS=ON -DZEROPAGE_TORCH=OFF -DCMAKE_UNITY_BUILD=ON \
	  -DPython3_EXECUTABLE=$(CURDIR)/$(PYTHON) > $(BUILD)/cmake.log || { cat $(BUILD)/cmake.log; exit 1; }
	ninja -C $(BUILD)/arm --quiet core_tests
	qemu-aarch64 -L /usr/aarch64-linux-gnu $(BUILD)/arm/tests/core_tests -sf="*/kernels/*,*/pager/*" \
	  -tce="*volume*,an allocation that fails*"

lint: build docs ## formatting, types, functions' lengths, which module uses which, prose, and the docs
	$(PYTHON) -m ruff check python tests examples bench tools
	$(PYTHON) -m ruff format --check python tests examples bench tools
	$(PYTHON) -m mypy
	$(PYTHON) -m mypy --config-file bench/mypy.ini
	$(VENV)/bin/clang-format --dry-run --Werror $$(git ls-files '*.cpp' '*.h')
	$(PYTHON) -m lizard -l cpp -T length=70 -C 1000 -a 100 -w src
	$(PYTHON) tools/check_modules.py
	$(PYTHON) tools/generate_settings.py --check
	$(PYTHON) tools/check_prose.py

format: build ## what lint asks for
	$(PYTHON) -m ruff check --fix -q python tests examples bench tools || true
	$(PYTHON) -m ruff format -q python tests examples bench tools
	$(VENV)/bin/clang-format -i $$(git ls-files '*.cpp' '*.h')

docs: build ## the site, into build/site; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build -q

# For machines that have the same torch and no compiler; torch itself, and the OpenMP that it ships, are not in it. liburing
# is, and the wheel says of which glibc it is in need (manylinux).
wheel: build ## build/wheel/*.whl
	rm -rf $(BUILD)/wheel
	$(PYTHON) -m pip wheel -q --no-build-isolation --no-deps -w $(BUILD)/wheel/plain .
	PATH=$(CURDIR)/$(VENV)/bin:$$PATH $(PYTHON) -m auditwheel repair --exclude 'libtorch*.so' --exclude libc10.so --exclude 'libgomp*' \
	  -w $(BUILD)/wheel $(BUILD)/wheel/plain/*.whl 2>&1 | tail -1

BENCHES := $(patsubst bench/%.py,%,$(filter-out bench/_%,$(wildcard bench/*.py)))
bench: $(addprefix bench-,$(BENCHES)) ## every benchmark
bench-%: build
	$(PYTHON) bench/$*.py $(ARGS)

# In an environment of its own: it brings what the project must not come to depend on.
PEERS := $(BUILD)/peers
peers: build ## DeepSpeed, for bench-peers
	@tools/system_packages.sh libaio-dev
	python3 -m venv $(PEERS)
	$(PEERS)/bin/pip install -q torch==$(TORCH) numpy ninja setuptools wheel packaging
	$(PEERS)/bin/pip install -q py-cpuinfo einops msgpack psutil pydantic hjson tqdm
	$(PEERS)/bin/pip install -q --no-build-isolation deepspeed==0.19.8

clean:
	rm -rf $(BUILD) $(VENV) out
