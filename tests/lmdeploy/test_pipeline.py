"""pipeline(...) over the default model: lists, streams, conversations, sessions, and what ends them."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from compat.llm import ParameterError
from compat.lmdeploy import ChatTemplateConfig, GenerationConfig, Pipeline, Response, TurbomindEngineConfig, pipeline
from compat.lmdeploy.template import Template

SHORT = GenerationConfig(max_new_tokens=4)
LONG = GenerationConfig(max_new_tokens=1500, ignore_eos=True)


@pytest.fixture(scope="module")
def pipe() -> Iterator[Pipeline]:
    with pipeline(backend_config=TurbomindEngineConfig(max_batch_size=4)) as made:
        yield made


def test_a_text_gives_an_answer_and_a_list_a_list_in_its_order(pipe: Pipeline) -> None:
    one = pipe("import os", SHORT)
    assert isinstance(one, Response) and one.generate_token_len == 4 == len(one.token_ids)
    assert (one.finish_reason, one.index) == ("length", 0) and one.text and one.input_token_len > 3
    several = pipe(["import sys", "import os"], SHORT)
    assert [each.index for each in several] == [0, 1]
    assert (several[1].text, several[1].token_ids) == (one.text, one.token_ids)
    each_its_own = pipe(["import os"] * 2, [SHORT, GenerationConfig(max_new_tokens=2)])
    assert [each.generate_token_len for each in each_its_own] == [4, 2]
    assert pipe([], SHORT) == []


def test_a_conversation_is_one_prompt_by_the_template_of_the_model(pipe: Pipeline) -> None:
    messages = [{"role": "user", "content": "import os"}]
    assert pipe(messages, SHORT) == pipe("import os", SHORT)
    (first, second) = pipe([messages, messages], SHORT)
    assert first.text == second.text
    parts = [{"role": "user", "content": [{"type": "text", "text": "import "}, {"type": "text", "text": "os"}]}]
    assert pipe(parts, SHORT) == pipe("import os", SHORT)
    bare = pipe("import os", SHORT, do_preprocess=False)
    assert bare.input_token_len < pipe("import os", SHORT).input_token_len


def test_the_pieces_of_a_stream_join_to_the_answers(pipe: Pipeline) -> None:
    prompts = ["import os", "import sys"]
    whole = pipe(prompts, SHORT)
    texts, reasons = ["", ""], [None, None]
    for piece in pipe.stream_infer(prompts, gen_config=SHORT):
        assert reasons[piece.index] is None
        texts[piece.index] += piece.text
        reasons[piece.index] = piece.finish_reason
    assert texts == [each.text for each in whole] and reasons == ["length", "length"]


def test_a_prompt_that_fails_is_an_error_and_the_others_go_on(pipe: Pipeline) -> None:
    too_long = "x " * 20_000
    bad, good = pipe([too_long, "import os"], SHORT)
    assert bad.finish_reason == "error" and "shorten it" in bad.text
    assert good.finish_reason == "length"
    pieces = list(pipe.stream_infer([too_long, "import os"], gen_config=SHORT))
    assert [each.index for each in pieces if each.finish_reason == "error"] == [0]
    assert [each.index for each in pieces if each.finish_reason == "length"] == [1]
    for wrong in (5, ("describe",), (5, "image.png"), [5]):
        with pytest.raises(ParameterError, match=r"a text, \(text, image\), .* or a list of messages is needed"):
            pipe(wrong)
    with pytest.raises(ParameterError, match="neither text nor pictures; leave audio and video out"):
        pipe([{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "x"}}]}])
    with pytest.raises(ParameterError, match="gen_config has 1 entries for 2 prompts"):
        pipe(["a", "b"], [SHORT])
    with pytest.raises(TypeError, match="'top_k' is no argument; give its field in a GenerationConfig"):
        pipe("a", top_k=3)


def test_a_session_goes_on_with_its_turns(pipe: Pipeline) -> None:
    with pipe.session(SHORT) as session:
        first = session("import os")
        second = session("import sys")
        asked = [
            {"role": "user", "content": "import os"},
            {"role": "assistant", "content": first.text},
            {"role": "user", "content": "import sys"},
        ]
        assert second.text == pipe(asked, SHORT).text
        assert session.history == [("import os", first.text), ("import sys", second.text)]
        assert session.step == second.input_token_len + second.generate_token_len
    assert session.history == [] and session.response is None
    chatted = pipe.chat("import os", gen_config=SHORT)
    again = pipe.chat("import sys", session=chatted, gen_config=SHORT)
    assert again is chatted and again.history[0] == ("import os", first.text)
    assert "".join(piece.text for piece in pipe.chat("x", session=chatted, gen_config=SHORT, stream_response=True))


def test_a_turn_has_all_that_an_answer_without_a_session_has() -> None:
    """It is made of the pieces of a stream, which bring the new tokens, and all logits so far."""
    whole = Response("", 0, 0)
    whole.extend(Response("a", 1, 3, None, [7], [{7: -1.0}], logits=["row of 7"]))
    whole.extend(
        Response("bc", 3, 3, None, [8, 9], [{8: -2.0}, {9: -3.0}], logits=["row of 7", "row of 8", "row of 9"])
    )
    whole.extend(Response("", 3, 3, "stop"))
    logprobs, logits = [{7: -1.0}, {8: -2.0}, {9: -3.0}], ["row of 7", "row of 8", "row of 9"]
    assert whole == Response("abc", 3, 3, "stop", [7, 8, 9], logprobs, logits)


def test_a_session_has_a_number(pipe: Pipeline) -> None:
    first = "".join(piece.text for piece in pipe.stream_infer("import os", session_id=77, gen_config=SHORT))
    list(pipe.stream_infer("import sys", session_id=77, gen_config=SHORT))
    assert pipe.session_of(77).history[0] == ("import os", first) and len(pipe.session_of(77).history) == 2
    pipe.end_session(77)
    assert pipe.session_of(77).history == []
    for wrong in (-1, "x", True, 1e308):
        with pytest.raises(ParameterError, match="a Session, or a number from 0 is needed"):
            list(pipe.stream_infer("a", session_id=wrong))
    with pytest.raises(ParameterError, match="give one text, the next message"):
        list(pipe.stream_infer(["a"], session_id=77))


def test_a_turn_that_is_stopped_keeps_what_has_come(pipe: Pipeline) -> None:
    session = pipe.session(LONG, session_id=78)
    source = session("import os", stream_response=True)
    first = next(source)
    with pytest.raises(ParameterError, match="session 78 has a turn that is running; wait for it, or stop it"):
        next(session("more", stream_response=True))
    stopper = threading.Thread(target=pipe.stop_session, args=(78,))
    stopper.start()
    pieces = [first, *source]
    stopper.join(60)
    assert pieces[-1].finish_reason is not None and pieces[-1].generate_token_len < 1500
    assert session.history == [("import os", "".join(piece.text for piece in pieces))]
    assert pipe("import os", SHORT).finish_reason == "length"


def test_a_stream_that_is_left_ends_its_requests(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    started, begin = [], pipe.llm.generate_async
    monkeypatch.setattr(pipe.llm, "generate_async", lambda *a, **k: started.append(begin(*a, **k)) or started[-1])
    source = pipe.stream_infer(["import os"] * 4, gen_config=LONG)
    next(source)
    source.close()
    assert [each.result(60).outputs[0].finish_reason for each in started] == ["cancelled"] * 4


def test_a_template_of_texts_takes_the_place_of_the_models(pipe: Pipeline) -> None:
    config = ChatTemplateConfig(
        system="<S>", meta_instruction="be brief", eosys="</S>", user="<U>", eoh="</U>", assistant="<A>", eoa="</A>",
        separator="\n", stop_words=["import"],
    )  # fmt: skip
    own = Template(pipe.llm, config)
    made = own.of_messages(
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    )
    text = "<S>be brief</S><U>a</U><A>b</A>\n<U>c</U><A>"
    assert made == {"prompt_token_ids": pipe.llm.tokenizer.encode(text)} and own.stop_words == ["import"]
    meta = Template(pipe.llm, ChatTemplateConfig(meta_instruction="be brief")).of_text("a")
    system = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "a"}]
    assert meta == Template(pipe.llm, None).of_messages(system)
    assert Template(pipe.llm, ChatTemplateConfig(capability="completion")).of_text("a") == {"prompt": "a"}
    with pytest.raises(ParameterError, match="it is 'chat' or 'completion'"):
        Template(pipe.llm, ChatTemplateConfig(capability="voice"))


def test_log_probabilities_and_adapters(pipe: Pipeline) -> None:
    found = pipe("import os", GenerationConfig(max_new_tokens=3, logprobs=2)).logprobs
    assert found is not None and len(found) == 3 and all(value <= 0 for entry in found for value in entry.values())
    with pytest.raises(ParameterError, match="adapter_name is 'doll'; known are none"):
        pipe("a", adapter_name="doll")
