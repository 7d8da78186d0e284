"""The capabilities of a model, which it tells with the tokens of a prompt; /v1/models and other lists have them from there."""

from __future__ import annotations

from backend.core.step import ModelInfo
from backend.serving.wires.front import TextTools


def capabilities_of(model: ModelInfo, tools: TextTools) -> list[str]:
    """Some of `completion`, `chat`, `tools`, `vision`, `fim` and `embedding`."""
    if not model.has_head:
        return ["embedding"]
    chats = tools.template.exists
    has = {"completion": True, "chat": chats, "tools": chats, "vision": model.image_token_id >= 0, "fim": tools.fim}
    return [name for name, value in has.items() if value]
