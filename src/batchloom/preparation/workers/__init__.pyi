from .executors import (
    Crewed as Crewed,
    EngineName as EngineName,
    Execution as Execution,
    alone as alone,
    crew_for as crew_for,
    ready_for as ready_for,
    workers_of as workers_of,
)
from .inline_executor import Here as Here
from .machine_limits import cores as cores, free_memory as free_memory, workers_for as workers_for
from .process_pool import Pool as Pool, Ready as Ready
from .protocols import (
    Crew as Crew,
    Done as Done,
    Lost as Lost,
    Tell as Tell,
    Told as Told,
    Work as Work,
)
from .ray_cluster import RayCluster as RayCluster, RayCrew as RayCrew
from .run_settings import RunSettings as RunSettings
from .task_retry import carry_out as carry_out
from .versions import refuse_other_versions as refuse_other_versions, versions_of as versions_of
from .worker_results import Failed as Failed, error_of as error_of, failure as failure
