"""The contract of docs/replay.md: every field is in its tables, and each does what its row says when the engine dies."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import Struct
from torch import Tensor

from backend.api import Request, Response, SessionConfig, Unsupported
from backend.api.config.schema import (
    EngineConfig,
    KvCacheConfig,
    KvTransferConfig,
    LoraSection,
    ModelConfigSection,
    SchedulerConfig,
    SpeculationConfig,
)
from backend.core.messages import Delivered, Resume
from backend.engine.core import EngineCore
from backend.engine.resume import check_resume, goes_on
from backend.executor.load import workers_of
from tests.crashes.contract import ANEW, EXACT, NOT_APPLICABLE, PROMPT, REFUSED, STRUCTS, WAYS, cases, plain
from tests.crashes.lives import Client, Lives
from tests.model.adapters import make_adapter

ROOT = Path(__file__).resolve().parents[2]
ROW = re.compile(r"^\| `(\w+\.(?:\w+|\*))` \| ([^|]+?) \| ([^|]+?) \|", re.MULTILINE)
OF_CLIENTS = {EXACT: "goes on", ANEW: "sent again", REFUSED: "refused", NOT_APPLICABLE: "not applicable"}
# The engine dies when the client of a request has had so many responses. Beams run when all others have ended.
MOMENTS = (("Request.input_token_ids", 1), ("Request.input_token_ids", 5), ("SamplingConfig.beam_width", 4))


def table() -> dict[str, str]:
    """Field -> way, of the page."""
    return {field: way for field, way, _ in rows()}


def rows() -> list[tuple[str, str, str]]:
    """Field, what becomes of it when the engine dies, and for a client that comes back to another server."""
    found = ROW.findall((ROOT / "docs" / "replay.md").read_text())
    own = {field for field, _, _ in found}
    return [
        (field, *ways)
        for name, *ways in found
        for field in (fields_of(name.removesuffix(".*")) - own if name.endswith(".*") else {name})
    ]


def fields() -> set[str]:
    return {field for name in STRUCTS for field in fields_of(name)}


def fields_of(name: str) -> set[str]:
    return {f"{name}.{field}" for field in STRUCTS[name].__struct_fields__}


def test_every_field_of_a_request_has_its_row_and_its_case(tmp_path: Path) -> None:
    assert set(table()) == fields(), "docs/replay.md says of each field what happens to it when the engine dies"
    assert set(cases(tmp_path)) == fields()
    assert set(table().values()) <= set(WAYS)


def test_rows_say_of_each_case_what_the_engine_does(tmp_path: Path) -> None:
    """A field whose request goes on from its middle is replayed, one whose request does not is run again."""
    for name, request in cases(tmp_path).items():
        way = table()[name]
        if way in (EXACT, ANEW):
            assert goes_on(request) == (way == EXACT), name


def test_rows_say_of_each_case_what_becomes_of_a_client_that_comes_back(tmp_path: Path) -> None:
    of_clients = {field: way for field, _, way in rows()}
    assert of_clients == {field: OF_CLIENTS[way] for field, way in table().items()}
    for name, request in cases(tmp_path).items():
        delivered = [Delivered([1])] * (request.sampling_config.num_return_sequences or 1)
        if of_clients[name] == "sent again":
            with pytest.raises(Unsupported, match="^resume: this request cannot go on from its middle"):
                check_resume(Resume(delivered), request, 8192, 2048)
        elif of_clients[name] == "goes on":
            check_resume(Resume(delivered), request, 8192, 2048)


def shift(request_id: int, logits: Tensor, token_ids: list[list[int]], stream: int, client_id: int | None) -> None:
    """Prefers tokens that depend on what is there."""
    logits[..., (sum(token_ids[0]) * 7) % 4096] += 8.0


class Runs:
    """All cases together, undisturbed and with an engine that dies."""

    def __init__(self, adapter: Path) -> None:
        self._config = EngineConfig(
            model=ModelConfigSection(
                dtype="float32",
                num_threads=1,
                gather_context_logits=True,
                gather_generation_logits=True,
                additional_outputs=("hidden_states",),
            ),
            kv_cache=KvCacheConfig(max_tokens=8192),
            scheduler=SchedulerConfig(max_batch_size=64, max_beam_width=4),
            lora=LoraSection(enabled=True),
            speculation=SpeculationConfig(mode="lookup"),
            kv_transfer=KvTransferConfig(enabled=True),
        )
        self.begun: dict[tuple[str, int], set[str]] = {}  # that had had something, and not all
        self.cases = cases(adapter)
        self.cases["Request.kv_state"] = plain(kv_state=self._state())
        self.undisturbed = self._run(None)
        self.disturbed = {moment: self._run(moment) for moment in MOMENTS}

    def resume(self, moment: tuple[str, int]) -> dict[str, Client]:
        """The same with a server that ends: its clients send to the next one what they have had, where a request goes on."""
        lives, clients = self._begin()
        lives.run(lambda: len(clients[moment[0]].responses) >= moment[1])
        lives.core.close()
        later = Lives(self._make, files=lives.files)
        for name, request in self.cases.items():
            client = clients[name]
            if client.has_ended or not (client.responses and goes_on(request)):
                continue
            delivered = [
                had(request, client, index) for index in range(request.sampling_config.num_return_sequences or 1)
            ]
            again = later.ask(request, Resume(delivered, turn="" if request.session is None else f"{name}/again"))
            client.responses = Joined(client.responses, again.responses)
        lives.core.check_integrity()
        later.run(lambda: all(client.has_ended for client in clients.values() if isinstance(client.responses, Joined)))
        return {name: client for name, client in clients.items() if isinstance(client.responses, Joined)}

    def _make(self) -> EngineCore:
        workers = workers_of(self._config, named={"shift": shift})
        core = EngineCore(self._config, workers)
        workers.guides.start()
        return core

    def _state(self) -> bytes:
        lives = Lives(self._make)
        client = lives.ask(plain(context_only=True))
        lives.run(lambda: client.has_ended)
        return client.responses[-1].result.kv_state

    def _begin(self) -> tuple[Lives, dict[str, Client]]:
        """An engine with all cases in it, each session with its first turn."""
        lives = Lives(self._make)
        ids = {request.session.id for request in self.cases.values() if request.session is not None}
        first = [
            lives.ask(plain(input_token_ids=PROMPT, max_tokens=5, session=SessionConfig(each, start=True)))
            for each in ids
        ]
        lives.run(lambda: all(each.has_ended for each in first))
        return lives, {name: lives.ask(request) for name, request in self.cases.items()}

    def _run(self, moment: tuple[str, int] | None) -> dict[str, Client]:
        lives, clients = self._begin()
        if moment is not None:
            lives.run(lambda: len(clients[moment[0]].responses) >= moment[1])
            self.begun[moment] = {name for name, each in clients.items() if each.responses and not each.has_ended}
            lives.crash()
        lives.run(lambda: all(each.has_ended for each in clients.values()))
        lives.core.check_integrity()
        return clients


class Joined(list[Response]):
    """What has come from a server, and after it what comes from the next."""

    def __init__(self, first: list[Response], later: list[Response]) -> None:
        self._first, self._later = first, later

    def _all(self) -> list[Response]:
        return [*self._first, *self._later]

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[Response]:
        return iter(self._all())

    def __getitem__(self, index: Any) -> Any:
        return self._all()[index]


def had(request: Request, client: Client, index: int) -> Delivered:
    """What the client of a stream has had of a sequence."""
    results = [each.result for each in client.responses if each.result.sequence_index == index]
    tokens = [token for each in results for token in each.output_token_ids[0]]
    if request.return_all_generated_tokens and results:
        tokens = results[-1].output_token_ids[0]
    sums = [each.cum_log_probs[0] for each in results if each.cum_log_probs]
    return Delivered(tokens, sums[-1] if sums else 0.0, any(each.is_sequence_final for each in results))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    adapter = make_adapter(ROOT / "models" / "default", tmp_path_factory.mktemp("adapter"), seed=3)
    yield Runs(adapter)


def told(client: Client) -> list[object]:
    """What a client has had, of each sequence its own, without what depends on the moment."""
    by_sequence: dict[int, list[Struct]] = {}
    for response in client.responses:
        if response.has_error():
            return [response.error_msg]
        figures = dict(is_final=False, perf_metrics=None, decoding_iter=0, kv_state=None)  # of one engine
        result = msgspec.structs.replace(response.result, **figures)
        by_sequence.setdefault(result.sequence_index, []).append(result)
    return [response.client_id for response in client.responses[:1]] + [
        by_sequence[index] for index in sorted(by_sequence)
    ]


def joined(client: Client) -> list[object]:
    """The same with the tokens of all responses together: with drafts, how many share one depends on the engine's guesses."""
    parts = told(client)
    if len(parts) == 1:
        return parts
    return [
        parts[0],
        *(
            [
                [token for each in sequence for token in each.output_token_ids[0]],
                [value for each in sequence for value in (each.log_probs or [[]])[0]],
                [value for each in sequence for value in each.top_log_probs or []],
                [each.finish_reasons for each in sequence if each.is_sequence_final],
                b"".join(each.generation_logits.data for each in sequence if each.generation_logits),
                [each.history_token_ids for each in sequence if each.history_token_ids],
                [each.prompt_log_probs for each in sequence if each.prompt_log_probs],
                [each.prompt_logits for each in sequence if each.prompt_logits],
                [each.prompt_hidden_states for each in sequence if each.prompt_hidden_states],
                sequence[-1].cum_log_probs,
            ]
            for sequence in parts[1:]
        ),
    ]


def test_engines_die_in_the_midst_of_streams(runs: Runs) -> None:
    assert [len(runs.begun[moment]) > 20 for moment in MOMENTS] == [True, True, False]
    assert "SamplingConfig.beam_width" in runs.begun[MOMENTS[2]]


@pytest.mark.parametrize("name", sorted(fields()))
def test_a_client_gets_the_same_bytes_as_without_the_death(runs: Runs, name: str) -> None:
    right = runs.undisturbed[name]
    is_refused = right.responses[-1].has_error()
    assert is_refused == (table()[name] == REFUSED), right.responses[-1]
    request = runs.cases[name]
    shows_all = not is_refused and (request.sampling_config.beam_width > 1 or request.return_all_generated_tokens)
    for moment in MOMENTS:
        disturbed = runs.disturbed[moment][name]
        if shows_all:
            assert [each.output_token_ids for each in told(disturbed)[1]] == [
                each.output_token_ids for each in told(right)[1]
            ]
            assert [each.cum_log_probs for each in told(disturbed)[1]] == [
                each.cum_log_probs for each in told(right)[1]
            ]
        else:
            assert joined(disturbed) == joined(right), f"the engine died after {moment[1]} responses of {moment[0]}"
        assert sum(each.is_final for each in disturbed.responses) == 1


@pytest.mark.feature("002-34")
@pytest.mark.parametrize("moment", MOMENTS[:2])
def test_a_client_that_brings_what_it_has_had_to_the_next_server_gets_the_rest(
    runs: Runs, moment: tuple[str, int]
) -> None:
    resumed = runs.resume(moment)
    assert len(resumed) > 20
    for name, client in resumed.items():
        request, right = runs.cases[name], runs.undisturbed[name]
        if request.return_all_generated_tokens:
            assert [each.output_token_ids for each in told(client)[1]] == [
                each.output_token_ids for each in told(right)[1]
            ]
        else:
            assert joined(client) == joined(right), name
        assert table()[name] == EXACT
