"""How the launcher asks the models of each protocol."""

from __future__ import annotations

from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from deploy.probe import ProbeFailed, generate_one_token
from deploy.questions import FORMS, TOKENS, VLLM, AskedModel, shown_model, text_model
from deploy.repository import Model, compose

TENSORS = {  # what tells the protocols' models from each other, in the words of their configurations
    "trtllm": (["text_input", "max_tokens", "bad_words"], ["text_output"]),
    "vllm_model": (["text_input", "stream", "sampling_parameters"], ["text_output"]),
    "llmapi": (["text_input", "sampling_param_max_tokens"], ["text_output"]),
    "lmdeploy_model": (["prompt", "max_tokens", "ignore_eos", "stream"], ["response"]),
    "everbatch": (["request", "stop"], ["response"]),
    "tokens": (["input_ids", "input_lengths", "request_output_len"], ["output_ids"]),
}


def model(directory: Path, name: str, text: str | None = None) -> Model:
    if text is None:
        inputs, outputs = (", ".join(f'{{ name: "{tensor}" }}' for tensor in part) for part in TENSORS[name])
        text = f'name: "{name}"\ninput [ {inputs} ]\noutput [ {outputs} ]\n'
    (directory / name).mkdir()
    (directory / name / "config.pbtxt").write_text(text)
    return Model(name, directory / name, "here")


@pytest.mark.parametrize("name, index", [(name, index) for index, name in enumerate(TENSORS) if name != "tokens"])
def test_each_protocol_is_known_by_its_tensors(name: str, index: int, tmp_path: Path) -> None:
    assert text_model([model(tmp_path, "tokens"), model(tmp_path, name)]) == AskedModel(name, FORMS[index])


def test_the_protocol_of_the_profile_is_preferred_to_the_own_wire(tmp_path: Path) -> None:
    models = [model(tmp_path, name) for name in ("everbatch", "vllm_model")]
    assert text_model(models) == AskedModel("vllm_model", VLLM)
    named = text_model(models, "everbatch")
    assert named is not None and named.name == "everbatch"


def test_a_model_whose_backend_completes_it_is_known_by_the_backend(tmp_path: Path) -> None:
    asked = text_model([model(tmp_path, "any_name", 'backend: "vllm"\n')])
    assert asked == AskedModel("any_name", VLLM)


def test_a_server_without_a_text_model_is_not_asked(tmp_path: Path) -> None:
    assert text_model([model(tmp_path, "tokens")]) is None


def test_token_ids_are_shown_rather_than_the_own_wire_and_rather_text_than_these(tmp_path: Path) -> None:
    models = [model(tmp_path, name) for name in ("everbatch", "tokens", "vllm_model")]
    assert shown_model(models) == (VLLM, models[2])
    assert shown_model(models[:2]) == (TOKENS, models[1])
    assert shown_model([]) is None


def test_the_default_server_is_asked_through_its_ensemble() -> None:
    asked = text_model(compose(()))
    assert asked is not None and asked.name == "ensemble"


@pytest.fixture
def url() -> Iterator[str]:
    """A server that answers every generate request as the model `everbatch` does."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"response": "one token"}')

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_the_first_token_is_looked_for_where_the_protocol_puts_it(url: str) -> None:
    assert generate_one_token(url, AskedModel("everbatch", FORMS[-1]), 10) == "one token"
    with pytest.raises(ProbeFailed, match="model vllm_model answered 200"):
        generate_one_token(url, AskedModel("vllm_model", VLLM), 10)
