"""Which memory limits are seen: of both versions of control groups, nested, in containers with and without names."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradsync.transport.cgroups import folders, free_memory_nbytes

GB = 1 << 30
UNLIMITED_1 = 9223372036854771712


class Machine:
    """What a process finds under /proc/self and where control groups are mounted."""

    def __init__(self, folder: Path) -> None:
        self.proc, self.mount = folder / "proc", folder / "sys fs" / "cgroup"
        self.proc.mkdir()
        self.mount.mkdir(parents=True)

    def runs_in(self, *lines: str) -> None:
        (self.proc / "cgroup").write_text("".join(f"{line}\n" for line in lines))

    def mounts(self, kind: str, root: str = "/", point: str = "", options: str = "rw") -> None:
        where = str(self.mount / point).replace(" ", r"\040")
        with open(self.proc / "mountinfo", "a") as file:
            file.write("22 1 0:20 / /proc rw,nosuid shared:5 - proc proc rw\n")
            file.write(f"29 22 0:26 {root} {where} rw,nosuid shared:9 - {kind} cgroup {options}\n")

    def group(self, path: str, **values: object) -> None:
        folder = self.mount / path
        folder.mkdir(parents=True, exist_ok=True)
        for name, value in values.items():
            (folder / f"memory.{name}").write_text(f"{value}\n")

    @property
    def free(self) -> int | None:
        return free_memory_nbytes(self.proc)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_the_tightest_group_on_the_way_to_the_root_counts(machine: Machine) -> None:
    machine.runs_in("0::/job/step")
    machine.mounts("cgroup2")
    machine.group("job", max=8 * GB, current=7 * GB)
    machine.group("job/step", max=4 * GB, current=1 * GB)
    assert machine.free == GB
    machine.group("job", max="max", current=7 * GB)
    assert machine.free == 3 * GB
    machine.group("job/step", max="max", current=GB)
    assert machine.free is None
    machine.group("other", max=1, current=0)  # that of somebody else
    assert machine.free is None


def test_memory_for_files_can_be_taken_back(machine: Machine) -> None:
    machine.runs_in("0::/")
    machine.mounts("cgroup2")
    machine.group("", max=4 * GB, current=4 * GB, stat=f"anon 5\ninactive_file {2 * GB}")
    assert machine.free == 2 * GB
    machine.group("", max=GB, current=4 * GB, stat="anon 5")
    assert machine.free == 0


def test_version_1_has_a_tree_for_memory_alone(machine: Machine) -> None:
    machine.runs_in("7:cpu,cpuacct:/else", "5:memory:/slurm/job_1", "0::/")
    machine.mounts("cgroup", point="cpu", options="rw,cpu,cpuacct")
    machine.mounts("cgroup", point="memory", options="rw,memory")
    machine.group("memory", limit_in_bytes=UNLIMITED_1, usage_in_bytes=GB)
    machine.group("memory/slurm", limit_in_bytes=6 * GB, usage_in_bytes=GB)
    machine.group("memory/slurm/job_1", limit_in_bytes=2 * GB, usage_in_bytes=GB, stat=f"total_inactive_file {GB // 2}")
    assert machine.free == GB + GB // 2
    assert [path.name for _, path in folders("memory", machine.proc)] == ["job_1", "slurm", "memory"]


def test_a_container_without_names_of_its_own_sees_its_part_of_the_tree(machine: Machine) -> None:
    machine.runs_in("5:memory:/docker/abc/inner")
    machine.mounts("cgroup", root="/docker/abc", point="memory", options="rw,memory")
    machine.group("memory", limit_in_bytes=3 * GB, usage_in_bytes=GB)
    machine.group("memory/inner", limit_in_bytes=5 * GB, usage_in_bytes=GB)
    assert machine.free == 2 * GB


@pytest.mark.parametrize("path", ["/", "/../../elsewhere", "/docker/gone"])
def test_a_group_that_cannot_be_seen_has_the_limit_of_the_mount(machine: Machine, path: str) -> None:
    machine.runs_in(f"0::{path}")
    machine.mounts("cgroup2", root="/docker/abc" if path == "/docker/gone" else "/")
    machine.group("", max=2 * GB, current=GB)
    assert machine.free == GB


@pytest.mark.parametrize("text", ["", "\n", "x", "::", "0::", "5:memory", "\x00", "a b c - d", "1 2 3 4 5 - cgroup2"])
def test_what_is_not_as_expected_is_no_limit(machine: Machine, text: str) -> None:
    assert machine.free is None
    (machine.proc / "cgroup").write_text(text)
    (machine.proc / "mountinfo").write_text(text)
    assert machine.free is None
    machine.runs_in("0::/")
    machine.mounts("cgroup2")
    machine.group("", max=text, current=text, stat=text)
    assert machine.free is None


def test_this_process_has_something_left() -> None:
    free = free_memory_nbytes()
    assert free is None or free > 0
