"""The prompts of a pipeline: by the chat template of the model, or by a ChatTemplateConfig."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from compat.llm import LLM, ParameterError
from compat.llm.chat import ChatTokenizer
from compat.lmdeploy.configs import ChatTemplateConfig

Messages = Sequence[Mapping[str, Any]]
_AROUND = ("system", "eosys", "user", "eoh", "assistant", "eoa", "tool", "eotool", "separator")
ROLES = ("system", "user", "assistant", "tool")


class Template:
    """Makes a prompt of a conversation. Raises ParameterError for messages that it cannot read."""

    def __init__(self, llm: LLM, config: ChatTemplateConfig | None) -> None:
        if config is not None and not isinstance(config, ChatTemplateConfig):
            raise TypeError(f"chat_template_config is a {type(config).__name__}, a ChatTemplateConfig is needed")
        self._llm, self._config = llm, config or ChatTemplateConfig()
        if self._config.capability not in (None, "chat", "completion"):
            raise ParameterError(f"capability is {self._config.capability!r}"[:100] + "; it is 'chat' or 'completion'")
        self._is_own = any(getattr(self._config, name) is not None for name in _AROUND)
        self.stop_words = list(self._config.stop_words or [])

    def of_text(self, prompt: str) -> dict[str, Any]:
        """The prompt of a conversation of one message."""
        if self._config.capability == "completion":
            return {"prompt": prompt}
        return self.of_messages([{"role": "user", "content": prompt}])

    def of_messages(self, messages: Messages) -> dict[str, Any]:
        checked = [_checked(message) for message in messages]
        meta = self._config.meta_instruction
        if meta and not any(message["role"] == "system" for message in checked):
            checked = [{"role": "system", "content": meta}, *checked]
        tokenizer = self._llm.tokenizer
        if self._config.capability == "completion":
            return {"prompt": "".join(message["content"] for message in checked)}
        if self._is_own:
            if tokenizer is None:
                raise ParameterError("there is no tokenizer; load the model with its tokenizer")
            return {"prompt_token_ids": tokenizer.encode(self._written(checked))}
        if not isinstance(tokenizer, ChatTokenizer):
            raise ParameterError("there is no chat template; load the model with its tokenizer, or give its directory")
        return {"prompt_token_ids": tokenizer.apply_chat_template(checked, add_generation_prompt=True)}

    def _written(self, messages: list[dict[str, str]]) -> str:
        config = self._config
        begins = {role: getattr(config, role) or "" for role in ROLES}
        ends = {
            "system": config.eosys or "",
            "user": config.eoh or "",
            "assistant": (config.eoa or "") + (config.separator or ""),
            "tool": config.eotool or "",
        }
        written = [begins[each["role"]] + each["content"] + ends[each["role"]] for each in messages]
        return "".join([*written, begins["assistant"]])


def _checked(message: Any) -> dict[str, str]:
    """A message of text. Its content may be a list of parts, as OpenAI has them."""
    role = message.get("role") if isinstance(message, Mapping) else None
    if role not in ROLES:
        raise ParameterError(f"a message has the role {role!r}"[:100] + f"; known are {', '.join(ROLES)}")
    content = message.get("content")
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
        content = None if any(not isinstance(text, str) for text in parts) else "".join(map(str, parts))
    if not isinstance(content, str):
        raise ParameterError(f"the content of a message of role {role} is no text; images and audio are not served")
    return {"role": role, "content": content}
