"""Replayed batches are the pristine ones, in this process and in the next (D9)."""

from __future__ import annotations

import copy
import json
import threading
from collections import OrderedDict, UserDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, is_dataclass
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from holdfast.errors import ConfigError, CorruptionError, HoldfastError, MismatchError
from holdfast.format.values import Codec, Codecs, decode_tree
from holdfast.parallel import Layout
from holdfast.rerun.kept_trees import members_of
from holdfast.rerun.replay import ReplayableBatches
from holdfast.state import RNG, flatten_state
from holdfast.state.tensor_elements import tensors_of
from tests.drawn import drawn


class Kind(Enum):
    TEXT = 1
    IMAGE = 2


@dataclass
class Sample:
    tokens: torch.Tensor
    kind: Kind = Kind.TEXT
    extra: dict[str, Any] = field(default_factory=dict)


class Pair(NamedTuple):
    one: torch.Tensor
    other: torch.Tensor


CODECS = Codecs(
    dataclasses=[Sample],
    enums=[Kind],
    codecs=[Codec(name="pair", type=Pair, encode=tuple, decode=lambda items: Pair(*items))],
)


def bits(value: Any) -> object:
    """A batch as plain values that are equal only for equal types, dtypes, shapes and bytes."""
    if isinstance(value, torch.Tensor):
        plain = value.detach().clone(memory_format=torch.contiguous_format)
        raw = plain.reshape(-1).view(torch.uint8).tolist()
        return type(value), value.dtype, tuple(value.shape), value.requires_grad, raw
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, dict | UserDict):
        return type(value), [(key, bits(item)) for key, item in value.items()]
    if isinstance(value, list | tuple | deque):
        return type(value), [bits(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return type(value), bits(vars(value))
    return type(value), repr(value)


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if is_dataclass(value) and not isinstance(value, type):
        value = list(vars(value).values())
    items = value if isinstance(value, list | tuple | deque) else []
    return [tensor for item in items for tensor in tensors_in(item)]


def spoil(value: Any) -> None:
    """Change everything in a batch in place, as a careless model does."""
    for tensor in tensors_in(value):
        raw = tensor.detach()
        with torch.no_grad():
            raw.copy_(torch.zeros_like(raw) if raw.any() else torch.ones_like(raw))
    if isinstance(value, dict):
        value.clear()
    elif isinstance(value, list):
        del value[:]


DTYPES = [
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8,
    torch.bool, torch.complex64, torch.float8_e4m3fn, torch.uint16,
]  # fmt: skip


@st.composite
def views(draw: st.DrawFn, memory: torch.Tensor) -> torch.Tensor:
    """A view of some memory: any dtype, offset, order of dims; of no dims, or empty."""
    dtype = draw(st.sampled_from(DTYPES))
    flat = memory if dtype == torch.bool else memory.view(dtype)
    if dtype == torch.bool:
        flat = (memory[: len(memory) // 2] & 1).view(torch.bool)
    start = draw(st.integers(0, len(flat) - 1))
    rows, columns = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    shape = draw(st.sampled_from(["scalar", "matrix", "transposed", "gaps"]))
    room = len(flat) - start
    if shape == "scalar":
        return flat[start]
    if shape == "gaps":
        return flat[start::3]
    if rows * columns > room:
        return flat[start:]
    matrix = flat[start : start + rows * columns].view(rows, columns)
    return matrix.T if shape == "transposed" else matrix


@st.composite
def batches(draw: st.DrawFn) -> Any:
    """Trees over views of a few pieces of memory, so that tensors overlap, or are one."""
    seed = draw(st.integers(0, 99))
    generator = torch.Generator().manual_seed(seed)
    memories = [
        torch.randint(0, 256, (48,), generator=generator, dtype=torch.uint8)
        for _ in range(draw(st.integers(1, 2)))
    ]
    tensors = [draw(views(draw(st.sampled_from(memories)))) for _ in range(draw(st.integers(1, 5)))]
    leaves = st.sampled_from(tensors) | st.none() | st.integers() | st.text() | st.binary()
    leaves |= st.floats() | st.just(Kind.IMAGE) | st.just(np.arange(3, dtype=">i4"))
    leaves |= st.sampled_from(tensors).map(Sample)
    tree = st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3),
        ),
        max_leaves=8,
    )
    return [draw(tree), *tensors] if draw(st.booleans()) else draw(tree)


def stored(batches: ReplayableBatches) -> Any:
    """What a checkpoint gives back of the kept batches: leaves of one rank, tied ones once."""
    layout = Layout(dp=1)
    flat = flatten_state({"kept": batches.kept()}, layout=layout, rank=0, codecs=Codecs())
    memory = {
        key: leaf.detach().clone(memory_format=torch.contiguous_format)
        for key, leaf in flat.tensors.items()
    }
    node = json.loads(json.dumps(flat.nodes["kept"]))
    return decode_tree(node, on_leaf=lambda path, leaf: memory[str(leaf["k"])])


def moved(batches: ReplayableBatches, **settings: Any) -> ReplayableBatches:
    """The iterator of the next process, whose source goes on behind the step."""
    result = ReplayableBatches(iter(["behind"]), codecs=CODECS, **settings)
    result.replay_kept(stored(batches))
    return result


@drawn(
    quick=20,
    slow=60,
    given_batches=st.lists(batches(), min_size=1, max_size=3),
    num_first=st.integers(0, 3),
)
def test_whatever_is_done_to_a_batch_its_replays_are_the_pristine_one(
    given_batches: list[Any], num_first: int
) -> None:
    expected = [bits(copy.deepcopy(batch)) for batch in given_batches]
    # Copies, so that batches do not spoil each other: that is the source's doing, not a model's.
    batches = ReplayableBatches([copy.deepcopy(batch) for batch in given_batches], codecs=CODECS)
    batches.begin()
    num_first = min(num_first, len(given_batches))
    for i in range(num_first):
        batch = next(batches)
        assert bits(batch) == expected[i]
        spoil(batch)
    for _ in range(2):
        batches.rewind()
        replayed = []
        for batch in batches:  # goes on with the source where the kept ones end
            replayed.append(bits(batch))
            spoil(batch)
        assert replayed == expected
    after = moved(batches)
    for _ in range(2):
        replayed = []
        after.rewind()
        for _ in given_batches:
            batch = next(after)
            replayed.append(bits(batch))
            spoil(batch)
        assert replayed == expected


@drawn(quick=20, slow=60, batch=batches(), which=st.integers(0, 4))
def test_tensors_that_overlap_in_a_batch_overlap_in_its_replays(batch: Any, which: int) -> None:
    batches = ReplayableBatches([copy.deepcopy(batch)], codecs=CODECS)
    next(batches)
    batches.rewind()
    replays = [next(batches), next(moved(batches))]
    for replay in replays:
        expected = copy.deepcopy(batch)  # torch keeps views of one storage together
        for tree in (expected, replay):
            tensors = tensors_in(tree)
            if tensors:
                tensor = tensors[which % len(tensors)]
                tensor.copy_(torch.zeros_like(tensor) if tensor.any() else torch.ones_like(tensor))
        assert bits(replay) == bits(expected)


def take(batches: Iterator[Any], num: int) -> list[Any]:
    return [next(batches) for _ in range(num)]


def test_a_step_that_is_accepted_is_forgotten() -> None:
    batches = ReplayableBatches(range(6))
    assert take(batches, 2) == [0, 1]
    batches.begin()
    assert batches.num_kept == 0
    assert take(batches, 2) == [2, 3]
    batches.rewind()
    assert batches.is_replaying
    assert take(batches, 3) == [2, 3, 4]
    assert not batches.is_replaying
    batches.rewind()
    assert take(batches, 3) == [2, 3, 4]
    batches.begin()
    batches.rewind()
    assert list(batches) == [5]


def test_a_rerun_that_takes_fewer_batches_loses_none() -> None:
    batches = ReplayableBatches(range(5))
    take(batches, 3)
    batches.rewind()
    assert take(batches, 1) == [0]
    batches.begin()
    assert list(batches) == [1, 2, 3, 4]


def test_the_end_of_a_source_is_replayed_between_two_epochs() -> None:
    class Epochs:
        """Ends after two batches, and then begins again."""

        def __init__(self) -> None:
            self.num = 0

        def __iter__(self) -> Epochs:
            return self

        def __next__(self) -> int:
            self.num += 1
            if self.num % 3 == 0:
                raise StopIteration
            return self.num

    batches = ReplayableBatches(Epochs())
    first = [list(batches), list(batches)]
    assert first == [[1, 2], [4, 5]]
    batches.rewind()
    assert [list(batches), list(batches), list(batches)] == [[1, 2], [4, 5], [7, 8]]
    after = moved(batches)
    assert [list(after), list(after)] == [[1, 2], [4, 5]]


def test_an_error_of_the_source_is_replayed() -> None:
    class Source:
        num = 0

        def __iter__(self) -> Source:
            return self

        def __next__(self) -> int:
            self.num += 1
            if self.num == 2:
                raise OSError("bad sample")
            return self.num

    batches = ReplayableBatches(Source())
    for _ in range(2):
        batches.rewind()
        assert next(batches) == 1
        with pytest.raises(OSError, match="bad sample"):
            next(batches)
        assert next(batches) == 3
    after = moved(batches)
    assert next(after) == 1
    with pytest.raises(HoldfastError, match="OSError: bad sample"):
        next(after)
    assert next(after) == 3


def test_generators_loaders_and_reused_memory() -> None:
    def reusing() -> Iterator[torch.Tensor]:
        memory = torch.zeros(2)
        for _ in range(3):
            memory += 1
            yield memory

    batches = ReplayableBatches(reusing())
    first = [batch.tolist() for batch in batches]
    batches.rewind()
    assert [batch.tolist() for batch in batches] == first == [[1, 1], [2, 2], [3, 3]]

    loader = DataLoader(TensorDataset(torch.arange(6)), batch_size=2)
    batches = ReplayableBatches(loader)
    first = [bits(batch) for batch in batches]
    batches.rewind()
    assert [bits(batch) for batch in batches] == first
    assert [bits(batch) for batch in ReplayableBatches(iter(loader))] == first


@pytest.mark.parametrize("draws", [{0}, {1}, {0, 2}, set()])
def test_a_replay_brings_the_streams_to_where_each_draw_of_the_source_has_left_them(
    draws: set[int],
) -> None:
    # NumPy draws two normal numbers at once: the second one leaves the words as they are.
    def source() -> Iterator[torch.Tensor]:
        for number in range(3):
            yield torch.tensor([np.random.standard_normal() if number in draws else 0.0])

    def program() -> list[float]:
        return [np.random.standard_normal() for _ in range(3) if next(batches) is not None]

    streams = RNG()
    batches = ReplayableBatches(source(), streams=[streams])
    np.random.seed(0)
    start = streams.capture()
    first, end = program(), streams.capture()
    batches.rewind()
    streams.reset(start)
    assert program() == first
    assert streams.capture().is_same(end)
    assert [bool(entry.get("streams")) for entry in batches.kept()] == [
        number in draws for number in range(3)
    ]


def test_a_slice_of_a_large_tensor_costs_the_slice() -> None:
    data = torch.arange(1 << 20)
    batches = ReplayableBatches([{"x": data[:8], "y": data[1:9], "far": data[-4:]}])
    next(batches)
    assert batches.kept_nbytes == 9 * 8 + 4 * 8
    leaves = {id(each): each.nbytes for _, each in tensors_of(batches.kept())}
    assert sum(leaves.values()) == 9 * 8 + 4 * 8
    batches.rewind()
    batch = next(batches)
    batch["x"][1] = -1
    assert batch["y"][0] == -1
    assert data[1] == 1


def test_parameters_leaves_and_readonly_arrays_keep_what_they_are() -> None:
    array = np.arange(4.0)
    array.setflags(write=False)
    batch = {
        "parameter": nn.Parameter(torch.ones(2)),
        "leaf": torch.ones(2, requires_grad=True),
        "expanded": torch.ones(1).expand(4),
        "array": array,
        "dates": np.array(["2024-01-02"], dtype="M8[D]"),
        "pair": Pair(torch.ones(1), torch.zeros(1)),
        "ordered": OrderedDict(b=1, a=2),
        "nan": torch.tensor([0x7F800001], dtype=torch.int32).view(torch.float32),
    }
    expected = bits(batch)
    batches = ReplayableBatches([batch], codecs=CODECS)
    assert next(batches) is batch
    batches.rewind()
    assert bits(next(batches)) == expected
    assert bits(next(moved(batches))) == expected


SPARSE = {
    "coo": lambda: torch.eye(4).to_sparse(),
    "not coalesced": lambda: torch.sparse_coo_tensor(
        torch.tensor([[0, 0, 3]]), torch.arange(6.0).view(3, 2), (4, 2)
    ),
    "empty": lambda: torch.zeros(4, 4, dtype=torch.bfloat16).to_sparse(),
    "csr": lambda: torch.eye(4).to_sparse_csr().requires_grad_(),
    "csc": lambda: torch.eye(4, dtype=torch.int64).to_sparse_csc(),
    "bsr": lambda: torch.eye(4).to_sparse_bsr((2, 2)),
    "bsc": lambda: torch.eye(4).to_sparse_bsc((2, 2)),
}


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("kind", SPARSE)
def test_sparse_batches_are_replayed_here_and_after_a_restart(kind: str) -> None:
    """A graph's adjacency: of its layout, and no larger than what it stores."""
    batch, expected = SPARSE[kind](), SPARSE[kind]()
    batches = ReplayableBatches([{"adjacency": batch, "twice": batch}])
    given = next(batches)["adjacency"]
    for each in members_of(given)[-1:]:
        each.zero_()
    after_restart = ReplayableBatches([])
    after_restart.replay_kept(stored(batches))
    batches.rewind()
    for replayed in (next(batches), next(after_restart)):
        again = replayed["adjacency"]
        values, others = (members_of(each)[-1] for each in replayed.values())
        assert values.data_ptr() == others.data_ptr()
        assert (again.layout, again.dtype, again.shape) == (
            expected.layout, expected.dtype, expected.shape,
        )  # fmt: skip
        assert again.requires_grad == expected.requires_grad
        assert bits(members_of(again)) == bits(members_of(expected))
    assert batches.kept_nbytes == sum(each.nbytes for each in members_of(expected))


def test_batches_of_foreign_types_need_a_codec_from_the_first_one_on() -> None:
    codec = Codec(name="user dict", type=UserDict, encode=dict, decode=UserDict)
    batches = ReplayableBatches([UserDict({"x": torch.ones(3)})], codecs=Codecs(codecs=[codec]))
    next(batches)["x"].zero_()
    batches.rewind()
    assert next(batches)["x"].tolist() == [1, 1, 1]
    with pytest.raises(ConfigError, match=r"batch 0.*UserDict.*Codec"):
        next(ReplayableBatches([UserDict({"x": torch.ones(3)})]))


def test_long_texts_are_tensors_and_no_values_of_a_manifest() -> None:
    batch = ["text \ud800 " * 500, b"\xff\0" * 2000, bytearray(3000), "short"]
    batches = ReplayableBatches([batch])
    next(batches)
    assert batches.kept_nbytes >= 4000 + 3000
    assert "text text" not in repr(batches.kept())
    assert next(moved(batches)) == batch


def test_two_tensors_of_one_key_are_refused_before_a_fault() -> None:
    for batch in (
        {"a.b": torch.ones(1), "a": {"b": torch.ones(1)}},
        {"a.v.0": torch.ones(1), "a": (torch.ones(1),)},
    ):
        with pytest.raises(ConfigError, match="rename one"):
            next(ReplayableBatches([batch]))


UNKNOWN: list[tuple[Callable[[], Any], str]] = [
    (lambda: {"a": [Pair(torch.ones(1), torch.ones(1))]}, r"batch 0\.a\.0.*Pair.*Codec"),
    (lambda: Sample(torch.ones(1)), r"Codecs\(dataclasses=\[Sample\]\)"),
    (lambda: [Kind.TEXT], r"Codecs\(enums=\[Kind\]\)"),
    (lambda: torch.nested.nested_tensor([torch.ones(2)]), "that is nested"),
    (lambda: torch.ones(2).to_mkldnn(), "_mkldnn"),
    (lambda: torch.empty(2, device="meta"), "without data"),
    (lambda: np.array([object()]), "dtype object"),
    (lambda: np.ma.masked_array([1.0]), "Masked"),
]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
@pytest.mark.parametrize(("make", "message"), UNKNOWN)
def test_what_a_checkpoint_cannot_hold_is_refused_early(
    make: Callable[[], Any], message: str
) -> None:
    batches = ReplayableBatches([make(), 1])
    for _ in range(2):  # a step that starts again does not run on the batch behind it
        with pytest.raises(ConfigError, match=message) as refusal:
            next(batches)
        assert "Transient" not in str(refusal.value)
        batches.rewind()


def test_a_batch_whose_copy_was_interrupted_is_the_next_one() -> None:
    """D7: a loop that catches that starts the step again, with the draws of the source, too."""
    interrupts = [KeyboardInterrupt()]

    def encode(batch: Any) -> dict[str, Any]:
        if interrupts:
            raise interrupts.pop()
        return dict(batch)

    codecs = Codecs(codecs=[Codec(name="d", type=UserDict, encode=encode, decode=UserDict)])
    source = (UserDict(number=number, noise=torch.rand(1)) for number in range(2))
    batches = ReplayableBatches(source, codecs=codecs, streams=[RNG()])
    torch.manual_seed(0)
    with pytest.raises(KeyboardInterrupt):
        next(batches)
    behind = torch.get_rng_state()
    torch.manual_seed(0)
    for _ in range(2):
        batches.give_back()
        assert next(batches)["number"] == 0
        assert torch.equal(torch.get_rng_state(), behind)
    assert next(batches)["number"] == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: {"lock": threading.Lock()}, "lock"),
        (lambda: (i for i in range(2)), "generator"),
        (lambda: [torch.ones(2, requires_grad=True) * 2], r"MulBackward.*detach"),
    ],
)
def test_what_cannot_be_copied_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        next(ReplayableBatches([make()]))


def test_a_restart_replays_the_saved_batches_and_then_its_source() -> None:
    batches = ReplayableBatches(range(10))
    take(batches, 4)
    batches.begin()
    take(batches, 2)
    data = stored(batches)

    behind = ReplayableBatches(range(6, 10))
    behind.replay_kept(data)
    assert list(behind) == [4, 5, 6, 7, 8, 9]

    rewound = ReplayableBatches(range(4, 10), is_rewound=True)
    rewound.replay_kept(data)
    for _ in range(3):
        rewound.rewind()
        assert take(rewound, 2) == [4, 5]
    assert next(rewound) == 6
    rewound.begin()
    assert list(rewound) == [7, 8, 9]

    partly = ReplayableBatches(range(4, 10), is_rewound=True)
    partly.replay_kept(data)
    assert next(partly) == 4
    partly.begin()
    assert list(partly) == [5, 6, 7, 8, 9]


def test_a_source_that_is_not_rewound_as_declared_is_noticed() -> None:
    batches = ReplayableBatches(range(3))
    take(batches, 3)
    after = ReplayableBatches([], is_rewound=True)
    after.replay_kept(stored(batches))
    with pytest.raises(ConfigError, match="is_rewound=False"):
        next(after)
    batches = ReplayableBatches(range(1))
    assert list(batches) == [0]
    after = ReplayableBatches([7], is_rewound=True)
    after.replay_kept(stored(batches))
    assert list(after) == [0]


@pytest.mark.parametrize(
    "change",
    [
        {"offset": 1},
        {"shape": [6]},
        {"shape": [5, 1]},
        {"strides": [-1]},
        {"dtype": "I65"},
        {"dtype": "C128"},
        {"v": 3},
        {"$": "record"},
        {"kind": "requires grad"},
    ],
)
def test_damaged_entries_are_noticed_and_change_nothing(change: dict[str, Any]) -> None:
    """Elements that nobody has saved are never read; bytes themselves have digests."""
    batches = ReplayableBatches([{"x": torch.arange(5), "y": "text"}])
    next(batches)
    (entry,) = batches.kept()
    after = ReplayableBatches(["source"])
    damaged = {"batch": {**entry["batch"], "x": {**entry["batch"]["x"], **change}}}
    for odd in (damaged, {}, "text", {"batch": {"$": "tensor"}}, {"batch": {"$": "sparse"}}):
        with pytest.raises(CorruptionError):
            after.replay_kept([entry, odd])
    assert list(after) == ["source"]


def test_saved_batches_of_types_that_are_unknown_here_are_named() -> None:
    batches = ReplayableBatches([Sample(torch.ones(1))], codecs=CODECS)
    next(batches)
    with pytest.raises(MismatchError, match="Sample"):
        ReplayableBatches([]).replay_kept(stored(batches))
