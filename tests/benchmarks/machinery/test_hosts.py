"""Two hosts as namespaces: their link, what ends with them, and the refusal without rights."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from machinery.hosts import ADDRESSES, NAMES, Network, Unavailable

if sys.platform != "linux":
    pytest.skip("namespaces are Linux's", allow_module_level=True)

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"

#: Receives until the sender closes; prints the seconds from the first byte on.
RECEIVE = """
import socket, time
with socket.create_server(("", 5000)) as server:
    print("listening", flush=True)
    connection, _ = server.accept()
    began = time.monotonic()
    while connection.recv(1 << 16):
        pass
    print(time.monotonic() - began)
"""
#: Sends zeros to the other host.
SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], 5000), float(sys.argv[3])) as connection:
    connection.sendall(bytes(int(sys.argv[2])))
"""
#: Makes two hosts, prints processes of both and does nothing until it is ended.
KEEP = """
import time
import psutil
from machinery.hosts import Network
with Network() as network:
    sleeper = network.hosts[1].start(["sleep", "1000"], {})
    while not (inside := psutil.Process(sleeper.pid).children()):
        time.sleep(0.01)
    print(network.switch.pid, *(host.pid for host in network.hosts), inside[0].pid, flush=True)
    time.sleep(1000)
"""


def make() -> Network:
    try:
        return Network()
    except Unavailable as why:
        pytest.skip(f"no two hosts can be made here: {why}")


@pytest.fixture
def network() -> Iterator[Network]:
    with make() as made:
        yield made


def seconds_of_transfer(network: Network, size: int) -> float:
    """Of so many bytes from the second host to the first."""
    first, second = network.hosts
    server = first.start([sys.executable, "-c", RECEIVE], {}, stdout=subprocess.PIPE)
    assert server.stdout is not None
    with server.stdout as lines:
        assert lines.readline() == b"listening\n"
        client = second.start([sys.executable, "-c", SEND, NAMES[0], str(size), "60"], {})
        assert client.wait(60) == 0
        return float(lines.readline())


def reaches(network: Network, seconds: float) -> bool:
    """Whether the second host gets a connection to the first one, which nobody accepts, in time."""
    words = ["-c", SEND, ADDRESSES[0], "0", str(seconds)]
    error = network.hosts[1].start([sys.executable, *words], {}, stderr=subprocess.PIPE)
    _, said = error.communicate()
    assert b"refused" in said or b"timed out" in said, said
    return b"refused" in said


def test_hosts_have_their_own_names_and_interfaces(network: Network) -> None:
    for host, name in zip(network.hosts, NAMES, strict=True):
        words = ["sh", "-c", "hostname; pwd; cat /etc/hosts; ip -oneline link | cut -d ' ' -f 2"]
        asked = host.start(words, {}, stdout=subprocess.PIPE)
        said, _ = asked.communicate()
        lines = said.decode().splitlines()
        assert lines[:2] == [name, os.getcwd()]
        assert [line.split("@")[0] for line in lines[-2:]] == ["lo:", "eth0"]
        assert {f"{a} {n}" for a, n in zip(ADDRESSES, NAMES, strict=True)} < set(lines)


def test_the_link_is_as_fast_as_asked_for(network: Network) -> None:
    size = 1_500_000
    network.set_speed(20)
    before = network.bytes_to(0)
    # Except for the first 256 KiB, and longer on a busy machine.
    assert seconds_of_transfer(network, size) > 0.9 * 8 * (size - (256 << 10)) / 20e6
    assert size < network.bytes_to(0) - before < 1.2 * size
    network.set_speed(None)
    assert seconds_of_transfer(network, size) < 60


def test_a_cut_link_swallows_packets_until_it_is_restored(network: Network) -> None:
    network.cut()
    with make() as other:  # two at once have nothing to do with each other
        assert not reaches(network, 0.3)
        assert reaches(other, 60)
    network.restore()
    assert reaches(network, 60)


def test_a_killed_host_leaves_nothing(network: Network) -> None:
    first, second = network.hosts
    sleepers = [host.start(["sleep", "1000"], {}) for host in network.hosts]
    second.kill()
    assert sleepers[1].poll() is not None
    assert sleepers[0].poll() is None
    assert not psutil.pid_exists(second.pid)
    first.kill()
    first.kill()  # once more does nothing
    assert not psutil.pid_exists(first.pid)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_however_the_program_ends(how: signal.Signals) -> None:
    make().__exit__()  # or skip
    environ = os.environ | {"PYTHONPATH": str(BENCHMARKS)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", KEEP], env=environ, **pipes) as program:
        assert program.stdout is not None
        processes = [psutil.Process(int(pid)) for pid in program.stdout.readline().split()]
        assert len(processes) == 4
        assert all(map(alive, processes))
        program.send_signal(how)
        program.wait(60)
    until = time.monotonic() + 60
    while any(map(alive, processes)) and time.monotonic() < until:
        time.sleep(0.01)
    assert not any(map(alive, processes))


def alive(process: psutil.Process) -> bool:
    return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)


def test_a_missing_tool_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(Unavailable, match=r"^the command unshare is missing$"):
        Network()


def test_missing_rights_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for tool in ("unshare", "nsenter", "mount", "hostname", "ip", "tc"):
        path = tmp_path / tool
        path.write_text("#!/bin/sh\necho unshare failed: Operation not permitted >&2\nexit 1\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unavailable, match=r"not permitted; it takes .* CAP_NET_ADMIN, which root"):
        Network()
