"""How memory and threads are divided between several models, and that nothing is promised twice."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from backend.api import load_config
from backend.architectures.checkpoint import examine
from deploy import shares
from deploy.errors import UserError
from deploy.model_source import DEFAULT_MODEL
from deploy.models_file import GIB, Entry
from deploy.shares import WantedModel, check_beside, divide, free_bytes, share_again

CHECKPOINT = examine(DEFAULT_MODEL, "native")
MIB = 1 << 20


def wanted(*overrides: str, **entry: object) -> WantedModel:
    config = load_config(overrides=["model.device=cpu", *overrides])
    return WantedModel(msgspec.convert({"path": str(DEFAULT_MODEL), **entry}, Entry), config, CHECKPOINT)


def test_each_gets_what_it_is_told_and_its_pool_is_what_the_weights_leave() -> None:
    found = divide({"a": wanted(memory=1.0), "b": wanted(memory="25%")}, 4 * GIB, cores=8)
    for share in found.values():
        tokens = share.config.kv_cache.max_tokens
        a_token = CHECKPOINT.kv_bytes_per_token(share.config, on_cpu=True)
        assert tokens == (GIB - CHECKPOINT.weight_bytes) // a_token
        assert GIB - a_token < share.num_bytes <= GIB
        assert share.config.model.num_threads == 4, "an equal share of the cores"


def test_models_that_say_nothing_get_equal_shares_of_what_the_others_leave() -> None:
    found = divide({"a": wanted(memory=1.0), "b": wanted(), "c": wanted()}, 5 * GIB, cores=2)
    assert found["b"] == found["c"] and found["b"].config.model.num_threads == 1
    assert found["b"].num_bytes < GIB, "a quarter of the rest, for two"
    assert sum(share.num_bytes for share in found.values()) <= 5 * GIB


def test_a_pool_that_the_configuration_sizes_counts_as_it_is() -> None:
    found = divide({"a": wanted("kv_cache.max_tokens=4096"), "b": wanted(memory=1.0)}, 2 * GIB, cores=2)
    a_token = CHECKPOINT.kv_bytes_per_token(found["a"].config, on_cpu=True)
    assert found["a"].num_bytes == CHECKPOINT.weight_bytes + 4096 * a_token


def test_threads_are_those_of_the_file_before_those_of_the_configuration() -> None:
    found = divide({"a": wanted("model.num_threads=3", threads=5), "b": wanted("model.num_threads=3")}, GIB, cores=8)
    assert [share.config.model.num_threads for share in found.values()] == [5, 3]


def test_too_little_memory_is_one_sentence_with_every_value() -> None:
    with pytest.raises(UserError) as caught:
        divide({"a": wanted(memory=1.5), "b": wanted(memory=1.0)}, 2 * GIB, cores=2)
    assert str(caught.value) == (
        "the models need 2.5 GiB for weights and KV (a 1.5 GiB, b 1.0 GiB), and 2.0 GiB are free; give them less `memory` in "
        "models.json, or serve fewer"
    )


def test_memory_that_does_not_hold_the_weights_is_one_sentence() -> None:
    with pytest.raises(UserError, match=r"model a gets 1.0 MiB of memory, and needs .* for its weights \(9.9 MiB\)"):
        divide({"a": wanted(memory=1 / 1024)}, GIB, cores=1)


def test_a_replacement_has_the_former_share_where_nothing_else_is_said() -> None:
    former = divide({"a": wanted(), "b": wanted(memory=0.5)}, 2 * GIB, cores=4)
    assert share_again("a", wanted(), former["a"], 2 * GIB) == former["a"]
    larger = share_again("b", wanted(memory=1.0), former["b"], 2 * GIB)
    assert larger.num_bytes > former["b"].num_bytes and larger.config.model.num_threads == 2


def test_a_replacement_must_fit_beside_what_runs() -> None:
    share = divide({"a": wanted(memory=1.0)}, 2 * GIB, cores=1)["a"]
    check_beside("a", share, share.num_bytes)
    with pytest.raises(UserError, match="model a needs 1.0 GiB for weights and KV, and 512 MiB are free beside what"):
        check_beside("a", share, 512 * MIB)


def test_on_a_gpu_the_one_with_the_least_free_memory_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 81000\necho 70000\n")
    tool.chmod(0o755)
    monkeypatch.setattr(shares.shutil, "which", lambda name: str(tool))
    assert free_bytes(load_config(overrides=["model.device=cuda"])) == 70000 * MIB
    tool.write_text("#!/bin/sh\necho 'No devices were found'\n")
    with pytest.raises(UserError, match="nvidia-smi does not say"):
        free_bytes(load_config(overrides=["model.device=cuda"]))
