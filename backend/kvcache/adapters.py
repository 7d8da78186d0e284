"""AdapterCache: which LoRA adapters are held, on the host and on the device. It knows their hashes and sizes, not their weights.

    host     least recently used first; an adapter stays while an accepted request uses it
    device   a subset of the host's; an adapter stays while a sequence with it runs

Sizes are whole pages (worker/adapter_pages.py). An adapter is identified by its content. A client's task id is a name for an
adapter within the client's namespace; given with other weights it names another adapter, and sequences that run with the old one
keep it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator

from backend.api.config.schema import LoraSection
from backend.api.errors import InvalidRequest
from backend.core.step import ModelInfo, PreparedAdapter

Name = tuple[str, int]  # namespace, task id
_OFF = LoraSection()


class AdapterLru:
    """Content hashes of the adapters in one memory, with their sizes, least recently used first. Adapters in use stay."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._bytes: OrderedDict[str, int] = OrderedDict()
        self._users: Counter[str] = Counter()

    def __contains__(self, content: str) -> bool:
        return content in self._bytes

    def __len__(self) -> int:
        return len(self._bytes)

    def __iter__(self) -> Iterator[str]:
        return iter(self._bytes)

    @property
    def num_bytes(self) -> int:
        return sum(self._bytes.values())

    @property
    def num_used_bytes(self) -> int:
        """Bytes of the adapters in use."""
        return sum(self._bytes[content] for content in self._users)

    def has_room(self, wanted: dict[str, int]) -> bool:
        """True if these (content -> bytes) fit beside all adapters in use."""
        more = sum(num_bytes for content, num_bytes in wanted.items() if content not in self._users)
        return self.num_used_bytes + more <= self.capacity

    def put(self, content: str, num_bytes: int) -> list[str]:
        """Hold an adapter as the most recently used. Returns the evicted contents. There must be room."""
        assert self.has_room({content: num_bytes}), f"no room for adapter {content} of {num_bytes} bytes"
        self._bytes[content] = num_bytes
        self._bytes.move_to_end(content)
        gone = []
        while self.num_bytes > self.capacity:
            oldest = next(each for each in self._bytes if each not in self._users and each != content)
            del self._bytes[oldest]
            gone.append(oldest)
        return gone

    def drop(self, content: str) -> None:
        self._bytes.pop(content, None)

    def use(self, content: str) -> None:
        """Count one more user, until `leave`."""
        self._users[content] += 1
        self._bytes.move_to_end(content)

    def leave(self, content: str) -> None:
        self._users[content] -= 1
        if not self._users[content]:
            del self._users[content]


class AdapterCache:
    def __init__(self, config: LoraSection = _OFF, model: ModelInfo | None = None, free_bytes: int = 0) -> None:
        """free_bytes: memory of the device that the weights of the model leave."""
        self.is_enabled = config.enabled
        host = _in_pages(config.host_module_layers, model) or config.host_bytes
        device = _in_pages(config.device_module_layers, model) or int(config.device_fraction * free_bytes)
        if not config.device_module_layers and model is not None and model.device == "cpu":
            device = host  # both are the same memory
        self.host, self.device = AdapterLru(host), AdapterLru(device)
        self._adapters: dict[str, PreparedAdapter] = {}  # adapters held on the host
        self._names: dict[Name, str] = {}
        self._names_for_all: dict[int, str] = {}  # by task id, unless the client uses the id for another adapter
        self._coming: list[str] = []  # for the device, with the next step
        self._going: list[str] = []

    def resolve(self, name: Name) -> str:
        """The content that a task id names. Raises InvalidRequest if it is not held."""
        content = self._names.get(name) or self._names_for_all.get(name[1])
        if content is None:
            raise InvalidRequest(
                f"LoRA task {name[1]} not found in cache. Please send LoRA weights with request: the host cache holds "
                f"{len(self.host)} adapters, {self.host.num_bytes} of {self.host.capacity} bytes (lora.host_bytes)"
            )
        return content

    def check_fits(self, adapter: PreparedAdapter) -> None:
        """Raise InvalidRequest for an adapter that can never be held."""
        for level, num_bytes, kind, key in (
            (self.host, adapter.num_bytes, "host", "lora.host_bytes"),
            (self.device, adapter.device_bytes, "device", "lora.device_fraction"),
        ):
            if num_bytes > level.capacity:
                raise InvalidRequest(
                    f"the LoRA adapter takes {num_bytes} bytes, the {kind} cache has {level.capacity} ({key}); use an "
                    f"adapter of a lower rank, or ask the server's operator to raise it"
                )

    def put(self, name: Name, adapter: PreparedAdapter) -> bool:
        """Hold an adapter under a name. False, and nothing changes, while those in use leave no room. Raises as `check_fits`."""
        self.check_fits(adapter)
        content = adapter.content
        if not self.host.has_room({content: adapter.num_bytes}):
            return False
        for gone in self.host.put(content, adapter.num_bytes):
            self._forget(gone)
        self._adapters[content] = adapter
        self._names[name] = content
        return True

    def put_for_all(self, task_id: int, adapter: PreparedAdapter) -> None:
        """Hold an adapter that all clients may name. Raises InvalidRequest if it does not fit beside all others."""
        self.check_fits(adapter)
        adapters = {**self._adapters, adapter.content: adapter}
        num_bytes = sum(each.num_bytes for each in adapters.values())
        if num_bytes > self.host.capacity:
            raise InvalidRequest(
                f"the LoRA adapters up to this one take {num_bytes} bytes, the host cache has {self.host.capacity}; raise "
                f"lora.host_bytes, or leave some out"
            )
        self.host.put(adapter.content, adapter.num_bytes)
        self._adapters = adapters
        self._names_for_all[task_id] = adapter.content

    def hold(self, content: str) -> None:
        """Keep the adapter of an accepted sequence on the host, until `let_go`. A sequence without one has an empty `content`."""
        if content:
            self.host.use(content)

    def let_go(self, content: str) -> None:
        if content:
            self.host.leave(content)

    def has_room(self, contents: Iterable[str]) -> bool:
        """True if sequences with these adapters can run beside those that do."""
        wanted = {content: self._adapters[content].device_bytes for content in contents if content}
        return not wanted or self.device.has_room(wanted)

    def start(self, content: str) -> None:
        """Keep the adapter of a sequence on the device from the next step on, until `stop`."""
        if not content:
            return
        if content not in self.device:
            self._going += self.device.put(content, self._adapters[content].device_bytes)
            self._coming.append(content)
        self.device.use(content)

    def stop(self, content: str) -> None:
        if content:
            self.device.leave(content)

    def take_changes(self) -> tuple[list[PreparedAdapter], list[str]]:
        """Take the adapters to upload with the next step, and the contents to release before it."""
        coming, going = [self._adapters[content] for content in self._coming], self._going
        self._coming, self._going = [], []
        return coming, going

    def send_again(self) -> None:
        """Queue every held adapter for upload again: after a failed step the state of the device copies is unknown."""
        self._coming = list(self.device)

    def _forget(self, content: str) -> None:
        """Release the device copy and the names of an adapter that was evicted from the host. No sequence uses it."""
        del self._adapters[content]
        if content in self.device:
            self.device.drop(content)
            self._going.append(content)
        self._names = {name: each for name, each in self._names.items() if each != content}
        self._names_for_all = {task_id: each for task_id, each in self._names_for_all.items() if each != content}


def _in_pages(module_layers: int, model: ModelInfo | None) -> int:
    """Bytes of the pages for `module_layers` projections of one layer at rank 1."""
    if model is None:
        return 0
    return -(-module_layers * model.lora_module_bytes // model.lora_page_bytes) * model.lora_page_bytes
