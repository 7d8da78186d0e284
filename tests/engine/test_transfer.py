"""A prompt that one engine computes and another one continues: the tokens of one engine, and no harm from a hostile state."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from backend.api.config.schema import KvTransferConfig
from backend.api.request import SessionConfig
from backend.api.sampling import SamplingConfig
from backend.core import kv_state
from backend.core.kv_state import KvState
from tests.engine.driver import Driver, answer

pytestmark = pytest.mark.feature("002-49")
PROMPT = list(range(100, 110))  # two blocks of 4, and half of one
ON = KvTransferConfig(enabled=True)


def engine(**options: Any) -> Driver:
    return Driver(**{"kv_transfer": ON, "pool_tokens": 64, **options})


def state_of(driver: Driver, prompt: list[int] = PROMPT, **fields: Any) -> bytes:
    """The state of a prompt that this engine has computed."""
    request = driver.ask(prompt, 20, streaming=False, context_only=True, **fields)
    driver.run()
    result = driver.responses[request][-1].result
    assert result.kv_state is not None and len(result.output_token_ids[0]) == len(prompt) + 1
    return result.kv_state


def num_run(driver: Driver) -> int:
    return driver.core.counters.context_tokens_total


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 10])
@pytest.mark.parametrize("streaming", [False, True])
def test_another_engine_goes_on_with_the_tokens_of_one_and_computes_one_token_of_the_prompt(
    length: int, streaming: bool
) -> None:
    prompt = PROMPT[:length]
    first, second = engine(), engine()
    state = state_of(first, prompt)
    request = second.ask(prompt, 8, kv_state=state, streaming=streaming)
    second.run()
    tokens = second.tokens(request)
    assert (tokens if streaming else tokens[length:]) == answer(prompt, 8)
    assert num_run(second) == 1
    assert second.core.counters.kv_transfers_total == 1 and second.core.counters.kv_transfer_ns_total > 0
    assert first.core.counters.kv_transfers_total == 0
    assert kv_state.decode(state, 1 << 20).first_token_ids == answer(prompt, 1)


def test_sampling_goes_on_in_the_same_random_stream() -> None:
    first, second = engine(), engine()
    sampling = SamplingConfig(seed=7)
    state = state_of(first, sampling_config=sampling)
    request = second.ask(PROMPT, 8, kv_state=state, sampling_config=sampling)
    second.run()
    assert second.tokens(request) == answer(PROMPT, 8, seed=7) != answer(PROMPT, 8)


def test_a_prompt_that_finds_kv_of_others_travels_whole() -> None:
    first, second = engine(sharing="all"), engine()
    first.ask(PROMPT[:8], 1)
    first.run()
    state = state_of(first)
    assert num_run(first) == 10, "two of them for the second request"
    request = second.ask(PROMPT, 8, kv_state=state)
    second.run()
    assert second.tokens(request) == answer(PROMPT, 8) and num_run(second) == 1


def test_kv_from_outside_serves_nobody_else() -> None:
    """The state is a forgery with a right checksum: wrong cells give its own request wrong tokens, and others right ones."""
    first, second = engine(sharing="all"), engine(sharing="all")
    state = kv_state.decode(state_of(first), 1 << 20)
    forged = kv_state.encode(msgspec.structs.replace(state, blocks=bytes(len(state.blocks))))
    for _ in range(2):
        hit = second.ask(PROMPT, 8, kv_state=forged)
        second.run()
        assert second.tokens(hit) != answer(PROMPT, 8)
        other = second.ask(PROMPT, 8)
        second.run()
        assert second.tokens(other) == answer(PROMPT, 8)


@pytest.mark.parametrize("length", [3, 10])
def test_not_even_a_tail_of_foreign_kv_is_found(length: int) -> None:
    first, second = engine(sharing="all"), engine(sharing="all")
    second.ask(PROMPT[:length], 1, kv_state=state_of(first, PROMPT[:length]))
    second.run()
    assert len(second.core.kv.state.trie) == 0
    assert second.core.kv.stats().cached_num_blocks == 0


def test_what_is_evicted_before_the_admission_is_computed_again() -> None:
    first, second = engine(), engine(slots=1, pool_tokens=32)
    state = state_of(first)
    running = second.ask([1, 2, 3], 26)  # needs 29 of the 32 tokens
    second.step()
    waiting = second.ask(PROMPT, 8, kv_state=state)
    second.run()
    assert second.tokens(running) == answer([1, 2, 3], 26)
    assert second.tokens(waiting) == answer(PROMPT, 8) and num_run(second) > 4


def test_a_pool_without_room_takes_the_request_and_computes_the_prompt() -> None:
    first, second = engine(), engine(slots=2, pool_tokens=32)
    state = state_of(first)
    running = second.ask(list(range(20)), 8)
    second.step(6)
    waiting = second.ask(PROMPT, 8, kv_state=state)
    second.run()
    assert second.tokens(running) == answer(list(range(20)), 8) and second.tokens(waiting) == answer(PROMPT, 8)
    assert num_run(second) == 20 + len(PROMPT)


def test_a_cancelled_request_leaves_nothing() -> None:
    first, second = engine(), engine(slots=1)
    state = state_of(first)
    second.ask([1, 2, 3], 20)
    second.step()
    before = second.core.kv.stats()
    waiting = second.ask(PROMPT, 8, kv_state=state)
    assert second.core.kv.stats().cached_num_blocks == before.cached_num_blocks + 3
    second.core.cancel(waiting)
    assert second.core.kv.stats().cached_num_blocks == before.cached_num_blocks
    second.run()


@pytest.mark.parametrize(
    "options", [{"kv_transfer": KvTransferConfig(enabled=True, max_bytes=95)}, {"window": 8}], ids=["large", "window"]
)
def test_where_kv_does_not_travel_the_state_has_the_tokens_alone(options: dict[str, Any]) -> None:
    first, second = engine(**options), engine(**options)
    prompt = list(range(100, 130))
    state = state_of(first, prompt)
    assert not kv_state.decode(state, 0).blocks
    request = second.ask(prompt, 8, kv_state=state)
    second.run()
    assert second.tokens(request) == answer(prompt, 8, window=options.get("window"))
    assert num_run(second) == len(prompt)


@pytest.mark.parametrize(
    "fields, why",
    [
        ({"context_only": True, "max_tokens": 0}, "max_tokens is 0"),
        ({"context_only": True, "session": SessionConfig(1)}, "without a session"),
        ({"context_only": True, "sampling_config": SamplingConfig(num_return_sequences=2)}, "for one sequence"),
        ({"context_only": True, "sampling_config": SamplingConfig(beam_width=2)}, "for one sequence"),
        ({"context_only": True, "kv_state": b"x"}, "leave one of both out"),
        ({"kv_state": b"nonsense"}, "none of this version's"),
        ({"kv_state": kv_state.MAGIC + b"short"}, "damaged"),
    ],
)
def test_what_cannot_be_is_refused(fields: dict[str, Any], why: str) -> None:
    driver = engine()
    request = driver.ask(PROMPT, fields.pop("max_tokens", 8), **fields)
    driver.run()
    assert why in driver.error(request) and ";" in driver.error(request)


def test_it_is_off_unless_the_operator_turns_it_on() -> None:
    driver = Driver()
    for fields in ({"context_only": True}, {"kv_state": b"x"}):
        assert "kv_transfer.enabled is false" in driver.error(driver.ask(PROMPT, 8, **fields))


def refusal(state: bytes, prompt: list[int] = PROMPT) -> str:
    """The error of a request that brings the state; another request of the same engine is served."""
    driver = engine()
    request, other = driver.ask(prompt, 4, kv_state=state), driver.ask([1, 2], 4)
    driver.run()
    assert driver.tokens(other) == answer([1, 2], 4)
    return driver.error(request)


def test_a_state_of_another_model_prompt_or_adapter_is_refused() -> None:
    state = kv_state.decode(state_of(engine()), 1 << 20)
    assert "that of another prompt, of 10 tokens, than the request's of 9" in refusal(
        kv_state.encode(state), PROMPT[:9]
    )
    assert "that of another prompt" in refusal(kv_state.encode(state), [*PROMPT[:9], 1])
    other = msgspec.structs.replace(state, fingerprint="another one")
    assert "fingerprint 'another one'" in refusal(kv_state.encode(other))
    other = msgspec.structs.replace(state, digest="x")
    assert "another adapter or other inputs" in refusal(kv_state.encode(other))


def test_every_truncation_and_every_flipped_bit_is_noticed() -> None:
    state = state_of(engine(), PROMPT[:3])
    dice = random.Random(3)
    for length in range(len(state)):
        with pytest.raises(Exception, match="none of this version|damaged") as failed:
            kv_state.decode(state[:length], 1 << 20)
        assert type(failed.value).__name__ == "InvalidRequest"
    for _ in range(300):
        place, bit = dice.randrange(len(state)), 1 << dice.randrange(8)
        damaged = bytearray(state)
        damaged[place] ^= bit
        with pytest.raises(Exception, match="none of this version|damaged"):
            kv_state.decode(bytes(damaged), 1 << 20)
    assert "damaged" in refusal(state[:-1], PROMPT[:3])


def sealed(body: bytes) -> bytes:
    """A body with its right checksum, as somebody who knows the format can make it."""
    return kv_state.MAGIC + kv_state._hash(body) + body


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"\xdf\xff\xff\xff\xff",  # a map of four thousand million entries
        b"\xdd\xff\xff\xff\xff",  # as many elements of an array
        b"\xc6\xff\xff\xff\xff" + b"x" * 10,  # four gigabytes of bytes, of which ten are there
        b"\x91" * 5000,  # arrays in arrays
        b"\x81\xabfingerprint\xa2\xff\xff",  # text that is not UTF-8
        b"\x81\xa1x" + b"\x91" * 100_000,  # the same depth behind a key that is not known
        msgspec.msgpack.encode({"fingerprint": "hash"}),
        msgspec.msgpack.encode({**msgspec.to_builtins(KvState("hash", "", PROMPT, [1], 4, 32)), "token_ids": "x"}),
        msgspec.msgpack.encode(KvState("hash", "", PROMPT, [1], 0, 32, b"x")),
        msgspec.msgpack.encode(KvState("hash", "", PROMPT, [1], -4, 32, b"x")),
        msgspec.msgpack.encode(KvState("hash", "", PROMPT, [1], 4, 0, b"x")),
        msgspec.msgpack.encode(KvState("hash", "", PROMPT, [1], 4, 1 << 62, b"x")),
        msgspec.msgpack.encode(KvState("hash", "", PROMPT, [1], 4, 32, bytes(95))),
        msgspec.msgpack.encode(KvState("hash", "", [], [1], 4, 32)),
    ],
)  # fmt: skip
def test_a_forged_body_is_refused_in_one_sentence(body: bytes) -> None:
    error = refusal(sealed(body))
    assert "the opaque state" in error and len(error) < 300


def test_a_state_with_more_kv_than_the_limit_is_refused() -> None:
    state = KvState("hash", "", PROMPT, [1], 4, 32, bytes(96))
    driver = engine(kv_transfer=KvTransferConfig(enabled=True, max_bytes=90))
    request = driver.ask(PROMPT, 4, kv_state=kv_state.encode(state))
    assert "96 bytes of KV, the limit is 90" in driver.error(request)


def test_blocks_of_another_size_are_not_written_but_computed() -> None:
    """Equal fingerprints forbid it; a forger may write anything."""
    driver = engine()
    state = KvState("hash", "", PROMPT, [1], 5, 40, bytes(80))
    request = driver.ask(PROMPT, 4, kv_state=kv_state.encode(state))
    driver.run()
    assert driver.tokens(request) == answer(PROMPT, 4) and num_run(driver) == len(PROMPT)


def with_directory(directory: Path, **options: Any) -> Driver:
    return engine(kv_transfer=KvTransferConfig(enabled=True, directory=str(directory), **options))


def test_engines_of_one_machine_pass_kv_through_a_directory(tmp_path: Path) -> None:
    first, second = with_directory(tmp_path), with_directory(tmp_path)
    state = state_of(first)
    assert not kv_state.decode(state, 0).blocks and len(list(tmp_path.iterdir())) == 1
    for num_computed in (1, 1 + len(PROMPT)):  # the second time the file has gone
        request = second.ask(PROMPT, 8, kv_state=state)
        second.run()
        assert second.tokens(request) == answer(PROMPT, 8) and num_run(second) == num_computed
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("options", [{"directory_bytes": 90}, {}], ids=["full", "elsewhere"])
def test_kv_that_is_not_there_is_computed_again(tmp_path: Path, options: dict[str, Any]) -> None:
    state = state_of(with_directory(tmp_path / "a", **options))
    second = with_directory(tmp_path / "b")
    request = second.ask(PROMPT, 8, kv_state=state)
    second.run()
    assert second.tokens(request) == answer(PROMPT, 8) and num_run(second) == len(PROMPT)


def test_a_file_that_was_changed_is_refused(tmp_path: Path) -> None:
    first, second = with_directory(tmp_path), with_directory(tmp_path)
    state = state_of(first)
    (file,) = tmp_path.iterdir()
    file.write_bytes(bytes(file.stat().st_size))
    request = second.ask(PROMPT, 8, kv_state=state)
    assert "the checksum of its 96 bytes is another one" in second.error(request)
