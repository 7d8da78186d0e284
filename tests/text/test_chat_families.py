"""The chat templates of well-known families render as in transformers, word for word, and refuse as they do there.

The templates in chat_templates/ were written from memory: its README.md.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast

from backend.api.errors import ConfigError, InvalidRequest
from backend.text.chat import ChatTemplate
from backend.text.tokenizer import Tokenizer
from backend.text.tool_prompt import with_tools, without_calls
from tests.text.tokenizers_made import word_level, write_directory

Chat = list[dict[str, Any]]

TEMPLATES = Path(__file__).parent / "chat_templates"
TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
LLAMA3_HI = "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
VICUNA_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
HI = {  # what each family makes of one user's "Hi"
    "llama2": "<s>[INST] Hi [/INST]",
    "llama3": "<s>" + LLAMA3_HI,
    "llama3_1": None,  # has the date
    "mistral_v1": "<s>[INST] Hi [/INST]",
    "mistral_v3": "<s>[INST] Hi[/INST]",
    "qwen2_5": "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "qwen3": "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "gemma2": "<s><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n",
    "phi3": "<|user|>\nHi<|end|>\n<|assistant|>\n",
    "zephyr": "<|user|>\nHi</s>\n<|assistant|>\n",
    "vicuna": f"<s>{VICUNA_SYSTEM} USER: Hi ASSISTANT:",
    "deepseek_v3": "<s><｜User｜>Hi<｜Assistant｜>",
    "command_r": "<s><|START_OF_TURN_TOKEN|><|USER_TOKEN|>Hi<|END_OF_TURN_TOKEN|>"
    "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
    "smollm": "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "falcon": "User: Hi\nFalcon:",
}
CONTENTS = [
    "", " ", "Hi", " two\n\nlines \r\n", "été 人人 👩‍👩‍👧 e\u0301\u200d\u2028", "<b> & 'q' \"d\" \\n {{ bos_token }} {% if %}",
    "</s><|im_end|>", "<think>\nwhy\n</think>\n\nso", "<tool_response>4</tool_response>", "\x00\ufeff", "long " * 300,
]  # fmt: skip
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "wetter",
            "description": "The <weather> & 'more' in a city, \"now\"",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "Österreich 🙂"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "none", "description": "", "parameters": {"properties": {}}}},
]
TOOL_CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "wetter", "arguments": {"city": "Köln <1>"}}}

KNOWING = ("qwen2_5", "llama3_1", "mistral_v3")  # families whose templates show tools
SPECIAL = ("image_token", "audio_token", "image", "eoi_token", "boi_token", "odd_token", "plain_token")

every_family = pytest.mark.parametrize("name", list(HI))
refusing = {
    "llama2",
    "mistral_v1",
    "mistral_v3",
    "gemma2",
    "vicuna",
    "command_r",
}  # families that want an order of roles


@pytest.fixture(scope="module")
def backend() -> Any:
    return word_level()[0]


def source_of(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")


def both(name: str, backend: Any) -> tuple[ChatTemplate, PreTrainedTokenizerFast]:
    theirs = PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=source_of(name), **TOKENS)
    return ChatTemplate(source_of(name), TOKENS), theirs


def assert_same(ours: ChatTemplate, theirs: Any, chat: Chat, generation: bool, tools: Any = None) -> str:
    """Compare one rendering; returns "text", "refused" or "failed". A date may change while the test runs."""

    def expected() -> tuple[str, str]:
        try:
            given = {"add_generation_prompt": generation, "tools": tools, "tokenize": False}
            return "text", theirs.apply_chat_template(chat, **given)
        except TemplateError as error:
            return ("refused", str(error)) if type(error) is TemplateError else ("failed", type(error).__name__)
        except TypeError as error:
            return "failed", type(error).__name__

    before, got = expected(), _outcome(ours, chat, generation, tools)
    assert got == before or got == expected(), chat
    return got[0]


def _outcome(ours: ChatTemplate, chat: Chat, generation: bool, tools: Any) -> tuple[str, str]:
    try:
        return "text", ours.render(chat, generation, tools)
    except InvalidRequest as error:
        message = str(error)
        refused = message.partition("the chat template refuses these messages: ")[2]
        return ("refused", refused) if refused else ("failed", type(error.__cause__).__name__)


def valid_chat(rng: random.Random, turns: int) -> Chat:
    roles = ["system"] * rng.randrange(2) + ["user", "assistant"] * turns
    return [{"role": role, "content": rng.choice(CONTENTS)} for role in roles[: rng.choice([-1, len(roles)]) or None]]


def any_chat(rng: random.Random) -> Chat:
    roles = rng.choices(
        ["system", "user", "assistant", "tool", "observer", ""], [3, 5, 5, 1, 1, 1], k=rng.randrange(1, 7)
    )
    return [{"role": role, "content": rng.choice(CONTENTS)} for role in roles]


@every_family
def test_a_greeting_is_rendered_in_the_familys_form(name: str, backend: Any) -> None:
    ours, theirs = both(name, backend)
    chat = [{"role": "user", "content": "Hi"}]
    assert assert_same(ours, theirs, chat, True) == "text"
    assert HI[name] is None or ours.render(chat) == HI[name]


@every_family
@pytest.mark.parametrize("generation", [True, False])
def test_conversations_render_as_in_transformers(name: str, generation: bool, backend: Any) -> None:
    ours, theirs = both(name, backend)
    rng = random.Random(name)
    outcomes = Counter(
        assert_same(ours, theirs, valid_chat(rng, turns), generation) for turns in [*([1, 2, 3, 7] * 8), 150]
    )
    assert outcomes["text"] > 10, outcomes


@every_family
def test_any_order_of_roles_is_rendered_or_refused_as_in_transformers(name: str, backend: Any) -> None:
    ours, theirs = both(name, backend)
    rng = random.Random(name + "roles")
    outcomes = Counter(assert_same(ours, theirs, any_chat(rng), rng.random() < 0.5) for _ in range(100))
    assert (outcomes["refused"] > 10) == (name in refusing), outcomes


def test_the_familys_own_words_refuse_a_wrong_order(backend: Any) -> None:
    ours, _ = both("gemma2", backend)
    with pytest.raises(InvalidRequest, match="^the chat template refuses these messages: System role not supported$"):
        ours.render([{"role": "system", "content": "x"}, {"role": "user", "content": "y"}])
    ours, _ = both("mistral_v3", backend)
    with pytest.raises(InvalidRequest, match=r"After the optional system message, conversation roles must alternate"):
        ours.render([{"role": "user", "content": "x"}, {"role": "user", "content": "y"}])


@every_family
@pytest.mark.parametrize("last", [{}, {"content": None}, {"content": [{"type": "text", "text": "parts é"}]}])
def test_a_message_without_text_is_rendered_or_refused_as_in_transformers(
    name: str, last: dict[str, Any], backend: Any
) -> None:
    ours, theirs = both(name, backend)
    for role in ("user", "assistant"):
        assert_same(ours, theirs, [{"role": "user", "content": "x"}, {"role": role, **last}], False)
        assert_same(ours, theirs, [{"role": role, **last}], True)


TOOL_CHAT: Chat = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "How is it in Köln?"},
    {"role": "assistant", "content": None, "tool_calls": [TOOL_CALL]},
    {"role": "tool", "tool_call_id": "abcdefghi", "name": "wetter", "content": '{"temperature": "4 °C"}'},
    {"role": "assistant", "content": "Cold."},
    {"role": "user", "content": "Thanks"},
]


@pytest.mark.parametrize("name", KNOWING)
def test_tools_and_calls_render_as_in_transformers(name: str, backend: Any) -> None:
    ours, theirs = both(name, backend)
    for turns in range(1, len(TOOL_CHAT) + 1):
        for tools in (None, TOOLS, TOOLS[:1], []):
            outcome = assert_same(ours, theirs, TOOL_CHAT[:turns], True, tools)
            assert outcome == "text" or turns > 2 or name in {*refusing, "llama3_1"}


@pytest.mark.parametrize("name", [name for name in HI if name not in KNOWING])
def test_a_template_that_knows_no_tools_is_given_them_as_text(name: str, backend: Any) -> None:
    """No template refuses that, and what it makes of it is what transformers makes of the same messages."""
    ours, theirs = both(name, backend)
    has_calls = "tool_calls" in source_of(name)
    takes_system = name not in ("gemma2", "mistral_v1")
    for first in (0, 1) if takes_system else (1,):
        for turns in range(2, len(TOOL_CHAT) + 1):
            for tools in (None, TOOLS, []):
                chat = TOOL_CHAT[first:turns]
                told = chat if has_calls or turns < 3 else without_calls(chat)
                text = ours.render(chat, True, tools)
                given = with_tools(told, tools, takes_system) if tools else told
                assert text == theirs.apply_chat_template(given, add_generation_prompt=True, tokenize=False)
                assert ('"name": "wetter", "description"' in text) == bool(tools)
                assert ("Köln <1>" in text) == (turns > 2) and ("4 °C" in text) == (turns > 3)


def test_calls_and_their_results_become_text() -> None:
    calls = [{"id": i, "function": {"name": name, "arguments": {"n": 1}}} for i, name in (("1", "a"), ("2", "b"))]
    chat: Chat = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "I look.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "2", "content": "two"},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "one"}]},
        {"role": "user", "content": "and?"},
        {"role": "assistant", "tool_calls": calls[:1]},
        {"role": "tool", "tool_call_id": "x", "content": ""},
    ]
    first, second = (json.dumps({"name": name, "arguments": {"n": 1}}) for name in "ab")
    texts = ["Result of b:\ntwo", "Result of a:", "one", "and?"]
    assert without_calls(chat) == [
        chat[0],
        {"role": "assistant", "content": f"I look.\n\n[{first}, {second}]"},
        {"role": "user", "content": [{"type": "text", "text": text} for text in texts]},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "Result of the function:"},
    ]
    hostile: Chat = [{"role": "assistant", "content": 5, "tool_calls": [None, {"function": 7}, {}]}, {"role": "tool"}]
    assert len(without_calls(hostile)) == 2


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
def test_an_answers_reasoning_is_found_under_each_of_its_names(key: str, backend: Any) -> None:
    chat = [{"role": "user", "content": "4?"}, {"role": "assistant", "content": "yes", key: "2 + 2 é"}]
    ours, theirs = both("qwen3", backend)
    assert assert_same(ours, theirs, chat, False) == "text"
    assert "<think>\n2 + 2 é\n</think>" in ours.render(chat, False)
    shown = "{% for m in messages %}{{ m.thinking }}|{{ m.reasoning_content }}|{{ m.reasoning }};{% endfor %}"
    theirs.chat_template = shown
    for more in ({}, {"reasoning": "other"}, {"thinking": ""}, {"reasoning_content": None, "thinking": "own"}):
        mixed = [chat[0], {**more, **chat[1]}]
        assert assert_same(ChatTemplate(shown), theirs, mixed, False) == "text"


def test_with_tools_the_template_named_for_them_is_taken(tmp_path: Path, backend: Any) -> None:
    named = {"default": source_of("command_r"), "tool_use": source_of("command_r_tool_use"), "rag": "{{ never }}"}
    listed = [{"name": key, "template": source} for key, source in named.items()]
    write_directory(tmp_path, backend, {**TOKENS, "chat_template": listed})
    ours = ChatTemplate.from_directory(tmp_path, Tokenizer.from_directory(tmp_path))
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    chat = valid_chat(random.Random(1), 2)
    for tools in (None, TOOLS, []):
        assert assert_same(ours, theirs, chat, True, tools) == "text"
    assert "## Available Tools" in ours.render(chat, tools=TOOLS)
    assert "## Available Tools" not in ours.render(chat)


def test_templates_of_their_own_files_win_over_the_config(tmp_path: Path, backend: Any) -> None:
    write_directory(tmp_path, backend, {**TOKENS, "chat_template": [{"name": "tool_use", "template": "config"}]})
    (tmp_path / "chat_template.jinja").write_text(source_of("command_r"), encoding="utf-8")
    more = tmp_path / "additional_chat_templates"
    more.mkdir()
    for with_tool_file in (False, True):
        if with_tool_file:
            (more / "tool_use.jinja").write_text(source_of("command_r_tool_use"), encoding="utf-8")
        ours = ChatTemplate.from_directory(tmp_path, Tokenizer.from_directory(tmp_path))
        theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
        for tools in (None, TOOLS) if with_tool_file else (None,):
            assert assert_same(ours, theirs, [{"role": "user", "content": "x"}], True, tools) == "text"


@pytest.mark.parametrize(
    "named",
    [
        {"image_token": "<img>", "add_bos_token": True, "odd_token": 7, "plain_token": {"content": "<plain>"}},
        {"image_token": {"content": "<img>", "__type": "AddedToken", "special": True}},
        {"extra_special_tokens": {"audio_token": "<aud>", "image": "<img>"}, "image_token": "<img2>"},
        {
            "extra_special_tokens": {"eoi_token": "</img>"},
            "bos_token": "<s>",
            "eos_token": {"content": "</s>", "__type": "AddedToken"},
        },
        {"model_specific_special_tokens": {"image_token": "<img>"}, "extra_special_tokens": ["<one>", "<two>"]},
        {"additional_special_tokens": ["<one>"], "boi_token": "<one>"},
    ],
)
def test_the_tokens_that_a_model_names_are_variables_of_its_template(
    named: dict[str, Any], tmp_path: Path, backend: Any
) -> None:
    shown = "".join("{{ " + name + " | default('-') }}|" for name in ("bos_token", *SPECIAL))
    write_directory(tmp_path, backend, {**named, "chat_template": shown})
    tokenizer, theirs = Tokenizer.from_directory(tmp_path), PreTrainedTokenizerFast.from_pretrained(tmp_path)
    chat = [{"role": "user", "content": "x"}]
    assert assert_same(ChatTemplate.from_directory(tmp_path, tokenizer), theirs, chat, True) == "text"
    assert tokenizer.special_tokens == theirs.special_tokens_map
    text = "".join(theirs.special_tokens_map.values()) + "<one><two><plain>"
    assert tokenizer.encode(text) == theirs.encode(text)
    added = theirs.added_tokens_decoder.items()
    assert tokenizer.special_ids == {token_id for token_id, token in added if token.special}


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"image_token": {"content": 5, "__type": "AddedToken"}}, "tokenizer_config.json: image_token.content"),
        ({"model_specific_special_tokens": {"image_token": 5}}, "model_specific_special_tokens"),
        ({f"n{n}_token": str(n) for n in range(20_001)}, "names 20001 tokens, at most 20000 can be added"),
    ],
)
def test_a_named_token_that_is_none_is_refused(
    named: dict[str, Any], message: str, tmp_path: Path, backend: Any
) -> None:
    with pytest.raises(ConfigError, match=message):
        Tokenizer.from_directory(write_directory(tmp_path, backend, named))


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in [1, 2, 3, 4] %}{% if i == 2 %}{% continue %}{% elif i == 4 %}{% break %}{% endif %}{{ i }}{% endfor %}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
        "{% set ns = namespace(_n=0) %}{{ ns._n }}",
        "{% set ns = namespace() %}{% set ns._n = 1 %}{{ ns._n }}",
        "{{ dict(a=1, b=[2]) | tojson }}{{ dict.fromkeys(['k'], 0) | tojson }}{{ dict([['x', 1]]).x }}",
        "{{ dict.mro() }}",
        "{{ tools is none }}{{ tools is defined }}{{ documents is none }}{{ nothing is defined }}",
        "{{ bos_token }}{{ eos_token }}{{ unk_token }}{{ pad_token is defined }}{{ cls_token }}",
        "{{ {'é': '<&>', 'n': 1.5, 't': true, 'z': none} | tojson }}{{ [1, {'a': 2}] | tojson(indent=2) }}",
        "{{ {'b': 1, 'a': 'ü'} | tojson(ensure_ascii=true, separators=(',', ':'), sort_keys=true) }}",
        "{{ strftime_now('%Y-%m-%d') }}{{ strftime_now('') }}",
        "{% generation %}{{ messages[0].content }}{% endgeneration %}",
        "{% macro turn(m, end='') %}<{{ m.role }}>{{ m['content'] }}{{ end }}{% endmacro %}{{ turn(messages[0], '!') }}",
        "{{ messages | map(attribute='role') | join(',') }}{{ messages | selectattr('role', 'equalto', 'user') | list }}",
        "  {% if true %}\n  a\n  {% endif %}\n  b {#- gone -#}  \n\n",
        "a\r\nb\rc\n{{ 'd\r\ne' }}\n",
        "{{ 9 ** 20 }}{{ 7 // 2 }}{{ '%s-%d' % ('x', 3) }}{{ 'a' 'b' }}{{ 1 ~ none ~ true }}",
        "{{ raise_exception('nö: ' ~ messages[0].role) }}",
        "{{ missing.attribute }}",
        "{{ messages[0].content.upper().split() }}{{ messages[0]['content'][::-1] }}{{ 'x' in messages[0].content }}",
        "{{ messages.append(1) }}",
        "{{ messages | string }}{{ messages[0] | items | list }}",
        "{% set x = messages | last %}{{ x.content | trim | replace('i', 'ï') | indent(4) | e }}",
    ],
)
def test_what_templates_use_works_as_in_transformers(source: str, backend: Any) -> None:
    theirs = PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=source, **TOKENS)
    for chat in ([{"role": "user", "content": "Hi x\ny"}], valid_chat(random.Random(2), 2)):
        assert_same(ChatTemplate(source, TOKENS), theirs, chat, True)


def test_every_template_here_is_tried() -> None:
    names = {path.stem for path in TEMPLATES.glob("*.jinja")}
    assert names == {*HI, "command_r_tool_use"}
