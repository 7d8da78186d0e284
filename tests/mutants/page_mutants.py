"""Planted bugs: the stream of views costs too much, shows too much or ends, and the files of the page are served loosely."""

from __future__ import annotations

from gateway import live, middleware, page_routes
from gateway.answers import Running
from gateway.live import LiveFeed
from gateway.server import GatewayServer
from tests.mutants.changes import Plant, SetAttribute, change, change_everywhere

LIVE = ["tests/gateway/test_live.py"]
PAGE = ["tests/gateway/test_page.py"]


def without_header(name: str) -> Plant:
    """The files are served without this header."""

    def plant(set_attribute: SetAttribute) -> None:
        assert name in page_routes.HEADERS
        headers = {key: value for key, value in page_routes.HEADERS.items() if key != name}
        set_attribute(page_routes, "HEADERS", headers)

    return plant


MUTANTS = {
    "each_viewer_has_a_poller_of_its_own": (
        change(LiveFeed, "events", ("if self._poller is None:", "if True:")),
        LIVE,
    ),
    "the_engine_is_asked_though_no_viewer_is_left": (
        change(LiveFeed, "events", ("self._poller.cancel()\n", "pass\n")),
        LIVE,
    ),
    "a_poller_that_was_cancelled_is_taken_for_a_running_one": (
        change(LiveFeed, "events", ("self._poller.cancel()\n            self._poller = None", "self._poller.cancel()")),
        LIVE,
    ),
    "a_viewer_who_leaves_still_sets_the_pace": (change(LiveFeed, "events", ("self._rates.remove(hz)", "pass")), LIVE),
    "the_slowest_viewer_sets_the_pace": (
        change(LiveFeed, "_ask_again_and_again", ("max(self._rates)", "min(self._rates)")),
        LIVE,
    ),
    "a_viewer_gets_what_an_earlier_one_has_seen": (
        change(LiveFeed, "events", ("seen = self._number  # an", "seen = -1  # an")),
        LIVE,
    ),
    "the_poller_ends_with_the_first_failure": (
        change(LiveFeed, "_poll", ("await self._publish(away_event(error))", "raise")),
        LIVE,
    ),
    "a_model_without_views_is_passed_on": (change_everywhere(live._look, ('if view == b"null":', "if False:")), LIVE),
    "a_rate_may_be_no_number": (
        change_everywhere(live.rate_of, ("not SLOWEST_HZ <= hz <= FASTEST_HZ", "hz < SLOWEST_HZ or hz > FASTEST_HZ")),
        LIVE,
    ),
    "every_key_sees_the_load_of_all": (
        change_everywhere(
            page_routes.add_page_routes, ("gateway.check_right(READ_METRICS, visit_of(request.scope))", "pass")
        ),
        LIVE,
    ),
    "a_stream_never_ends": (
        change_everywhere(page_routes.add_page_routes, ("asyncio.timeout(longest_s)", "asyncio.timeout(None)")),
        LIVE,
    ),
    "viewers_take_the_places_of_replies": (
        change_everywhere(page_routes.add_page_routes, ("gateway.viewers", "gateway.running")),
        LIVE,
    ),
    "viewers_keep_the_server_from_ending": (
        change(GatewayServer, "shutdown", ("self.gateway.viewers.stop()", "pass")),
        LIVE,
    ),
    "the_place_of_a_viewer_who_left_stays_taken": (
        change(Running, "leave", ("self._places.give_back(namespace, choices)", "pass")),
        LIVE,
    ),
    "a_name_of_a_file_is_a_path": (
        change_everywhere(
            page_routes.add_page_routes,
            ("if name not in files:", "if not (DIRECTORY / name).exists():"),
            ("_answer(files[name], request)", "_answer(_file(DIRECTORY / name), request)"),
        ),
        PAGE,
    ),
    "a_browser_gets_a_file_again": (
        change_everywhere(page_routes._answer, ('file.headers["etag"] in', "None in")),
        PAGE,
    ),
    "all_files_have_one_tag": (change_everywhere(page_routes._file, ("sha256(content)", "sha256()")), PAGE),
    "scripts_of_other_servers_may_run": (without_header("content-security-policy"), PAGE),
    "browsers_guess_the_type_of_a_file": (without_header("x-content-type-options"), PAGE),
    "a_page_is_kept_without_a_question": (without_header("cache-control"), PAGE),
    "paths_that_begin_like_the_page_need_no_key": (
        change(middleware.Middleware, "_answer", ("startswith(PAGE)", 'startswith("/")')),
        PAGE,
    ),
    "the_page_asks_for_a_key_before_it_can_be_entered": (
        change(middleware.Middleware, "_answer", (' or scope["path"].startswith(PAGE)', "")),
        PAGE,
    ),
}
