from .inline_executor import InlineExecutor as InlineExecutor
from .machine_limits import (
    compute_worker_count as compute_worker_count,
    count_cores as count_cores,
    measure_free_memory as measure_free_memory,
)
from .process_pool import PrestartedWorkers as PrestartedWorkers, ProcessPool as ProcessPool
from .protocols import (
    MessageCallback as MessageCallback,
    TaskFailure as TaskFailure,
    TaskFunction as TaskFunction,
    TaskLoss as TaskLoss,
    TaskMessage as TaskMessage,
    TaskResult as TaskResult,
    encode_failure as encode_failure,
    iter_task_events as iter_task_events,
    restore_error as restore_error,
)
from .ray_cluster import RayClusterSettings as RayClusterSettings, RayExecutor as RayExecutor
