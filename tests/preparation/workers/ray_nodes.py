"""Ray clusters on this machine: a head, and nodes that tests kill."""

import contextlib
import os
import signal
import sys

import pytest

OBJECTS = 80 << 20


@contextlib.contextmanager
def ray_cluster(nodes=3, head=0):
    """Start a head and nodes of one processor each, listed as ``living``."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
        cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": head,
                "include_dashboard": False,
                "object_store_memory": OBJECTS,
                # A dead node is detected after two seconds, not thirty.
                "_system_config": {
                    "health_check_initial_delay_ms": 500,
                    "health_check_period_ms": 500,
                    "health_check_timeout_ms": 500,
                    "health_check_failure_threshold": 3,
                },
            },
        )
        try:
            cluster.living = [add_node(cluster) for _ in range(nodes)]
            yield cluster
        finally:
            cluster.shutdown()


def add_node(cluster):
    return cluster.add_node(num_cpus=1, object_store_memory=OBJECTS)


def kill_node(cluster):
    """Kill the raylet of a node, which ends its workers, as a power failure does."""
    node = cluster.living.pop()
    os.kill(node.all_processes["raylet"][0].process.pid, signal.SIGKILL)
    return node
