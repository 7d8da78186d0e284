"""An ExecutorConfig is held to the limits of the configuration that is made of it, and errors name the program's attributes."""

from __future__ import annotations

from typing import Any

import pytest

from backend.api import EngineConfig
from backend.api.config.schema import ModelConfigSection
from compat import trtllm
from compat.trtllm.engine_config import engine_config
from compat.trtllm.parameters import ATTRIBUTES
from tests.trtllm.test_conversion import tuned


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_queue_size": -2}, r"ExecutorConfig\.max_queue_size is -2, allowed is 1 to"),
        (
            {"kv_cache_config": trtllm.KvCacheConfig(sink_token_length=-1)},
            r"ExecutorConfig\.kv_cache_config\.sink_token_length is -1, allowed is 0 to",
        ),
        (
            {"decoding_config": trtllm.DecodingConfig(trtllm.DecodingMode.Medusa())},
            r"ExecutorConfig\.decoding_config\.decoding_mode is DecodingMode\.Medusa\(\): Auto or .* or Lookahead is expected",
        ),
        (
            {"peft_cache_config": trtllm.PeftCacheConfig(num_put_workers=0)},
            r"ExecutorConfig\.peft_cache_config\.num_put_workers is 0, allowed is 1 to 64$",
        ),
        (
            {"peft_cache_config": trtllm.PeftCacheConfig(device_cache_percent=5.0)},
            r"ExecutorConfig\.peft_cache_config\.device_cache_percent is 5\.0, allowed is 0 to 1$",
        ),
        (
            {"max_beam_width": 5, "max_batch_size": 4},
            r"ExecutorConfig\.max_beam_width is 5, more than ExecutorConfig\.max_batch_size 4",
        ),
        (
            {"scheduler_config": tuned(False, True, 7)},
            r"ExecutorConfig\.scheduler_config\.dynamic_batch_config\.enable_max_num_tokens_tuning is true and "
            r"ExecutorConfig\.enable_chunked_context is false",
        ),
    ],
)
def test_what_the_configuration_refuses_is_refused_here_too_by_the_bindings_own_name(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RuntimeError, match=message):
        engine_config(trtllm.ExecutorConfig(**options))


def test_the_configuration_that_a_program_brings_is_checked() -> None:
    config = trtllm.ExecutorConfig()
    config.engine_config = EngineConfig(ModelConfigSection(num_threads=0))
    with pytest.raises(
        RuntimeError, match=r"ExecutorConfig\.engine_config\.model\.num_threads is 0, allowed is 1 to 1024$"
    ):
        engine_config(config)
    config.engine_config = EngineConfig(ModelConfigSection(num_threads="x"))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=r"ExecutorConfig\.engine_config\.model\.num_threads is \"x\": Expected int"):
        engine_config(config)


def test_every_attribute_has_a_row_in_the_table() -> None:
    records = {
        "": trtllm.ExecutorConfig,
        "kv_cache_config.": trtllm.KvCacheConfig,
        "peft_cache_config.": trtllm.PeftCacheConfig,
    }
    listed = [attribute.key for attribute in ATTRIBUTES]
    for prefix, record in records.items():
        names = [
            f"{prefix}{name}" for name in record._fields if name != "runtime_defaults"
        ]  # only the constructor takes it
        assert [name for name in names if not any(f"{key}.".startswith(f"{name}.") for key in listed)] == []
