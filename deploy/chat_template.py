"""The chat template that a server will use: of the model, or the operator's own file, which is tried before anything starts."""

from __future__ import annotations

from pathlib import Path

from backend.api.config.schema import EngineConfig
from backend.api.errors import ConfigError, EverbatchError
from backend.text.chat import ChatTemplate, read_templates
from backend.text.tokenizer import Tokenizer
from deploy.errors import UserError

SAMPLE = [{"role": "user", "content": "Hello"}]


def check_own(config: EngineConfig) -> None:
    """Try the operator's template, where there is one, on a chat of one message. Raises UserError in one sentence."""
    file, model = config.model.chat_template, config.model.path
    if not file:
        return
    try:
        ChatTemplate.from_directory(model, Tokenizer.from_directory(model), file).render(SAMPLE)
    except EverbatchError as error:
        raise UserError(f"--chat-template {file}: {error}") from None


def source(config: EngineConfig) -> str:
    """The source of the chat template, of all of them where there are several; '' where none can be read."""
    if not config.model.path:
        return ""
    try:
        return "\n".join(read_templates(Path(config.model.path), config.model.chat_template).values())
    except ConfigError:
        return ""


def exists(config: EngineConfig) -> bool:
    """True if the model has a chat template, also one that cannot be read: the server reports what is wrong with that. True
    for a server without a checkpoint, which may have one.
    """
    if not config.model.path:
        return True
    try:
        return "default" in read_templates(Path(config.model.path), config.model.chat_template, is_logged=True)
    except ConfigError:
        return True
