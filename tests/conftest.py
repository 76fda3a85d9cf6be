"""Where tests find material that is not part of the project: real data, expected numbers, a real tokenizer."""

import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

ROOT = Path(__file__).resolve().parents[1]


def _outside(variable: str, default: str) -> Path:
    path = Path(os.environ.get(variable, ROOT.parent / "shared" / default))
    if not path.exists():
        pytest.skip(f"{variable} is not set and {path} does not exist: this test needs it")
    return path


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The real training set and benchmarks (JSONL)."""
    return _outside("ERPO_DATA", "data")


@pytest.fixture(scope="session")
def golden_dir() -> Path:
    """Expected numbers from reference implementations."""
    return _outside("ERPO_GOLDEN", "golden")


@pytest.fixture(scope="session")
def qwen_tokenizer_dir() -> Path:
    """A Qwen2.5-compatible tokenizer."""
    return _outside("ERPO_TOKENIZER", "tokenizers/qwen")
