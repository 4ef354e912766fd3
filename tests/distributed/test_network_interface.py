"""The network interface that gloo is given."""

from __future__ import annotations

import os

import pytest

from hf_zero.distributed import rank_hosts
from hf_zero.distributed.rank_hosts import VARIABLES, choose_interface, interface_of, interfaces
from hf_zero.errors import LaunchError


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # so that monkeypatch takes back what a test sets


def chosen() -> list[str]:
    return [os.environ[name] for name in VARIABLES]


def test_ranks_that_meet_on_loopback_talk_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    for address in ("127.0.0.1", "localhost", "127.0.0.2"):
        monkeypatch.setenv(VARIABLES[0], "")
        choose_interface(address, several_hosts=True)
        assert chosen() == ["lo", ""]
    for address in (None, "no-such-host.invalid"):  # where no way is known the choice is gloo's
        monkeypatch.setenv(VARIABLES[0], "")
        choose_interface(address, several_hosts=True)
        assert chosen() == ["", ""]
    choose_interface("10.1.2.3", several_hosts=True, asked="lo")  # for gloo and NCCL
    assert chosen() == ["lo", "lo"]
    assert interface_of("192.0.2.1") is None and interface_of("127.0.0.1") == "lo"


def test_what_the_user_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    other = next((name for name in interfaces() if name != "lo"), "lo")
    monkeypatch.setenv(VARIABLES[0], f"{other},lo")
    choose_interface("127.0.0.1", several_hosts=False)
    assert os.environ[VARIABLES[0]] == f"{other},lo"


def test_an_interface_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    said = r"interface=eth99: this host has no network interface eth99; it has .*lo"
    with pytest.raises(LaunchError, match=said):
        choose_interface("127.0.0.1", several_hosts=False, asked="eth99")
    monkeypatch.setenv(VARIABLES[0], "lo,eth98")
    with pytest.raises(LaunchError, match=r"GLOO_SOCKET_IFNAME=lo,eth98: .* interface eth98;"):
        choose_interface("127.0.0.1", several_hosts=False)


def test_a_name_that_is_loopback_in_etc_hosts_does_not_lead_other_hosts_astray(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Many machines know their own name as 127.0.1.1."""
    ways = {"worker-0": "127.0.0.1", rank_hosts.SOMEWHERE: "10.9.8.7"}
    monkeypatch.setattr(rank_hosts, "_source", lambda address: ways.get(address))
    names = {"127.0.0.1": "lo", "10.9.8.7": "eth0"}
    monkeypatch.setattr(rank_hosts, "interface_of", names.get)
    choose_interface("worker-0", several_hosts=True)
    assert os.environ[VARIABLES[0]] == "eth0"
    monkeypatch.setenv(VARIABLES[0], "")
    choose_interface("worker-0", several_hosts=False)
    assert os.environ[VARIABLES[0]] == "lo"
