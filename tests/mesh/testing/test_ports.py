import socket

import pytest

from mesh.testing import ports


def test_a_port_can_be_listened_on_and_is_not_given_to_others():
    port = ports.free_port()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", port))
    with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
        first = int(file.read().split()[0])
    assert port < first, "an outgoing connection may have it"


def test_ports_that_are_taken_are_passed_over(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", ports.free_port()))
        port = taken.getsockname()[1]
        monkeypatch.setattr(ports, "_RANGE", range(port, port + 2))
        assert ports.free_port() == port + 1
        monkeypatch.setattr(ports, "_RANGE", range(port, port + 1))
        with pytest.raises(OSError, match="no free port"):
            ports.free_port()
