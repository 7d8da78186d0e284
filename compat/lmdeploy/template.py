"""The prompts of a pipeline: by the chat template of the model, or by a ChatTemplateConfig."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from compat.llm import LLM, ParameterError
from compat.llm.chat import ChatTokenizer
from compat.llm.images import lifted
from compat.lmdeploy.configs import ChatTemplateConfig
from compat.lmdeploy.vl import content_of

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

    def of_text(self, prompt: str, pictures: Sequence[Any] = ()) -> dict[str, Any]:
        """The prompt of a conversation of one message. Where the model's own template does not write it, its text has the
        model's placeholder for each picture.
        """
        if self._config.capability == "completion":
            return as_prompt(prompt, pictures)
        if self._is_own and pictures:
            return as_prompt(self.of_messages([{"role": "user", "content": prompt}]), pictures)
        return self.of_messages([{"role": "user", "content": content_of(prompt, list(pictures))}])

    def of_messages(self, messages: Messages) -> dict[str, Any]:
        shown, pictures = lifted(messages)
        if pictures and (self._is_own or self._config.capability == "completion"):
            raise ParameterError(
                "a message has a picture, and the model's own chat template is not used, which says where it stands; write "
                "the model's placeholder into a text, and give (text, picture)"
            )
        return as_prompt(self._of_shown(shown), pictures)

    def _of_shown(self, messages: Messages) -> dict[str, Any]:
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

    def _written(self, messages: list[dict[str, Any]]) -> str:
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


def as_prompt(prompt: str | dict[str, Any], pictures: Sequence[Any]) -> dict[str, Any]:
    """The prompt of an LLM, with its pictures."""
    made = {"prompt": prompt} if isinstance(prompt, str) else prompt
    return {**made, "multi_modal_data": {"image": list(pictures)}} if pictures else made


def _checked(message: Any) -> dict[str, Any]:
    """A message of text and places for pictures. Its content may be a list of parts, as OpenAI has them."""
    role = message.get("role") if isinstance(message, Mapping) else None
    if role not in ROLES:
        raise ParameterError(f"a message has the role {role!r}"[:100] + f"; known are {', '.join(ROLES)}")
    content = message.get("content")
    if isinstance(content, list) and {"type": "image"} in content:
        texts = [part for part in content if part != {"type": "image"}]
        if all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in texts):
            return {"role": role, "content": content}
    elif isinstance(content, list):
        parts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
        content = None if any(not isinstance(text, str) for text in parts) else "".join(map(str, parts))
    if not isinstance(content, str):
        raise ParameterError(
            f"the content of a message of role {role} is neither text nor pictures; leave audio and video out"
        )
    return {"role": role, "content": content}
