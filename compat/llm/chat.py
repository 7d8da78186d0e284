"""ChatTokenizer: a tokenizer with the chat template of its model, under the method name that transformers uses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from backend.text.chat import ChatTemplate
from backend.text.tokenizer import Tokenizer


class ChatTokenizer(Tokenizer):
    chat_template = ChatTemplate(None)

    @classmethod
    def from_directory(cls, path: str | Path) -> Self:
        """Raises ConfigError for a tokenizer or a chat template that cannot be read. A model need not have a template."""
        made = super().from_directory(path)
        made.chat_template = ChatTemplate.from_directory(path, made)
        return made

    def apply_chat_template(
        self,
        conversation: Sequence[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
    ) -> Any:
        """Token ids of a conversation, or its text with `tokenize=False`; the defaults are those of transformers.

        Raises Unsupported when the model has no template, and InvalidRequest for messages that the template refuses.
        """
        text = self.chat_template.render(list(conversation), add_generation_prompt, tools)
        return self.encode(text, add_special_tokens=False) if tokenize else text
