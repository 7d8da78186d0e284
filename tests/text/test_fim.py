"""Prompts that fill in the middle, in the order and with the tokens that each family was trained on."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import AddedToken, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from backend.api.errors import InvalidRequest
from backend.text.fim import FORMS, MAX_MARKS, FimForm, FimWriter, Gap
from backend.text.tokenizer import Tokenizer

FILES = (("a.py", "one\n"), ("b.py", "two"))
LAYOUTS = {  # without files, and with them
    "qwen": (
        "<|fim_prefix|>P<|fim_suffix|>S<|fim_middle|>",
        "<|repo_name|>myproject\n<|file_sep|>a.py\none\n<|file_sep|>b.py\ntwo\n<|file_sep|>filename\n"
        "<|fim_prefix|>P<|fim_suffix|>S<|fim_middle|>",
    ),
    "granite": (
        "<|fim_prefix|>P<|fim_suffix|>S<|fim_middle|>",
        "<|reponame|>myproject\n<|filename|>a.py\none\n<|filename|>b.py\ntwo\n<|filename|>filename\n"
        "<|fim_prefix|>P<|fim_suffix|>S<|fim_middle|>",
    ),
    "codegemma": (
        "<|fim_prefix|>P<|fim_suffix|>S<|fim_middle|>",
        "<|file_separator|>a.py\none\n<|file_separator|>b.py\ntwo\n<|file_separator|>filename\n"
        "<|fim_prefix|>P<|fim_suffix|>S<|fim_middle|>",
    ),
    "starcoder2": (
        "<fim_prefix>P<fim_suffix>S<fim_middle>",
        "<repo_name>myproject\n<file_sep>a.py\none\n<file_sep>b.py\ntwo\n<file_sep>"
        "<fim_prefix>filename\nP<fim_suffix>S<fim_middle>",
    ),
    "starcoder": (
        "<fim_prefix>P<fim_suffix>S<fim_middle>",
        "<reponame>myproject\n<filename>a.py\none\n<filename>b.py\ntwo\n<filename>filename\n"
        "<fim_prefix>P<fim_suffix>S<fim_middle>",
    ),
    "deepseek": (
        "<｜fim▁begin｜>P<｜fim▁hole｜>S<｜fim▁end｜>",
        "<｜fim▁begin｜>#a.py\none\n#b.py\ntwo\nP<｜fim▁hole｜>S<｜fim▁end｜>",
    ),
    "seed": (
        "<[fim-suffix]>S<[fim-prefix]>P<[fim-middle]>",
        "<[fim-suffix]>S<[fim-prefix]>#a.py\none\n#b.py\ntwo\nP<[fim-middle]>",
    ),
    "codestral": ("[SUFFIX]S[PREFIX]P", "[SUFFIX]S[PREFIX]+++++ a.py\none\n+++++ b.py\ntwo\nP"),
    "codellama": ("▁<PRE>P▁<SUF>S▁<MID>", "▁<PRE>#a.py\none\n#b.py\ntwo\nP▁<SUF>S▁<MID>"),
    "bars": (
        "<|fim_prefix|>P<|fim_suffix|>S<|fim_middle|>",
        "<|fim_prefix|>#a.py\none\n#b.py\ntwo\nP<|fim_suffix|>S<|fim_middle|>",
    ),
    "plain": ("<fim_prefix>P<fim_suffix>S<fim_middle>", "<fim_prefix>#a.py\none\n#b.py\ntwo\nP<fim_suffix>S<fim_middle>"),
}  # fmt: skip


def letters(*special: str, prepend: str = "") -> Tokenizer:
    """Each character is a token, and each of the special ones. `prepend`: put in front of every text, as by SentencePiece."""
    vocab = {chr(code): code for code in (*range(256), 0x2581, 0x263A)}
    backend = Backend(models.WordLevel(vocab, unk_token="\0"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    if prepend:
        backend.normalizer = normalizers.Prepend(prepend)
    backend.add_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    return Tokenizer(backend)


def shown(tokenizer: Tokenizer, ids: list[int]) -> str:
    return "".join(tokenizer.visible_token(token_id, False) or "?" for token_id in ids)


def writer_of(form: FimForm, **options: Any) -> tuple[Tokenizer, FimWriter]:
    tokenizer = letters(*form.tokens, **options)
    writer = FimWriter.of(tokenizer)
    assert writer is not None
    return tokenizer, writer


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_each_form_is_found_by_its_tokens_and_written_as_it_was_trained(form: FimForm) -> None:
    tokenizer, writer = writer_of(form)
    assert writer.form is form, "no form ahead of it in the table has fewer tokens of the same names"
    alone, with_files = LAYOUTS[form.name]
    assert shown(tokenizer, writer.written(Gap("P", "S"), 1000).ids) == alone
    found = writer.written(Gap("P", "S", FILES), 1000)
    assert shown(tokenizer, found.ids) == with_files and not found.files_left_out
    assert set(found.end_ids) == {tokenizer.token_to_id(token) for token in form.tokens}


def test_a_tokenizer_without_the_tokens_has_no_form() -> None:
    assert FimWriter.of(letters("<|fim_prefix|>", "<|fim_suffix|>", "<|repo_name|>")) is None


def test_files_that_do_not_fit_are_left_out_whole_from_the_first_one_on() -> None:
    tokenizer, writer = writer_of(FORMS[0])
    whole = len(writer.written(Gap("P", "S", FILES), 1000).ids)
    assert len(writer.written(Gap("P", "S", FILES), whole).ids) == whole
    found = writer.written(Gap("P", "S", FILES), whole - 1)
    assert found.files_left_out == 1 and "two" in shown(tokenizer, found.ids)
    assert "one" not in shown(tokenizer, found.ids)
    found = writer.written(Gap("P" * 50, "S", FILES), 10)
    assert found.files_left_out == 2 and shown(tokenizer, found.ids).startswith("<|fim_prefix|>PP")


def test_a_text_that_holds_the_name_of_a_token_stays_text() -> None:
    tokenizer, writer = writer_of(FORMS[0])
    ids = writer.written(Gap("a<|fim_middle|>b", "<|repo_name|>"), 1000).ids
    assert [token_id for token_id in ids if token_id in tokenizer.special_ids] == [
        tokenizer.token_to_id(token) for token in FORMS[0].tokens[:3]
    ]
    assert shown(tokenizer, ids) == "<|fim_prefix|>a<|fim_middle|>b<|fim_suffix|><|repo_name|><|fim_middle|>"


def test_a_text_that_is_nothing_but_names_of_tokens_is_refused() -> None:
    _, writer = writer_of(FORMS[0])
    assert writer.written(Gap("<|fim_pad|>" * MAX_MARKS, ""), 10).ids
    with pytest.raises(InvalidRequest, match=f"more than {MAX_MARKS} special tokens, the limit"):
        writer.written(Gap("<|fim_pad|>" * (MAX_MARKS + 1), ""), 10)


def test_the_space_of_sentencepiece_stands_before_the_prefix_only() -> None:
    form = next(form for form in FORMS if form.name == "codestral")
    tokenizer, writer = writer_of(form, prepend="▁")
    assert shown(tokenizer, writer.written(Gap("P", "S"), 1000).ids) == "[SUFFIX]S[PREFIX]▁P"
