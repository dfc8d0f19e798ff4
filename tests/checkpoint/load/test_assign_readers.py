"""The arithmetic of a load against brute force: who reads what, and what goes where."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.arrays.box_table import BoxTable, pad_shapes, union_nbytes
from holdfast.arrays.boxes import Box
from holdfast.checkpoint.load import read_plan
from holdfast.checkpoint.load.choose_exchange import ReplicaSets
from holdfast.checkpoint.load.read_plan import ReadPlan, plan_reads
from holdfast.checkpoint.load.requests import decode_boxes, encode_boxes
from holdfast.checkpoint.load.transfers import RankTransfers, Transfers
from holdfast.errors import CorruptionError
from holdfast.format import byte_ranges
from holdfast.format.index import ChunkIndex
from tests.drawn import drawn

GRAIN = 16


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    """Any box inside a shape, empty ones among them, the whole of it often."""
    if draw(st.booleans()):
        return Box((0,) * len(shape), shape)
    ends = [sorted(draw(st.tuples(*[st.integers(0, size)] * 2))) for size in shape]
    return Box(tuple(a for a, _ in ends), tuple(b - a for a, b in ends))


@st.composite
def tilings(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """A grid of a shape with random cuts."""
    cuts = [
        [0, *sorted(draw(st.sets(st.integers(1, size - 1), max_size=3))), size]
        if size > 1
        else [0, size]
        for size in shape
    ]
    cells = itertools.product(*(itertools.pairwise(each) for each in cuts))
    return [Box(tuple(a for a, _ in c), tuple(b - a for a, b in c)) for c in cells]


def index_of(chunks: list[tuple[int, int, Box, int]], ndim: int) -> ChunkIndex:
    """A table of (tensor, file, box, itemsize), each file filled from byte 0."""
    ends: Counter[int] = Counter()
    start, nbytes = [], []
    for _, file, box, itemsize in chunks:
        start.append(ends[file])
        nbytes.append(box.numel * itemsize)
        ends[file] += nbytes[-1]

    def ints(values: list[int]) -> np.ndarray:
        return np.array(values, dtype=np.int64)

    def padded(name: str, value: int) -> np.ndarray:
        rows = [getattr(c[2], name) + (value,) * (ndim - c[2].ndim) for c in chunks]
        return np.array(rows, dtype=np.int64).reshape(len(chunks), ndim)

    return ChunkIndex(
        tensor=ints([c[0] for c in chunks]),
        file=ints([c[1] for c in chunks]),
        offset=padded("offset", 0),
        extent=padded("shape", 1),
        start=ints(start),
        nbytes=ints(nbytes),
        copy=ints([0] * len(chunks)),
        holders=ints([0] * len(chunks)),
        holder_ptr=ints([0, 1]),
        holder=ints([0]),
        digest_ptr=ints([0] * (len(chunks) + 1)),
        digest=np.empty(0, dtype=np.uint64),
    )


def table_of(requests: list[tuple[int, Box]], ndim: int) -> BoxTable:
    """(tensor, box) as columns."""
    rows = len(requests)
    return BoxTable(
        tensor=np.array([t for t, _ in requests], dtype=np.int64),
        offset=np.array(
            [b.offset + (0,) * (ndim - b.ndim) for _, b in requests], dtype=np.int64
        ).reshape(rows, ndim),
        extent=np.array(
            [b.shape + (1,) * (ndim - b.ndim) for _, b in requests], dtype=np.int64
        ).reshape(rows, ndim),
    )


class Case:
    """A random checkpoint's table and what random ranks ask for."""

    def __init__(self, data: st.DataObject) -> None:
        num_files = data.draw(st.integers(1, 3))
        num_tensors = data.draw(st.integers(1, 3))
        self.shapes = [
            tuple(data.draw(st.lists(st.integers(1, 7), max_size=3))) for _ in range(num_tensors)
        ]
        self.itemsize = np.array(
            [data.draw(st.sampled_from([1, 2, 4, 8, 16])) for _ in range(num_tensors)]
        )
        self.ndim = max(1, *map(len, self.shapes))
        self.chunks = [
            (tensor, data.draw(st.integers(0, num_files - 1)), box, int(self.itemsize[tensor]))
            for tensor, shape in enumerate(self.shapes)
            for box in data.draw(tilings(shape))
        ]
        self.num_ranks = data.draw(st.integers(1, 4))
        self.asked: list[list[tuple[int, Box]]] = []
        for _ in range(self.num_ranks):
            again = data.draw(st.integers(-2, len(self.asked) - 1))
            if again >= 0:
                self.asked.append(self.asked[again])
                continue
            tensors = data.draw(st.lists(st.integers(0, num_tensors - 1), max_size=4))
            self.asked.append([(t, data.draw(boxes_in(self.shapes[t]))) for t in tensors])
        self.index = index_of(self.chunks, self.ndim)
        self.writer = np.array(
            [data.draw(st.integers(-1, self.num_ranks - 1)) for _ in range(num_files)]
        )
        tables = [table_of(asked, self.ndim) for asked in self.asked]
        self.plan = plan_reads(
            self.index,
            tables,
            itemsize=self.itemsize,
            writer=self.writer,
            hosts=np.arange(self.num_ranks),
            grain=GRAIN,
        )

    def wanted_blocks(self, rank: int) -> set[tuple[int, int]]:
        """(row, block) of every block with an element that the rank asks for, by brute force."""
        found = set()
        for row, (tensor, _, chunk, itemsize) in enumerate(self.chunks):
            for asked, box in self.asked[rank]:
                common = chunk.intersect(box) if asked == tensor else None
                if common is None or not common.numel:
                    continue
                flat = np.arange(chunk.numel).reshape(chunk.shape)
                elements = flat[common.relative_to(chunk.offset)].ravel()
                found |= {(row, int(block)) for block in elements * itemsize // GRAIN}
        return found

    def own_blocks(self, rank: int) -> set[tuple[int, int]]:
        """Those of them that its own file has."""
        return {
            (row, block)
            for row, block in self.wanted_blocks(rank)
            if self.writer[self.chunks[row][1]] == rank
        }


def blocks_of_piece(plan: ReadPlan, piece: int) -> set[tuple[int, int]]:
    """The (row, block) of one piece."""
    row, start, stop = (int(each[piece]) for each in (plan.row, plan.start, plan.stop))
    assert start % GRAIN == 0
    return {(row, block) for block in range(start // GRAIN, -(-stop // GRAIN))}


def blocks_of(plan: ReadPlan, rank: int) -> Counter[tuple[int, int]]:
    """How often a rank reads each (row, block)."""
    count: Counter[tuple[int, int]] = Counter()
    for piece in np.flatnonzero(plan.reader == rank).tolist():
        count.update(blocks_of_piece(plan, piece))
    return count


def kept_by(transfers: RankTransfers, rank: int) -> Transfers:
    """What a rank keeps of what it reads itself."""
    kept = transfers.plan.kept(rank)
    return transfers.in_messages(kept, np.full(len(kept), rank))


def counted(transfers: RankTransfers, case: Case, rank: int) -> dict[int, np.ndarray]:
    """Box asked for -> how often each of its elements is put in place on a rank."""
    boxes = transfers.plan.requests.boxes
    counts = {
        int(q): np.zeros(boxes.extent[q], dtype=np.int64)
        for q in np.unique(case.plan.numbers[rank])
        if q >= 0
    }
    for got in (kept_by(transfers, rank), transfers.incoming):
        for i in range(len(got)):
            size = int(transfers.plan.overlaps.itemsize[got.overlap[i]])
            there = counts[int(got.request[i])]
            if got.is_run[i]:
                first = int(got.target[i]) // size
                there.reshape(-1)[first : first + int(got.nbytes[i]) // size] += 1
                continue
            copies = transfers.strided_copies(int(got.piece[i]), int(got.overlap[i]))
            assert sum(int(np.prod(copy.extent)) for copy in copies) * size == int(got.nbytes[i])
            for copy in copies:
                assert there[copy.target].shape == copy.extent
                there[copy.target] += 1
    return counts


def letters(transfers: Transfers, plan: ReadPlan, peer: int) -> list[tuple[int, ...]]:
    """What goes between two ranks, in order, with places and sizes."""
    columns = ("piece", "overlap", "nbytes", "at", "is_run", "is_large", "source", "target")
    chosen = transfers.take(transfers.peer == peer)
    rows = zip(plan.round[chosen.piece], *(getattr(chosen, c) for c in columns), strict=True)
    return [tuple(map(int, row)) for row in rows]


@drawn(quick=50, slow=150, data=st.data())
def test_each_element_comes_exactly_once_to_each_that_asks(data: st.DataObject) -> None:
    """P7, R4: blocks are read once over the job, and by each that has them in its own file, and
    every asker gets every element once."""
    case = Case(data)
    plan = case.plan
    everybody = [case.wanted_blocks(rank) for rank in range(case.num_ranks)]
    read: Counter[tuple[int, int]] = Counter()
    for rank in range(case.num_ranks):
        mine = blocks_of(plan, rank)
        own = case.own_blocks(rank)
        assert set(mine) <= everybody[rank], "a rank reads only what it wants itself"
        assert own <= set(mine), "a rank reads what its own file has"
        assert set(mine.values()) <= {1}
        read.update(set(mine) - own)
        received = RankTransfers(plan, position=rank).incoming.piece.tolist()
        assert not own & {b for p in received for b in blocks_of_piece(plan, p)}
    everybodys_own = set().union(*(case.own_blocks(rank) for rank in range(case.num_ranks)))
    assert set(read) | everybodys_own == set().union(*everybody)
    assert set(read.values()) <= {1}
    everybody_transfers = [RankTransfers(plan, position=rank) for rank in range(case.num_ranks)]
    for rank, transfers in enumerate(everybody_transfers):
        for number, times in counted(transfers, case, rank).items():
            assert (times == 1).all(), (rank, number)
        for other, theirs in enumerate(everybody_transfers):
            assert letters(transfers.outgoing, plan, other) == letters(theirs.incoming, plan, rank)
            sent = transfers.outgoing.take(transfers.outgoing.peer == other)
            assert (plan.reader[sent.piece] == rank).all()
            assert other != rank or not len(sent)
    alone = np.isin(
        np.arange(len(plan.row)), [p for m in everybody_transfers for p in m.outgoing.piece]
    )
    assert (plan.round[~alone] >= -1).all()
    assert (plan.round[alone] >= 0).all()


@drawn(quick=40, slow=100, data=st.data())
def test_shared_blocks_are_read_in_equal_shares(data: st.DataObject) -> None:
    """B9: all ranks ask for the same; none reads more than its share and a block more, but for what
    its own file has."""
    case = Case(data)
    num_ranks = data.draw(st.integers(1, 8))
    writer = case.writer % num_ranks
    if data.draw(st.booleans()):
        writer[:] = -1
    plan = plan_reads(
        case.index,
        [table_of(case.asked[0], case.ndim)] * num_ranks,
        itemsize=case.itemsize,
        writer=writer,
        hosts=np.arange(num_ranks),
        grain=GRAIN,
    )
    shares = np.bincount(plan.reader, plan.stop - plan.start, minlength=num_ranks)
    own = writer[case.index.file[plan.row]] == plan.reader
    others = np.bincount(plan.reader[~own], minlength=num_ranks)
    level = -(-shares.sum() // num_ranks) + 2 * GRAIN
    assert shares.max(where=others > 0, initial=0) <= level
    assert (writer >= 0).any() or shares.max() <= level
    assert union_nbytes(plan.requests.boxes, case.itemsize) <= shares.sum()


def test_a_rank_reads_its_own_file_where_the_balance_allows() -> None:
    whole = Box((0,), (256,))
    index = index_of([(t, file, whole, 1) for t, file in enumerate((1, 0, 1, 0))], 1)
    asked = table_of([(t, whole) for t in range(4)], 1)
    one = np.ones(4, dtype=np.int64)
    for writer, expected in (((0, 1), (1, 0, 1, 0)), ((1, 0), (0, 1, 0, 1))):
        plan = plan_reads(
            index,
            [asked] * 2,
            itemsize=one,
            writer=np.array(writer),
            hosts=np.arange(2),
            grain=GRAIN,
        )
        for row, reader in zip(plan.row, plan.reader, strict=True):
            assert reader == expected[row]
    plan = plan_reads(
        index,
        [asked] * 2,
        itemsize=one,
        writer=np.array([0, 0]),
        hosts=np.arange(2),
        grain=GRAIN,
    )
    assert np.bincount(plan.reader, plan.stop - plan.start).tolist() == [1024]
    # Of four ranks it sends twice its share, and the others read the rest once more.
    plan = plan_reads(
        index,
        [asked] * 4,
        itemsize=one,
        writer=np.array([0, 0]),
        hosts=np.arange(4),
        grain=GRAIN,
    )
    assert np.bincount(plan.reader, plan.stop - plan.start).tolist() == [1024, 176, 160, 176]
    is_sent = plan.round >= 0
    sent = np.bincount(plan.reader[is_sent], (plan.stop - plan.start)[is_sent])
    assert sent.tolist() == [512, 176, 160, 176]


def test_rounds_bound_what_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each round transfers about the stated bytes, and readers take turns in it."""
    monkeypatch.setattr(read_plan, "_ROUND_NBYTES", 256)
    monkeypatch.setattr(byte_ranges, "PIECE_NBYTES", 64)
    whole = Box((0,), (4096,))
    index = index_of([(0, 0, whole, 1)], 1)
    plan = plan_reads(
        index,
        [table_of([(0, whole)], 1)] * 4,
        itemsize=np.ones(1, dtype=np.int64),
        writer=np.array([-1]),
        hosts=np.arange(4),
        grain=GRAIN,
    )
    assert plan.num_rounds == 16
    for number in range(16):
        here = plan.round == number
        assert (plan.stop - plan.start)[here].sum() == 256
        assert sorted(plan.reader[here]) == [0, 1, 2, 3]


@drawn(quick=40, slow=100, data=st.data())
def test_a_rank_in_many_sets_holds_one_round(data: st.DataObject) -> None:
    """What a rank sends and receives in one round is bounded, in however many sets it is."""
    most = piece = GRAIN
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(read_plan, "_ROUND_NBYTES", most)
        patch.setattr(byte_ranges, "PIECE_NBYTES", piece)
        case = Case(data)
        plan = case.plan
        held: Counter[tuple[int, int]] = Counter()
        for rank in range(case.num_ranks):
            transfers = RankTransfers(plan, position=rank)
            moved = np.unique([*transfers.outgoing.piece, *transfers.incoming.piece]).astype(int)
            for number in moved.tolist():
                nbytes = int(plan.stop[number] - plan.start[number])
                held[rank, int(plan.round[number])] += nbytes
        assert max(held.values(), default=0) <= most + piece
        rounds = plan.round[plan.round >= 0]
        assert set(range(plan.num_rounds)) == set(rounds.tolist()) or not len(rounds)


def test_sets_without_a_common_rank_are_sent_in_the_same_rounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(read_plan, "_ROUND_NBYTES", 256)
    monkeypatch.setattr(byte_ranges, "PIECE_NBYTES", 64)
    whole = Box((0,), (1024,))
    index = index_of([(t, 0, whole, 1) for t in range(3)], 1)
    # Tensors 0 and 1 of two ranks each, tensor 2 of all four.
    tables = [table_of([(t, whole), (2, whole)], 1) for t in (0, 0, 1, 1)]
    plan = plan_reads(
        index,
        tables,
        itemsize=np.ones(3, dtype=np.int64),
        writer=np.array([-1]),
        hosts=np.arange(4),
        grain=GRAIN,
    )
    rounds = [sorted(set(plan.round[plan.row == t].tolist())) for t in range(3)]
    assert rounds == [[0, 1, 2, 3], [0, 1, 2, 3], [4, 5, 6, 7]]


@drawn(quick=40, slow=100, data=st.data())
def test_what_is_not_sent_each_of_its_ranks_reads(data: st.DataObject) -> None:
    """P7: whichever sets of ranks are chosen, each element comes once to each that asks."""
    case = Case(data)
    hosts = np.array([data.draw(st.integers(0, 2)) for _ in range(case.num_ranks)])
    seen: list[tuple[list[int], int, int, bool]] = []

    def choose(sets: ReplicaSets) -> list[bool]:
        answers = [data.draw(st.booleans()) for _ in sets]
        columns = zip(sets, answers, strict=True)
        seen.extend((ranks.tolist(), size, files, yes) for (ranks, size, files), yes in columns)
        return answers

    plan = plan_reads(
        case.index,
        [table_of(asked, case.ndim) for asked in case.asked],
        itemsize=case.itemsize,
        writer=case.writer,
        hosts=hosts,
        grain=GRAIN,
        choose=choose,
    )
    case.plan = plan
    everybody = [case.wanted_blocks(rank) for rank in range(case.num_ranks)]
    asking: dict[tuple[int, int], list[int]] = {}
    for rank, blocks in enumerate(everybody):
        for each in blocks:
            asking.setdefault(each, []).append(rank)
    is_sent = {tuple(ranks): sent for ranks, _, _, sent in seen}
    reads = [blocks_of(plan, rank) for rank in range(case.num_ranks)]
    by_set: dict[tuple[int, ...], int] = {}
    for (row, block), ranks in asking.items():
        counts = [reads[rank][row, block] for rank in range(case.num_ranks)]
        one_host = len({int(hosts[rank]) for rank in ranks}) == 1
        own = [(row, block) in case.own_blocks(rank) for rank in range(case.num_ranks)]
        have_all = all(own[rank] for rank in ranks)
        assert one_host or have_all or tuple(ranks) in is_sent
        if is_sent.get(tuple(ranks), False) and not have_all:
            others = [count for count, is_own in zip(counts, own, strict=True) if not is_own]
            assert all(counts[rank] == 1 for rank in ranks if own[rank])
            assert sum(others) == 1 or (sum(others) == 0 and any(own))
        else:
            assert counts == [int(rank in ranks) for rank in range(case.num_ranks)]
        if have_all:
            continue
        nbytes = int(case.index.nbytes[row])
        size = min((block + 1) * GRAIN, nbytes) - block * GRAIN
        by_set[tuple(ranks)] = by_set.get(tuple(ranks), 0) + size
    assert {tuple(ranks): size for ranks, size, _, _ in seen} == {
        ranks: size for ranks, size in by_set.items() if ranks in is_sent
    }
    for rank in range(case.num_ranks):
        transfers = RankTransfers(plan, position=rank)
        for number, times in counted(transfers, case, rank).items():
            assert (times == 1).all(), (rank, number)


def test_a_box_that_no_chunk_covers_is_damage() -> None:
    index = index_of([(0, 0, Box((0,), (3,)), 4)], 1)
    with pytest.raises(CorruptionError, match="1 elements"):
        plan_reads(
            index,
            [table_of([(0, Box((0,), (4,)))], 1)],
            itemsize=np.array([4]),
            writer=np.array([0]),
            hosts=np.arange(1),
            grain=GRAIN,
        )


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_requests_come_back_from_their_bytes(data: st.DataObject) -> None:
    ndim = data.draw(st.integers(1, 3))
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=ndim, max_size=ndim)))
    rows = data.draw(st.lists(st.tuples(st.integers(0, 2), boxes_in(shape)), max_size=6))
    boxes = table_of(rows, ndim)
    again = decode_boxes(encode_boxes(boxes))
    assert (again.offset == boxes.offset).all()
    assert (again.extent == boxes.extent).all()
    assert (again.tensor == boxes.tensor).all()


def test_a_large_job_is_planned_in_seconds() -> None:
    """E20: 100 000 chunks, requested by 64 ranks in another cut; memory by the overlaps."""
    num_tensors, cut = 1000, 100
    rows = 800
    box = [Box((i * rows // cut, 0), (rows // cut, 64)) for i in range(cut)]
    index = index_of([(t, i % 16, box[i], 4) for t in range(num_tensors) for i in range(cut)], 2)
    ranks = 64
    asked = [
        table_of(
            [(t, Box(((r // 4) * 50, 0), (50, 64))) for t in range(num_tensors)],
            2,
        )
        for r in range(ranks)
    ]
    shapes = pad_shapes([(rows, 64)] * num_tensors, 2)
    assert shapes.shape == (num_tensors, 2)
    plan = plan_reads(
        index,
        asked,
        itemsize=np.full(num_tensors, 4),
        writer=np.arange(16),
        hosts=np.arange(ranks),
        grain=1 << 20,
    )
    shares = np.bincount(plan.reader, plan.stop - plan.start)
    # The rest are reads of owners who send only some of what they own.
    assert num_tensors * cut <= len(plan.row) <= 1.02 * num_tensors * cut
    has_others = np.bincount(plan.reader, index.file[plan.row] != plan.reader) > 0
    assert shares.max(where=has_others, initial=0) <= 1.05 * shares.mean()
    transfers = RankTransfers(plan, position=3)
    assert (
        int(kept_by(transfers, 3).nbytes.sum() + transfers.incoming.nbytes.sum())
        == num_tensors * 50 * 256
    )
