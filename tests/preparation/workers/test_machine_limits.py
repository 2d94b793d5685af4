"""Number of workers, and the machine limits that Linux reports."""

import os

import pytest

from batchloom.preparation.workers.machine_limits import (
    compute_worker_count,
    count_cores,
    measure_free_memory,
    read_cpu_quota,
    read_memory_left,
)

GIB = 1 << 30


@pytest.mark.parametrize(
    ("tasks", "free_memory", "memory", "workers"),
    [
        (100, None, None, 8),
        (3, None, None, 3),
        (0, None, None, 1),
        (100, 2 * GIB, None, 2),
        (100, 2 * GIB, GIB // 2, 4),
        (100, 1, None, 1),
    ],
)
def test_workers_are_as_many_as_cores_tasks_and_memory_allow(tasks, free_memory, memory, workers):
    assert compute_worker_count(tasks, cores=8, free=free_memory, memory=memory) == workers


def write(folder, texts):
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize(
    ("groups", "files", "quota", "memory_left"),
    [
        ("0::/\n", {}, None, None),
        ("0::/\n", {"cpu.max": "max 100000\n", "memory.max": "max\n"}, None, None),
        (
            "0::/job/step\n",
            {
                "job/cpu.max": "150000 100000\n",
                "job/step/cpu.max": "max 100000\n",
                "job/step/memory.max": "1000\n",
                "job/step/memory.current": "700\n",
                "job/step/memory.stat": "anon 500\ninactive_file 150\nactive_file 50\n",
            },
            1.5,
            500,
        ),
        # The path of a group outside the container, whose own folder is the root inside it.
        (
            "4:memory:/docker/0123\n1:cpu,cpuacct:/docker/0123\n",
            {
                "cpu/cpu.cfs_quota_us": "400000\n",
                "cpu/cpu.cfs_period_us": "100000\n",
                "memory/memory.limit_in_bytes": "1000\n",
                "memory/memory.usage_in_bytes": "1200\n",
            },
            4.0,
            0,
        ),
        ("1:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "1\n"}, None, None),
    ],
)
def test_the_bounds_of_control_groups_are_heeded(tmp_path, groups, files, quota, memory_left):
    group_file, root = tmp_path / "own", tmp_path / "groups"
    group_file.write_text(groups)
    write(root, files)
    assert read_cpu_quota(group_file, root) == quota
    assert read_memory_left(group_file, root) == memory_left


def test_the_facts_of_this_machine():
    assert 1 <= count_cores() <= os.cpu_count()
    assert measure_free_memory() > 0
