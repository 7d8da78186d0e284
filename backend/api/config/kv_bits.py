"""In how many bits the KV cache holds the numbers of keys and of values."""

from __future__ import annotations

from backend.api.config.schema import KvCacheConfig, KvDType, KvNumbers
from backend.api.errors import ConfigError

KV_BITS: dict[KvDType, int] = {"auto": 16, "int8": 8, "int4": 4}  # 16: the model's own type, whatever its size
# name -> types of keys and of values; the same names as in KV_FORMATS of kernels/common/kv_format.py
KV_TYPES: dict[str, tuple[KvNumbers | None, KvNumbers | None]] = {
    "auto": (None, None),
    "int8": ("int8", "int8"),
    "int4": ("int4", "int4"),
    "k8v4": ("int8", "int4"),
}


def named(name: str) -> dict[str, KvNumbers | None]:
    """The settings of kv_cache that make an entry of KV_TYPES."""
    return dict(zip(("key_dtype", "value_dtype"), KV_TYPES[name], strict=True))


def kv_bits(kv_cache: KvCacheConfig, own: KvNumbers | None) -> tuple[int, int]:
    """Bits of keys and of values. own: the type that the checkpoint asks for. Raises ConfigError for pairs that there are not."""
    both = own if kv_cache.dtype == "auto" else kv_cache.dtype
    keys, values = kv_cache.key_dtype or both, kv_cache.value_dtype or both
    if (keys, values) not in KV_TYPES.values():
        pairs = (f"{key} with {value}" for key, value in KV_TYPES.values() if key and value)
        raise ConfigError(
            f"kv_cache.key_dtype is {keys or 'auto'} and kv_cache.value_dtype {values or 'auto'}, and kernels have "
            f"{', '.join(pairs)} only; set both to one of these pairs, or neither"
        )
    return KV_BITS[keys or "auto"], KV_BITS[values or "auto"]
