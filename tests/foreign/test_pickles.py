"""Pickles are read as Python reads them where they are harmless; nothing in them is ever run."""

from __future__ import annotations

import argparse
import builtins
import datetime
import io
import os
import pathlib
import pickle
import random
import struct
import subprocess
import sys
import time
import tracemalloc
import uuid
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import CorruptionError, HoldfastError, PlacementError
from holdfast.foreign import pickles
from holdfast.foreign.pickle_nodes import array_form, to_node
from holdfast.foreign.pickle_types import _ENUMS, STANDARD_TYPES
from holdfast.foreign.pickled_values import (
    Constructor,
    EnumValue,
    PickledArray,
    PickledDeque,
    PickledMapping,
    Record,
    TorchSize,
)
from holdfast.foreign.pickles import read_pickle
from holdfast.format.values import Codec, Codecs, decode_tree, walk
from holdfast.storage import host_memory
from tests.drawn import drawn

PROTOCOLS = range(6)


def read(data: bytes, **options: Any) -> Any:
    return read_pickle(data, place="file.pkl", **options)


def refused(data: bytes, reason: str = "") -> str:
    with pytest.raises(CorruptionError, match=reason) as raised:
        read(data)
    assert str(raised.value).startswith("file.pkl: ")
    assert len(str(raised.value)) < 400
    return str(raised.value)


# What is harmless.

PLAIN = [
    None, True, False, 0, 1, -1, 255, 256, 65535, 65536, -(2**31), 2**31, 2**63, -(2**200), 10**999,
    0.0, -0.0, 1e300, float("inf"), "", "text", "ä\n\\ 'x' \"y\"", "\ud800", "long" * 100, b"",
    b"\x00\xff", b"x" * 300, bytearray(b"abc"), [], [1, [2]], (), (1,), (1, 2), (1, 2, 3),
    (1, 2, 3, 4), {}, {"a": 1, 2: (3,), (4, 5): None, None: 0, 1.5: 1, b"k": 2}, set(), {1, "a"},
    frozenset(), frozenset({(1, 2), "b"}), 1 + 2j, range(3), range(1, 9, 2), slice(1, None, 2),
    list(range(2000)), {str(i): i for i in range(2000)}, set(range(3000)),
]  # fmt: skip


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_plain_values(protocol: int) -> None:
    for value in PLAIN:
        mine = read(pickle.dumps(value, protocol))
        assert type(mine) is type(value)
        assert mine == value
        assert repr(mine) == repr(value) or isinstance(value, set | frozenset)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_mappings_and_deques(protocol: int) -> None:
    ordered = OrderedDict(b=1, a=2)
    ordered.extra = [1]
    values = [
        (ordered, "collections.OrderedDict", [("b", 1), ("a", 2)]),
        (Counter("aab"), "collections.Counter", [("a", 2), ("b", 1)]),
        (defaultdict(list, a=[1]), "collections.defaultdict", [("a", [1])]),
    ]
    for value, name, items in values:
        mine = read(pickle.dumps(value, protocol))
        assert isinstance(mine, PickledMapping)
        assert (mine.name, list(mine.items())) == (name, items)
    assert read(pickle.dumps(ordered, protocol)).state == {"extra": [1]}
    mine = read(pickle.dumps(deque([1, 2], maxlen=5), protocol))
    assert isinstance(mine, PickledDeque)
    assert (mine.maxlen, list(mine)) == (5, [1, 2])


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_objects_are_records(protocol: int) -> None:
    value = argparse.Namespace(
        lr=0.5, inner=SimpleNamespace(a=1), path=pathlib.PurePosixPath("/a/b")
    )
    mine = read(pickle.dumps(value, protocol))
    assert isinstance(mine, Record)
    assert mine.name == "argparse.Namespace"
    assert mine.get("lr") == 0.5
    assert mine.get("inner").state == {"a": 1}
    assert mine.get("path").args == ("/", "a", "b")


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_dates(protocol: int) -> None:
    now = datetime.datetime(2026, 1, 2, 3, 4, 5, 678901, fold=1)
    for value in (now, now.date(), now.time(), datetime.timedelta(-1, 5, 7)):
        mine = read(pickle.dumps(value, protocol))
        assert type(mine) is type(value)
        assert mine == value
    aware = now.replace(tzinfo=datetime.UTC)
    assert read(pickle.dumps(aware, protocol)).name == "datetime.datetime"


ARRAYS = [
    np.arange(6.0).reshape(2, 3), np.asfortranarray(np.arange(6).reshape(2, 3)), np.array(5),
    np.zeros((0, 3), dtype=np.int8), np.array([True, False]), np.arange(3, dtype=">i4"),
    np.array(["2020-01-01", "NaT"], dtype="M8[ns]"), np.array([5], dtype="m8[3D]"),
    np.array([1 + 2j], dtype=np.complex64), np.array(["ab", "c"]), np.array([b"ab"]),
    np.arange(10)[::2], np.float16([1, 2]),
]  # fmt: skip
SCALARS = [
    np.float32(1.5), np.int8(-1), np.bool_(True), np.float16(2), np.uint64(2**63),
    np.complex128(1j), np.str_("ä"), np.bytes_(b"x"), np.datetime64("2020-01-01"),
    np.timedelta64(5, "s"), np.str_(""),
]  # fmt: skip


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_numpy(protocol: int) -> None:
    for value in ARRAYS:
        mine = read(pickle.dumps(value, protocol))
        assert isinstance(mine, PickledArray)
        array = mine.numpy()
        assert array.dtype == value.dtype
        assert array.shape == value.shape
        assert np.array_equal(array, value, equal_nan=value.dtype.kind in "mM")
        assert not array.flags.writeable
    for scalar in SCALARS:
        mine = read(pickle.dumps(scalar, protocol))
        assert type(mine) is type(scalar)
        assert mine == scalar
        assert mine.dtype == scalar.dtype


def test_values_stay_shared() -> None:
    inner = ["x"]
    mine = read(pickle.dumps({"a": inner, "b": inner}))
    assert mine["a"] is mine["b"]
    cycle: list[Any] = []
    cycle.append(cycle)
    mine = read(pickle.dumps(cycle))
    assert mine[0] is mine


def test_python_2() -> None:
    """Protocols 0 to 2 as Python 2 wrote them: byte strings, INST, OrderedDict of pairs."""
    assert read(b"\x80\x02}U\x01aU\x02\xc3\xa4s.") == {"a": "ä"}
    assert read(b"\x80\x02T\x02\x00\x00\x00\xff\xfe.") == b"\xff\xfe"
    assert read(b"S'a\\n\\x41\\'\\\\'\n.") == "a\nA'\\"
    assert read(b"(iargparse\nNamespace\np0\n(dp1\nS'a'\nI5\nsb.").state == {"a": 5}
    assert read(b"c__builtin__\nset\n((lI1\naI2\natR.") == {1, 2}
    assert list(read(b"ccollections\nOrderedDict\n((l(lS'a'\naI1\naatR.").items()) == [("a", 1)]
    assert read(b"I01\n.") is True
    assert read(b"L5L\n.") == 5


def test_every_listed_enum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pickles of enums of these names, by value and as Python 3.11.0 wrote them."""
    assert len(_ENUMS) > 15
    for whole, members in _ENUMS.items():
        module, _, name = whole.rpartition(".")
        made = Enum(name, {member: value for value, member in members.items()}, module=module)
        parts = module.split(".")
        for num in range(1, len(parts) + 1):
            monkeypatch.setitem(sys.modules, ".".join(parts[:num]), ModuleType(parts[num - 1]))
        setattr(sys.modules[module], name, made)
        for each in made:
            for protocol in PROTOCOLS:
                mine = read(pickle.dumps(each, protocol))
                assert mine == EnumValue(whole, each.value, each.name)
            old = b"cbuiltins\ngetattr\n" + f"(c{module}\n{name}\nV{each.name}\ntR.".encode()
            assert read(old) == mine
        monkeypatch.undo()


def test_getattr_is_for_enums_alone() -> None:
    for cls in (
        b"ccollections\nOrderedDict\n",
        b"cargparse\nNamespace\n",
        b"Vtext\n",
        b"ctorch\nTensor\n",
    ):
        refused(b"cbuiltins\ngetattr\n(" + cls + b"V__init__\ntR.", "listed enum")
    refused(b"cbuiltins\ngetattr\n(csignal\nSignals\nVa.b\ntR.", "listed enum")


def test_enums_of_megatron() -> None:
    assert read(b"\x80\x02cmegatron.core.enums\nModelType\nK\x01\x85R.") == EnumValue(
        "megatron.core.enums.ModelType", 1, "encoder_or_decoder"
    )
    mine = read(b"\x80\x02csignal\nSignals\nK\x0f\x85R.")
    assert (mine.value, mine.member) == (15, None)


def test_persistent_ids_belong_to_the_caller() -> None:
    assert read(b"\x80\x02K\x05Q.", persistent=lambda name: [name]) == [5]
    assert read(b"Pabc\n.", persistent=lambda name: [name]) == ["abc"]
    refused(b"\x80\x02K\x05Q.", "outside of itself")
    with pytest.raises(CorruptionError, match="no such"):
        read(b"K\x05Q.", persistent=lambda name: (_ for _ in ()).throw(ValueError("no such")))


def test_a_callers_own_types() -> None:
    types = {**STANDARD_TYPES, "a.B": Constructor("a.B", lambda args: Record("a.B", args))}
    assert read(b"ca\nB\n(I1\ntR.", types=types).args == (1,)
    refused(b"ca\nB\n(I1\ntR.", r"'a\.B'")


def test_a_million_opcodes_are_read_fast() -> None:
    """The metadata of a large job; the bound is loose, as other work may share the machine."""
    value = {f"layer.{i}": (i, [i, i + 1], {"a": i}) for i in range(30_000)}
    data = pickle.dumps(value)
    num = sum(1 for _ in pickle_ops(data))
    assert num > 450_000
    start = time.process_time()
    assert read(data) == value
    assert time.process_time() - start < 4e-6 * num


def pickle_ops(data: bytes) -> Iterator[Any]:
    import pickletools

    return pickletools.genops(data)


# What is refused: names.


def text(value: str) -> bytes:
    raw = value.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def stack_global(module: str, name: str) -> bytes:
    return b"\x80\x04" + text(module) + text(name) + b"\x93"


COMMAND = text("touch pwned")
ATTACKS: dict[str, bytes] = {
    "reduce": b"\x80\x02cos\nsystem\n" + COMMAND + b"\x85R.",
    "reduce, posix": b"\x80\x02cposix\nsystem\n" + COMMAND + b"\x85R.",
    "text": b"cos\nsystem\n(S'touch pwned'\ntR.",
    "inst": b"(S'touch pwned'\nios\nsystem\n.",
    "obj": b"(cos\nsystem\nS'touch pwned'\no.",
    "newobj": b"\x80\x02csubprocess\nPopen\n" + COMMAND + b"\x85\x81.",
    "newobj_ex": b"\x80\x04csubprocess\nPopen\n" + COMMAND + b"\x85}\x92.",
    "stack_global": stack_global("os", "system") + COMMAND + b"\x85R.",
    "computed": b"\x80\x04" + text("so") + text("os") + b"\x94q\x000h\x00" + text("system")
    + b"\x93" + COMMAND + b"\x85R.",
    "eval": b"\x80\x02cbuiltins\neval\n" + text("open('pwned', 'w')") + b"\x85R.",
    "exec": b"\x80\x02c__builtin__\nexec\n" + text("open('pwned', 'w')") + b"\x85R.",
    "open": b"\x80\x02cio\nopen\n" + text("pwned") + text("w") + b"\x86R.",
    "import": b"\x80\x02cbuiltins\n__import__\n" + text("os") + b"\x85R.",
    "getattr": stack_global("builtins", "getattr") + stack_global("os", "path")[2:]
    + text("os") + b"\x86R.",
    "dotted": stack_global("torch", "nn.Module.__init__") + b")R.",
    "dotted, inside": stack_global("collections", "OrderedDict.__init__") + b")R.",
    "dunder": stack_global("argparse.Namespace", "__class__") + b")R.",
    "torch.load": b"\x80\x02ctorch\nload\n" + text("evil.pt") + b"\x85R.",
    "hub": b"\x80\x02ctorch.hub\nload\n" + text("evil") + b"\x85R.",
    "load_from_bytes": b"\x80\x02ctorch.storage\n_load_from_bytes\nU\x00\x85R.",
    "numpy.load": b"\x80\x02cnumpy\nload\n" + text("evil.npy") + b"\x85R.",
    "runpy": b"\x80\x02crunpy\nrun_path\n" + text("evil.py") + b"\x85R.",
    "pickle": b"\x80\x02cpickle\nloads\nU\x01.\x85R.",
    "partial": b"\x80\x02cfunctools\npartial\n)R.",
    "apply": b"\x80\x02c__builtin__\napply\n)R.",
    "newline": b"\x80\x04" + text("os\nsystem") + text("x") + b"\x93.",
    "extension": b"\x80\x02\x82\x01.",
    "extension, 4 bytes": b"\x80\x02\x84\x01\x00\x00\x00.",
    "buffer": b"\x80\x05\x97.",
}  # fmt: skip


@pytest.fixture
def is_watched(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Iterator[None]:
    """Fails the test if anything is run, opened, imported or written while a pickle is read."""
    monkeypatch.chdir(tmp_path)

    def never(*args: object, **kwargs: object) -> None:
        raise AssertionError("something was run")

    with monkeypatch.context() as patch:
        for owner, name in (
            (os, "system"), (os, "popen"), (subprocess, "Popen"), (builtins, "eval"),
            (builtins, "open"), (pickle, "loads"),
        ):  # fmt: skip
            patch.setattr(owner, name, never)
        yield
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("is_watched")
@pytest.mark.parametrize("name", ATTACKS)
def test_what_would_run_is_refused(name: str) -> None:
    message = refused(ATTACKS[name])
    assert "is not in the list" in message or "outside of the file" in message


def test_a_refusal_names_what_was_asked_for() -> None:
    assert refused(ATTACKS["reduce"]) == (
        "file.pkl: the file asks for 'os.system', which is not in the list of what may be read; "
        "nothing was run"
    )


@pytest.mark.usefixtures("is_watched")
def test_calls_go_to_listed_names_only() -> None:
    """A call of a value, a state for a value without one, a name that cannot be called."""
    attacks = {
        b"\x80\x02K\x05)R.": "calls a int",
        b"\x80\x02]q\x00h\x00)R.": "calls a list",
        b"\x80\x02X\x02\x00\x00\x00os)R.": "calls a str",
        b"(I1\nI2\no.": "calls a int",
        b"\x80\x02ctorch\nfloat32\n)R.": r"calls 'torch\.float32'",
        b"\x80\x02cargparse\nNamespace\n)R)R.": r"calls 'argparse\.Namespace'",
        b"\x80\x02cargparse\nNamespace\nK\x01R.": "with a int",
        b"\x80\x04cargparse\nNamespace\n)}X\x01\x00\x00\x00aK\x01s\x92.": "keyword",
        b"\x80\x02]}b.": "state of a list",
        b"\x80\x02}}b.": "state of a dict",
        b"\x80\x02cargparse\nNamespace\n}b.": r"state of 'argparse\.Namespace'",
        b"\x80\x02cargparse\nNamespace\n)R}b}b.": "two states",
        b"\x80\x02K\x01K\x02a.": "not a list",
        b"\x80\x02)K\x02a.": "not a list",
        b"\x80\x02]K\x01K\x02s.": "sets items of a list",
        b"\x80\x02K\x01(K\x02\x90.": "not a set",
        b"\x80\x02}]K\x01s.": "key or member that is a list",
        b"\x80\x04(]\x91.": "key or member",
        b"\x80\x04\x8f(}\x90.": "key or member",
        b"\x80\x02}]\x85K\x01s.": "key or member",
        b"\x80\x04NN\x93.": "not text",
        b"\x80\x02ccopyreg\n_reconstructor\ncos\nsystem\n.": "not in the list",
        b"\x80\x02ccopyreg\n_reconstructor\n(cargparse\nNamespace\nc__builtin__\nlist\n]tR.": (
            "base"
        ),
    }
    for data, reason in attacks.items():
        refused(data, reason)


def test_a_setstate_is_data() -> None:
    """A state that names methods stays a dict; no attribute of anything is set."""
    mine = read(b"\x80\x02cargparse\nNamespace\n)R}" + text("__class__") + text("x") + b"sb.")
    assert type(mine) is Record
    assert mine.state == {"__class__": "x"}


def test_arguments_of_listed_names_are_checked() -> None:
    """Sizes that would allocate, arguments of other types, numbers that are none."""
    attacks = [
        b"cbuiltins\nbytearray\n(I99999999999\ntR.",
        b"cbuiltins\nbytes\n(I99999999999\ntR.",
        b"cbuiltins\nlist\n(cbuiltins\nrange\n(I99999999999\ntRtR.",
        b"cbuiltins\nint\n(V9\nI36\ntR.",
        b"cbuiltins\nslice\n((ltR.",
        b"c_codecs\nencode\n(Va\nVidna\ntR.",
        b"ccollections\ndeque\n((lI-1\ntR.",
        b"ccollections\ndefaultdict\n(VNot a name\ntR.",
        b"ccollections\nCounter\n(I1\ntR.",
        b"csignal\nSignals\n((ltR.",
        b"cdatetime\ndate\n(Vtext\ntR.",
        b"\x80\x03cdatetime\ndate\nC\x04\x00\x00\x00\x00\x85R.",
        b"cdatetime\ntimedelta\n(I99999999999\nI0\nI0\ntR.",
        b"cnumpy._core.multiarray\n_reconstruct\n(cargparse\nNamespace\n(I0\ntVb\ntR.",
        b"cnumpy._core.multiarray\nscalar\n(I1\nI2\ntR.",
        b"\x80\x03cnumpy._core.multiarray\nscalar\ncnumpy\ndtype\nX\x02\x00\x00\x00O8\x85R"
        b"C\x08AAAAAAAA\x86R.",
        b"ctorch\nSize\n((I-1\ntR.",
        b"ctorch\nSize\n((I-1\nttR.",
        b"ctorch._utils\n_rebuild_tensor_v2\n(I1\nI0\n(t(tI00\n}tR.",
        b"ctorch._utils\n_rebuild_parameter\n(I1\nI00\n}tR.",
    ]
    for data in attacks:
        refused(data)


# What is refused: damage, and what is made to hurt.


def test_every_cut_and_what_follows() -> None:
    value = {"a": [1.5, 2**70, "x" * 300, b"y" * 300], "b": np.arange(3), "c": {(1, 2)}}
    for protocol in PROTOCOLS:
        data = pickle.dumps(value, protocol)
        for end in range(len(data)):
            refused(data[:end])
        refused(data + b"\x00", "does not belong")
        refused(data[:-1], "cut short|not there")


BOMBS: dict[str, bytes] = {
    "length": b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7f.",
    "negative length": b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\xff.",
    "bytes": b"\x80\x04\x8e\x00\x00\x00\x00\x00\x01\x00\x00.",
    "long": b"\x80\x02\x8b\xff\xff\xff\x7f\x00.",
    "negative long": b"\x80\x02\x8b\xff\xff\xff\xff\x00.",
    "string": b"T\xff\xff\xff\xff.",
    "frame": b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7fN.",
    "digits": b"I" + b"9" * 100_000 + b"\n.",
    "digits, long": b"L" + b"9" * 100_000 + b"L\n.",
    "memo": b"j\xff\xff\xff\xff.",
    "memo, negative": b"g-1\n.",
    "memo, empty": b"q\x00.",
    "protocol": b"\x80\x06N.",
    "unknown": b"\xff.",
    "zeros": bytes(1 << 20),
    "marks": b"(" * (1 << 18),
    "open marks": b"(" * (1 << 16) + b"N.",
    "stack": b"N" * (1 << 18) + b".",
    "underflow": b"0.",
    "underflow, tuple": b"N\x86.",
    "no mark": b"Nt.",
    "half a pair": b"}(Nu.",
    "empty": b"",
    "only the end": b".",
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_refused_at_once(name: str) -> None:
    tracemalloc.start()
    start = time.process_time()
    refused(BOMBS[name])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert time.process_time() - start < 8
    assert peak < 250 * (1 << 20)


def test_numbers_of_the_memo_are_those_of_pickle() -> None:
    """In order, again, with gaps that are filled later: all that PUT, MEMOIZE and GET can do."""
    for seed in range(300):
        rng = random.Random(seed)
        known, code = set[int](), b"\x80\x04]("
        for value in range(20):
            code += b"K" + bytes([value])
            number = rng.choice([len(known), rng.randrange(12)])
            put = rng.choice([b"\x94", b"q" + bytes([number]), b"r" + struct.pack("<I", number)])
            known.add(len(known) if put == b"\x94" else number)
            code += put + b"h" + bytes([rng.choice(sorted(known))])
        assert read(code + b"e.") == pickle.loads(code + b"e."), seed


def test_a_pickle_that_does_not_fit_into_memory_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """X2: values of 1 GiB of a pickle may take a hundred times that."""
    monkeypatch.setattr(host_memory, "_MACHINE", tmp_path / "meminfo")
    monkeypatch.setattr(pickles, "_OPCODES_AT_ONCE", 1000)
    data = pickle.dumps([[i] for i in range(10_000)])
    for available, is_read in ((1 << 20, True), (200_000, False)):
        (tmp_path / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {available} kB\n")
        if is_read:
            assert read(data) == pickle.loads(data)
        else:
            with pytest.raises(CorruptionError, match=r"does not fit into memory: 205 MB are left"):
                read(data)


def test_a_huge_number_of_the_memo_costs_nothing() -> None:
    assert read(b"Nr\xff\xff\xff\xff0j\xff\xff\xff\xff.") is None
    refused(b"Np99999999999999999\n.", "memo")


def nested(opening: bytes, wrap: bytes, levels: int) -> bytes:
    return opening + wrap * levels + b"."


NAME = b"\x80\x02c%b\nq\x010N"
DEEP = {
    "tuple": (b"\x80\x02N", b"\x85"),
    "list": (b"\x80\x02N", b"q\x000]h\x00a"),
    "dict": (b"\x80\x02N", b"q\x000}K\x01h\x00s"),
    "mapping": (NAME % b"collections\nOrderedDict", b"q\x000h\x01)RK\x01h\x00s"),
    "state": (NAME % b"collections\nOrderedDict", b"q\x000h\x01)Rh\x00b"),
    "default": (NAME % b"collections\ndefaultdict", b"q\x000h\x01)RK\x01h\x00s"),
    "deque": (NAME % b"collections\ndeque", b"q\x000h\x01)Rh\x00a"),
    "record": (NAME % b"argparse\nNamespace", b"q\x000h\x01h\x00\x85R"),
    "record state": (NAME % b"argparse\nNamespace", b"q\x000h\x01)Rh\x00b"),
}


@pytest.mark.parametrize("kind", DEEP)
def test_depth_is_no_danger(kind: str) -> None:
    """Read and released at any depth; stored up to the depth that the format has."""
    opening, wrap = DEEP[kind]
    value = read(nested(opening, wrap, 100_000))
    if kind != "state":  # what is attached to a mapping is left out
        with pytest.raises(PlacementError, match="deeper than 100"):
            to_node(value)
    del value
    value = read(nested(opening, wrap, 30))
    assert to_node(value).leaves == ()


@pytest.mark.parametrize("levels", [25, 33, 34, 49, 50, 99, 100, 101, 150])
def test_depth_at_the_limit(levels: int) -> None:
    """Whatever is accepted can be encoded and decoded, on the stack that is left by a caller."""
    for opening, wrap in DEEP.values():
        value = read(nested(opening, wrap, levels))
        try:
            tree = to_node(value)
        except PlacementError:
            assert levels > 33
            continue
        assert sum(1 for _ in walk(tree.node)) > 0


def test_deep_keys_are_not_hashed() -> None:
    for levels in (17, 1000, 200_000):
        refused(b"\x80\x02}" + nested(b"N", b"\x85", levels)[:-1] + b"Ns.", "key or member")
    doubled = b"\x80\x02}N" + b"2\x86" * 40 + b"Ns."  # 2 to the 40 members
    refused(doubled, "key or member|composed or huge")
    shallow = b"\x80\x02}N" + b"2\x86" * 15 + b"Ns."
    refused(shallow, "composed or huge")


def test_colliding_keys_are_limited() -> None:
    """Integers with one hash would make a dict quadratic; honest keys are not that large."""
    keys = [k * (2**61 - 1) for k in range(1, 20_000)]
    data = pickle.dumps(dict.fromkeys(keys[:1000]), 2)
    assert len(read(data)) == 1000
    opcodes = b"\x80\x02}(" + b"".join(pickle.dumps(k, 2)[2:-1] + b"N" for k in keys) + b"u."
    start = time.process_time()
    refused(opcodes, "composed or huge")
    assert time.process_time() - start < 8


def test_copies_are_limited() -> None:
    """A long value that is copied at every third byte."""
    long = b"\x80\x02]q\x01(" + b"N" * 20_000 + b"eh\x01\x85q\x02"
    for name in (b"list", b"tuple"):
        copies = b"c__builtin__\n" + name + b"\nq\x00" + b"0h\x00h\x02R" * 5000 + b"."
        refused(long + b"0" + copies, "again and again")
    raw = b"\x80\x02" + text("x" * 20_000) + text("latin1") + b"\x86q\x02c_codecs\nencode\nq\x00"
    refused(raw + b"0h\x00h\x02R" * 5000 + b".", "again and again")


def laughs(levels: int) -> bytes:
    """Ten references to ten references to …"""
    return b"\x80\x02" + text("ha") + b"".join(
        b"q%c0](" % i + b"h%c" % i * 10 + b"e" for i in range(levels)
    ) + b"."  # fmt: skip


def test_billion_laughs() -> None:
    """Small while it is shared; refused where it would unfold."""
    value = read(laughs(40))
    start = time.process_time()
    with pytest.raises(PlacementError, match="unfolds"):
        to_node(value, limit=100_000)
    assert time.process_time() - start < 4
    assert sum(1 for _ in walk(to_node(read(laughs(4))).node)) == 11_111


def test_shared_texts_and_long_paths_are_counted() -> None:
    shared = b"\x80\x02" + text("x" * 100_000) + b"q\x000](" + b"h\x00" * 10_000 + b"e."
    with pytest.raises(PlacementError, match="unfolds"):
        to_node(read(shared))
    long_path = b"\x80\x02}" + text("k" * 100_000) + b"](" + b"N" * 10_000 + b"es."
    with pytest.raises(PlacementError, match="unfolds"):
        to_node(read(long_path))
    key = b"\x80\x02](" + text("x" * 200_000) + b"\x85q\x000"
    with pytest.raises(PlacementError, match="unfolds"):
        to_node(read(key + b"}h\x00Ns" * 5_000 + b"e."))
    data = b"\x80\x03](C\xffx" + b"x" * 254 + b"q\x000" + b"h\x00" * 10
    assert to_node(read(data + b"e.")).leaves == ()


def test_cycles_are_refused_by_path() -> None:
    cycle: dict[str, Any] = {"a": {"b": []}}
    cycle["a"]["b"].append(cycle)
    with pytest.raises(PlacementError, match=r"^x\.a\.b\.0: it contains itself"):
        to_node(read(pickle.dumps(cycle)), path="x")
    space = argparse.Namespace()
    space.me = space
    with pytest.raises(PlacementError, match="contains itself"):
        to_node(read(pickle.dumps(space)), path="x")


SEEDS = [
    pickle.dumps({"a": [1, 2.5, None], "b": (1, "x", b"y"), "c": {1, 2}}, protocol)
    for protocol in PROTOCOLS
] + [
    pickle.dumps([np.arange(3), np.float32(1), OrderedDict(a=1), argparse.Namespace(a=1)], p)
    for p in (2, 4, 5)
]  # fmt: skip
_OPCODES = bytes(ord(code) for code in pickles._OPCODES)


def outcome(data: bytes) -> None:
    """Read it and store it; only errors of ours may come out."""
    try:
        value = read(data, persistent=lambda name: name)
        tree = to_node(value, limit=20_000)
    except HoldfastError:
        return
    for leaf in tree.leaves:
        if isinstance(leaf.value, PickledArray):
            array_form(leaf.value, path=leaf.key)


@settings(max_examples=250, deadline=None, derandomize=True)
@given(
    st.sampled_from(SEEDS),
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), max_size=8),
)
def test_changed_bytes(data: bytes, changes: list[tuple[int, int]]) -> None:
    changed = bytearray(data)
    for at, value in changes:
        changed[at % len(data)] = value
    outcome(bytes(changed))


@settings(max_examples=250, deadline=None, derandomize=True)
@given(
    st.lists(st.sampled_from(_OPCODES), max_size=60), st.sampled_from(SEEDS), st.integers(0, 200)
)
def test_random_opcodes(codes: list[int], data: bytes, at: int) -> None:
    outcome(bytes(codes) + b".")
    at = min(at, len(data) - 1)
    outcome(data[:at] + bytes(codes) + data[at:])


def _args() -> st.SearchStrategy[object]:
    names = st.sampled_from(sorted(STANDARD_TYPES)).map(STANDARD_TYPES.__getitem__)
    scalars = st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5),
        st.binary(max_size=12), names, st.sampled_from(["<", ">", "C", "f4", "M8", "latin1"]),
        st.just(PickledArray()), st.just(Record("x")), st.just(2**63 - 1),
    )  # fmt: skip
    return st.recursive(
        scalars,
        lambda inner: st.one_of(
            st.lists(inner, max_size=8), st.lists(inner, max_size=8).map(tuple),
            st.dictionaries(st.text(max_size=3), inner, max_size=3),
        ),
        max_leaves=12,
    )  # fmt: skip


@drawn(
    quick=80,
    slow=250,
    name=st.sampled_from(sorted(STANDARD_TYPES)),
    args=st.lists(_args(), max_size=6),
    state=_args(),
)
def test_any_arguments_of_any_listed_name(name: str, args: list[object], state: object) -> None:
    """A constructor returns something inert or refuses, whatever it is given."""
    machine = pickles._Machine(b"", 0, place="f", types=STANDARD_TYPES, persistent=None)
    try:
        value = machine._made(STANDARD_TYPES[name], tuple(args))
        to_node(value)
        machine._stack = [value, state]
        machine._build()
        to_node(value)
    except (HoldfastError, pickles._Refusal):
        return
    assert isinstance(value, pickles._STATEFUL)


# The stored tree.


class Colour(Enum):
    RED = 1


NODES = [
    {"a": 1, 2: (3, None), (4, "b"): {"c": [1.5]}}, OrderedDict({2: 1, 1: [2]}), Counter("aab"),
    defaultdict(int, {3: 4}), defaultdict(str, a=""), deque([1, 2], maxlen=9), {1, (2, 3)},
    frozenset({"x"}), range(1, 5), slice(None, 3), 1 + 2j, b"\x00", bytearray(b"\x01"), 2**70,
    float("inf"), np.float32(1.5), np.str_("x"), np.datetime64("2020-01-01", "s"), "\ud800",
    {"$": 1, "$$": 2}, [[], {}, (), set()],
]  # fmt: skip


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_nodes_decode_to_what_was_pickled(protocol: int) -> None:
    """In protocol 2, which `torch.save` writes, `int` and `str` are `long` and `unicode`."""
    for value in NODES:
        decoded = decode_tree(to_node(read(pickle.dumps(value, protocol))).node)
        assert type(decoded) is type(value)
        assert decoded == value
        assert repr(decoded) == repr(value) or isinstance(value, set | frozenset)


def test_what_is_more_than_plain_keeps_its_name() -> None:
    codecs = Codecs(
        codecs=[
            Codec(
                name="argparse.Namespace", type=argparse.Namespace, encode=vars,
                decode=lambda table: argparse.Namespace(**table),
            ),
            Codec(
                name="pathlib.PurePath", type=pathlib.PurePosixPath, encode=str,
                decode=pathlib.PurePosixPath,
            ),
        ]
    )  # fmt: skip
    value = argparse.Namespace(lr=0.5, path=pathlib.PurePosixPath("/a/b"), seen=[1])
    node = to_node(read(pickle.dumps(value))).node
    assert decode_tree(node, codecs=codecs) == value
    with pytest.raises(HoldfastError, match=r"'argparse\.Namespace', which is not registered"):
        decode_tree(node)


def test_enums_decode_by_member_or_value() -> None:
    make = Constructor("m.Colour", lambda args: EnumValue("m.Colour", args[0], None))
    data = pickle.dumps([Colour.RED, {Colour.RED: 1}], 4).replace(__name__.encode(), b"m")
    data = b"\x80\x04" + data[11:] if data[2:3] == b"\x95" else data
    module, here = struct.pack("B", 1) + b"m", struct.pack("B", len(__name__)) + b"m"
    data = data.replace(here, module)
    value = read(data, types={"m.Colour": make})
    node = to_node(value).node
    codecs = Codecs(enums=[Colour])
    assert decode_tree(node, codecs=codecs) == [Colour.RED, {Colour.RED: 1}]
    named = to_node(EnumValue("m.Colour", 1, "RED")).node
    assert decode_tree(named, codecs=codecs) is Colour.RED


def test_arrays_have_their_elements_and_their_code() -> None:
    values = {str(i): array for i, array in enumerate(ARRAYS) if array.dtype.kind not in "SU"}
    tree = to_node(read(pickle.dumps(values)), path="p")
    assert [leaf.key for leaf in tree.leaves] == [f"p.{name}" for name in values]
    for leaf, array in zip(tree.leaves, values.values(), strict=True):
        assert isinstance(leaf.value, PickledArray)
        name, elements, code = array_form(leaf.value, path=leaf.key)
        assert elements.flags.c_contiguous
        assert elements.shape == array.shape
        whole = elements.view(array.dtype.newbyteorder("<")) if code else elements
        assert np.array_equal(whole, array, equal_nan=array.dtype.kind in "mM")
        assert (code is not None) == (array.dtype.kind in "mM" or array.dtype.str[0] == ">")
        assert name[0] in "FIBCU"
    texts = to_node(read(pickle.dumps(np.array(["ab", "c"])))).node
    assert texts["v"] == {"dtype": "<U2", "shape": [2], "v": ["ab", "c"]}


def test_keys_of_tensors_are_distinct() -> None:
    value = {"a.b": np.arange(2), "a": {"b": np.arange(3)}}
    tree = to_node(read(pickle.dumps(value)))
    assert [leaf.key for leaf in tree.leaves] == ["a.b", "a.b#2"]


def test_what_cannot_be_stored_is_refused_by_path() -> None:
    unstorable = {
        "longdouble": np.longdouble(1), "factory": defaultdict(argparse.Namespace),
        "key": {uuid.UUID(int=5): 1}, "long": np.zeros(1, dtype=np.longdouble),
    }  # fmt: skip
    for name, value in unstorable.items():
        with pytest.raises(PlacementError, match=rf"^top\.{name}"):
            to_node(read(pickle.dumps({name: value})), path="top")


def test_configurations_of_omegaconf() -> None:
    """Values know their containers, so that the pickle is circular; the tree is not."""
    parent = Record("omegaconf.dictconfig.DictConfig")
    value = Record("omegaconf.nodes.AnyNode", state={"_parent": parent, "_val": 0.5})
    empty = Record("omegaconf.nodes.AnyNode", state={"_parent": parent, "_val": None})
    items = Record(
        "omegaconf.listconfig.ListConfig", state={"_parent": parent, "_content": [value, empty]}
    )
    parent.state = {"_parent": None, "_content": {"lr": value, "all": items}}
    tree = to_node(parent, path="p")
    codecs = Codecs(
        codecs=[
            Codec(name="omegaconf.dictconfig.DictConfig", type=Colour, encode=vars, decode=dict),
            Codec(name="omegaconf.listconfig.ListConfig", type=Record, encode=vars, decode=list),
        ]
    )
    assert decode_tree(tree.node, codecs=codecs) == {"lr": 0.5, "all": [0.5, None]}
    assert [line.partition(":")[0] for line in tree.left_out] == ["p.all", "p"]


def test_dicts_of_lightning_and_streams_in_memory() -> None:
    data = b"\x80\x02clightning.fabric.utilities.data\nAttributeDict\n)\x81Vlr\nI5\ns."
    node = to_node(read(data)).node
    name = "lightning.fabric.utilities.data.AttributeDict"
    codec = Codec(name=name, type=Colour, encode=vars, decode=dict)
    assert decode_tree(node, codecs=Codecs(codecs=[codec])) == {"lr": 5}
    stream = io.BytesIO(b"abc")
    codec = Codec(name="_io.BytesIO", type=io.BytesIO, encode=io.BytesIO.getvalue, decode=bytes)
    for protocol in (2, 4, 5):
        node = to_node(read(pickle.dumps(stream, protocol))).node
        assert decode_tree(node, codecs=Codecs(codecs=[codec])) == b"abc"


def test_a_size_of_torch_becomes_a_tuple() -> None:
    mine = read(b"\x80\x02ctorch\nSize\nK\x01K\x02\x86\x85R.")
    assert type(mine) is TorchSize
    assert decode_tree(to_node(mine).node) == (1, 2)


def test_the_list_is_inert() -> None:
    """Every name has a constructor of its own name, and none is a callable of the process."""
    for name, constructor in STANDARD_TYPES.items():
        assert constructor.name == name
        make: Callable[..., object] | None = constructor.make
        assert make is None or make.__module__.startswith("holdfast.")
    assert not any(name.startswith(("os.", "subprocess.", "sys.")) for name in STANDARD_TYPES)


def test_the_room_needs_no_torch() -> None:
    code = (
        "import sys; import holdfast.foreign.torch_save; "
        "sys.exit(any(m == 'torch' or m.startswith('torch.') for m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
