"""What the model `everbatch` tells of its tokenizer."""

from __future__ import annotations

import json

from backend.serving.wires.front import TextTools
from tests.serving.helpers import MODEL_DIRECTORY
from tests.serving.test_everbatch_model import work


def test_the_tokenizer_is_told_where_that_is_asked_for(tools: TextTools) -> None:
    for asked in (False, True):
        answer = work(tools, prompt_token_ids=[5], tokenize=True, tell_tokenizer=asked).output
        told_of = json.loads(dict(answer.render()[0])["response"][0]).get("tokenizer")
        source = (MODEL_DIRECTORY / "chat_template.jinja").read_text() if asked else None
        assert told_of == ({**tools.tokenizer.special_tokens, "chat_template": source} if asked else None)
