"""Planted bugs of images in requests: what is fetched, from where, and what the model gets."""

from __future__ import annotations

from client import history
from gateway import anthropic_turns, core, image_fetch, image_hosts, image_intake, images
from tests.mutants.changes import change, change_everywhere

HOSTS = ["tests/gateway/test_image_hosts.py"]
FETCH = ["tests/gateway/test_image_fetch.py"]
IMAGES = ["tests/gateway/test_images.py"]
CLIENT = ["tests/client/test_images.py"]

MUTANTS = {
    "a_user_in_a_url_is_passed_over": (
        change_everywhere(image_hosts.parsed, ('"@" in parts.netloc', "False")),
        HOSTS,
    ),
    "another_port_of_a_host_is_asked": (
        change(image_hosts.AllowedHosts, "_holds", ("target.port in ports", "bool(ports)")),
        HOSTS,
    ),
    "what_leads_to_other_networks_is_public": (
        change_everywhere(image_hosts.is_public, ("not any(address in network for", "not all(address in network for")),
        HOSTS,
    ),
    "a_redirect_may_leave_tls": (
        change_everywhere(image_hosts.redirected, ('target.scheme == "https"', "False")),
        HOSTS,
    ),
    "an_address_in_a_url_is_not_looked_at": (
        change(image_fetch.ImageFetcher, "_asked", ("_is_address(target.host) and", "False and")),
        FETCH,
    ),
    "one_good_address_is_enough": (
        change_everywhere(image_fetch._resolver, ("not all(is_allowed", "not any(is_allowed")),
        FETCH,
    ),
    "a_redirect_goes_anywhere": (
        change(
            image_fetch.ImageFetcher,
            "_fetched",
            ("redirected(target, found, self._hosts)", "__import__('gateway.image_hosts').image_hosts.parsed(found)"),
        ),
        FETCH,
    ),
    "a_body_without_a_length_has_no_limit": (
        change(image_fetch.ImageFetcher, "_asked", ("if len(data) > limit", "if len(data) > 1000 * limit")),
        FETCH,
    ),
    "a_model_that_says_nothing_takes_images": (
        change(image_intake.ImageIntake, "filled", ("if not (takes", "if None is (takes")),
        IMAGES,
    ),
    "any_model_s_bodies_are_large": (
        change(core.Gateway, "body_limit", ("if takes_images else", "if True else")),
        IMAGES,
    ),
    "images_are_sent_in_another_order": (
        change_everywhere(images.lifted, ("return shown, pictures", "return shown, pictures[::-1]")),
        IMAGES,
    ),
    "images_of_results_are_left_out": (
        change_everywhere(
            anthropic_turns._result, ("enumerate(block.content)]", "enumerate(block.content) if one.type == 'text']")
        ),
        IMAGES,
    ),
    "a_turn_with_images_is_sent_in_a_session": (
        change(history.History, "_request", ("if images:", "if images and not self._session_id:")),
        CLIENT,
    ),
}
