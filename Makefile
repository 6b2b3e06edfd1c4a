# Three commands on a fresh machine, with Python >= 3.11 and make: `make try`, `make demo` and `make test`.
# Everything is installed into .venv, once; a change of pyproject.toml, constraints.txt or release/addresses.toml installs
# again.
# `make try` and `make demo` install torch, the core and plots; `make test` and the others add what tests and tools need.

PYTHON ?= python3
VENV ?= .venv
TORCH_SPEC ?= torch==2.13.0
TORCH_INDEX ?=
# What `make try` translates.
TEXT ?= I am very hungry.
# `make test-pythons`: which versions.
PYTHONS ?= 3.12 3.13
# Minutes of training in `make demo`.
MINUTES ?= 5
# `make fuzz`: minutes, unless MINUTES is given, and which cases.
FUZZ_MINUTES := $(if $(filter command line environment,$(origin MINUTES)),$(MINUTES),30)
SEED ?= 1
# `make check-long`: which parts (all); `python tests/long_parts.py reliability.json --list` shows them.
PART ?=
# Test processes: one more than the two cores for which times are stated, because some tests wait.
JOBS ?= 3
# `make first-minute`: classes of machine (all); see tests/machines/run.py.
CLASSES ?=
# `make bench`: which tasks (all), seconds of a turn, and any other options of benchmarks/run.py.
TASKS ?=
SECONDS ?= 4
BENCH ?=
# `make bench-gpu`: the Python with torch for CUDA, the file of results, and which parts (all).
GPU_PYTHON ?= python3
GPU_OUTPUT ?= gpu.json
PARTS ?=
# Where the peers that it measures against are installed, apart from everything else.
PEERS_VENV ?= .venv-peers
# Where the clients of `make check-serving` are installed, and any options of tests/clients/check_serving.py.
CLIENTS_VENV ?= .venv-clients
CLIENTS ?=
# Where the runtimes of `make check-export` are installed; a model of your own in place of tiny ones, and how many sentences.
EXPORT_VENV ?= .venv-export
LM_EVAL_VENV ?= .venv-lm-eval
MODEL ?=
SENTENCES ?=
# Where Weights & Biases, MLflow and Trackio are installed for `make check-loggers`.
LOGGERS_VENV ?= .venv-loggers
# Where Triton is installed for `make check-triton`: a folder for each version, beside the torch of $(VENV).
TRITON_VENV ?= .venv-triton
# `make check-container`: what runs containers; some hosts run runc and not crun.
RUNTIME ?= runc
# Where podman-compose, and the client of DeepL, are installed for it.
COMPOSE_VENV ?= .venv-compose
# `make pictures`: which files (all). `make notebooks`: which pages (all).
NAMES ?=
PAGES ?=
# Where the tools of `make release`, `make lock` and `make audit` are installed.
RELEASE_VENV ?= .venv-release

BIN := $(VENV)/bin
READY := $(VENV)/ready
READY_DEV := $(VENV)/ready-dev
PEERS_READY := $(PEERS_VENV)/ready
RELEASE_READY := $(RELEASE_VENV)/ready
SHARED := $(or $(MANYHEADS_SHARED),../shared)

# The files with tests that run without the checks of shapes; to collect all the others would take longer.
UNHOOKED := $(shell grep -rlE 'mark\.unhooked' tests --include='test_*.py')

.PHONY: try demo check-site test test-pythons without-torch first-minute check ceilings fuzz fuzz-guided check-long check-serving check-container check-export check-loggers check-lm-eval check-triton bench bench-gpu recipes sample-model docs notebooks pictures release lock audit dates setup clean

# The first translation, with the translator that comes with the package.
try: export TEXT := $(TEXT)
try: $(READY)
	@$(BIN)/manyheads sample-model models/en-de
	@printf '%s\n' "$$TEXT" | $(BIN)/manyheads translate models/en-de

demo: $(READY)
	@echo "Training takes $(MINUTES) minute$(if $(filter-out 1,$(MINUTES)),s), evaluation and pictures about a minute more."
	$(BIN)/manyheads train --preset demo --run-dir runs/demo --resume none --minutes $(MINUTES)
	$(BIN)/python -m manyheads.extras.demo runs/demo

# Bytecode is kept, also where the environment says otherwise: the tests start the program hundreds of times.
test first-minute: export PYTHONDONTWRITEBYTECODE =

# A file stays in one process, because its tests share fixtures; compiled tests share none, and are few and long.
test: $(READY_DEV)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m "not slow and not page"
	MANYHEADS_TYPECHECK=0 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "unhooked and not slow" $(UNHOOKED)

# `make test` with each of PYTHONS that is found; what ran goes into docs/versions.md. Not in CI: 20 minutes each.
test-pythons:
	$(PYTHON) release/pythons.py $(PYTHONS)

# Help, settings and catalogue with a newer Python and without torch, where it is found.
without-torch:
	$(PYTHON) release/pythons.py --without-torch 3.13

# What a new user does first, once more for each class of machine: other processors, one thread, no /proc, not Linux.
first-minute: $(READY_DEV)
	$(BIN)/python tests/machines/run.py $(CLASSES)

check: $(READY_DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --config-file tests/mypy.ini
	$(BIN)/lint-imports
	PYTHONPATH=src:tests $(BIN)/python -m ceilings.check

# After a change that made figures of the structure smaller: they become the ceilings. None is ever raised.
ceilings: $(READY)
	PYTHONPATH=src:tests $(BIN)/python -m ceilings.check --lower

# Hostile and random input, for $(FUZZ_MINUTES) minutes (MINUTES=N for another time). What is found is written, made
# small, into tests/fuzz/found, whose files the tests replay.
fuzz: export OMP_NUM_THREADS = 1
fuzz: $(READY_DEV)
	PYTHONPATH=src:tests $(BIN)/python -m fuzz.campaign .fuzz --seed $(SEED) --minutes $(FUZZ_MINUTES) --found tests/fuzz/found

# The readers of files alone, with cases that are guided by coverage.
fuzz-guided: export OMP_NUM_THREADS = 1
fuzz-guided: $(READY_DEV)
	$(BIN)/python -m pip install --quiet -r tests/fuzz/requirements.txt
	PYTHONPATH=src:tests $(BIN)/python -m fuzz.guided .fuzz-guided --seed $(SEED) --minutes $(FUZZ_MINUTES) --found tests/fuzz/found

# In parts of at most half an hour, whose figures are added to reliability.json. Parts that have passed at this commit
# are not run again; PART="R2 R4" runs these alone.
check-long: $(READY_DEV)
	-@$(MAKE) --no-print-directory $(TRITON_VENV)/3.6.0/ready
	$(BIN)/python tests/long_parts.py reliability.json $(PART) --jobs $(JOBS)
	$(if $(PART),,MANYHEADS_TYPECHECK=0 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "unhooked and slow" $(UNHOOKED))

# Clients that others wrote against a server of ours; they are installed apart. Needs node, npm, curl and chromium.
check-serving: $(READY_DEV)
	$(PYTHON) -m venv $(CLIENTS_VENV)
	$(CLIENTS_VENV)/bin/pip install --quiet -r tests/clients/requirements.txt
	cp tests/clients/package.json $(CLIENTS_VENV)/
	cd $(CLIENTS_VENV) && npm install --no-audit --no-fund --silent
	$(BIN)/python tests/clients/serve_tiny_models.py $(CLIENTS_VENV)/bin/python tests/clients/check_serving.py \
	  --node $(CLIENTS_VENV) --pictures $(CLIENTS_VENV)/pictures $(CLIENTS)

# The image of deploy/Containerfile on a base of Debian's packages: built, run with a read-only root, asked for a
# translation, stopped; then deploy/compose.yaml. As root, with podman, netavark, aardvark-dns, iptables, runc and mmdebstrap; two
# idle cores need a few minutes.
check-container: $(COMPOSE_VENV)/ready
	$(PYTHON) tests/clients/check_container.py $(or $(MODEL),src/manyheads/extras/sample_model/model) --runtime $(RUNTIME) \
		--compose $(COMPOSE_VENV)/bin/podman-compose $(if $(TORCH_INDEX),--torch-index $(TORCH_INDEX))

$(COMPOSE_VENV)/ready: tests/clients/compose.txt
	$(PYTHON) -m venv $(COMPOSE_VENV)
	$(COMPOSE_VENV)/bin/pip install --quiet -r $<
	@touch $@

# Exports in the runtimes of others: two lines of transformers, CTranslate2, onnxruntime, Optimum, and where npm is
# installed transformers.js. onnxruntime-node downloads libraries for GPUs unless it is told not to.
check-export: $(READY_DEV) $(EXPORT_VENV)/transformers5/ready $(EXPORT_VENV)/transformers4/ready
	@mkdir -p $(EXPORT_VENV)/node
	@if command -v npm > /dev/null; then \
		ONNXRUNTIME_NODE_INSTALL=skip npm install --silent --no-fund --no-audit --prefix $(EXPORT_VENV)/node \
			$$(cat tests/clients/exports-npm.txt); \
	fi
	$(BIN)/python tests/clients/check_exports.py --node $(EXPORT_VENV)/node $(if $(MODEL),--model $(MODEL)) \
		$(if $(SENTENCES),--sentences $(SENTENCES)) \
		--python5 $(EXPORT_VENV)/transformers5/bin/python --python4 $(EXPORT_VENV)/transformers4/bin/python

# lm-evaluation-harness on a task over a local file, compared with our own evaluation; installed apart.
check-lm-eval:
	$(PYTHON) -m venv $(LM_EVAL_VENV)
	$(LM_EVAL_VENV)/bin/pip install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) '$(TORCH_SPEC)'
	$(LM_EVAL_VENV)/bin/pip install --quiet '$(TORCH_SPEC)' -r tests/clients/lm-eval.txt -e .
	MANYHEADS_TYPECHECK=0 $(LM_EVAL_VENV)/bin/python -m pytest tests/extras/hf/test_lm_eval.py

# The Triton kernels without a GPU: interpreted, and compiled for two cards. The first installation fetches 200 MB.
check-triton: WITH_TRITON = PYTHONPATH=$(TRITON_VENV)/3.7.1 MANYHEADS_TYPECHECK=0
check-triton: $(READY_DEV) $(TRITON_VENV)/3.7.1/ready
	$(WITH_TRITON) TRITON_INTERPRET=1 $(BIN)/python -m pytest $(addprefix tests/unit/nn/kernels/test_triton_,interpreted.py loss.py chunks.py)
	$(WITH_TRITON) $(BIN)/python -m pytest tests/unit/nn/kernels/test_triton_compiled.py tests/unit/training/test_launches.py -k "not test_launches or triton"

# Without its dependencies: torch is there, and an older Triton needs an older numpy.
$(TRITON_VENV)/%/ready: tests/clients/triton-%.txt $(READY_DEV)
	rm -rf $(@D)
	$(BIN)/python -m pip install --quiet --no-deps --target $(@D) -r $<
	@touch $@

$(EXPORT_VENV)/%/ready: tests/clients/exports-%.txt
	$(PYTHON) -m venv $(EXPORT_VENV)/$*
	$(EXPORT_VENV)/$*/bin/pip install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) '$(TORCH_SPEC)'
	$(EXPORT_VENV)/$*/bin/pip install --quiet '$(TORCH_SPEC)' -r $<
	@touch $@

# A run with each logger's package, without a network; what was stored is read back. These packages exclude some of our
# versions, so they are installed apart.
check-loggers: $(LOGGERS_VENV)/ready
	WANDB_MODE=offline $(LOGGERS_VENV)/bin/python tests/clients/check_loggers.py

$(LOGGERS_VENV)/ready: tests/clients/loggers.txt
	$(PYTHON) -m venv $(LOGGERS_VENV)
	$(LOGGERS_VENV)/bin/pip install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) '$(TORCH_SPEC)'
	$(LOGGERS_VENV)/bin/pip install --quiet '$(TORCH_SPEC)' -r $< -e .
	@touch $@

# Without the shared peers only what needs none is measured, and none is installed.
bench: $(READY_DEV) $(if $(wildcard $(SHARED)/peers.py),$(PEERS_READY))
	$(BIN)/python benchmarks/run.py $(TASKS) --seconds $(SECONDS) --peer-python $(PEERS_VENV)/bin/python $(BENCH)

# Nothing is installed: machines with GPUs bring their own torch. Parts that are in the file are not run again.
bench-gpu:
	$(GPU_PYTHON) benchmarks/gpu.py $(PARTS) --output $(GPU_OUTPUT)

# The commands of every recipe, on a little of the data; needs the folder of large fixtures (MANYHEADS_SHARED).
recipes: $(READY_DEV)
	$(BIN)/python -m pytest -n $(JOBS) tests/integration/test_recipes.py

# The translator of `manyheads sample-model`: about 30 minutes on two idle cores. Stopped, it goes on where it was.
sample-model: $(READY)
	$(BIN)/manyheads train --config recipes/sample-model.yaml --resume auto
	$(BIN)/python -m manyheads.extras.sample_model.making runs/sample-model

# The documentation as a site: site/index.html. Every link and name must hold.
# The pages are run, README first, and what they print is compared; then they become a folder of Markdown, and that a site.
# Pages in Chinese are compared with the English ones: code, figures and links; where only words changed, a line says so.
docs: export PYTHONDONTWRITEBYTECODE =
docs: $(READY_DEV)
	$(BIN)/python -m pip install --quiet -c $(VENV)/constraints.txt -e '.[docs]' -r docs/_site/requirements.txt
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m page tests/integration/test_readme.py tests/integration/test_docs.py tests/integration/test_notebooks.py tests/integration/test_chinese_pages.py
	@$(BIN)/python docs/_site/chinese.py --report
	$(BIN)/python docs/_site/pages.py build/pages
	env NO_MKDOCS_2_WARNING=1 $$($(BIN)/python docs/_site/pages.py --addresses) $(BIN)/python -m mkdocs build --strict

# The built site by axe-core's rules, in a browser: three minutes. Needs npm and chromium, and `make docs` before.
check-site: $(READY_DEV)
	npm install --silent --no-audit --no-fund --prefix $(CLIENTS_VENV) "axe-core@$$(sed -n 's/.*"axe-core": "\([0-9.]*\)".*/\1/p' tests/clients/package.json)"
	$(BIN)/python -m pytest -m page tests/browser/test_site.py

# docs/notebooks, from pages, run whole in a kernel: about 45 minutes. PAGES="heads sources/d2l": these alone.
notebooks: $(READY_DEV)
	$(BIN)/python -m pip install --quiet -c $(VENV)/constraints.txt -r docs/_site/requirements.txt
	$(BIN)/python docs/_site/notebooks.py $(PAGES)

# docs/pictures: every picture and its numbers; trains the models that are missing, half an hour. NAMES=heads.png: these alone.
pictures: $(READY)
	$(BIN)/python docs/_site/pictures.py $(NAMES)

# dist/: wheel, source archive, SBOM, the documentation as a site. The wheel is installed into a clean environment, and
# tried there, README's first commands too. RELEASING.md has all steps of a release.
release: $(RELEASE_READY)
	$(RELEASE_VENV)/bin/python release/build.py --torch '$(TORCH_SPEC)' $(if $(TORCH_INDEX),--torch-index $(TORCH_INDEX))

# requirements.lock, from pyproject.toml and constraints.txt.
lock: $(RELEASE_READY)
	$(RELEASE_VENV)/bin/python release/lock.py

# release/dates.json, for the lower bounds of extras; asks the package index.
dates: $(RELEASE_READY)
	$(RELEASE_VENV)/bin/python release/dates.py

# Known vulnerabilities of what is locked, and of torch; asks the package index.
audit: $(RELEASE_READY)
	@grep -h '^torch==' constraints.txt > $(RELEASE_VENV)/torch.txt
	$(RELEASE_VENV)/bin/pip-audit --strict --disable-pip --require-hashes -r requirements.lock
	$(RELEASE_VENV)/bin/pip-audit --strict --disable-pip --no-deps -r $(RELEASE_VENV)/torch.txt

setup: $(READY_DEV)

# release/set_up.py chooses the build of torch: see TORCH_SPEC and TORCH_INDEX. `make demo` needs few packages; what tests
# and tools need comes into the same environment when it is first asked for.
$(READY): pyproject.toml constraints.txt release/addresses.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or later is needed, this is " + sys.version.split()[0] + "; name another: make PYTHON=python3.12")'
	@$(PYTHON) release/set_up.py $(VENV) --extras plot --torch '$(TORCH_SPEC)' --torch-index '$(TORCH_INDEX)'
	@touch $@

$(READY_DEV): $(READY)
	@$(PYTHON) release/set_up.py $(VENV) --extras dev --torch '$(TORCH_SPEC)' --torch-index '$(TORCH_INDEX)'
	@touch $@

$(PEERS_READY): benchmarks/peers-requirements.txt
	@echo "Setting up $(PEERS_VENV), once: torch and the peers of the benchmarks."
	@$(PYTHON) -m venv $(PEERS_VENV)
	@grep -v '^torch==' benchmarks/peers-requirements.txt > $(PEERS_VENV)/requirements.txt
	@echo '$(TORCH_SPEC)' > $(PEERS_VENV)/constraints.txt
	$(PEERS_VENV)/bin/python -m pip install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) '$(TORCH_SPEC)'
	$(PEERS_VENV)/bin/python -m pip install --quiet -c $(PEERS_VENV)/constraints.txt -r $(PEERS_VENV)/requirements.txt
	@touch $(PEERS_READY)

$(RELEASE_READY): release/requirements.txt
	@$(PYTHON) -m venv $(RELEASE_VENV)
	@$(RELEASE_VENV)/bin/python -m pip install --quiet -r release/requirements.txt
	@touch $(RELEASE_READY)

clean:
	rm -rf $(VENV) .venv-3.* $(PEERS_VENV) $(CLIENTS_VENV) $(EXPORT_VENV) $(LOGGERS_VENV) $(TRITON_VENV) $(RELEASE_VENV) $(COMPOSE_VENV) .fuzz .fuzz-guided dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache build/pages
