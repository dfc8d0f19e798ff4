"""How much memory is left: what the page cache holds is, in a control group too.

Prevents that a save is refused in a container whose page cache is full of training data.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.storage import host_memory
from holdfast.storage.host_memory import available_memory_nbytes, total_memory_nbytes


@pytest.mark.parametrize("version", [1, 2])
def test_the_page_cache_of_a_control_group_is_available(
    version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit, used, prefix = {
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
        2: ("memory.max", "memory.current", ""),
    }[version]
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9000 kB\nMemFree: 1 kB\nMemAvailable: 7000 kB\n")
    monkeypatch.setattr(host_memory, "_MACHINE", meminfo)
    groups = [(name, tmp_path, *names) for name, _, *names in host_memory._CONTROL_GROUPS]
    monkeypatch.setattr(host_memory, "_CONTROL_GROUPS", groups)
    own = tmp_path / "own"
    own.write_text("0::/\n")
    monkeypatch.setattr(host_memory, "_OWN_GROUPS", own)
    assert (available_memory_nbytes(), total_memory_nbytes()) == (7000 << 10, 9000 << 10)
    (tmp_path / used).write_text("5000\n")
    stat = {"anon": 1000, "file": 4000, "active_file": 1500, "inactive_file": 2300}
    lines = [f"{prefix}{name} {number}" for name, number in stat.items()]
    if version == 1:  # without those of the groups below it
        lines += ["active_file 1", "inactive_file 1"]
    (tmp_path / "memory.stat").write_text("\n".join(lines) + "\n")
    (tmp_path / limit).write_text("5000\n")
    assert (available_memory_nbytes(), total_memory_nbytes()) == (3800, 5000)
    # The limit of a job of Slurm is at a group above that of each of its steps.
    for folder, most in (("job", 4500), ("job/step", 1 << 40)):
        (tmp_path / folder).mkdir()
        for name, text in ((used, "3000\n"), ("memory.stat", ""), (limit, f"{most}\n")):
            (tmp_path / folder / name).write_text(text)
    own.write_text(f"9:name=systemd:/\n{'4:cpu,memory' if version == 1 else '0:'}:/job/step\n")
    assert (available_memory_nbytes(), total_memory_nbytes()) == (1500, 4500)
    own.unlink()
    if version == 2:
        (tmp_path / limit).write_text("max\n")
        assert available_memory_nbytes() == 7000 << 10
    meminfo.unlink()
    assert available_memory_nbytes() > 1 << 50  # a system that does not tell
