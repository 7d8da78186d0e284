"""Loads, unloads and replaces the models of a server that runs, and puts those that are idle to sleep.

    loaded     -> asleep    its Triton models have had no request for idle_unload_s: the engine ends, they stay and hold requests
    asleep     -> loaded    a request has come
    loaded     -> unloaded  an operator has asked for it, here or by Triton's own model control: requests are refused
    any        -> failed    the engine could not be loaded, or was given up
    any        -> loaded    an operator has asked for `load` or `replace`

`replace` starts a new engine beside the old one and has it generate a token; then Triton moves the clients over, one Triton
model after the other (new requests go to the new instance, the old one ends with its last request); then the old engine ends.
Where anything fails before that, all clients go back to the old engine, which has served all the time.

One operation on a model at a time, and one load of an engine: others wait. The signs of life of the stubs (deploy/signs.py) say
who is idle and who waits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from backend.api.config.multi_model import Notice
from backend.api.processes.liveness import TICK_S
from deploy import health
from deploy.engine_sets import Engine, EngineSet
from deploy.errors import UserError
from deploy.health import Report
from deploy.models_file import Entry
from deploy.shares import Share, check_beside
from deploy.triton_control import ControlFailed, TritonControl

Away = Literal["asleep", "unloaded", "failed"]
State = Literal["loaded", Away]
SETTLE_S = 4 * TICK_S  # by then the sign of every stub counts the requests that came ahead of the order to hold them
KEPT_S = 15.0  # for the instances of Triton models that have answered all their requests
END_S = 60.0  # for the processes of an engine that was unloaded
GIVEN_UP = "the engine of this model ended too often and is not started again; ask an operator to load the model"
NOT_LOADED = "the model could not be loaded; ask an operator to load it"
REPLACED = "the model was replaced while the request ran; send it again"
UNLOADED = "the model is unloaded; ask for it again when an operator has loaded it"


class Described(msgspec.Struct, frozen=True):
    """A model's state, for operators."""

    name: str
    state: State
    engine: int
    owner: str  # the Triton model that starts the engine
    memory_bytes: int  # the size of weights and KV; 0 while it is not loaded
    requests: int  # that run or wait
    why: str = ""
    operation: str = ""  # the operation that runs; empty: none does


class _Served:
    """A set, and how it is."""

    def __init__(self, engines: EngineSet, now: float) -> None:
        self.set = engines
        self.state: State = "loaded"
        self.why = self.operation = ""
        self.busy_at = now  # when a request was seen last
        self.lock = threading.Lock()  # held during an operation

    @property
    def memory_bytes(self) -> int:
        """The size of its weights and KV; 0 while it is not loaded."""
        return self.set.engine.share.num_bytes if self.state == "loaded" else 0


class ModelControl:
    """`run` is the body of its own thread. Any thread may call `load`, `unload`, `replace` and `described`."""

    def __init__(
        self,
        sets: Sequence[EngineSet],
        triton: TritonControl,
        reports: Callable[[], list[Report]],
        place: Path,
        describe_again: Callable[[EngineSet, bool], tuple[Entry, Share]],
        free_bytes: Callable[[Share], int],
        first_token: Callable[[Engine, float], None],
        is_alive: Callable[[int], bool],
        tell: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """place: the server's directory, which holds `models` and those of the engines
        describe_again: what a model is to be from now on, as models.json says now; raises UserError. The bool: its former
            engine runs on for a while
        first_token: has an engine generate a token within so many seconds; raises ControlFailed
        tell: gets a sentence for the log
        """
        self._triton, self._reports, self._place = triton, reports, place
        self._describe_again, self._free_bytes, self._first_token = describe_again, free_bytes, first_token
        self._is_alive, self._tell, self._clock = is_alive, tell, clock
        self._served = {each.name: _Served(each, clock()) for each in sets}
        self._numbers = max(each.engine.number for each in sets)
        self._machine = (
            threading.Lock()
        )  # held while an engine is loaded: the memory that is free is not promised twice
        self._end = threading.Event()
        self.retired: set[int] = set()  # stubs that are to end, and of which it does not matter how they are
        self._ended: set[int] = set()  # owners' stubs that were ended here and whose last signs may not have been read

    # ---- any thread --------------------------------------------------------------------------------------------------

    def described(self) -> list[Described]:
        return [
            Described(
                *(name, each.state, each.set.engine.number, each.set.engine.owner, each.memory_bytes),
                *(self._requests(each), each.why, each.operation),
            )
            for name, each in self._served.items()
        ]

    def load(self, name: str) -> None:
        """A model that was unloaded, or has failed, is loaded as models.json says now. Raises UserError, ControlFailed."""
        if self._known(name).state in ("unloaded", "failed"):
            self._check(name)
        with self._operation(name, "load") as each:
            if each.state == "asleep":
                self._load(each)
            elif each.state != "loaded":
                self._replace(each)

    def unload(self, name: str) -> None:
        """Requests that run may finish, within the exit timeout; new ones are refused. Raises UserError, ControlFailed."""
        with self._operation(name, "unload") as each:
            was_loaded = each.state == "loaded"
            self._away(each, "unloaded", UNLOADED)
            if was_loaded:
                self._end_engine(each.set.engine)

    def replace(self, name: str) -> None:
        """Raises UserError, ControlFailed; then the former engine serves on."""
        self._check(name)
        with self._operation(name, "replace") as each:
            self._replace(each)

    def note_failure(self, what: str, error: Exception) -> None:
        """Write an unexpected error to the log."""
        self._tell(f"{what} failed: {type(error).__name__}: {error}")

    def stop(self) -> None:
        """Begin nothing from now on. The thread ends soon, and what is being done goes on until its server ends."""
        self._end.set()

    # ---- the thread --------------------------------------------------------------------------------------------------

    def run(self) -> None:
        while not self._end.wait(TICK_S):
            try:
                self.look()
            except (UserError, ControlFailed) as error:
                self._tell(str(error))
            except Exception as error:  # Whatever it is, the next look is worth more.
                self.note_failure("looking after the models", error)

    def look(self) -> None:
        """One look at the signs of the stubs: who is idle, who waits, whose engine has gone. What follows is done in threads of
        its own, so that a long load of one model does not keep the others from being looked at.
        """
        reports = self._reports()
        self._ended &= {report.pid for report in reports if report.state != health.UNLOADED}
        for each in self._served.values():
            if each.operation:
                continue
            if self._requests(each):
                each.busy_at = self._clock()
                if each.state == "asleep":
                    self._begin(each, "load", self._wake)
            elif each.state == "loaded" and self._is_idle(each):
                self._begin(each, "sleep", self._put_to_sleep)
            if not each.operation:
                owner = each.set.engine.owner
                known = [report for report in reports if report.model == owner and report.pid not in self._ended]
                self._follow_owner(each, known)

    def _begin(self, each: _Served, what: str, action: Callable[[_Served], None]) -> None:
        def work() -> None:
            try:
                with self._operation(each.set.name, what):
                    action(each)
            except (UserError, ControlFailed) as error:
                self._tell(f"model {each.set.name}: {error}")

        each.operation = what
        threading.Thread(target=work, name=f"everbatch-{what}", daemon=True).start()

    def _requests(self, each: _Served) -> int:
        """Requests that its Triton models have not answered in full."""
        names = each.set.client_names()
        return sum(report.live for report in self._live() if report.model in names)

    def _is_idle(self, each: _Served) -> bool:
        limit = each.set.entry.idle_unload_s
        return limit is not None and self._clock() - each.busy_at >= limit

    def _follow_owner(self, each: _Served, reports: list[Report]) -> None:
        """Take note when Triton's own model control has loaded or unloaded the model, or its engine has been given up."""
        if each.operation or not reports:
            return
        states = {report.state for report in reports if report.state != health.UNLOADED}
        if each.state == "loaded" and not states and not self._triton.is_ready(each.set.engine.owner):
            self._away(each, "unloaded", UNLOADED)
            self._tell(f"model {each.set.name}: unloaded by Triton's model control")
        elif each.state == "loaded" and "given_up" in states:
            self._begin(each, "unload", self._give_up)
        elif each.state != "loaded" and "ready" in states:
            self._is_there(each)
            self._tell(f"model {each.set.name}: loaded by Triton's model control")

    def _wake(self, each: _Served) -> None:
        if each.state == "asleep":
            self._load(each)

    def _put_to_sleep(self, each: _Served) -> None:
        """Requests are held from the first step on, so none is in the engine when it ends."""
        if each.state != "loaded":
            return
        self._away(each, "asleep")
        self._end.wait(SETTLE_S)
        if self._requests(each):
            self._is_there(each)
            return
        self._tell(f"model {each.set.name}: idle for {each.set.entry.idle_unload_s:g} s, unloading its engine")
        self._end_engine(each.set.engine)

    def _give_up(self, each: _Served) -> None:
        self._away(each, "failed", GIVEN_UP)
        self._tell(f"model {each.set.name}: its engine ended too often and was given up; load it again")
        self._end_engine(each.set.engine)

    # ---- steps of an operation ---------------------------------------------------------------------------------------

    def _check(self, name: str) -> None:
        """Raise UserError for what is wrong in models.json, at once: an operation that runs may take minutes, and so may the load
        of a model that is asleep.
        """
        each = self._known(name)
        self._describe_again(each.set, each.state in ("loaded", "asleep"))

    def _known(self, name: str) -> _Served:
        if name not in self._served:
            raise UserError(f"there is no model {name[:80]!r}; there are {', '.join(self._served)}")
        return self._served[name]

    def _operation(self, name: str, what: str) -> _Operation:
        return _Operation(self._known(name), what)

    def _load(self, each: _Served) -> None:
        engine, entry = each.set.engine, each.set.entry
        began = self._clock()
        self._tell(f"model {each.set.name}: loading its engine")
        try:
            self._load_engine(each.set.name, engine, entry.load_timeout_s)
        except (UserError, ControlFailed) as error:
            self._away(each, "failed", NOT_LOADED)
            each.why = str(error)
            raise
        self._is_there(each)
        self._tell(f"model {each.set.name}: loaded after {self._clock() - began:.1f} s")

    def _load_engine(self, name: str, engine: Engine, timeout_s: float) -> None:
        with self._machine:
            check_beside(name, engine.share, self._free_bytes(engine.share))
            self._triton.load(engine.owner, timeout_s)
        self._wait(SETTLE_S, lambda: any(report.model == engine.owner for report in self._live()))

    def _away(self, each: _Served, state: Away, why: str = "") -> None:
        each.state, each.why = state, why
        each.set.engine.tell(self._place, Notice(state, why, each.set.entry.load_timeout_s))

    def _is_there(self, each: _Served) -> None:
        each.state, each.why, each.busy_at = "loaded", "", self._clock()
        each.set.engine.tell(self._place, None)

    def _end_engine(self, engine: Engine) -> None:
        """Returns when its stub has ended, which takes its engine along, or after END_S."""
        pids = {report.pid for report in self._reports() if report.model == engine.owner}
        self._ended |= pids
        self._triton.unload(engine.owner)
        self._wait(END_S, lambda: not any(map(self._is_alive, pids)))

    def _replace(self, each: _Served) -> None:
        if each.state == "asleep":  # Requests may be held for the former engine.
            self._load(each)
        former, models, began = each.set.engine, each.set, self._clock()
        was_loaded = each.state == "loaded"
        entry, share = self._describe_again(models, was_loaded)
        with self._machine:
            self._numbers += 1
            fresh = Engine(models.name, self._numbers, share, is_first=False)
        self._tell(f"model {models.name}: starting engine {fresh.number} in the place of engine {former.number}")
        try:
            fresh.lay_out(self._place)
            models.render([fresh.model], self._place / "models")
            self._load_engine(models.name, fresh, entry.load_timeout_s)
            self._first_token(fresh, entry.load_timeout_s)
            left = self._move_clients(models, former, fresh, entry.load_timeout_s)
        except BaseException:
            self._discard(fresh)
            raise
        models.engine, models.entry = fresh, entry
        self._is_there(each)
        self._tell(f"model {models.name}: engine {fresh.number} serves after {self._clock() - began:.1f} s")
        self._drain(left, entry.drain_timeout_s)
        former.tell(self._place, Notice("unloaded", REPLACED))
        if was_loaded:
            self._end_engine(former)
        former.remove(self._place)
        self._tell(f"model {models.name}: engine {former.number} has ended")

    def _move_clients(self, models: EngineSet, former: Engine, fresh: Engine, timeout_s: float) -> set[int]:
        """Have Triton move the clients, or move them back. Returns the stubs of their former instances."""
        left = {report.pid for report in self._live() if report.model in models.client_names()}
        try:
            self._load_clients(models, fresh, timeout_s)
        except BaseException:
            self._load_clients(models, former, timeout_s)
            raise
        return left

    def _load_clients(self, models: EngineSet, engine: Engine, timeout_s: float) -> None:
        clients = models.clients(engine)
        models.render(clients, self._place / "models")
        for model in clients:
            self._triton.load(model.name, timeout_s)

    def _discard(self, fresh: Engine) -> None:
        """End an engine that will not serve."""
        try:
            self._end_engine(fresh)
        except ControlFailed as error:
            self._tell(str(error))
        fresh.remove(self._place)

    def _drain(self, stubs: set[int], timeout_s: float) -> None:
        """Until the former instances have ended. Their requests end with the engine where that takes too long."""
        if not self._wait(timeout_s, lambda: not any(report.pid in stubs and report.live for report in self._live())):
            self._tell(f"requests of the former engine have run for {timeout_s:g} s (drain_timeout_s), and are ended")
        # Triton's gRPC front may keep an answered request, and with it the instance; nothing is lost with that.
        self._wait(KEPT_S, lambda: not any(report.pid in stubs for report in self._live()))
        self.retired |= stubs

    def _wait(self, seconds: float, condition: Callable[[], bool]) -> bool:
        deadline = self._clock() + seconds
        while not condition():
            if self._clock() >= deadline or self._end.wait(TICK_S):
                return False
        return True

    def _live(self) -> list[Report]:
        """The last signs of stubs that are not about to end."""
        return [report for report in self._reports() if report.state != health.UNLOADED and not report.is_silent]


class _Operation:
    """One operation on one model: while it is entered, no other one on that model runs."""

    def __init__(self, each: _Served, what: str) -> None:
        self._each, self._what = each, what

    def __enter__(self) -> _Served:
        self._each.lock.acquire()
        self._each.operation = self._what
        return self._each

    def __exit__(self, *_: object) -> None:
        self._each.operation = ""
        self._each.lock.release()
