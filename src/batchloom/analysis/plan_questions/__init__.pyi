from .checkpoint_plan import is_endless as is_endless, read_checkpoint as read_checkpoint
from .data_source_labels import mark_of as mark_of
from .plan_lookup import (
    Asked as Asked,
    Entry as Entry,
    entry_of as entry_of,
    journal_of as journal_of,
    plan_asked as plan_asked,
)
from .pool_counts import (
    adopt_tables as adopt_tables,
    have_tables as have_tables,
    have_tables_for as have_tables_for,
    write_tables as write_tables,
)
from .rank_rows import (
    dealt as dealt,
    in_batches as in_batches,
    plan_of as plan_of,
    world_of as world_of,
)
from .source_measure import (
    Measure as Measure,
    Mixing as Mixing,
    measure_pools as measure_pools,
    mixing as mixing,
)
from .unserved import why_unserved as why_unserved
