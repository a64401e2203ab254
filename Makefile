# Run inside a virtual environment.
.PHONY: dev check test bench

dev:  ## an editable install with everything for working on edgellm
	pip install -e '.[dev]'

check:  ## style and types
	ruff check .
	mypy

test:  ## all tests; those that need absent models or vectors say so
	pytest

bench:  ## speed beside llama.cpp (needs llama-cpp-python)
	python benchmarks/peers.py
