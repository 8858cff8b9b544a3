"""No library may need the network for what was exported."""

from __future__ import annotations

import socket

import pytest


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.socket.connect

    def connect(self: socket.socket, address: object) -> None:
        if isinstance(address, tuple) and address[0] == "127.0.0.1":
            return real(self, address)
        raise OSError(f"a test without network connects to {address}")

    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # for programs that a test starts
