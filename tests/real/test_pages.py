"""README.md and docs/start.md: `serve` without a model serves the default one, which answers as the pages show."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator

import openai
import pytest

from deploy.default_model import VARIABLE
from deploy.published import SMOLLM2
from tests.docs.blocks import blocks
from tests.docs.pages import text_of
from tests.e2e.launched import launched
from tests.e2e.test_page_examples import requests_of
from tests.e2e.test_shell_examples import Shell, checkout, shapes
from tests.e2e.wire import post
from tests.real import weights

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """Beside a server that was started without a model."""
    try:
        weights.fetch(weights.DEFAULT)
    except weights.NoRegistry:
        pytest.skip(weights.NO_REGISTRY)
    shell = checkout(tmp_path_factory.mktemp("checkout"))
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(VARIABLE, raising=False)
        with launched() as server:
            shell.server = server
            shell.variables["EVERBATCH_RUN_ROOT"] = str(server.root)
            yield shell


@pytest.mark.parametrize("page", ["README.md", "docs/start.md"])
def test_generate_and_chat_print_what_the_page_shows(shell: Shell, page: str) -> None:
    (shown,) = [block.text for block in blocks(page) if "$ ./everbatch chat" in block.text]
    generate, chat = shown[shown.index("$ ./everbatch generate") :].split("\n\n")
    command, _, expected = generate[2:].partition("\n")
    prompt = shlex.split(command)[2]  # only a terminal shows it once more
    alone = f"--namespace {page}"  # others have asked the same, and their KV is cached
    assert shapes(shell.at_this_server(expected).replace(prompt, "")) <= shapes(shell.told_by(f"{command} {alone}"))
    command, *lines = chat[2:].splitlines()
    said = "\n".join(line[2:] for line in lines if line.startswith("> "))
    expected = "\n".join(line for line in lines if not line.startswith("> "))
    assert shapes(expected) <= shapes(shell.told_by(f"{command} {alone}", typed=said))


def test_the_start_prints_what_the_page_shows(shell: Shell) -> None:
    assert shell.server is not None
    (shown,) = [block.text for block in blocks("docs/start.md") if block.text.startswith("model ")]
    path, loaded, *settings = shown.splitlines()[:4]
    expected = [
        path.partition("models/")[2],
        loaded.partition(", KV")[0],
        *(each.split("--set ")[1] for each in settings),
    ]
    assert [each for each in expected if each not in shell.server.said] == []


def test_the_curl_line_prints_what_the_page_shows(shell: Shell) -> None:
    assert shell.server is not None
    ((path, body),) = requests_of("start.md")
    status, text = post(f"http://127.0.0.1:{shell.server.ports.http}{path}", body)
    shown = re.search(r"prints `({.*})`", text_of("start.md"))
    assert status == 200 and shown is not None and json.loads(shown[1]) == json.loads(text)


def test_openais_clients_know_it_by_its_own_name_first(shell: Shell) -> None:
    assert shell.server is not None
    with openai.OpenAI(base_url=shell.server.url, api_key="none") as client:
        names = [model.id for model in client.models.list()]
        assert names[:2] == [SMOLLM2.title, "everbatch"]
        question = [{"role": "user", "content": "What is the capital of France?"}]
        answer = client.chat.completions.create(model=names[0], messages=question, temperature=0)  # type: ignore[arg-type]
    assert "Paris" in str(answer.choices[0].message.content)
