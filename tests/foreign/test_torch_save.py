"""Files that torch writes are opened as torch loads them; all others are refused by name."""

from __future__ import annotations

import io
import random
import struct
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from holdfast.errors import CorruptionError, HoldfastError, PlacementError
from holdfast.foreign.pickle_nodes import to_node
from holdfast.foreign.pickled_values import PickledMapping, PickledTensor, Record
from holdfast.foreign.pickles import read_pickle
from holdfast.foreign.torch_save import open_torch_save
from holdfast.format.dtypes import DTYPES as ALL_DTYPES
from holdfast.format.dtypes import STORAGE_DTYPES
from tests.foreign.making import DTYPES, MemorySource, opened, saved, tensor_of

FORMS = pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "legacy"])


def leaves(value: Any) -> Iterator[PickledTensor]:
    """The tensors of a value of plain containers."""
    if isinstance(value, PickledTensor):
        yield value
    for inner in value.values() if isinstance(value, dict) else value:
        if isinstance(inner, dict | list | tuple | PickledTensor):
            yield from [inner] if isinstance(inner, PickledTensor) else leaves(inner)


def require_equal(mine: torch.Tensor, torchs: torch.Tensor) -> None:
    """The same element type, shape and bytes."""
    assert mine.dtype == torchs.dtype
    assert mine.shape == torchs.shape
    one, other = (t.detach().contiguous().flatten().view(torch.uint8) for t in (mine, torchs))
    assert torch.equal(one, other)


def require_same(data: bytes) -> None:
    """Every tensor of a flat dict is the one that torch loads."""
    file = opened(data)
    loaded = torch.load(io.BytesIO(data), weights_only=True)
    assert isinstance(file.value, dict)
    assert list(file.value) == list(loaded)
    for key, tensor in loaded.items():
        mine = file.value[key]
        assert isinstance(mine, PickledTensor), key
        assert mine.stride == tensor.stride() or 0 in mine.shape
        require_equal(tensor_of(file, data, mine), tensor)


def noise(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if dtype == torch.bool:
        return torch.rand(shape) > 0.5
    nbytes = torch.tensor([], dtype=dtype).element_size() * int(np.prod(shape))
    raw = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


@FORMS
def test_every_element_type(is_zip: bool) -> None:
    assert sorted(DTYPES) == sorted(ALL_DTYPES)
    # torch itself cannot load a legacy file of the types that have no class of storages.
    names = DTYPES if is_zip else set(STORAGE_DTYPES.values())
    state = {name: noise(DTYPES[name], (3, 5)) for name in sorted(names)}
    require_same(saved(state, _use_new_zipfile_serialization=is_zip))


@FORMS
def test_views_ties_and_empty_tensors(is_zip: bool) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    state = {
        "base": base, "tied": base, "row": base[2], "column": base[:, 1], "transposed": base.t(),
        "broadcast": torch.arange(3.0).expand(4, 3), "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(2.5), "every_other": base[::2, 1::2],
        "end": base.flatten()[23:],
    }  # fmt: skip
    data = saved(state, _use_new_zipfile_serialization=is_zip)
    require_same(data)
    file = opened(data)
    value: Any = file.value
    assert value["tied"].identity == value["base"].identity
    assert value["row"].identity != value["base"].identity
    assert value["row"].storage.key == value["base"].storage.key
    start, nbytes = file.range_of(value["row"])
    assert data[start : start + nbytes] == base[2].numpy().tobytes()
    assert file.range_of(value["every_other"])[1] == 4 * (2 * 6 + 4 + 1)
    assert file.range_of(value["empty"])[1] == 0


@FORMS
def test_a_module_and_its_optimizer(is_zip: bool) -> None:
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.rand(8, 4)).sum().backward()
    optimizer.step()
    data = saved(
        {"model": module.state_dict(), "optimizer": optimizer.state_dict(), "step": 7},
        _use_new_zipfile_serialization=is_zip,
    )
    file = opened(data)
    loaded = torch.load(io.BytesIO(data), weights_only=True)
    value: Any = file.value
    assert isinstance(value["model"], PickledMapping)
    assert list(value["model"].state) == ["_metadata"]
    for mine, torchs in zip(value["model"].values(), loaded["model"].values(), strict=True):
        require_equal(tensor_of(file, data, mine), torchs)
    for number, entries in loaded["optimizer"]["state"].items():
        for name, tensor in entries.items():
            mine = value["optimizer"]["state"][number][name]
            require_equal(tensor_of(file, data, mine), tensor)
    assert value["optimizer"]["param_groups"][0]["betas"] == (0.9, 0.999)
    tree = to_node(value, path="file")
    assert "file.optimizer.state.0.exp_avg" in {leaf.key for leaf in tree.leaves}
    assert tree.left_out == ("file.model: _metadata attached to the collections.OrderedDict",)


def test_parameters_and_their_attributes() -> None:
    marked = nn.Parameter(torch.ones(2))
    marked.tensor_model_parallel = True
    buffer = nn.Buffer(torch.ones(1))
    plain = nn.Parameter(torch.ones(3), requires_grad=False)
    value: Any = opened(saved({"marked": marked, "plain": plain, "buffer": buffer})).value
    assert value["marked"].requires_grad
    assert value["marked"].attributes == {"tensor_model_parallel": True}
    assert not value["plain"].requires_grad
    assert value["plain"].attributes is None
    assert value["buffer"].attributes["_is_buffer"] is True


def test_random_states() -> None:
    generator = np.random.Generator(np.random.PCG64(3))
    state = {
        "torch": torch.get_rng_state(), "numpy": np.random.get_state(),
        "python": random.getstate(), "generator": generator.bit_generator.state,
        "object": generator,
    }  # fmt: skip
    data = saved(state)
    file = opened(data)
    value: Any = file.value
    require_equal(tensor_of(file, data, value["torch"]), state["torch"])
    assert value["numpy"][0] == "MT19937"
    assert np.array_equal(value["numpy"][1].numpy(), state["numpy"][1])
    assert value["python"] == state["python"]
    assert value["generator"] == state["generator"]
    assert isinstance(value["object"], Record)


@pytest.mark.parametrize("protocol", range(6))
def test_every_protocol(protocol: int) -> None:
    """torch passes the protocol to pickle; with 0 it cannot load tensors again itself."""
    tensor = torch.arange(6.0)
    state = {
        "w": tensor if protocol else None,
        "b": b"\x00\xff",
        "n": np.arange(3),
        "t": (1, -2.5, "ä\n", 2**70),
    }
    for is_zip in (True, False):
        data = saved(state, pickle_protocol=protocol, _use_new_zipfile_serialization=is_zip)
        file = opened(data)
        value: Any = file.value
        if protocol:
            require_equal(tensor_of(file, data, value["w"]), tensor)
        assert (value["b"], value["t"]) == (state["b"], state["t"])
        assert np.array_equal(value["n"].numpy(), state["n"])


def test_storages_are_not_read() -> None:
    data = saved({f"w{i}": torch.zeros(1 << 18) for i in range(8)})
    source = MemorySource(data)
    file = open_torch_save(source, place="file.pt")
    assert len(file.storages) == 8
    assert source.num_read < len(data) // 10


def test_a_file_inside_of_another_one() -> None:
    """As in the files of PyTorch's distributed checkpoints."""
    one, two = saved({"a": torch.arange(5)}), saved({"b": torch.arange(7)})
    data = b"x" * 100 + one + two
    source = MemorySource(data)
    first = open_torch_save(source, place="f", start=100, nbytes=len(one))
    second = open_torch_save(source, place="f", start=100 + len(one))
    value: Any = second.value
    assert list(first.value) == ["a"]
    require_equal(tensor_of(second, data, value["b"]), torch.arange(7))
    for start, nbytes in ((100, len(one) - 1), (101, None), (-1, 5), (0, len(data) + 1)):
        with pytest.raises(CorruptionError):
            open_torch_save(source, place="f", start=start, nbytes=nbytes)


def saved_without_checksums(value: object) -> bytes:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        return saved(value)
    finally:
        torch.serialization.set_crc32_options(before)


def test_a_distributed_checkpoint(tmp_path: Path) -> None:
    """Its metadata is a pickle; each of its values is a file of torch.save inside of another."""
    module = nn.Linear(3, 3)
    state = {"model": module.state_dict(), "step": 5, "sizes": [torch.Size([1, 2])]}
    torch.distributed.checkpoint.save(state, checkpoint_id=tmp_path)
    metadata: Any = read_pickle((tmp_path / ".metadata").read_bytes(), place=".metadata")
    assert metadata.name == "torch.distributed.checkpoint.metadata.Metadata"
    values = {}
    for entry, where in metadata.get("storage_data").items():
        data = (tmp_path / where.get("relative_path")).read_bytes()
        file = opened(data, start=where.get("offset"), nbytes=where.get("length"))
        value: Any = file.value
        is_tensor = isinstance(value, PickledTensor)
        values[entry.get("fqn")] = tensor_of(file, data, value) if is_tensor else value
    assert values["step"] == 5
    require_equal(values["model.weight"], module.weight)
    require_equal(values["model.bias"], module.bias)
    chunk = metadata.get("state_dict_metadata")["model.weight"].get("chunks")[0]
    assert (chunk.get("offsets"), chunk.get("sizes")) == ((0, 0), (3, 3))


def test_files_without_checksums() -> None:
    data = saved_without_checksums({"w": torch.arange(6)})
    require_same(data)
    assert [each.crc for each in opened(data).storages.values()] == [None]
    assert None not in [each.crc for each in opened(saved([torch.ones(1)])).storages.values()]


# What is refused.


def repacked(data: bytes, change: Callable[[str, bytes], bytes | None], **options: Any) -> bytes:
    """The archive again, with entries changed or left out."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(buffer, "w", **options) as new:
        for name in old.namelist():
            changed = change(name.partition("/")[2], old.read(name))
            if changed is not None:
                new.writestr(name, changed)
    return buffer.getvalue()


def script() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in ("constants.pkl", "data.pkl", "code/__torch__.py", "version"):
            archive.writestr(f"archive/{name}", b"\x80\x02}.")
    return buffer.getvalue()


def tar() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        archive.addfile(tarfile.TarInfo("storages"), io.BytesIO())
    return buffer.getvalue()


GOOD = saved({"w": torch.arange(6.0), "v": torch.arange(3)})
REFUSED = {
    "big-endian": (repacked(GOOD, lambda n, d: b"big" if n == "byteorder" else d), "big-endian"),
    "no order": (repacked(GOOD, lambda n, d: b"odd" if n == "byteorder" else d), "byte order"),
    "no version": (repacked(GOOD, lambda n, d: None if n == "version" else d), "version"),
    "no pickle": (repacked(GOOD, lambda n, d: None if n == "data.pkl" else d), "not one of torch"),
    "no storage": (repacked(GOOD, lambda n, d: None if n == "data/0" else d), "storage '0'"),
    "short": (repacked(GOOD, lambda n, d: d[:-1] if n == "data/1" else d), "need 24"),
    "compressed": (
        repacked(GOOD, lambda n, d: d, compression=zipfile.ZIP_DEFLATED), "compressed",
    ),
    "TorchScript": (script(), "TorchScript"),
    "tar": (tar(), "tar archive"),
    "pickle": (b"\x80\x02}q\x00.", "not one that torch.save"),
    "empty": (b"", "not a file of torch.save"),
    "text": (b"PKbut no archive", "end of the archive"),
    "module": (saved(nn.Linear(2, 2)), "torch.nn.modules.linear.Linear"),
    "conjugate": (saved(torch.zeros(2, dtype=torch.complex64).conj()), "resolve_conj"),
    "objects": (saved(np.array([1, "b"], dtype=object)), "O8"),
    "structure": (saved(np.zeros(2, dtype=[("a", "i4")])), "structured"),
    "quantized": (
        saved(torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8)), "(a quantized",
    ),
    "subclass": (
        saved(TwoTensor(torch.ones(2), torch.ones(2))), "such as a DTensor or one of torchao",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_read_is_refused_by_name(name: str) -> None:
    data, reason = REFUSED[name]
    with pytest.raises(CorruptionError) as raised:
        opened(data)
    assert "file.pt" in str(raised.value)
    assert reason in str(raised.value)


def test_a_file_before_the_byte_order_was_stored() -> None:
    require_same(repacked(GOOD, lambda n, d: None if n == "byteorder" else d))


@FORMS
def test_a_tensor_outside_of_its_storage_is_refused(is_zip: bool) -> None:
    """The storage has 6 elements; the tensor begins or ends elsewhere."""
    data = saved({"w": torch.arange(6.0)}, _use_new_zipfile_serialization=is_zip)
    view = b"QK\x00K\x06\x85"
    assert data.count(view) == 1
    for changed in (b"QK\x01K\x06\x85", b"QK\x00K\x07\x85", b"QJ\x00\x00\x00\x80K\x06\x85"):
        with pytest.raises(CorruptionError):
            opened(data.replace(view, changed) if not is_zip else _with_pickle(data, view, changed))


def _with_pickle(data: bytes, before: bytes, after: bytes) -> bytes:
    return repacked(data, lambda n, d: d.replace(before, after) if n == "data.pkl" else d)


def test_damage_of_the_pickle_is_detected() -> None:
    at = GOOD.index(b"_rebuild_tensor_v2")
    with pytest.raises(CorruptionError, match="CRC"):
        opened(GOOD[:at] + b"X" + GOOD[at + 1 :])


@FORMS
def test_every_cut(is_zip: bool) -> None:
    data = saved({"w": torch.arange(3), "s": {1}}, _use_new_zipfile_serialization=is_zip)
    for end in range(len(data)):
        with pytest.raises(CorruptionError):
            opened(data[:end])


def test_random_changes_of_a_file() -> None:
    """A changed file is refused, or its tensors still lie inside of it; nothing else happens."""
    rng = random.Random(7)
    value = {"w": torch.arange(3), "p": nn.Parameter(torch.ones(2)), "s": {1}, "n": np.arange(2)}
    for data in (
        saved_without_checksums(value), saved(value, _use_new_zipfile_serialization=False)
    ):  # fmt: skip
        end = data.index(b".", data.index(b"_rebuild_parameter"))
        for _ in range(2000):
            changed = bytearray(data)
            for _ in range(rng.choice((1, 1, 2, 8))):
                at = rng.randrange(end if rng.random() < 0.8 else len(data))
                changed[at] = rng.choice((rng.randrange(256), changed[at] ^ 1, 255))
            try:
                file = opened(bytes(changed))
                tree = to_node(file.value)
            except HoldfastError:
                continue
            for leaf in tree.leaves:
                if isinstance(leaf.value, PickledTensor):
                    start, nbytes = file.range_of(leaf.value)
                    assert 0 <= start <= start + nbytes <= len(changed)


def test_a_legacy_file_names_its_lengths() -> None:
    data = saved([torch.arange(5)], _use_new_zipfile_serialization=False)
    with pytest.raises(CorruptionError, match="follow its last storage"):
        opened(data + b"x")
    count = struct.pack("<q", 5)
    at = data.rindex(count)
    with pytest.raises(CorruptionError, match="has 6 elements"):
        opened(data[:at] + struct.pack("<q", 6) + data[at + 8 :])


def test_a_long_legacy_pickle() -> None:
    """It is longer than the part that is tried first."""
    state = {"text": [str(i) for i in range(40_000)], "w": torch.arange(4)}
    data = saved(state, _use_new_zipfile_serialization=False)
    file = opened(data)
    value: Any = file.value
    assert value["text"] == state["text"]
    require_equal(tensor_of(file, data, value["w"]), torch.arange(4))


def test_a_number_without_a_stored_form_is_refused_with_its_path() -> None:
    file = opened(saved({"a": [np.longdouble(1)]}))
    with pytest.raises(PlacementError, match=r"a\.0"):
        to_node(file.value)
