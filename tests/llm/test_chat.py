"""LLM.chat and the tokenizer's apply_chat_template."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import tokenizers
import transformers

from backend.api import InvalidRequest, Unsupported
from compat.llm import LLM, GuidedDecodingParams, ParameterError, SamplingParams
from compat.llm.llm import _as_tokenizer
from compat.llm.mapping import guide

TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}"
    "{% if tools %}[{{ tools | length }} tools]{% endif %}{% if add_generation_prompt %}assistant:{% endif %}"
)
HELLO = [{"role": "user", "content": "Hello"}]
ASKED = SamplingParams(max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def chat(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(model_dir, path)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    backend = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    begins = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.post_processor = begins  # plain prompts begin with <s>; the template writes its own
    backend.save(str(path / "tokenizer.json"))
    with LLM(path) as llm:
        yield llm


def test_a_conversation_is_generated_from_what_the_template_makes_of_it(chat: LLM) -> None:
    text = "<s>user: Hello</s>assistant:"
    assert chat.tokenizer.apply_chat_template(HELLO, add_generation_prompt=True, tokenize=False) == text
    output = chat.chat(HELLO, ASKED)
    assert output.prompt_token_ids == chat.tokenizer.encode(text, add_special_tokens=False)
    assert output.outputs == chat.generate({"prompt_token_ids": output.prompt_token_ids}, ASKED).outputs
    several = chat.chat([HELLO, [*HELLO, {"role": "assistant", "content": "Hi"}]], [ASKED, ASKED])
    assert several[0].outputs == output.outputs and len(several) == 2 and chat.chat([], ASKED) == []


def test_the_tokenizer_makes_what_that_of_transformers_makes(chat: LLM) -> None:
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(Path(chat.executor.hello.model_path) / "tokenizer.json"), chat_template=TEMPLATE
    )
    for options in ({}, {"add_generation_prompt": True}, {"tokenize": False}):
        expected = (
            theirs.apply_chat_template(HELLO, return_dict=False, **options)
            if options.get("tokenize", True)
            else (theirs.apply_chat_template(HELLO, **options))
        )
        assert chat.tokenizer.apply_chat_template(HELLO, **options) == expected
    assert _as_tokenizer(theirs).apply_chat_template(HELLO, tokenize=False) == "<s>user: Hello</s>"


def test_tools_reach_the_template(chat: LLM) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    with_tools = chat.chat(HELLO, ASKED, tools=tools).prompt_token_ids
    assert with_tools == chat.tokenizer.encode("<s>user: Hello</s>[1 tools]assistant:", add_special_tokens=False)


def test_without_a_template_or_a_tokenizer_it_is_said_what_is_missing(llm: LLM, chat: LLM, model_dir: Path) -> None:
    with pytest.raises(Unsupported, match="this model has no chat template; send the prompt as text"):
        llm.chat(HELLO, ASKED)
    with pytest.raises(InvalidRequest, match="a message has no role"):
        chat.chat([{"content": "x"}], ASKED)
    with LLM(model_dir, skip_tokenizer_init=True) as without:
        with pytest.raises(ParameterError, match="load the model with its tokenizer"):
            without.chat(HELLO, ASKED)


def test_a_choice_is_a_guide(chat: LLM) -> None:
    asked = SamplingParams(
        max_tokens=20, guided_decoding=GuidedDecodingParams(choice=["red.", "green"]), top_k=50, seed=3
    )
    assert chat.chat(HELLO, asked).outputs[0].text in ("red.", "green")
    assert guide(GuidedDecodingParams(choice=["a.b"])).text == r"a\.b"
    for wrong in ("red", [], [""], [1]):
        with pytest.raises(InvalidRequest, match="guided_decoding.choice is no list of texts"):
            chat.chat(HELLO, SamplingParams(guided_decoding=GuidedDecodingParams(choice=wrong)))


def test_a_mistyped_parameter_is_told_the_one_that_was_meant() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'temprature'; did you mean temperature?"):
        SamplingParams(temprature=0.5)
    with pytest.raises(TypeError, match="unexpected keyword argument 'xyzzy'; known are end_id, pad_id"):
        SamplingParams(xyzzy=1)
