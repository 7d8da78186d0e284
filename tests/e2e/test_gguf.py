"""A GGUF file behind a real tritonserver: text in, text out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend

from backend.models.loader import DEFAULT_MODEL
from compat.llm import LLM, SamplingParams
from tests.e2e.conftest import serve
from tests.e2e.starts import wait_ready
from tests.e2e.wire import post
from tests.model.gguf_files import write_gguf
from tests.text.gguf_tokenizers import add_tokenizer

PROMPT = "def main(args):"


def test_a_file_is_served_with_its_own_tokenizer(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The default model as GGUF. Its words are nobody's of llama.cpp's list; SmolLM's are the same for such a prompt."""
    config = json.loads((DEFAULT_MODEL / "tokenizer_config.json").read_text())
    backend = Backend.from_file(str(DEFAULT_MODEL / "tokenizer.json"))
    file = write_gguf(
        DEFAULT_MODEL,
        tmp_path / "tiny.gguf",
        "F32",
        lambda writer: add_tokenizer(writer, backend, config, pre="smollm"),
    )
    with LLM(DEFAULT_MODEL, dtype="float32") as llm:
        expected = llm.generate(PROMPT, SamplingParams(max_tokens=12, temperature=0.0)).outputs[0].text
    with serve(tmp_path_factory.mktemp("run"), f"model.path={file}") as server:
        wait_ready(server)
        status, answer = post(
            f"{server.http_url}/v2/models/ensemble/generate", {"text_input": PROMPT, "max_tokens": 12}
        )
    assert status == 200
    assert json.loads(answer)["text_output"].removeprefix(PROMPT) == expected
