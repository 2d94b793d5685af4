from .worker_setup import (
    WorkerSetup as WorkerSetup,
    check_versions as check_versions,
    collect_unit_settings as collect_unit_settings,
    collect_versions as collect_versions,
)
