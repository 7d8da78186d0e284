"""Writes the table of keys without effect in docs/openai.md, between two markers, from gateway/without_effect.py.

.venv/bin/python -m tools.write_key_table          rewrite it
.venv/bin/python -m tools.write_key_table --check  fail when it is not up to date
"""

from __future__ import annotations

import json
import sys
from itertools import groupby

from gateway.messages import Wire
from gateway.without_effect import TABLE, Key, Values
from tools.marked_part import MarkedPart

PART = MarkedPart(
    "openai.md",
    "<!-- keys without effect: written by tools/write_key_table.py -->",
    "<!-- end of keys without effect -->",
)
ROUTES: dict[str, str] = {
    "ChatRequest": "chat",
    "CompletionRequest": "completions",
    "ResponseRequest": "responses",
    "InputTokensRequest": "",
    "MessagesRequest": "messages",
    "CountTokensRequest": "",
    "EmbeddingRequest": "embeddings",
    "RerankRequest": "rerank",
    "TokenizeRequest": "tokenize",
    "InteractiveRequest": "interactive",
    "InfillRequest": "infill",
    "OllamaChat": "Ollama's",
    "OllamaGenerate": "",
    "OllamaEmbed": "",
    "OllamaEmbeddings": "",
    "NewConversation": "conversations",
    "ConversationItems": "",
}
TYPES = {str: "a text", int: "an integer", float: "a number", bool: "true, false", dict: "an object", list: "a list"}


def table() -> str:
    """The table in Markdown, a row for what one client sends to the same routes with the same values."""
    rows = ["| sent by | keys | to | values |", "|---|---|---|---|"]
    for (client, messages, values, _), keys in groupby(TABLE, _alike):
        names = ", ".join(f"`{key.path}`" for key in keys)
        rows.append(f"| {client} | {names} | {_routes(messages)} | {_shown(values)} |")
    return "\n" + "\n".join(rows) + "\n"


def _alike(key: Key) -> tuple[str, tuple[type[Wire], ...], Values, str]:
    return key.client, key.messages, key.values, key.remedy


def _routes(messages: tuple[type[Wire], ...]) -> str:
    return ", ".join(filter(None, (ROUTES[kind.__name__] for kind in messages)))


def _shown(values: Values) -> str:
    if isinstance(values, tuple):
        return ", ".join(f"`{json.dumps(one)}`" for one in values) or "`null`"
    return TYPES.get(values, "any")


if __name__ == "__main__":
    sys.exit(PART.run(table()))
