from .collate import (
    CollateRow as CollateRow,
    collate_rows as collate_rows,
    stacks_features_by_row as stacks_features_by_row,
    take_single_row as take_single_row,
)
from .combined_store import is_replicated as is_replicated
from .loader import LoaderTemplate as LoaderTemplate, lose_track as lose_track
from .loader_data import (
    check_no_preferences as check_no_preferences,
    default_overlong as default_overlong,
    first_store as first_store,
)
from .pool_tables import (
    MAX_INLINE_POOLS as MAX_INLINE_POOLS,
    get_open_store as get_open_store,
    load_table as load_table,
    lock_table as lock_table,
    table_folders as table_folders,
    table_name as table_name,
    wait_for_table as wait_for_table,
    write_table as write_table,
)
from .rank_share import make_run_share as make_run_share
from .stream_steps import RawStream as RawStream
