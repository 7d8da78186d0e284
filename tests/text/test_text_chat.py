"""ChatTemplate renders what transformers' apply_chat_template renders, within its caps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jinja2
import pytest
from transformers import AutoTokenizer

from backend.api.errors import ConfigError, InvalidRequest, Unsupported
from backend.text.chat import ChatTemplate
from backend.text.tokenizer import Tokenizer

CHATML = """{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""
LLAMA2 = """{% if messages[0]['role'] == 'system' %}{% set system = '<<SYS>>' ~ messages[0]['content'] ~ '<</SYS>>' %}
{% set rest = messages[1:] %}{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}
{% for message in rest %}
    {% if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Conversation roles must alternate') }}
    {% endif %}
    {% if message.role == 'user' %}{{ bos_token + '[INST] ' + (system if loop.first else '') + message.content }}
    {% else %}{% generation %}{{ ' ' + message.content | trim + ' ' + eos_token }}{% endgeneration %}{% endif %}
{% endfor %}"""
TOOLS = """{% set ns = namespace(last=-1) %}{{ bos_token }}
{%- for message in messages %}{% if message.role == 'system' %}{% continue %}{% endif %}
{%- if message.content is string %}{{ message.role | upper }}: {{ message.content }}
{%- elif message.content is defined %}{% for x in message.content %}[{{ x.text | default('?') }}]{% endfor %}{% endif %}
{%- set ns.last = loop.index0 %}
{%- endfor %}
{%- if tools %}{{ tools | tojson(indent=2) }}{{ tools[0] | tojson }}{% endif %}
{{ 'last ' ~ ns.last ~ (' in ' ~ strftime_now('%Y')) }}{% if add_generation_prompt %}>{% endif %}"""

CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be <brief> & kind."}, {"role": "user", "content": " two\n\nlines "}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b 'c' \"d\""},
        {"role": "user", "content": "é🙂"},
    ],
]
TOOL_CHAT = [
    {"role": "system", "content": "skipped"},
    {"role": "user", "content": [{"type": "text", "text": "x<y"}, {"type": "image"}]},
    {"role": "assistant", "content": None, "tool_calls": None},
]
TOOL_LIST = [{"type": "function", "function": {"name": "f", "parameters": {"z": "<é>", "a": [1, 2.5, None, True]}}}]


def write_model(path: Path, source: Path, **config: Any) -> Path:
    """A directory with the byte-level tokenizer of `source` and another chat template."""
    (path / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    known = json.loads((source / "tokenizer_config.json").read_text())
    known.pop("chat_template")
    (path / "tokenizer_config.json").write_text(json.dumps({**known, **config}))
    return path


@pytest.fixture
def byte_level(directories: dict[str, Path]) -> Path:
    return directories["byte_level_bpe"]


def load(path: Path, **caps: int) -> ChatTemplate:
    return ChatTemplate.from_directory(path, Tokenizer.from_directory(path), **caps)


@pytest.mark.parametrize("generation_prompt", [True, False])
@pytest.mark.parametrize("template", [CHATML, LLAMA2, TOOLS])
def test_rendering_equals_transformers(
    tmp_path: Path, byte_level: Path, template: str, generation_prompt: bool
) -> None:
    path = write_model(tmp_path, byte_level, chat_template=template)
    ours, theirs = load(path), AutoTokenizer.from_pretrained(path)
    tokenizer = Tokenizer.from_directory(path)
    for chat in CHATS:
        expected = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=generation_prompt)
        rendered = ours.render(chat, generation_prompt)
        assert rendered == expected
        ids = theirs.apply_chat_template(chat, add_generation_prompt=generation_prompt, return_dict=False)
        assert tokenizer.encode(rendered, add_special_tokens=False) == ids


def test_tools_parts_and_null_fields_render_as_in_transformers(tmp_path: Path, byte_level: Path) -> None:
    path = write_model(tmp_path, byte_level, chat_template=TOOLS)
    expected = AutoTokenizer.from_pretrained(path).apply_chat_template(TOOL_CHAT, tools=TOOL_LIST, tokenize=False)
    assert load(path).render(TOOL_CHAT, False, TOOL_LIST) == expected


def test_a_template_file_wins_over_the_config(tmp_path: Path, byte_level: Path) -> None:
    path = write_model(tmp_path, byte_level, chat_template="from the config")
    (path / "chat_template.jinja").write_text(CHATML)
    expected = AutoTokenizer.from_pretrained(path).apply_chat_template(CHATS[0], tokenize=False)
    assert load(path).render(CHATS[0], False) == expected == "<|im_start|>user\nHi<|im_end|>\n"


def test_of_named_templates_the_default_is_taken(tmp_path: Path, byte_level: Path) -> None:
    named = [{"name": "rag", "template": "no"}, {"name": "default", "template": CHATML}]
    path = write_model(tmp_path, byte_level, chat_template=named)
    expected = AutoTokenizer.from_pretrained(path).apply_chat_template(CHATS[2], tokenize=False)
    assert load(path).render(CHATS[2], False) == expected


def test_a_model_without_template_says_so(tmp_path: Path, byte_level: Path) -> None:
    template = load(write_model(tmp_path, byte_level))
    assert not template.exists
    with pytest.raises(Unsupported, match="no chat template"):
        template.render(CHATS[0])


def test_a_template_that_is_not_jinja_is_refused_when_it_is_read() -> None:
    with pytest.raises(ConfigError, match="not valid at line 2"):
        ChatTemplate("x\n{% for %}")


def test_the_templates_own_refusal_reaches_the_client() -> None:
    template = ChatTemplate(LLAMA2, {"bos_token": "<s>", "eos_token": "</s>"})
    with pytest.raises(InvalidRequest, match="refuses these messages: Conversation roles must alternate"):
        template.render([{"role": "assistant", "content": "me first"}])


def test_any_other_failure_of_a_template_ends_the_request_without_details() -> None:
    template = ChatTemplate("{{ messages[0].content + 1 }}{{ messages[5].x.y }}")
    with pytest.raises(InvalidRequest, match=r"cannot render these messages \(TypeError\)"):
        template.render(CHATS[0])


@pytest.mark.parametrize(
    "escape",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ raise_exception.__globals__ }}",
        "{% for i in range(10000000) %}x{% endfor %}",
    ],
)
def test_the_sandbox_holds(escape: str) -> None:
    try:
        assert ChatTemplate(escape).render(CHATS[0]) == ""  # an unsafe attribute is undefined, and prints as nothing
    except InvalidRequest as error:
        assert isinstance(error.__cause__, (jinja2.TemplateError, OverflowError))


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "there are 0 messages"),
        ([{"role": "user", "content": "x"}] * 6, "there are 6 messages, allowed is 1 to 5"),
        ("user: hi", "must be a list of objects"),
        (["hi"], "must be a list of objects"),
        ([{"content": "x"}], "has no role"),
        ([{"role": "user", "content": "x" * 101}], "characters, allowed is 100"),
        ([{"role": "user", "content": object()}], "holds a object"),
        ([{"role": "user", "content": {1: 2}}], "holds a dict"),
    ],
)
def test_messages_beyond_the_caps_are_refused(messages: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        ChatTemplate(CHATML, max_messages=5, max_chars=100).render(messages)


def test_tools_count_among_the_characters_of_a_chat() -> None:
    messages, tools = [{"role": "user", "content": "x" * 40}], [{"type": "function", "function": {"name": "f" * 100}}]
    template = ChatTemplate(CHATML, max_chars=150)
    assert "x" * 40 in template.render(messages)
    with pytest.raises(InvalidRequest, match="characters, allowed is 150; shorten them"):
        template.render(messages, tools=tools)


def test_deeply_nested_messages_are_refused() -> None:
    content: Any = "x"
    for _ in range(100_000):
        content = [content]
    with pytest.raises(InvalidRequest, match="nested deeper than 16"):
        ChatTemplate(CHATML).render([{"role": "user", "content": content}])


@pytest.mark.parametrize(("depth", "refused"), [(16, False), (17, True)])
def test_a_message_may_be_nested_sixteen_levels_deep(depth: int, refused: bool) -> None:
    content: Any = "x"
    for _ in range(depth):
        content = [content]
    template = ChatTemplate("{{ messages[0].content | tojson }}")
    if refused:
        with pytest.raises(InvalidRequest, match="nested deeper than 16"):
            template.render([{"role": "user", "content": content}])
    else:
        assert template.render([{"role": "user", "content": content}]) == "[" * 16 + '"x"' + "]" * 16


@pytest.mark.parametrize(("levels", "refused"), [(60, False), (90, True)])
def test_tools_may_be_nested_deeper_than_messages(levels: int, refused: bool) -> None:
    schema: Any = {"type": "string"}
    for _ in range(levels):
        schema = {"items": schema}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    template = ChatTemplate("{{ tools | tojson }}")
    if refused:
        with pytest.raises(InvalidRequest, match="the tools are nested deeper than 80 levels"):
            template.render([{"role": "user", "content": "x"}], tools=tools)
    else:
        assert template.render([{"role": "user", "content": "x"}], tools=tools).count("items") == levels


def test_of_a_message_only_what_is_null_is_left_out() -> None:
    template = ChatTemplate("{% for key in messages[0] %}{{ key }}={{ messages[0][key] | tojson }} {% endfor %}")
    message = {"role": "", "content": "", "flag": False, "count": 0, "list": [], "object": {}, "nothing": None}
    assert template.render([message]) == 'role="" content="" flag=false count=0 list=[] object={} '


def test_a_result_beyond_the_cap_is_cut_off_while_it_is_rendered() -> None:
    template = ChatTemplate("{% for i in range(90000) %}{{ messages[0].content }}{% endfor %}", max_chars=1000)
    with pytest.raises(InvalidRequest, match="longer than 1000 characters"):
        template.render([{"role": "user", "content": "x" * 100}])


def test_a_file_of_the_operators_replaces_all_templates_of_the_model(tmp_path: Path, byte_level: Path) -> None:
    """With tools too, for which the model has a template of its own."""
    model = write_model(tmp_path, byte_level, chat_template="model's own")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("the model's own for tools")
    target = tmp_path / "elsewhere" / "target.jinja"
    target.parent.mkdir()
    target.write_text("{{ messages[0].content }}, and {{ tools | length if tools else 'no' }} tools")
    (tmp_path / "mine.jinja").symlink_to(target)
    template = ChatTemplate.from_directory(model, Tokenizer.from_directory(model), str(tmp_path / "mine.jinja"))
    assert template.exists
    assert template.render(CHATS[0]) == "Hi, and no tools"
    assert template.render(CHATS[0], tools=TOOL_LIST) == "Hi, and 1 tools"


def test_further_variables_reach_the_template_and_count_among_the_characters() -> None:
    template = ChatTemplate(
        "{% if enable_thinking is false %}no thinking{% else %}{{ documents }}{% endif %}", max_chars=60
    )
    assert template.render(CHATS[0], further={"enable_thinking": False}) == "no thinking"
    assert template.render(CHATS[0], further={"template": 1, "self": 2}) == "None", "any name may be one"
    assert template.render(CHATS[0], further={"documents": "mine"}) == "mine"
    with pytest.raises(InvalidRequest, match="allowed is 60"):
        template.render(CHATS[0], further={"x": "y" * 61})
    deep: Any = []
    for _ in range(30):
        deep = [deep]
    with pytest.raises(InvalidRequest, match="nested deeper"):
        template.render(CHATS[0], further={"x": deep})


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt"])
def test_a_further_variable_takes_the_place_of_none_that_the_request_has(name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^chat_template_kwargs holds {name}, which the request has a key for"):
        ChatTemplate(CHATML).render(CHATS[0], further={name: "x"})


@pytest.mark.parametrize("content", ["def main(", "  two spaces ahead", "one behind "])
def test_the_last_message_is_continued_as_transformers_does(tmp_path: Path, byte_level: Path, content: str) -> None:
    path = write_model(tmp_path, byte_level, chat_template=CHATML)
    chat = [{"role": "user", "content": "def main("}, {"role": "assistant", "content": content}]
    theirs = AutoTokenizer.from_pretrained(str(path))
    expected = theirs.apply_chat_template(chat, tokenize=False, continue_final_message=True)
    assert load(path).render(chat, continue_final=True) == expected
    assert expected.endswith(content.strip()) or expected.endswith(content)


@pytest.mark.parametrize("content", ["", "  "])
def test_a_last_message_without_text_cannot_be_continued(content: Any) -> None:
    with pytest.raises(InvalidRequest, match="^continue_final_message needs text in the last message"):
        ChatTemplate(CHATML).render([{"role": "assistant", "content": content}], continue_final=True)
