"""Which URLs of images may be asked, and which addresses: rules without a network."""

from __future__ import annotations

import pytest

from gateway.image_hosts import (
    LONGEST_URL,
    AllowedHosts,
    Target,
    UrlFault,
    fault_of_hosts,
    is_public,
    parsed,
    redirected,
    split,
)

ALLOWED = AllowedHosts(split(["img.example.org,*.cdn.example", "files.example.net:8443", "93.184.216.34"]))


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("https://img.example.org/a.png", Target("https", "img.example.org", 443, "/a.png", "")),
        ("HTTP://IMG.example.org", Target("http", "img.example.org", 80, "/", "")),
        ("https://img.example.org./a?b=c%20d#e", Target("https", "img.example.org", 443, "/a", "b=c%20d")),
        ("https://a.b.cdn.example:443/x", Target("https", "a.b.cdn.example", 443, "/x", "")),
        ("https://files.example.net:8443/", Target("https", "files.example.net", 8443, "/", "")),
        ("http://93.184.216.34/a", Target("http", "93.184.216.34", 80, "/a", "")),
        ("https://img.example.org//evil.test/a", Target("https", "img.example.org", 443, "//evil.test/a", "")),
    ],
)
def test_a_url_of_an_allowed_host_is_read_as_its_parts(url: str, target: Target) -> None:
    assert ALLOWED.target(url) == target and parsed(target.url) == target


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("https://example.org/a.png", "example.org is no host of --allow-image-hosts"),
        ("https://evil-img.example.org/", "is no host of"),
        ("https://img.example.org.evil.test/", "is no host of"),
        ("https://cdn.example/", "is no host of"),  # the pattern stands for names below it
        ("https://xcdn.example/", "is no host of"),
        ("https://img.example.org:8443/", "img.example.org with port 8443 is no host of"),
        ("https://files.example.net/", "is no host of"),
        ("https://img.example.org:0/", "has a port that nothing listens at"),
        ("https://img.example.org:/", "has a port that nothing listens at"),
        ("https://img.example.org:99999/", "is no URL"),
        ("https://img.example.org:x/", "is no URL"),
        ("https://user:password@img.example.org/", "holds a user or a password"),
        ("https://img.example.org@evil.test/", "holds a user or a password"),
        ("https://@img.example.org/", "holds a user or a password"),
        ("https://img.example.org\\@evil.test/", "has a character that a URL cannot have"),
        ("https://img.example.org\t.evil.test/", "has a character that a URL cannot have"),
        ("https://img.example.org/a b", "has a character that a URL cannot have"),
        ("https://img.example.org/\r\nHost: evil", "has a character that a URL cannot have"),
        ("https://bücher.example/", "in its form of ASCII (xn--...)"),
        ("https://img。example。org/", "in its form of ASCII (xn--...)"),
        ("https://ⓘmg.example.org/", "in its form of ASCII (xn--...)"),
        ("file:///etc/passwd", "has the scheme 'file'"),
        ("ftp://img.example.org/", "has the scheme 'ftp'"),
        ("gopher://img.example.org/", "has the scheme 'gopher'"),
        ("//img.example.org/", "has the scheme ''"),
        ("https:img.example.org", "names no host"),
        ("https:///img.example.org", "names no host"),
        ("https://[::1/", "is no URL"),
        ("https://[img.example.org]/", "is no URL"),
        ("https://img..example.org/", "names no host"),
        ("https://-img.example.org/", "names no host"),
        ("https://%69mg.example.org/", "names no host"),
        ("https://img.example.org/" + "a" * LONGEST_URL, f"the limit is {LONGEST_URL}"),
        ("http://2130706433/", "is no host of"),
    ],
)
def test_any_other_url_is_refused_with_a_reason(url: str, said: str) -> None:
    with pytest.raises(UrlFault) as caught:
        ALLOWED.target(url)
    assert said in str(caught.value) and len(str(caught.value)) < 200


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "127.9.9.9", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.100.100.200"),
        *(
            "0.0.0.0",
            "0.1.2.3",
            "224.0.0.1",
            "240.0.0.1",
            "255.255.255.255",
            "192.0.2.1",
            "198.18.0.1",
            "168.63.129.16",
        ),
        *("::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "fd00:ec2::254", "ff02::1", "fec0::1", "2001:db8::1"),
        *("::ffff:127.0.0.1", "::ffff:8.8.8.8", "::127.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::", "2001:0:7f00:1::"),
        *("127.1", "0x7f.0.0.1", "2130706433", "localhost", ""),
    ],
)
def test_an_address_of_this_machine_or_its_network_is_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["8.8.8.8", "93.184.216.34", "2606:4700::1111", "2a00:1450:4001:80e::2004"])
def test_an_address_of_the_internet_is(address: str) -> None:
    assert is_public(address)


def test_a_redirect_is_looked_at_like_a_new_url() -> None:
    target = ALLOWED.target("https://img.example.org/a/b.png?x=1")
    assert redirected(target, "c.png", ALLOWED).url == "https://img.example.org/a/c.png"
    assert redirected(target, "//x.cdn.example/d", ALLOWED).url == "https://x.cdn.example/d"
    for location, said in [
        ("https://evil.test/", "is no host of"),
        ("http://img.example.org/", "leads from https: to http:"),
        ("file:///etc/passwd", "has the scheme 'file'"),
        ("https://img.example.org:22/", "with port 22"),
        ("http://169.254.169.254/latest/meta-data", "is no host of"),
    ]:
        with pytest.raises(UrlFault, match=said):
            redirected(target, location, ALLOWED)


@pytest.mark.parametrize(
    "entry",
    [
        "https://img.example.org",
        "*",
        "*.",
        "a*.example.org",
        "img.example.org/x",
        "ü.example",
        "a:b",
        "a:0",
        "a:65536",
        "-a",
    ],
)
def test_an_entry_that_is_no_host_is_refused_at_the_start(entry: str) -> None:
    fault = fault_of_hosts([entry])
    assert fault is not None and entry in fault and "\n" not in fault


def test_without_entries_nothing_is_fetched_and_the_option_is_named() -> None:
    assert not AllowedHosts(()) and fault_of_hosts(("a.example", "[2606:4700::1111]:8080", "*.b.example:444")) is None
    with pytest.raises(UrlFault, match=r"without --allow-image-hosts HOST\[,HOST\]; send a data: URL"):
        AllowedHosts(()).target("https://img.example.org/")
