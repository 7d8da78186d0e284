"""Planted bugs of the page and the live view.

Among them: checks of Host and Origin that let foreign web pages in, a live view that costs too much or shows texts of clients,
and files outside of the page's directory that are served.
"""

from __future__ import annotations

from backend.engine.live import LiveViews
from backend.kvcache import block_map
from client import top
from gateway import choices, live, middleware, page_routes
from gateway.browsers import Wall
from gateway.live import LiveFeed
from tests.mutants.changes import Plant, SetAttribute, change, change_everywhere

BROWSERS = ["tests/gateway/test_browsers.py"]
LIVE = ["tests/gateway/test_live.py"]
TEXT_TOKENS = ["tests/gateway/test_text_tokens.py"]
PAGE = ["tests/gateway/test_page.py"]


def without_header(name: str) -> Plant:
    """The files are served without this header."""

    def plant(set_attribute: SetAttribute) -> None:
        assert name in page_routes.HEADERS
        headers = {key: value for key, value in page_routes.HEADERS.items() if key != name}
        set_attribute(page_routes, "HEADERS", headers)

    return plant


LIVE_LIVE = ["tests/engine/test_live.py"]
TOP = ["tests/client/test_top.py"]

MUTANTS = {
    "a_viewer_gets_what_an_earlier_one_has_seen": (
        change(LiveFeed, "events", ("seen = self._number  # an", "seen = -1  # an")),
        LIVE,
    ),
    "the_poller_ends_with_the_first_failure": (
        change(LiveFeed, "_poll", ("await self._publish(away_event(error))", "raise")),
        LIVE,
    ),
    "a_rate_may_be_no_number": (
        change_everywhere(live.rate_of, ("not SLOWEST_HZ <= hz <= FASTEST_HZ", "hz < SLOWEST_HZ or hz > FASTEST_HZ")),
        LIVE,
    ),
    "pages_of_other_servers_are_let_in_by_their_origin": (
        change(Wall, "_check_origin", ("not _is_own(origin, headers)", "False")),
        BROWSERS,
    ),
    "images_of_other_servers_pages_are_let_in": (
        change(Wall, "_check_origin", ('("none", "same-origin")', '("none", "same-origin", "same-site")')),
        BROWSERS,
    ),
    "the_token_that_ends_an_answer_is_listed": (
        change_everywhere(choices._ended_by_last, ("return ended and", "return False and")),
        TEXT_TOKENS,
    ),
    "a_stream_never_ends": (
        change_everywhere(page_routes.add_page_routes, ("asyncio.timeout(longest_s)", "asyncio.timeout(None)")),
        LIVE,
    ),
    "viewers_take_the_places_of_replies": (
        change_everywhere(page_routes.add_page_routes, ("gateway.viewers", "gateway.running")),
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
    "names_of_clients_are_shown": (
        change(
            LiveViews,
            "_hash",
            ('hashlib.blake2b(name.encode(errors="replace"), digest_size=4, key=self._key).hexdigest()', "name"),
        ),
        LIVE_LIVE,
    ),
    "the_whole_queue_is_shown": (change(LiveViews, "view", ("MAX_QUEUED", "None")), LIVE_LIVE),
    "evicted_kv_of_a_session_counts_as_cached": (
        change(
            LiveViews,
            "_session",
            ("survivors(seq, seq.num_tokens)[1]", "survivors(seq, seq.num_tokens)[1] * 0 + seq.num_tokens"),
        ),
        LIVE_LIVE,
    ),
    "the_map_grows_with_the_pool": (
        change_everywhere(block_map.block_map, ("-(-blocks.num_blocks // MAX_CELLS)", "1")),
        LIVE_LIVE,
    ),
    "an_engine_that_is_away_ends_the_watch": (
        change_everywhere(top.watch, ("except ClientError", "except ZeroDivisionError")),
        TOP,
    ),
}
