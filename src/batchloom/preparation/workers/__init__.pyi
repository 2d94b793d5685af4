from .machine_limits import count_cores as count_cores
from .package_versions import check_versions as check_versions, collect_versions as collect_versions
from .process_pool import ProcessPool as ProcessPool
from .protocols import (
    MessageCallback as MessageCallback,
    TaskFunction as TaskFunction,
    TaskLoss as TaskLoss,
    TaskResult as TaskResult,
)
