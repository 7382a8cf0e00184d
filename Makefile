# Two commands do everything on a machine with Rust, a C++ compiler, python3 with pip, and make:
#
#   make grpo    a tiny language model learns arithmetic by reinforcement, before your eyes
#   make test    all tests
#
# Both bring libtorch first (once per user). Extra arguments:  make grpo ARGS="--set seed=1 --metrics 127.0.0.1:9464"

.PHONY: grpo sft test gpu-check test-large test-engines test-cluster test-stores test-hubs test-tinker test-monitoring test-page test-fleet lint check check-all docs asynchrony libtorch nccl tools help
.DEFAULT_GOAL := help

help:
	@sed -n 's/^# \{0,1\}//p' Makefile

tools:
	@./scripts/tools.sh

libtorch: tools
	@./scripts/libtorch.sh

# For runs of several ranks on GPUs.
nccl: libtorch
	@./scripts/nccl.sh

grpo: libtorch
	cargo run --release --bin rollflow -- run pipelines/recipes/grpo.toml $(ARGS)

sft: libtorch
	cargo run --release --bin rollflow -- run pipelines/recipes/sft.toml $(ARGS)

test: libtorch
	cargo test --workspace $(ARGS)
	python3 -m unittest discover --start-directory python/tests

# Packs what checks a machine with an NVIDIA GPU and no network, as target/gpu-check.tar.xz. There: tar xf gpu-check.tar.xz && gpu-check/run.sh
gpu-check: libtorch
	@./scripts/gpu_check.sh

# What takes minutes and gigabytes: ten million rows, folders of 3 GB, a larger trainer. TMPDIR must be on a disk, with 7 GB free.
test-large: libtorch
	cargo test --workspace --test data --test models -- --ignored --nocapture --test-threads 1

# Installs real inference servers (3 GB and about two minutes each, once) and drives them on this machine.
ENGINES ?= vllm sglang
test-engines: libtorch
	@./scripts/test_engines.sh $(ENGINES)

# Runs what `rollflow deploy` writes: ssh and Slurm on loopback, and the schemas of the other platforms. Needs root and Debian.
test-cluster: libtorch
	@./scripts/test_cluster.sh

# Weights and checkpoints through an S3-compatible server on loopback, which comes from PyPI.
test-stores: libtorch
	@./scripts/test_stores.sh

# Trains with environments of verifiers and OpenEnv, which come from PyPI.
test-hubs: libtorch
	@./scripts/test_hubs.sh

# The Tinker API with real clients and a real server, which come from PyPI.
test-tinker: libtorch
	@./scripts/test_tinker.sh

# Watches a run by a real Prometheus, which comes from Debian. Needs root if it is not installed.
test-monitoring: libtorch
	@./scripts/test_monitoring.sh

# Drives the live page by a real Chromium, which comes from Debian. Needs root if it is not installed.
test-page: libtorch
	@./scripts/test_page.sh

# Trains with servers that are killed, stopped, cut off, added and taken away, for 20 minutes. Needs root and Debian's iptables.
test-fleet: libtorch
	cargo build --release --workspace --bin rollflow
	@./scripts/test_fleet.py

lint: libtorch
	cargo fmt --all --check
	cargo clippy --workspace --all-targets -- -D warnings
	cargo clippy --workspace --features rollflow-pipelines/otlp --lib -- -D warnings
	cargo clippy --package rollflow --no-default-features --all-targets -- -D warnings
	./scripts/prose.sh

# The book of docs/ as target/book/index.html, and the documentation of the crates as target/doc.
docs: libtorch
	@./scripts/book.sh
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps

# Measures what docs/explain/asynchrony.md says, on a machine that does nothing else.
asynchrony: libtorch
	cargo bench --workspace --bench asynchrony -- $(ARGS)

# All that CI runs.
check:
	./.ci/run

# CI, longer, and with other people's programs: before a release, or after a change of what they read.
check-all:
	./scripts/check_all.sh
