"""Ports are looked at before anything is started."""

from __future__ import annotations

import socket

import pytest

from deploy.errors import UserError
from deploy.ports import Ports, check_port, is_loopback, reachable, url_host


def test_free_ports_are_three_different_ones_that_can_be_bound() -> None:
    ports = Ports.free()
    assert len({ports.http, ports.grpc, ports.metrics}) == 3
    ports.check_free("127.0.0.1")


@pytest.mark.parametrize("option", ["--http-port", "--grpc-port", "--metrics-port"])
def test_a_port_in_use_is_one_sentence_that_names_the_port_and_the_option(option: str) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen(1)
        taken = other.getsockname()[1]
        free = Ports.free()
        numbers = {"--http-port": free.http, "--grpc-port": free.grpc, "--metrics-port": free.metrics, option: taken}
        with pytest.raises(UserError) as caught:
            Ports(*numbers.values()).check_free("127.0.0.1")
    assert str(taken) in str(caught.value)
    assert f"{option} PORT" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_several_ports_in_use_are_named_together_with_free_ones() -> None:
    free = Ports.free()
    with socket.socket() as one, socket.socket() as other:
        for taken, port in ((one, free.http), (other, free.metrics)):
            taken.bind(("127.0.0.1", port))
            taken.listen(1)
        with pytest.raises(
            UserError, match=f"ports {free.http}, {free.metrics} on 127.0.0.1 are already in use"
        ) as caught:
            free.check_free("127.0.0.1")
        named = dict(part.split("=") for part in str(caught.value).split("such as ")[1].split())
    assert list(named) == ["--http-port", "--metrics-port"]
    assert not {free.http, free.grpc, free.metrics} & set(map(int, named.values()))


def test_the_same_port_twice_is_refused() -> None:
    port = Ports.free().http
    with pytest.raises(UserError, match=f"port {port} is given twice"):
        Ports(port, port, 18999).check_free("127.0.0.1")


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_a_port_out_of_range_is_refused(port: int) -> None:
    with pytest.raises(UserError, match=rf"--http-port is {port}, allowed is 1 to 65535"):
        Ports(http=port).check_free("127.0.0.1")


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(UserError, match="none of this machine's"):
        check_port("192.0.2.1", 18999, "--http-port")  # a documentation address: nobody has it


def test_a_client_reaches_a_server_on_every_interface_through_the_loopback() -> None:
    assert reachable("0.0.0.0") == "127.0.0.1"
    assert reachable("127.0.0.5") == "127.0.0.5"
    assert url_host(reachable("::")) == "[::1]"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.5", "::1", "localhost"])
def test_only_this_machine_reaches_a_loopback_address(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.0.2.1", "no-such-host.invalid"])
def test_everything_else_may_be_reached_by_others(host: str) -> None:
    assert not is_loopback(host)
