"""Tests of the vLLM engine itself. They need vLLM in the environment: `make test-vllm` brings it."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.tiny import Place, make_place

SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 2}
"""vLLM's CPU attention takes heads of 32."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if find_spec("vllm") is not None:
        return
    if os.environ.get("ERPO_NEEDS_VLLM"):
        pytest.exit("vLLM cannot be imported, and these tests were asked for: see tests/vllm/setup.sh", returncode=1)
    skip = pytest.mark.skip(reason="vLLM is not installed here: `make test-vllm` runs these tests")
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def place(tmp_path_factory) -> Place:
    return make_place(tmp_path_factory.mktemp("tiny"), **SHAPE)
