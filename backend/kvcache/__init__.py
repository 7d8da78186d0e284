"""The KV cache as a cache of KV caches: blocks, prefix trie, slots, plans, and KVCacheManager, the only facade. Pure."""
