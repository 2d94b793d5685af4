from .collate import (
    Row as Row,
    collate_rows as collate_rows,
    row_of as row_of,
    stands_by_row as stands_by_row,
)
from .combined_store import is_replicated as is_replicated
from .loader import Loader as Loader, LoaderTemplate as LoaderTemplate, lose_track as lose_track
from .loader_data import (
    first_store as first_store,
    refuse_preferences as refuse_preferences,
    usual_overlong as usual_overlong,
)
from .pool_tables import (
    IN_PLACE as IN_PLACE,
    load_table as load_table,
    lock_table as lock_table,
    opened_of as opened_of,
    table_folders as table_folders,
    table_name as table_name,
    wait_for_table as wait_for_table,
    write_table as write_table,
)
from .rank_share import (
    imbalance_of as imbalance_of,
    rank_rows as rank_rows,
    share_of as share_of,
    share_of_run as share_of_run,
)
from .stream_steps import Streamed as Streamed
