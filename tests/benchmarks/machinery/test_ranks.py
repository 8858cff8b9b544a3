from __future__ import annotations

import random
import socket

import pytest

from machinery.ranks import free_port


def test_a_port_where_somebody_listens_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = iter([taken.getsockname()[1], free_port()])
        chosen = []

        def choose(self: random.Random, *bounds: int) -> int:
            chosen.append(next(ports))
            return chosen[-1]

        monkeypatch.setattr(random.SystemRandom, "randrange", choose)
        assert free_port() == chosen[1]
    with socket.create_server(("127.0.0.1", chosen[1])):
        pass
