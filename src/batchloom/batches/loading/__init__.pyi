from .combined_store import (
    get_token_reader as get_token_reader,
    is_replicated as is_replicated,
    read_trained as read_trained,
)
from .loader import (
    make_run_share as make_run_share,
    reopen_loader as reopen_loader,
    require_plan_feed as require_plan_feed,
)
from .loader_plans import check_next_token_objective as check_next_token_objective, get_first_store as get_first_store
from .plan_feed import (
    PlanFeed as PlanFeed,
    copy_settings as copy_settings,
    iter_step_numbers as iter_step_numbers,
)
from .pool_tables import (
    MAX_INLINE_POOLS as MAX_INLINE_POOLS,
    get_open_store as get_open_store,
    list_table_folders as list_table_folders,
    load_table as load_table,
    lock_table as lock_table,
    make_table_name as make_table_name,
    start_counting_process as start_counting_process,
    wait_for_table as wait_for_table,
    write_table as write_table,
)
from .second_share import find_second_share as find_second_share, refuse_second_share as refuse_second_share
from .stream_steps import RawStream as RawStream
