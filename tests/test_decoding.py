"""Decoding is safe in threads; msgspec's own first decoding into a type is not."""

from __future__ import annotations

import ast
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import pytest

from holdfast.decoding import decode_json_as, decode_msgpack_as
from tests.ranks.pool import fork
from tests.test_structure import FILES, name_of, nodes_of, tree_of

NUM_TYPES, NUM_THREADS = 300, 4
ALL_DECODES = ("msgspec.json.decode", "msgspec.msgpack.decode", "msgspec.convert")
ALL_DECODERS = ("msgspec.json.Decoder", "msgspec.msgpack.Decoder")


def decode_new_types(_: Connection, decode: Any, encode: Any) -> None:
    """Threads that decode into a type at a time, and are changed as often as can be."""
    sys.setswitchinterval(1e-7)
    for _ in range(NUM_TYPES):
        row = msgspec.defstruct("Row", [("x", int), ("y", str | None, None)])
        kind = msgspec.defstruct("Table", [("rows", list[row]), ("by_name", dict[str, row])])  # type: ignore[valid-type]
        data = encode({"rows": [{"x": 1}], "by_name": {}})
        gate = threading.Barrier(NUM_THREADS)

        def run(kind: Any = kind, data: bytes = data, gate: threading.Barrier = gate) -> None:
            gate.wait()
            assert decode(data, kind).rows[0].x == 1

        threads = [threading.Thread(target=run) for _ in range(NUM_THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize(
    ("decode", "encode"),
    [(decode_json_as, msgspec.json.encode), (decode_msgpack_as, msgspec.msgpack.encode)],
    ids=("json", "msgpack"),
)
def test_threads_decode_into_a_new_type_together(decode: Any, encode: Any) -> None:
    """In a process of its own: what is tested for ends it."""
    pipe, process = fork(decode_new_types, decode, encode, environment={})
    with pipe:
        process.join(60)
    assert process.exitcode == 0


def test_nothing_else_decodes_into_types() -> None:
    for path in FILES:
        for node in nodes_of(tree_of(path)):
            if isinstance(node, ast.Call) and name_of(path) != "holdfast.decoding":
                called = ast.unparse(node.func)
                where = f"{path}:{node.lineno}"
                assert called not in ALL_DECODERS, where
                if called in ALL_DECODES:
                    assert "type" not in [each.arg for each in node.keywords], where
                    assert len(node.args) == 1, where
