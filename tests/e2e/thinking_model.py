"""The default model with the marks of Magistral as special tokens, and a chat template that begins the reasoning itself."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

MODEL = Path(__file__).resolve().parents[2] / "models" / "default"
MARKS = ("[TOOL_CALLS]", "[THINK]", "[/THINK]")
TEMPLATE = """{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}[THINK]{{ message.reasoning_content }}[/THINK]{% endif %}{{ message.content }}\
{% for call in message.tool_calls or [] %}[TOOL_CALLS][{{ call.function | tojson }}]{% endfor %}<|im_end|>
{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is not defined or enable_thinking %}[THINK]{% endif %}{% endif %}"""


def make_model(directory: Path) -> Path:
    """The marks have the ids of the last tokens that the vocabulary's last merges have made, so that no weight changes."""
    shutil.copytree(MODEL, directory)
    path = directory / "tokenizer.json"
    content: dict[str, Any] = json.loads(path.read_text())
    vocab, merges = content["model"]["vocab"], content["model"]["merges"]
    last = sorted(vocab, key=lambda token: int(vocab[token]))[-len(MARKS) :]
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    content["added_tokens"] += [{"id": vocab[token], "content": mark, **plain} for token, mark in zip(last, MARKS)]
    for token in last:
        del vocab[token]
    del merges[-len(MARKS) :]
    path.write_text(json.dumps(content))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory
