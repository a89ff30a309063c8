# make demo, make test and make check do all their set-up in a virtual environment, .venv.
PYTHON ?= python3
TORCH ?= torch==2.13.0

VENV := .venv
BIN := $(VENV)/bin
DEMO := demo-output

.PHONY: demo test check clean
.DELETE_ON_ERROR:

# A small checkpoint with random weights, in the original layout and in transformers' (the reference reads that one).
demo: $(VENV)/demo.stamp
	rm -rf $(DEMO)
	$(BIN)/python tests/synthetic_checkpoint.py $(DEMO)/checkpoint --layout phi4mm --original-max-position 4096
	$(BIN)/python tests/synthetic_checkpoint.py $(DEMO)/reference --layout phi4_multimodal --original-max-position 4096
	$(BIN)/optimum-cli export onnx --model $(DEMO)/checkpoint $(DEMO)/package
	$(BIN)/python examples/demo.py $(DEMO)/package $(DEMO)/reference
	$(BIN)/optimum-cli phi4mm inspect $(DEMO)/package
	$(BIN)/optimum-cli phi4mm generate --model $(DEMO)/package --prompt "Answer the question that is asked." \
		--image examples/data/picture.jpg --audio examples/data/recording.flac --max_new_tokens 16

test: $(VENV)/tests.stamp
	$(BIN)/python -m pytest -n 2 --dist loadfile

check: $(VENV)/quality.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) $(DEMO) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache

# torch comes first and by its exact version: a later one may bring a CUDA build of several gigabytes.
$(VENV)/torch.stamp:
	$(PYTHON) -c 'import sys; sys.exit("Python 3.10 or later is needed: make PYTHON=..." if sys.version_info < (3, 10) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -qq "$(TORCH)"
	touch $@

# The package, editable, with one of its extras: demo, tests or quality.
$(VENV)/%.stamp: $(VENV)/torch.stamp setup.cfg pyproject.toml
	$(BIN)/python -m pip install -qq --editable ".[$*]"
	touch $@
