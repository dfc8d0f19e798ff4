"""What every storage must do; a store is tested by one subclass that makes it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from holdfast.errors import StorageError
from holdfast.storage import Storage

BAD_PATHS = (
    "/etc/passwd", "..", "../x", "a/../../x", "a/..", "./a", "a//b", "a/", "/", "a\0b", ".",
    "x" * 256,
)  # fmt: skip


class StorageContract:
    """Behaviour through the protocol alone. `storage` is an empty store whose root exists."""

    is_tree = True
    """Directories inside others exist without files, and can be renamed as those at the root."""
    shows_open_files = True
    """A file that is being written has its name and size already."""

    @pytest.fixture
    def storage(self, tmp_path: Path) -> Storage:
        raise NotImplementedError

    def test_a_small_file_comes_back_whole_and_in_parts(self, storage: Storage) -> None:
        storage.write_file("a.bin", b"0123456789")
        assert storage.read("a.bin") == b"0123456789"
        assert storage.read("a.bin", start=3, nbytes=4) == b"3456"
        assert storage.read("a.bin", start=10) == b""
        assert storage.size("a.bin") == 10
        buffer = bytearray(3)
        storage.readinto("a.bin", memoryview(buffer), start=7)
        assert bytes(buffer) == b"789"
        storage.write_file("empty", b"")
        assert storage.read("empty") == b""
        assert storage.size("empty") == 0

    def test_an_open_file_serves_many_reads_and_closes_twice(self, storage: Storage) -> None:
        storage.write_file("a.bin", bytes(range(200)))
        source = storage.open("a.bin")
        assert source.nbytes == 200
        found: dict[int, bytes] = {}

        def read(start: int) -> None:
            buffer = bytearray(10)
            source.readinto(memoryview(buffer), start=start)
            found[start] = bytes(buffer)

        threads = [threading.Thread(target=read, args=(i * 10,)) for i in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == {i * 10: bytes(range(i * 10, i * 10 + 10)) for i in range(20)}
        source.close()
        source.close()

    def test_a_file_that_is_too_short_is_an_error_not_a_short_answer(
        self, storage: Storage
    ) -> None:
        storage.write_file("a.bin", b"12345")
        with pytest.raises(StorageError, match=r"a\.bin.*truncated"):
            storage.read("a.bin", start=2, nbytes=4)
        with pytest.raises(StorageError, match=r"a\.bin.*truncated"):
            storage.readinto("a.bin", memoryview(bytearray(6)), start=0)
        with pytest.raises(StorageError, match=r"a\.bin.*truncated"):
            storage.readinto("a.bin", memoryview(bytearray(1)), start=100)
        source = storage.open("a.bin")
        with pytest.raises(StorageError, match=r"a\.bin.*truncated"):
            source.readinto(memoryview(bytearray(2)), start=4)
        source.close()

    def test_a_lying_length_takes_no_memory(self, storage: Storage) -> None:
        storage.write_file("a.bin", b"12345")
        with pytest.raises(StorageError, match="truncated"):
            storage.read("a.bin", nbytes=2**60)

    @pytest.mark.parametrize("path", BAD_PATHS)
    def test_no_path_leaves_the_root(self, storage: Storage, path: str) -> None:
        calls = [
            lambda: storage.read(path),
            lambda: storage.readinto(path, memoryview(bytearray(1))),
            lambda: storage.open(path),
            lambda: storage.size(path),
            lambda: storage.exists(path),
            lambda: storage.is_dir(path),
            lambda: storage.list(path),
            lambda: storage.write_file(path, b"x"),
            lambda: storage.replace_file(path, b"x"),
            lambda: storage.create(path, nbytes=1).__enter__(),
            lambda: storage.make_dir(path),
            lambda: storage.sync_dir(path),
            lambda: storage.rename_dir(path, "ok"),
            lambda: storage.rename_dir("ok", path),
            lambda: storage.exchange_dir(path, "ok"),
            lambda: storage.exchange_dir("ok", path),
            lambda: storage.remove_tree(path),
            lambda: storage.local_path(path),
        ]
        storage.make_dir("ok")
        for call in calls:
            with pytest.raises(StorageError, match="refused"):
                call()  # type: ignore[no-untyped-call]
        assert storage.list("") == ["ok"]

    def test_what_is_not_there_is_named(self, storage: Storage) -> None:
        assert not storage.exists("a/b")
        assert not storage.is_dir("a/b")
        for call in (storage.read, storage.open, storage.size, storage.list, storage.sync_dir,
                     storage.remove_tree):  # fmt: skip
            with pytest.raises(StorageError, match="nothing"):
                call("nothing")
        for call in (
            lambda: storage.read("nothing", nbytes=0),
            lambda: storage.readinto("nothing", memoryview(b"")),
            lambda: storage.rename_dir("nothing", "other"),
        ):
            with pytest.raises(StorageError, match="nothing"):
                call()

    def test_directories(self, storage: Storage) -> None:
        storage.make_dir("b/c/d")
        storage.make_dir("b/c/d")
        storage.write_file("b/c/z", b"")
        storage.write_file("b/c/a", b"")
        storage.sync_dir("b/c")
        storage.sync_dir("")
        assert storage.list("b/c") == (["a", "d", "z"] if self.is_tree else ["a", "z"])
        assert storage.list("") == ["b"]
        assert storage.is_dir("b/c")
        assert storage.is_dir("")
        assert not storage.is_dir("b/c/a")
        assert storage.exists("b/c/a")
        if self.is_tree:
            with pytest.raises(StorageError, match="b/c/a"):
                storage.make_dir("b/c/a")
        with pytest.raises(StorageError, match="regular"):
            storage.size("b/c")
        with pytest.raises(StorageError, match="b/c"):
            storage.read("b/c")

    def test_replacing_a_file_leaves_only_the_new_one(self, storage: Storage) -> None:
        storage.replace_file("latest", b"1")
        storage.replace_file("latest", b"22")
        assert storage.read("latest") == b"22"
        assert storage.list("") == ["latest"]

    def test_readers_of_a_replaced_file_see_old_or_new_never_a_part(self, storage: Storage) -> None:
        versions = {bytes([i]) * (1000 + i) for i in range(30)}
        storage.replace_file("latest", bytes([0]) * 1000)
        stop = threading.Event()
        seen: set[bytes] = set()

        def watch() -> None:
            while not stop.is_set():
                seen.add(storage.read("latest"))

        thread = threading.Thread(target=watch)
        thread.start()
        for version in versions:
            storage.replace_file("latest", version)
            storage.write_file("latest", version)
        stop.set()
        thread.join()
        assert seen <= versions

    def test_a_sink_takes_pieces_in_any_order(self, storage: Storage) -> None:
        storage.make_dir("data")
        payload = bytes(range(256)) * 64
        with storage.create("data/f", nbytes=len(payload)) as sink:
            for start in (8192, 0, 12288, 4096):
                sink.write_at(start, memoryview(payload)[start : start + 4096])
                sink.write_at(12288, memoryview(b""))
            sink.sync()
        assert storage.read("data/f") == payload

    def test_a_sink_has_its_size_at_once_and_refuses_more(self, storage: Storage) -> None:
        with storage.create("f", nbytes=10) as sink:
            assert not self.shows_open_files or storage.size("f") == 10
            for offset, nbytes in ((8, 3), (-1, 2), (11, 0)):
                with pytest.raises(StorageError, match=r"declared with 10 bytes"):
                    sink.write_at(offset, memoryview(bytes(nbytes)))
        assert storage.read("f") == bytes(10)
        with storage.create("none", nbytes=0) as sink:
            sink.sync()
        assert storage.size("none") == 0

    def test_two_writers_never_share_a_file(self, storage: Storage) -> None:
        storage.write_file("f", b"precious")
        with pytest.raises(StorageError, match="f"):
            storage.create("f", nbytes=3).__enter__()
        assert storage.read("f") == b"precious"

    def test_an_error_inside_the_sink_reaches_the_caller(self, storage: Storage) -> None:
        def fail() -> None:
            with storage.create("f", nbytes=3):
                raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            fail()

    def test_renaming_a_directory_never_replaces_anything(self, storage: Storage) -> None:
        storage.make_dir("src")
        storage.write_file("src/f", b"1")
        storage.make_dir("empty")
        storage.make_dir("full/x")
        storage.write_file("file", b"2")
        for taken in ("empty", "full", "file"):
            with pytest.raises(StorageError, match="never overwritten"):
                storage.rename_dir("src", taken)
        assert storage.read("src/f") == b"1"
        moved = "full/dst" if self.is_tree else "dst"
        storage.rename_dir("src", moved)
        assert storage.read(f"{moved}/f") == b"1"
        assert not storage.exists("src")

    def test_exchanging_two_directories(self, storage: Storage) -> None:
        storage.make_dir("new")
        storage.make_dir("old")
        storage.write_file("new/f", b"new")
        storage.write_file("old/f", b"old")
        storage.exchange_dir("new", "old")
        assert storage.read("old/f") == b"new"
        assert storage.read("new/f") == b"old"
        assert storage.list("") == ["new", "old"]
        for one, two in (("missing", "old"), ("old", "missing")):
            with pytest.raises(StorageError, match="missing"):
                storage.exchange_dir(one, two)
        assert storage.read("old/f") == b"new"

    def test_a_pinned_directory_stays_what_it_is(self, storage: Storage) -> None:
        for name in ("new", "old"):
            storage.make_dir(f"{name}/data")
            storage.write_file(f"{name}/data/f", name.encode())
            storage.write_file(f"{name}/{name}.txt", b"")
        with storage.pin("old") as held:
            storage.exchange_dir("new", "old")
            assert storage.read("old/data/f") == b"new"
            for _ in range(2):
                source = held.open("old/data/f")
                buffer = bytearray(3)
                source.readinto(memoryview(buffer), start=0)
                source.close()
                assert bytes(buffer) == held.read("old/data/f") == b"old"
                assert held.list("old") == ["data", "old.txt"]
                assert held.list("old/data") == ["f"]
                assert held.size("old/data/f") == 3
                assert held.exists("old/data/f")
                assert held.is_dir("old")
                storage.rename_dir("new", "away")  # what is pinned has no name of its own by now
                storage.rename_dir("away", "new")
            storage.remove_tree("new")
            assert not held.exists("old/data/f")
            with pytest.raises(StorageError):
                held.read("old/data/f")
            assert storage.read("old/data/f") == b"new"
        for path in ("nothing", "old/data/f", "../x"):
            with pytest.raises(StorageError), storage.pin(path):
                pass

    def test_a_directory_is_removed_only_if_it_is_still_the_one(self, storage: Storage) -> None:
        above = "in/" if self.is_tree else ""
        storage.make_dir(f"{above}a")
        storage.write_file(f"{above}a/f", b"1")
        seen = []

        def answer(place: str) -> bool:
            seen.append(storage.read(f"{place}/f"))
            assert not storage.exists(f"{above}a")
            if len(seen) == 2:
                raise KeyError("mine")
            if len(seen) == 4:  # a save of that name is committed meanwhile
                storage.make_dir(f"{above}a")
                storage.write_file(f"{above}a/f", b"2")
            return len(seen) == 3

        storage.remove_tree(f"{above}a", only_if=answer)
        with pytest.raises(KeyError, match="mine"):
            storage.remove_tree(f"{above}a", only_if=answer)
        assert storage.read(f"{above}a/f") == b"1"
        storage.remove_tree(f"{above}a", only_if=answer)
        assert storage.list(above.rstrip("/")) == []
        assert seen == [b"1"] * 3
        storage.make_dir(f"{above}a")
        storage.write_file(f"{above}a/f", b"1")
        storage.remove_tree(f"{above}a", only_if=answer)
        assert storage.read(f"{above}a/f") == b"2"
        assert len(storage.list(above.rstrip("/"))) == 2  # a repair deals with the other one

    def test_removing_trees_and_files(self, storage: Storage) -> None:
        storage.make_dir("a/b/c")
        storage.write_file("a/b/f", b"")
        storage.write_file("g", b"")
        storage.remove_tree("a")
        storage.remove_tree("g")
        longest = "é" * 127  # a name has at most 255 bytes, a temporary one for it, too
        storage.write_file(longest, b"1")
        storage.replace_file(longest, b"2")
        storage.remove_tree(longest)
        storage.make_dir(longest)
        storage.remove_tree(longest)
        assert storage.list("") == []

    def test_the_root_is_never_renamed_or_removed(self, storage: Storage) -> None:
        storage.make_dir("a")
        for call in (
            lambda: storage.remove_tree(""),
            lambda: storage.rename_dir("", "b"),
            lambda: storage.exchange_dir("", "a"),
            lambda: storage.write_file("", b""),
        ):
            with pytest.raises(StorageError, match="root"):
                call()
        assert storage.list("") == ["a"]

    def test_free_space_and_places_in_words(self, storage: Storage) -> None:
        assert storage.free_nbytes() > 0
        assert storage.describe("a/b").endswith("a/b")
        local = storage.local_path("a/b")
        assert local is None or local.parts[-2:] == ("a", "b")
