"""Two hosts on one machine: namespaces joined by a switch whose speed can be set. Linux only.

A host has network, UTS, PID and mount namespaces of its own: its processes see only its interfaces,
its name, its addresses of both hosts in /etc/hosts, and its processes. The namespaces have no names
outside, so that two networks at once do not collide, and live as long as the host's first process,
which reads a pipe from this one. When this process ends, however it ends, so does that one; then
the kernel ends all processes of the host and removes its interfaces.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

#: Addresses of the hosts. No other network has them, and nothing is routed to another network.
ADDRESSES = ("10.77.0.1", "10.77.0.2")
NAMES = ("host-0", "host-1")
#: A host's interface.
INTERFACE = "eth0"

_TOOLS = ("unshare", "nsenter", "mount", "hostname", "ip", "tc")
_FIRST = 'mount --bind "$1" /etc/hosts && hostname "$0" && echo ready && exec cat'


class Unavailable(Exception):
    """Hosts cannot be made here: in a sentence, why not."""


class Host:
    """Namespaces, and the processes in them."""

    def __init__(self, name: str, table: Path) -> None:
        """`table` becomes its /etc/hosts."""
        kinds = "--net", "--uts", "--pid", "--mount-proc", "--fork"
        # Ctrl-C in a terminal goes to this process alone, which then ends the hosts.
        self._first = subprocess.Popen(
            ["unshare", *kinds, "sh", "-c", _FIRST, name, str(table)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._first.stdout is not None
        assert self._first.stderr is not None
        if self._first.stdout.readline() != b"ready\n":
            why = self._first.stderr.read().decode().strip()
            self._first.wait()
            raise Unavailable(_refusal(why))
        (child,) = psutil.Process(self._first.pid).children()
        self.pid = child.pid  # of that process, as this one sees it
        self._started: list[subprocess.Popen[bytes]] = []

    def start(
        self, words: Sequence[str], environment: Mapping[str, str], **options: Any
    ) -> subprocess.Popen[bytes]:
        """Start a program in this host, in the present folder; `options` are Popen's.

        The process is one that waits for the program, and ends as it does: kill the host instead.
        """
        # Gloo would otherwise look its name up, and take the loopback interface if that fails.
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": INTERFACE, **environment}
        kinds = "--net", "--uts", "--pid", "--mount", f"--wd={os.getcwd()}"
        command = ["nsenter", f"--target={self.pid}", *kinds, "--", *words]
        process: subprocess.Popen[bytes] = subprocess.Popen(
            command, env=environment, start_new_session=True, **options
        )
        self._started.append(process)
        return process

    def configure(self, words: str) -> None:
        """Run a command that configures this host's network.

        Raises:
            Unavailable: it failed.
        """
        # Not in the PID namespace: `ip` finds other hosts by their processes.
        command = ["nsenter", f"--net=/proc/{self.pid}/ns/net", "--", *words.split()]
        ended = subprocess.run(command, capture_output=True, text=True)
        if ended.returncode:
            raise Unavailable(_refusal(f"{words}: {ended.stderr.strip()}"))

    def transferred(self, interface: str) -> tuple[int, int]:
        """Bytes that an interface has received and sent so far."""
        for line in Path(f"/proc/{self.pid}/net/dev").read_text().splitlines():
            name, _, numbers = line.partition(":")
            if name.strip() == interface:
                fields = numbers.split()
                return int(fields[0]), int(fields[8])
        raise KeyError(interface)

    def kill(self) -> None:
        """End all its processes at once; the kernel then removes its namespaces."""
        if self._first.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
        for process in (*self._started, self._first):
            process.wait()  # those outside that wait for one inside
        for stream in (self._first.stdin, self._first.stdout, self._first.stderr):
            assert stream is not None
            stream.close()


class Network:
    """Two hosts and the switch between them. A context manager that ends all of it.

    Raises:
        Unavailable: a tool or a right is missing.
    """

    def __init__(self) -> None:
        for tool in _TOOLS:
            if shutil.which(tool) is None:
                raise Unavailable(f"the command {tool} is missing")
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            table = Path(folder, "hosts")
            known = [("127.0.0.1", "localhost"), *zip(ADDRESSES, NAMES, strict=True)]
            # By the addresses of IPv6 sockets too, whose names torch looks up.
            known += [(f"::ffff:{address}", name) for address, name in known]
            table.write_text("".join(f"{address} {name}\n" for address, name in known))
            made = []
            for name in ("switch", *NAMES):
                made.append(Host(name, table))
                stack.callback(made[-1].kill)
            self.switch, self.hosts = made[0], made[1:]
            self.switch.configure("ip link add switch type bridge")
            for number, host in enumerate(self.hosts):
                self._connect(number, host)
            self.restore()
            self._stack = stack.pop_all()

    def _connect(self, number: int, host: Host) -> None:
        port = f"port{number}"
        self.switch.configure(
            f"ip link add {port} type veth peer name {INTERFACE} netns {host.pid}"
        )
        self.switch.configure(f"ip link set {port} master switch up")
        host.configure(f"ip address add {ADDRESSES[number]}/24 dev {INTERFACE}")
        for interface in ("lo", INTERFACE):
            host.configure(f"ip link set {interface} up")

    def set_speed(self, mbit: float | None) -> None:
        """Limit what each host receives, in Mbit/s; None: as fast as this machine is."""
        for number in range(len(self.hosts)):
            device = f"dev port{number} root"
            if mbit is None:
                self.switch.configure(f"tc qdisc replace {device} pfifo")
                continue
            # A bucket of 4 ms, as the kernel may fill it no more often than that, and of several
            # packets of 64 KiB, as TCP hands them to the interface.
            burst = max(256 << 10, int(mbit * 1e6 / 8 * 4e-3))
            self.switch.configure(
                f"tc qdisc replace {device} tbf rate {mbit:g}mbit burst {burst} latency 50ms"
            )

    def cut(self) -> None:
        """From now on the switch drops everything; the hosts' interfaces stay up."""
        self.switch.configure("ip link set switch down")

    def restore(self) -> None:
        """The switch forwards packets."""
        self.switch.configure("ip link set switch up")

    def bytes_to(self, number: int) -> int:
        """Bytes that the switch has sent to a host so far, headers included."""
        return self.switch.transferred(f"port{number}")[1]

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def _refusal(why: str) -> str:
    return (
        f"{why or 'unshare failed'}; it takes a Linux kernel with bridges and tbf, and the rights "
        "CAP_SYS_ADMIN and CAP_NET_ADMIN, which root has, or unshare --user --map-root-user gives"
    )
