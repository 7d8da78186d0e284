"""Outputs with calls, in each format, made by a seeded generator: what models write, and what they should not.

A text is made of pieces: content, calls, and calls that are broken. Values of arguments hold what calls are made of: braces,
quotes, line breaks, and the marks of all formats.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from gateway.messages import Function
from gateway.tool_formats.table import TOOL_FORMATS

Arguments = dict[str, Any]
WORDS = [
    "{",
    "}",
    "]",
    '"',
    "'",
    "\\",
    "\n",
    "日本",
    "é",
    "🌍",
    " ",
    "a",
    "</tool_call>",
    "[TOOL_CALLS]",
    "<function=x>",
    ")",
]
WORDS += [
    "<|tool_call|>",
    "}}]",
    '{"name": "add"}',
    "<tool_call>",
    "# no",
    "\\n",
    "\t",
    "<|python_tag|>",
    "null",
    "</arg_value>",
    "</parameter>",
]
SCHEMA = {
    "type": "object",
    "properties": {"text": {"type": "string"}, "number": {"type": "number"}, "tree": {"type": "object"}, "flag": {}},
    "required": ["text"],
}
NAMES = ["add", "get-weather", "a.b", "x"]
FUNCTIONS = {name: Function.model_construct(name=name, parameters=SCHEMA) for name in NAMES}


class Case(NamedTuple):
    text: str
    calls: list[tuple[str, Arguments]]
    content: str | None = None  # None: not told; what is content is only told of texts without broken calls


def text_of(random: random.Random) -> str:
    return "".join(random.choices(WORDS, k=random.randrange(8)))


def value_of(random: random.Random, depth: int = 0) -> Any:
    match random.randrange(7 if depth < 3 else 5):
        case 0:
            return text_of(random)
        case 1:
            return random.randrange(-(10**12), 10**12)
        case 2:
            return random.random() * 100
        case 3:
            return random.choice([True, False, None])
        case 4:
            return {} if random.random() < 0.5 else []
        case 5:
            return [value_of(random, depth + 1) for _ in range(random.randrange(3))]
    return {text_of(random): value_of(random, depth + 1) for _ in range(random.randrange(3))}


def arguments_of(random: random.Random) -> Arguments:
    chosen: Arguments = {}
    if random.random() < 0.8:
        chosen["text"] = text_of(random)
    if random.random() < 0.5:
        chosen["number"] = random.choice([0, -1.5, 12345678901234567890, 1e300])
    if random.random() < 0.5:
        chosen["tree"] = {text_of(random): value_of(random)}
    if random.random() < 0.3:
        chosen["flag"] = random.choice([True, False, None, [1, "}"]])
    return chosen


def dumped(random: random.Random, value: Any) -> str:
    return json.dumps(value, ensure_ascii=random.random() < 0.5, indent=random.choice([None, None, 2]))


def _object(random: random.Random, name: str, arguments: Arguments, key: str = "arguments") -> str:
    return dumped(random, {"name": name, key: arguments})


_ENDS = re.compile(r"</arg_value>(\s|\\[nt])*</tool_call>")
Calls = list[tuple[str, Arguments]]


def hermes(random: random.Random, calls: Calls) -> str:
    gap = random.choice(["", "\n"])
    return "".join(f"<tool_call>{gap}{_object(random, *call)}{gap}</tool_call>" for call in calls)


def llama(random: random.Random, calls: Calls) -> str:
    tag = random.choice(["", "<|python_tag|>"])
    return tag + random.choice(["; ", ";", ", "]).join(_object(random, *call, "parameters") for call in calls)


def pythonic(random: random.Random, calls: Calls) -> str:
    mark, end = random.choice([("", ""), ("<|python_start|>", "<|python_end|>")])
    name = lambda one: one.replace("-", "_")
    written = [
        f"{name(function)}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
        for function, arguments in calls
    ]
    return f"{mark}[{', '.join(written)}]{end}"


def mistral(random: random.Random, calls: Calls) -> str:
    if random.random() < 0.5:
        return "[TOOL_CALLS]" + random.choice(["", " "]) + f"[{', '.join(_object(random, *call) for call in calls)}]"
    ids = random.choice(["", "[CALL_ID]abc123XYZ"])
    return "".join(f"[TOOL_CALLS]{name}{ids}[ARGS]{dumped(random, arguments)}" for name, arguments in calls)


def granite(random: random.Random, calls: Calls) -> str:
    return f"<|tool_call|>[{', '.join(_object(random, *call) for call in calls)}]"


def deepseek(random: random.Random, calls: Calls) -> str:
    blocks, is_old = [], random.random() < 0.5
    for name, arguments in calls:
        body = f"{name}<｜tool▁sep｜>{dumped(random, arguments)}"
        if is_old:
            body = f"function<｜tool▁sep｜>{name}\n```json\n{dumped(random, arguments)}\n```"
        blocks.append(f"<｜tool▁call▁begin｜>{body}<｜tool▁call▁end｜>")
    return "<｜tool▁calls▁begin｜>" + random.choice(["", "\n"]).join(blocks) + "<｜tool▁calls▁end｜>"


def kimi(random: random.Random, calls: Calls) -> str:
    blocks = [
        f"<|tool_call_begin|>functions.{name}:{i}<|tool_call_argument_begin|>{dumped(random, arguments)}<|tool_call_end|>"
        for i, (name, arguments) in enumerate(calls)
    ]
    return f"<|tool_calls_section_begin|>{''.join(blocks)}<|tool_calls_section_end|>"


def qwen_tags(random: random.Random, calls: Calls) -> str:
    def written(value: Any) -> str:
        return value if isinstance(value, str) else json.dumps(value)

    texts = []
    for name, arguments in calls:
        values = "".join(f"<parameter={key}>\n{written(value)}\n</parameter>\n" for key, value in arguments.items())
        texts.append(f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>")
    return "".join(texts)


def glm(random: random.Random, calls: Calls) -> str:
    texts = []
    for name, arguments in calls:
        values = "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{value if isinstance(value, str) else json.dumps(value)}</arg_value>\n"
            for key, value in arguments.items()
        )
        texts.append(f"<tool_call>{name}\n{values}</tool_call>")
    return "".join(texts)


WRITERS: dict[str, Callable[[random.Random, Calls], str]] = {
    "hermes": hermes,
    "llama": llama,
    "pythonic": pythonic,
    "mistral": mistral,
    "mistral_named": mistral,
    "granite": granite,
    "deepseek_v3": deepseek,
    "deepseek_v31": deepseek,
    "kimi": kimi,
    "qwen_tags": qwen_tags,
    "glm": glm,
}
WHOLE = ("llama", "pythonic")  # without a mark their calls are the whole answer
CONTENTS = ["", "Let me see.\n", "a < b { [ <to", "日本 🌍", "<｜tool", "\n\n"]


def cases(name: str, count: int = 200) -> list[Case]:
    """Outputs in a format. The same in every run."""
    chance = random.Random(f"calls in {name}")
    return [_case(name, chance) for _ in range(count)]


def _case(name: str, chance: random.Random) -> Case:
    calls = [(chance.choice(NAMES), arguments_of(chance)) for _ in range(chance.choice([1, 1, 1, 2, 3]))]
    if name == "pythonic":
        calls = [(function.replace("-", "_"), arguments) for function, arguments in calls]
    written = WRITERS[name](chance, calls)
    before = "" if name in WHOLE else chance.choice(CONTENTS)
    after = chance.choice(["", "", "", "\n", "done"])
    match chance.randrange(6):
        case 0:  # cut off
            return Case((before + written)[: chance.randrange(len(before + written) + 1)], [])
        case 1:  # broken somewhere
            place = chance.randrange(len(written))
            return Case(before + written[:place] + chance.choice(WORDS) + written[place + 1 :] + after, [])
    is_ambiguous = any(_ENDS.search(json.dumps(arguments)) for _, arguments in calls)  # texts stand as they are
    if is_ambiguous and name in ("glm", "qwen_tags"):
        return Case(before + written + after, [])
    return Case(before + written + after, calls, before + after)


assert set(WRITERS) | {"harmony"} == set(TOOL_FORMATS)  # a new format needs its writer here
