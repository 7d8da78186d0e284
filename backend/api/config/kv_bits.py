"""In how many bits the KV cache holds the numbers of keys and of values."""

from __future__ import annotations

from backend.api.config.schema import KvCacheConfig, KvDType
from backend.api.errors import ConfigError

KV_BITS: dict[KvDType, int] = {"auto": 16, "int8": 8, "int4": 4}  # 16: the model's own type, whatever its size
# Pairs of bits that the kernels have (KV_FORMATS of kernels/common/kv_format.py), with what makes them.
KV_PAIRS = {(16, 16): "auto", (8, 8): "int8", (4, 4): "int4", (8, 4): "int8 keys with int4 values"}


def kv_bits(kv_cache: KvCacheConfig, own: KvDType | None) -> tuple[int, int]:
    """Bits of keys and of values. own: the type that the checkpoint asks for. Raises ConfigError for pairs that there are not."""
    both = own or "auto" if kv_cache.dtype == "auto" else kv_cache.dtype
    keys, values = kv_cache.key_dtype or both, kv_cache.value_dtype or both
    bits = KV_BITS[keys], KV_BITS[values]
    if bits not in KV_PAIRS:
        raise ConfigError(
            f"the KV cache is to hold {keys} keys with {values} values, which no kernel does; set kv_cache.key_dtype and "
            f"kv_cache.value_dtype to one of: {', '.join(KV_PAIRS.values())}"
        )
    return bits
