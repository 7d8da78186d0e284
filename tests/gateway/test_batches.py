"""Files and batches, with OpenAI's own client, before a fake Triton."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import openai
import pytest

from gateway.batches import routes
from tests.docs.blocks import blocks
from tests.gateway.conftest import Served
from tests.gateway.fake_triton import FakeTriton

Serve = Callable[..., AbstractContextManager[Served]]
CHAT = "/v1/chat/completions"


def chat(number: int, text: str = "x", **more: Any) -> dict[str, Any]:
    body = {"model": "everbatch", "messages": [{"role": "user", "content": text}], **more}
    return {"custom_id": f"c{number}", "method": "POST", "url": CHAT, "body": body}


def jsonl(*lines: dict[str, Any] | bytes) -> bytes:
    return b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines)


def start(client: openai.OpenAI, content: bytes, endpoint: Any = CHAT, **more: Any) -> openai.types.Batch:
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **more)


def ended(client: openai.OpenAI, batch: openai.types.Batch) -> openai.types.Batch:
    deadline = time.monotonic() + 60
    while (batch := client.batches.retrieve(batch.id)).status in (
        "validating",
        "in_progress",
        "finalizing",
        "cancelling",
    ):
        assert time.monotonic() < deadline, batch
        time.sleep(0.01)
    return batch


def lines(client: openai.OpenAI, file_id: str | None) -> dict[str, Any]:
    """The lines of a file by their custom_id, each of which stands there once."""
    if file_id is None:
        return {}
    found = [json.loads(line) for line in client.files.content(file_id).text.splitlines()]
    by_id = {line["custom_id"]: line for line in found}
    assert len(by_id) == len(found), "a line was answered twice"
    return by_id


@pytest.fixture
def kept(serve: Serve, tmp_path: Path) -> Iterator[Served]:
    with serve(batches=tmp_path / "batches") as served:
        served.wait_healthy()
        yield served


def test_the_program_of_the_page_runs(
    kept: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (block,) = [block for block in blocks("docs/batches.md") if block.tag == "python"]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "requests.jsonl").write_bytes(jsonl(chat(1), chat(2)))
    program = block.text.replace("http://127.0.0.1:9000", f"http://{kept.address}").replace("sleep(1)", "sleep(0.01)")
    exec(compile(program, str(block), "exec"), {})
    assert "completed=2, failed=0, total=2" in capsys.readouterr().out


def test_a_batch_is_answered_as_its_endpoint_answers(kept: Served, triton: FakeTriton) -> None:
    client = kept.client()
    batch = start(
        client, jsonl(chat(1), chat(2, "error [INVALID_ARGUMENT] no"), b"", chat(3, n=2)), metadata={"a": "b"}
    )
    batch = ended(client, batch)
    assert (batch.status, batch.metadata, batch.model) == ("completed", {"a": "b"}, "everbatch")
    assert batch.request_counts is not None and batch.usage is not None
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (3, 2, 1)
    assert batch.usage.output_tokens == 12 and batch.usage.total_tokens > 12
    output, errors = lines(client, batch.output_file_id), lines(client, batch.error_file_id)
    assert set(output) == {"c1", "c3"} and set(errors) == {"c2"}
    answer = output["c1"]["response"]
    assert answer["status_code"] == 200 and output["c1"]["error"] is None
    assert answer["body"]["choices"][0]["message"]["content"] == "Hello wörld 🌍!"
    assert len(output["c3"]["response"]["body"]["choices"]) == 2
    refused = errors["c2"]["response"]
    assert (refused["status_code"], refused["body"]["error"]["message"]) == (400, "no")
    assert [seen.body["priority"] for seen in triton.requests if "messages" in seen.body] == [0, 0, 0]
    assert {file.purpose for file in client.files.list()} == {"batch", "batch_output"}


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/embeddings", {"input": ["x", "y"]}),
        ("/v1/responses", {"input": "x"}),
    ],
)
def test_other_endpoints(kept: Served, triton: FakeTriton, endpoint: str, body: dict[str, Any]) -> None:
    client = kept.client()
    line = {"custom_id": "a", "method": "POST", "url": endpoint, "body": {"model": "everbatch", **body}}
    batch = ended(client, start(client, jsonl(line), endpoint))
    assert batch.status == "completed" and lines(client, batch.output_file_id)["a"]["response"]["status_code"] == 200
    assert all(seen.body["priority"] == 0 for seen in triton.requests if not {"look", "tokenize"} & seen.body.keys())


def test_files_are_listed_page_by_page_and_deleted(kept: Served) -> None:
    client = kept.client()
    content = b"a\r\n\n" + b"\xff" * 100_000 + b"\nlast"
    files = [client.files.create(file=(f"../{i}.jsonl", content), purpose="batch") for i in range(3)]
    assert files[0].filename == "0.jsonl" and files[0].bytes == len(content)
    assert [file.id for file in client.files.list(limit=2)] == [file.id for file in reversed(files)]
    assert client.files.content(files[1].id).read() == content
    assert client.files.delete(files[1].id).deleted
    with pytest.raises(openai.NotFoundError, match="no such file"):
        client.files.retrieve(files[1].id)
    soon = client.files.create(file=b"x", purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600})
    assert soon.expires_at == soon.created_at + 3600


def test_a_batch_with_lines_that_are_no_requests_fails_and_says_which(kept: Served) -> None:
    client, good = kept.client(), json.dumps(chat(1)).encode()
    bad = [
        (good, "duplicate_custom_id", "custom_id 'c1' stands in line 1 already; give each line its own"),
        (b"{", "invalid_json_line", "the line is no JSON: Input data was truncated"),
        (b"[]", "invalid_json_line", "the line: expected `object`, got `array`"),
        (b'{"custom_id": "q"}', "missing_required_parameter", "method is missing"),
        (good.replace(b'"c1"', b"7"), "invalid_value", "custom_id: expected `str`, got `int`"),
        (good.replace(b"c1", b"c2").replace(b"POST", b"GET"), "invalid_method", "method is 'GET'; it is POST"),
        (
            good.replace(b"c1", b"c3").replace(b"/v1/chat", b"/v2"),
            "invalid_url",
            "url is '/v2/completions', the endpoint",
        ),
        (
            good.replace(b"c1", b"c4").replace(b'"model"', b'"stream": true, "model"'),
            "invalid_value",
            "body.stream is set",
        ),
        (
            good.replace(b"c1", b"c5").replace(b'"x"', b"[" * 50_000 + b"]" * 50_000),
            "invalid_json_line",
            "nested too deeply",
        ),
        (good.replace(b"c1", b""), "invalid_custom_id", "custom_id has 0 characters, allowed are 1 to 512"),
    ]
    batch = ended(client, start(client, jsonl(good, *(line for line, _, _ in bad))))
    assert batch.status == "failed" and batch.errors is not None and batch.errors.data is not None
    assert [(fault.line, fault.code) for fault in batch.errors.data] == [
        (i, code) for i, (_, code, _) in enumerate(bad, 2)
    ]
    for fault, (_, _, text) in zip(batch.errors.data, bad, strict=True):
        assert fault.message is not None and text in fault.message
    assert batch.output_file_id is None and batch.request_counts is not None and batch.request_counts.total == 0
    empty = ended(client, start(client, b"\n\n"))
    assert empty.errors is not None and empty.errors.data is not None and empty.errors.data[0].code == "empty_file"


def test_what_is_asked_wrongly_is_refused_in_a_sentence(kept: Served) -> None:
    client = kept.client()
    with pytest.raises(openai.BadRequestError, match="purpose is 'fine-tune'; it is batch"):
        client.files.create(file=b"x", purpose="fine-tune")
    with pytest.raises(openai.BadRequestError, match="there is no such file"):
        client.batches.create(input_file_id="file-x", endpoint=CHAT, completion_window="24h")
    with pytest.raises(openai.BadRequestError, match="endpoint is '/v1/moderations'; it should be"):
        start(client, b"{}\n", "/v1/moderations")
    with pytest.raises(openai.NotFoundError, match="there is no such batch"):
        client.batches.retrieve("batch_x")
    form = {"Content-Type": "multipart/form-data; boundary=b"}
    for headers, body, status in (
        ({"Content-Type": "application/json"}, b"{}", 415),
        ({"Content-Type": "multipart/form-data"}, b"x", 400),
        (form, b"--b\r\n" + b"x" * 20_000, 400),
        (form, b'--b\r\nContent-Disposition: form-data; name="file"\r\n\r\nx', 400),
        (form, b"--b--\r\n", 400),
    ):
        assert kept.request("POST", "/v1/files", body, headers)[0] == status, (headers, body[:50])
    assert len(list(client.files.list())) == 1, "the file of the batch that was refused"


def test_sizes_and_counts_are_bounded(serve: Serve, tmp_path: Path) -> None:
    limits = {"max_file_bytes": 300_000, "files_count": 2, "max_body_bytes": 200_000, "max_image_body_bytes": 0}
    with serve(batches=tmp_path, **limits) as served, served.client() as client:
        for content, kind, text in (
            (b"x\n" * 160_000, openai.APIStatusError, "more than 300000 bytes"),
            (b"x\n" + b"y" * 250_000, openai.BadRequestError, "line 2 of the file has more than 200000 bytes"),
        ):
            with pytest.raises(kind, match=text):
                client.files.create(file=content, purpose="batch")
        for _ in range(2):
            client.files.create(file=b"x", purpose="batch")
        with pytest.raises(openai.RateLimitError, match="there are 2 files"):
            client.files.create(file=b"x", purpose="batch")


def test_a_key_sees_only_its_own(serve: Serve, tmp_path: Path, triton: FakeTriton) -> None:
    keys = tmp_path / "keys"
    keys.write_text("ann ann-key-0123456789\nbob bob-key-0123456789 models=other\n")
    keys.chmod(0o600)
    with serve(batches=tmp_path / "b", api_keys=keys, model_names=("everbatch", "other")) as served:
        ann, bob = served.client("ann-key-0123456789"), served.client("bob-key-0123456789")
        batch = ended(ann, start(ann, jsonl(chat(1))))
        assert batch.output_file_id is not None
        for file_id in (batch.input_file_id, batch.output_file_id):
            with pytest.raises(openai.NotFoundError):
                bob.files.content(file_id)
            with pytest.raises(openai.NotFoundError):
                bob.files.delete(file_id)
        with pytest.raises(openai.NotFoundError):
            bob.batches.cancel(batch.id)
        with pytest.raises(openai.BadRequestError):
            bob.batches.create(input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h")
        assert list(bob.files.list()) == [] == list(bob.batches.list())
        refused = ended(bob, start(bob, jsonl(chat(1))))
        assert lines(bob, refused.error_file_id)["c1"]["response"]["status_code"] == 404, "a model that it may not use"
        assert [seen.namespace != "" for seen in triton.requests if "messages" in seen.body] == [True]


def test_cancelling_answers_what_was_not_executed_with_an_error(kept: Served, triton: FakeTriton) -> None:
    client = kept.client()
    batch = start(client, jsonl(chat(1), chat(2, "hold"), *(chat(number, "hold") for number in range(3, 30))))
    triton.wait_for(4)
    with pytest.raises(openai.ConflictError, match="has not ended; cancel it first"):
        client.files.delete(batch.input_file_id)
    assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    batch = ended(client, batch)
    assert batch.status == "cancelled" and batch.cancelled_at is not None
    output, errors = lines(client, batch.output_file_id), lines(client, batch.error_file_id)
    assert len(output) + len(errors) == 29 and not set(output) & set(errors)
    assert errors["c29"]["response"] is None and errors["c29"]["error"]["code"] == "batch_cancelled"
    with pytest.raises(openai.ConflictError, match="the batch is cancelled"):
        client.batches.cancel(batch.id)


def test_what_is_not_executed_in_time_expires(kept: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "WINDOW_S", 2)
    client = kept.client()
    batch = ended(client, start(client, jsonl(chat(1), chat(2, "hold"))))
    assert batch.status == "expired" and set(lines(client, batch.output_file_id)) == {"c1"}
    assert lines(client, batch.error_file_id)["c2"]["error"]["code"] == "batch_expired"


def test_a_full_server_makes_lines_wait(kept: Served, triton: FakeTriton) -> None:
    """Two lines are refused once each; then the script has an answer."""
    client = kept.client()
    full = "error [UNAVAILABLE] Exceeds maximum queue size: 8 requests wait"
    triton.script[:] = ["say yes"]
    batch = start(client, jsonl(chat(1, full), chat(2, full)))
    triton.wait_for(3)
    assert client.batches.retrieve(batch.id).status == "in_progress"
    triton.script[:] = ["say yes"] * 2
    batch = ended(client, batch)
    assert batch.request_counts is not None and batch.request_counts.failed == 0


def test_results_outlive_the_process_and_each_line_is_answered_once(
    serve: Serve, tmp_path: Path, triton: FakeTriton
) -> None:
    """The gateway ends while half of the lines hold; the next one asks those that have no answer, and only those."""
    with serve(batches=tmp_path) as served:
        client = served.client()
        texts = ["x" if number % 2 else "hold" for number in range(8)]
        batch = start(client, jsonl(*(chat(number, text) for number, text in enumerate(texts))))
        deadline = time.monotonic() + 20
        while (counts := client.batches.retrieve(batch.id).request_counts) is None or counts.completed < 4:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    triton.requests.clear()
    triton.script[:] = ["say again"] * 4
    with serve(batches=tmp_path) as served:
        client = served.client()
        batch = ended(client, batch)
        output = lines(client, batch.output_file_id)
        texts = [output[f"c{number}"]["response"]["body"]["choices"][0]["message"]["content"] for number in range(8)]
        assert texts == ["say again", "Hello wörld 🌍!"] * 4
        assert [seen.text() for seen in triton.requests if "messages" in seen.body] == ["hold"] * 4


def test_a_directory_has_one_server_and_none_has_no_files(serve: Serve, kept: Served, tmp_path: Path) -> None:
    from gateway.batches.database import DatabaseError

    with pytest.raises(DatabaseError, match="another server uses it"), serve(batches=tmp_path / "batches"):
        pass
    with serve() as served:
        status, body, _ = served.request("GET", "/v1/files")
    assert status == 404 and "start it with --batches DIRECTORY" in body["error"]["message"]
